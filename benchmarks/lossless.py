"""Greedy speculative output against transformers' own generate: 200 held-out prompts, float32.

    python -m benchmarks.lossless [drafter folder]

Batch 1 and batch 8. A prompt may differ only where the two best logits of the target lie within
1e-4 (`near_tie`); every difference is listed with its gap.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch

from data.prompts import load_prompts
from drafters.causal_lm import CausalLMDrafter
from eval.engine import SpeculativeDecoder
from eval.measure import difference, plain_generate
from eval.policies.table import make_budget
from target.cache import CachedModel
from target.decode import Request
from target.model import Target
from target.sampling import Sampling, row_key

GREEDY, LIMIT, K = Sampling(0.0), 96, 4


def main(arguments: list[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load("assets/toy/target", device=device)
    folder = arguments[0] if arguments else "assets/toy/draft"
    drafter = CausalLMDrafter.from_pretrained(folder, target).eval()
    prompts = load_prompts("toy", count=200, seed=11, toy_split="eval")
    ids = [target.tokenizer(p.text).input_ids for p in prompts]
    plain = [plain_generate(target, row, GREEDY, LIMIT) for row in ids]
    requests = [Request(row, row_key(0, row, 0), GREEDY, str(i)) for i, row in enumerate(ids)]
    result: dict[str, object] = {
        "drafter": folder,
        "prompts": len(ids),
        "tokens": sum(map(len, plain)),
        "machine": f"{platform.machine()}, torch {torch.__version__}, {device}",
    }
    for batch_size in (1, 8):
        decoder = SpeculativeDecoder(
            CachedModel(target.model),
            drafter,
            sampling=GREEDY,
            budget=make_budget("fixed", K),
            eos_ids=target.eos_ids,
            max_new_tokens=LIMIT,
            batch_size=batch_size,
        )
        differing = []
        for one in decoder.run(requests):
            index = int(one.request.tag)
            gap = difference(target, ids[index], plain[index], one)
            if gap is not None:
                differing.append({"prompt": index, **gap})
        result[f"batch {batch_size}"] = {
            "identical": len(ids) - len(differing),
            "near_ties": sum(d["near_tie"] for d in differing),
            "differing": differing,
        }
    print(json.dumps(result, indent=1))
    Path("benchmarks/results").mkdir(exist_ok=True)
    Path("benchmarks/results/lossless.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
