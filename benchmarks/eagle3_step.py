"""Memory of one EAGLE-3 step behind a draft vocabulary of 151,936 ids, beside one of 8,192.

    python -m benchmarks.eagle3_step
    python -m benchmarks.eagle3_step --vocab 4000 --draft-vocab 200 --positions 256 --width 64

One batch of the recipe as it ships (width 1,024, three unrolled steps, one sequence of 2,048
tokens, float32): loss and backward on random states of a target with 151,936 ids. Every run is a
process of its own; memory is its peak (`ru_maxrss`) beyond that of a process which holds model,
gradients and the batch. Goal: the large vocabulary takes at most 1.5 times what the small one does.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from data.batches import collate
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from recipes import eagle3
from target.model import Target
from target.outputs import LayerId, TargetOutputs

GOAL, STEPS, LAYERS = 1.5, 3, 4


class Words:
    """The part of a tokenizer that building a drafter needs."""

    def __init__(self, size: int):
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.size)}


def target_of(sizes: argparse.Namespace) -> Target:
    config = LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.width, intermediate_size=3 * sizes.width,
        num_hidden_layers=LAYERS, num_attention_heads=sizes.width // 64,
        max_position_embeddings=4 * sizes.positions, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return Target(model, Words(sizes.vocab), "random", {}, (0,))


def measure(draft_vocab: int, base: bool, sizes: argparse.Namespace) -> dict[str, float]:
    """One step in this process; `base` stops when all is there that a step begins with."""
    torch.manual_seed(0)
    target = target_of(sizes)
    recipe = eagle3.Recipe(eagle3.Config(steps=STEPS, layers=[0, 1, 2]), target)
    settings = Eagle3Settings([0, 1, 2], sizes.width)
    kept = None if draft_vocab == sizes.vocab else torch.arange(draft_vocab)
    drafter = Eagle3Drafter.build(target, settings, kept=kept).train()
    ids = torch.randint(min(sizes.vocab, draft_vocab), (sizes.positions,))
    batch = collate([ids[:1].tolist()], [ids[1:].tolist()], ["target"])
    hidden: dict[LayerId, torch.Tensor] = {
        layer: torch.randn(1, sizes.positions, sizes.width) for layer in (0, 1, 2)
    }
    # the target's first choice is then a token of the small vocabulary, so every position counts
    hidden["final_norm"] = 4 * nn.functional.normalize(target.head.weight[ids], dim=-1)[None]
    began = time.perf_counter()
    value = norm = 0.0
    if base:
        for p in drafter.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
    else:
        terms = recipe.objective.loss(drafter, batch, TargetOutputs(hidden), 0).terms
        loss: Any = sum(one.weight * one.total / one.count for one in terms.values())
        loss.backward()
        assert drafter.lm_head.weight.grad is not None
        value, norm = loss.item(), drafter.lm_head.weight.grad.norm().item()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts KiB
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_mib": peak_mib, "loss": value, "gradient_norm": norm}


def in_own_process(draft_vocab: int, what: str) -> dict[str, float]:
    """The parent must stay small: on Linux a child's peak starts at that of its parent."""
    command = [sys.executable, "-m", "benchmarks.eagle3_step", *sys.argv[1:]]
    command += ["--one", str(draft_vocab), what]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/eagle3_step.json"))
    parser.add_argument("--one", nargs=2, metavar=("IDS", "WHAT"), help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    if sizes.one:
        print(json.dumps(measure(int(sizes.one[0]), sizes.one[1] == "base", sizes)))
        return
    rows = []
    for draft_vocab in (sizes.draft_vocab, sizes.vocab):
        base = in_own_process(draft_vocab, "base")["peak_mib"]
        steps = [in_own_process(draft_vocab, "step") for _ in range(sizes.runs)]
        rows.append({
            "draft_vocab": draft_vocab,
            "base_mib": round(base),
            "step_mib": round(statistics.median(one["peak_mib"] for one in steps) - base),
            "seconds": round(statistics.median(one["seconds"] for one in steps), 1),
            "loss": steps[0]["loss"],
            "gradient_norm": steps[0]["gradient_norm"],
        })  # fmt: skip
        print(rows[-1], flush=True)
    result = {
        "sizes": {key: getattr(sizes, key) for key in ("vocab", "positions", "width", "runs")},
        "machine": f"{platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        "goal": GOAL,
        "memory": round(rows[1]["step_mib"] / rows[0]["step_mib"], 3),
        "rows": rows,
    }
    print(f"memory: {result['memory']} of the small vocabulary, goal {GOAL}")
    sizes.out.parent.mkdir(exist_ok=True)
    sizes.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
