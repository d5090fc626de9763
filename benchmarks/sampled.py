"""Sampled decoding of a chat model: has its text the target's distribution, its rounds replay's?

    python -m benchmarks.sampled <drafter> [seed ...]       # seeds 0 and 1 by default

SmolLM2-135M-Instruct answers the held-out prompts of `benchmarks.queue` at temperature 1 with
chains of the drafter, 64 tokens each. Three sums must be 0 up to their spread, each given as a
multiple of it: -log p of every token less the entropy of the distribution that it was drawn from;
answers that end with an EOS token less the probabilities of ending; rounds less the rounds that
replay of the same answers expects. They are martingales: every term has mean 0 given what came
before it. The spread of the last one is that of its own terms, by prompt.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import chat_model
from data.traces import Trace
from drafters.load import load_drafter
from drafters.round import Budget
from eval.engine import Speculated, SpeculativeDecoder
from eval.offline import OfflineEvaluator
from phases.run import provenance
from target.cache import CachedModel
from target.model import Target
from target.sampling import Sampling, surprise, warp
from trainer.files import write_json

SAMPLING, K, NEW_TOKENS = Sampling(1.0), 4, 64
RESULT = Path("benchmarks/results/sampled.json")


def trace_of(one: Speculated, index: int) -> Trace:
    """The answer as a row of target text, as replay reads it."""
    return Trace(
        prompt_ids=one.request.prompt_ids, response_ids=one.response_ids, source="target",
        domain="", conversation_id=str(index), turn=0, sample_index=0,
        temperature=SAMPLING.temperature, top_k=0, top_p=1.0, seed=0,
        finish_reason=one.finish_reason, model_hash="", tokenizer_hash="",
        prompt_hash=str(index), index=index,
    )  # fmt: skip


def ends(target: Target, traces: list[Trace]) -> dict[str, tuple[float, float]]:
    """(sum, variance) of the first two martingales."""
    texts, stops = [0.0, 0.0], [0.0, 0.0]
    for trace in traces:
        ids = torch.tensor([trace.prompt_ids + trace.response_ids])
        logits = target.outputs(ids).logits
        assert logits is not None
        probs = warp(logits[0, len(trace.prompt_ids) - 1 : -1, : target.vocab_size], SAMPLING)
        beyond, variance = surprise(probs, torch.tensor(trace.response_ids))
        texts = [texts[0] + float(beyond.sum()), texts[1] + float(variance.sum())]
        stop = probs[:, list(target.eos_ids)].sum(-1).double()
        ended = float(trace.response_ids[-1] in target.eos_ids)
        stops = [stops[0] + ended - float(stop.sum()), stops[1] + float((stop * (1 - stop)).sum())]
    return {"surprise": (texts[0], texts[1]), "ends": (stops[0], stops[1])}


@torch.inference_mode()
def measure(target: Target, name: str, seed: int) -> dict[str, Any]:
    drafter = load_drafter(name, target).eval()
    requests = chat_model.requests(target, SAMPLING, seed)
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=SAMPLING, budget=Budget(K),
        eos_ids=target.eos_ids, max_new_tokens=NEW_TOKENS, batch_size=8,
        vocab_size=target.vocab_size,
    )  # fmt: skip
    answers = sorted(decoder.run(requests), key=lambda one: int(one.request.tag))
    traces = [trace_of(one, int(one.request.tag)) for one in answers]
    replayed = OfflineEvaluator(target, traces, SAMPLING, Budget(K), engine_counters=False)(drafter)
    gaps = [len(a.rounds) - c.rounds for a, c in zip(answers, replayed.counters, strict=True)]
    sums = ends(target, traces) | {"beyond replay": (sum(gaps), sum(gap * gap for gap in gaps))}
    return {
        "answers": len(answers), "tokens": sum(len(one.response_ids) for one in answers),
        "rounds": sum(len(one.rounds) for one in answers),
        **{key: {"sum": total, "spreads": total / math.sqrt(variance)}
           for key, (total, variance) in sums.items()},
    }  # fmt: skip


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    target = Target.load(chat_model.TARGET)
    found = {seed: measure(target, name, int(seed)) for seed in words or ("0", "1")}
    about = provenance(["benchmarks.sampled", *sys.argv[1:]])
    write_json(RESULT, {**about, "K": K, "new_tokens": NEW_TOKENS, "seeds": found})
    print(json.dumps(found, indent=1))
