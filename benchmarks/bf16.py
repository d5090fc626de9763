"""How far acceptance may differ between float32 and an engine that computes in bfloat16.

    OMP_NUM_THREADS=1 python -m benchmarks.bf16 <drafter> <K>

SmolLM2-135M-Instruct, whose weights are stored in bfloat16, answers the held-out prompts of
`benchmarks.queue` with chains of the drafter, 64 tokens each, at temperature 0: in float32,
and with the output of every module of target and drafter, and the drafter's weights, rounded to
bfloat16, as a GPU rounds them behind sums in float32. Of both: tokens per round, with the paired
difference over prompts; how many greedy answers part and where; and on the float32 answers the
share of tokens that are no more the likeliest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import chat_model
from drafters.base import TrainedDrafter
from drafters.load import load_drafter
from drafters.round import Budget
from eval.counters import PromptCounters, counters_from_rounds
from eval.engine import Speculated, SpeculativeDecoder
from eval.metrics import paired_difference, summarise
from phases.run import provenance
from target.cache import CachedModel
from target.model import Target
from target.sampling import Sampling
from trainer.files import write_json

NEW_TOKENS, SEED, TEMPERATURES = 64, 0, (0.0,)
RESULT = Path("benchmarks/results/bf16.json")


@contextmanager
def rounding(*models: nn.Module) -> Iterator[None]:
    """Inside the block, what each module gives is rounded to bfloat16."""

    def rounded(module: nn.Module, given: object, found: object) -> object:
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            return found.bfloat16().to(found.dtype)
        return None

    modules = [module for model in models for module in model.modules()]
    handles = [module.register_forward_hook(rounded) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def answers(
    target: Target, drafter: TrainedDrafter, K: int, temperature: float
) -> list[Speculated]:
    sampling = Sampling(temperature)
    requests = chat_model.requests(target, sampling, SEED)
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=sampling, budget=Budget(K),
        eos_ids=target.eos_ids, max_new_tokens=NEW_TOKENS, batch_size=8,
        vocab_size=target.vocab_size,
    )  # fmt: skip
    return sorted(decoder.run(requests), key=lambda one: int(one.request.tag))


def counted(found: list[Speculated], K: int) -> list[PromptCounters]:
    return [counters_from_rounds(one.rounds, one.request.tag, "", K) for one in found]


@torch.inference_mode()
def other_choices(target: Target, found: list[Speculated]) -> tuple[int, int]:
    """Tokens of the answers that are not the likeliest, and all."""
    other = total = 0
    for one in found:
        prompt, response = one.request.prompt_ids, one.response_ids
        logits = target.outputs(torch.tensor([prompt + response])).logits
        assert logits is not None
        best = logits[0, len(prompt) - 1 : -1, : target.vocab_size].argmax(-1)
        other += int((best != torch.tensor(response)).sum())
        total += len(response)
    return other, total


def main(name: str, K: int) -> None:
    target = Target.load(str(chat_model.TARGET))
    drafter = load_drafter(name, target).eval()
    plain = {t: answers(target, drafter, K, t) for t in TEMPERATURES}
    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    found: dict[str, Any] = {"drafter": name, "K": K}
    with rounding(target.model, drafter):
        rounded = {t: answers(target, drafter, K, t) for t in plain}
        other, total = other_choices(target, plain[0.0])
    for temperature, own in plain.items():
        pair = counted(rounded[temperature], K), counted(own, K)
        pairs = [*zip(own, rounded[temperature], strict=True)]
        parted = [
            next((i for i, both in enumerate(zip(a.response_ids, b.response_ids, strict=False))
                  if both[0] != both[1]), None)
            for a, b in pairs
        ]  # fmt: skip
        places = sorted(place for place in parted if place is not None)
        found[f"T={temperature:g}"] = {
            "float32": summarise(pair[1], draws=1000, seed=SEED).tokens_per_round,
            "bfloat16": summarise(pair[0], draws=1000, seed=SEED).tokens_per_round,
            "difference": paired_difference(*pair, "tokens_per_round", draws=1000, seed=SEED),
            "answers": len(pairs), "parted": len(places),
            "median_place": places[len(places) // 2] if places else None,
        }  # fmt: skip
    found["no_more_the_likeliest"] = {"tokens": other, "of": total}
    found["run"] = provenance(["python", "-m", "benchmarks.bf16", name, str(K)])
    write_json(RESULT, found)
    print({key: value for key, value in found.items() if key != "run"})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
