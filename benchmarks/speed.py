"""Speed against transformers, each pair in one run, alternating.

    python -m benchmarks.speed            # all parts; also: generation, plain, speculative, replay

1. generation: traces by `target.decode` against padded `model.generate` batches in file order, same
   batch size, prompts and answers of mixed length, same tokens out. Goal 2x.
2. plain: batch 1, plain decoding through our cache against `model.generate`. Goal 0.95x.
3. speculative: batch 1 against transformers' assisted generation, same pair, same K. Goal 1.2x.
4. replay: acceptance without decoding against decoding at batch 8, traces cached. Goal 20x.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from data.prompts import load_prompts
from data.traces import Trace
from drafters.causal_lm import CausalLMDrafter
from eval.engine import SpeculativeDecoder
from eval.offline import OfflineEvaluator
from eval.policies.table import make_budget
from target.cache import CachedModel
from target.decode import Continuation, Request, decode
from target.model import Target
from target.sampling import Sampling, row_key

RUNS = 7
K = 4
GREEDY = Sampling(0.0)
T = TypeVar("T")


def requests_of(target: Target, count: int) -> list[Request]:
    prompts = load_prompts("toy", count=count, seed=7, toy_split="eval")
    ids = [target.tokenizer(p.text).input_ids for p in prompts]
    return [Request(row, row_key(0, row, 0), GREEDY, i) for i, row in enumerate(ids)]


def clock(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def alternating(first, second, runs: int = RUNS) -> dict:
    """Median seconds of both, taken in turn after one warm-up each."""
    first()
    second()
    pairs = [(clock(first)[0], clock(second)[0]) for _ in range(runs)]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "ours_s": a,
        "theirs_s": b,
        "ratio": b / a,
        "spread": [min(y / x for x, y in pairs), max(y / x for x, y in pairs)],
    }


@torch.inference_mode()
def generate_batches(
    target: Target, requests: list[Request], batch_size: int, limit: int
) -> list[list[int]]:
    """The usual way: left-padded batches in file order, each as long as its longest answer."""
    out = []
    tokenizer = target.tokenizer
    for i in range(0, len(requests), batch_size):
        rows = [r.prompt_ids for r in requests[i : i + batch_size]]
        width = max(map(len, rows))
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], device=target.device)
        mask = torch.tensor(
            [[0] * (width - len(r)) + [1] * len(r) for r in rows], device=target.device
        )
        result = target.model.generate(
            ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=pad
        )
        for row in result[:, width:].tolist():
            end = next((j + 1 for j, t in enumerate(row) if t in target.eos_ids), len(row))
            out.append(row[:end])
    return out


def ours(
    target: Target, requests: list[Request], batch_size: int, limit: int
) -> dict[int, Continuation]:
    rows = decode(
        CachedModel(target.model),
        list(requests),
        max_new_tokens=limit,
        eos_ids=target.eos_ids,
        batch_size=batch_size,
    )
    return {row.request.tag: row for row in rows}


def generation(target: Target, drafter: CausalLMDrafter) -> dict:
    requests, limit, batch = requests_of(target, 160), 160, 16
    mine = ours(target, requests, batch, limit)
    theirs = generate_batches(target, requests, batch, limit)
    differing = sum(mine[i].response_ids != row for i, row in enumerate(theirs))
    tokens = sum(len(row) for row in theirs)
    result = alternating(
        lambda: ours(target, requests, batch, limit),
        lambda: generate_batches(target, requests, batch, limit),
        3,
    )
    return result | {
        "tokens": tokens,
        "tokens_per_s": tokens / result["ours_s"],
        "differing_prompts": differing,
        "goal": 2.0,
    }


def plain(target: Target, drafter: CausalLMDrafter) -> dict:
    requests = requests_of(target, 12)
    result = alternating(
        lambda: ours(target, requests, 1, 96), lambda: generate_batches(target, requests, 1, 96)
    )
    return result | {"goal": 0.95}


@torch.inference_mode()
def assisted(
    target: Target, drafter: CausalLMDrafter, requests: list[Request], K: int, limit: int
) -> list[list[int]]:
    """transformers' assisted generation, batch 1, K tokens drafted in every round."""
    config = drafter.model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    rows = []
    for request in requests:
        ids = torch.tensor([request.prompt_ids], device=target.device)
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter.model,
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=target.tokenizer.pad_token_id,
        )
        rows.append(out[0, ids.shape[1] :].tolist())
    return rows


def speculative(target: Target, drafter: CausalLMDrafter) -> dict:
    requests = requests_of(target, 12)
    decoder = SpeculativeDecoder(
        CachedModel(target.model),
        drafter,
        sampling=GREEDY,
        budget=make_budget("fixed", K),
        eos_ids=target.eos_ids,
        max_new_tokens=96,
        batch_size=1,
    )

    def theirs() -> list[list[int]]:
        return assisted(target, drafter, requests, K, 96)

    def speculated() -> list[list[int]]:
        return [next(iter(decoder.run([request]))).response_ids for request in requests]

    differing = sum(a != b for a, b in zip(theirs(), speculated(), strict=True))
    plainly = alternating(speculated, lambda: generate_batches(target, requests, 1, 96))
    return alternating(speculated, theirs) | {
        "differing_prompts": differing,
        "speedup_over_generate": plainly["ratio"],
        "goal": 1.2,
    }


def replay(target: Target, drafter: CausalLMDrafter) -> dict:
    """Traces cached means: the evaluator has seen them once, as during training."""
    requests, limit = requests_of(target, 96), 96
    rows = decode(
        CachedModel(target.model),
        list(requests),
        max_new_tokens=limit,
        eos_ids=target.eos_ids,
        batch_size=16,
        lookahead=K,
    )
    same = {
        "source": "target",
        "domain": "toy",
        "turn": 0,
        "sample_index": 0,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "model_hash": "",
        "tokenizer_hash": "",
    }
    traces = [
        Trace(
            prompt_ids=r.request.prompt_ids,
            response_ids=r.response_ids,
            conversation_id=str(r.request.tag),
            finish_reason=r.finish_reason,
            lookahead_ids=r.lookahead_ids,
            prompt_hash=str(r.request.tag),
            **same,
        )
        for r in rows
    ]
    evaluator = OfflineEvaluator(target, traces, GREEDY, make_budget("fixed", K))
    decoder = SpeculativeDecoder(
        CachedModel(target.model),
        drafter,
        sampling=GREEDY,
        budget=make_budget("fixed", K),
        eos_ids=target.eos_ids,
        max_new_tokens=limit,
        batch_size=8,
    )
    result = alternating(lambda: evaluator(drafter), lambda: list(decoder.run(requests)), 3)
    return result | {"goal": 20.0}


PARTS = {"generation": generation, "plain": plain, "speculative": speculative, "replay": replay}


def main(names: list[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load("assets/toy/target", device=device)
    drafter = CausalLMDrafter.from_pretrained("assets/toy/draft", target)
    drafter.eval()
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    result: dict[str, Any] = {"machine": machine, "python": platform.python_version()}
    for name in names or list(PARTS):
        result[name] = PARTS[name](target, drafter)
        print(name, json.dumps(result[name]), flush=True)
    if not names:
        Path("benchmarks/results").mkdir(exist_ok=True)
        Path("benchmarks/results/speed.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
