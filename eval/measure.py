"""From drafters to report rows: acceptance without decoding, real decoding, timings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data.cache import CachedModel
from data.decode import Request
from data.sampling import Sampling, row_key
from data.target import Target
from data.traces import Trace
from drafters.base import Drafter
from eval.engine import Speculated, SpeculativeDecoder
from eval.metrics import (
    PromptCounters,
    Round,
    check_invariants,
    counters_from_rounds,
    per_domain,
    summarise,
)
from eval.offline import OfflineEvaluator
from eval.policies import make_budget
from eval.report import COUNTING
from eval.speed_model import expected_tokens_iid, mbsu, modelled_speedup
from trainer.config import EvalConfig

NEAR_TIE = 1e-4  # two best logits closer than this may swap between kernels (float32)


@dataclass
class Measurement:
    """One row of the report and the counters behind it."""

    row: dict[str, Any]
    counters: list[PromptCounters]
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Of a drafter against the target: seconds of one step, bytes and parameters read per step;
    `verify`: seconds of the target's forward on K+1 tokens against one token."""

    time_ratio: float
    verify: float
    byte_ratio: float
    parameter_ratio: float


def read_per_step(model: torch.nn.Module) -> tuple[int, int]:
    """(bytes, parameters) one decoding step reads; an embedding that is only looked up is left
    out."""
    skipped = model.get_input_embeddings().weight  # type: ignore[operator]
    if skipped is model.get_output_embeddings().weight:  # type: ignore[operator]
        skipped = None
    kept = [p for p in model.parameters() if p is not skipped]
    return sum(p.numel() * p.element_size() for p in kept), sum(p.numel() for p in kept)


@torch.inference_mode()
def step_seconds(model: torch.nn.Module, tokens: int = 1, context: int = 64) -> float:
    """Median seconds of one cached forward of `tokens` tokens at batch 1."""
    cached = CachedModel(model)
    device = cached.device
    cached.begin(1, context + tokens)
    positions = torch.arange(context + tokens, device=device).unsqueeze(0)
    first, last = positions[:, :context], positions[:, context:]
    cached.forward(torch.ones_like(first), first, used=context, first=0)
    spent = []
    for _ in range(18):
        began = time.perf_counter()
        cached.forward(torch.ones_like(last), last, used=context + tokens, first=context)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return sorted(spent[3:])[7]


def cost_of(drafter: Any, target: Target, K: int) -> Cost:
    """Measured on this machine; a training-free drafter reads nothing and costs next to nothing."""
    step = step_seconds(target.model)
    verify = max(1.0, step_seconds(target.model, K + 1) / step)
    model = getattr(drafter, "model", None)
    if model is None:
        return Cost(0.0, verify, 0.0, 0.0)
    if model is target.model:
        return Cost(1.0, verify, 1.0, 1.0)
    (bytes_, parameters), (all_bytes, all_parameters) = (
        read_per_step(model),
        read_per_step(target.model),
    )
    ratio = step_seconds(model) / step
    return Cost(ratio, verify, bytes_ / all_bytes, parameters / all_parameters)


class Bench:
    """Measures drafters on one set of held-out traces at one temperature."""

    def __init__(
        self,
        target: Target,
        traces: Sequence[Trace],
        sampling: Sampling,
        config: EvalConfig,
        prompts: dict[str, str],
    ):
        self.target, self.traces, self.sampling, self.config = (
            target,
            list(traces),
            sampling,
            config,
        )
        self.prompts = prompts  # name and hash
        self.offline = OfflineEvaluator(
            target, traces, sampling, make_budget(config.policy, config.K)
        )

    def replayed(self, name: str, drafter: Any, cost: Cost) -> Measurement:
        """Acceptance without decoding."""
        result = self.offline(drafter)
        extra = {"calibration": result.calibration} if result.calibration else {}
        return Measurement(
            self._row(name, result.counters, cost, "offline") | extra, result.counters
        )

    def decoded(self, name: str, drafter: Drafter, cost: Cost) -> Measurement:
        """Real speculative decoding of every prompt; a few also one by one against transformers'
        own generate, for tokens/s and (T=0) for equality."""
        cached = CachedModel(self.target.model)
        finished = {
            s.request.tag: s
            for s in self._decoder(cached, drafter, self.config.batch_size).run(self.requests())
        }
        counters, rounds = [], []
        for trace in self.traces:
            one = finished[trace.prompt_hash]
            check_invariants(one.rounds, len(one.response_ids))
            counters.append(
                counters_from_rounds(one.rounds, trace.prompt_hash, trace.domain, self.config.K)
            )
            rounds += one.rounds
        differing = self._time(cached, drafter, counters)
        for one in counters:  # alpha is a mean over all response positions, not over tested ones
            one.overlap_sum = one.overlap_count = 0.0
        row = self._row(name, counters, cost, "decoding")
        if self.sampling.temperature == 0:
            row["num_compared"] = sum(one.identical is not None for one in counters)
            row["differing_prompts"] = differing
            row["lossless"] = all(one["near_tie"] for one in differing)
        return Measurement(row, counters, rounds)

    def requests(self) -> list[Request]:
        return [
            Request(
                t.prompt_ids,
                row_key(self.config.seed, t.prompt_ids, t.sample_index),
                self.sampling,
                t.prompt_hash,
            )
            for t in self.traces
        ]

    def _decoder(
        self, cached: CachedModel, drafter: Drafter, batch_size: int, timed: bool = True
    ) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            cached,
            drafter,
            sampling=self.sampling,
            budget=make_budget(self.config.policy, self.config.K),
            eos_ids=self.target.eos_ids,
            max_new_tokens=self.config.max_new_tokens,
            batch_size=batch_size,
            vocab_size=self.target.vocab_size,
            timed=timed,
        )

    def _time(
        self, cached: CachedModel, drafter: Drafter, counters: list[PromptCounters]
    ) -> list[dict[str, Any]]:
        """Alternate plain and speculative decoding prompt by prompt, after one warm-up of each."""
        chosen = list(range(min(self.config.timing_prompts, len(self.traces))))
        decoder = self._decoder(cached, drafter, 1, timed=False)
        requests = self.requests()
        differing = []
        for turn, index in enumerate([chosen[0], *chosen] if chosen else []):
            plain, plain_s = timed(
                lambda i=index: plain_generate(
                    self.target,
                    self.traces[i].prompt_ids,
                    self.sampling,
                    self.config.max_new_tokens,
                ),
                self.target,
            )
            ours, ours_s = timed(
                lambda i=index: next(iter(decoder.run([requests[i]]))), self.target
            )
            if turn == 0:
                continue
            one = counters[index]
            one.plain_s, one.plain_tokens = plain_s, len(plain)
            one.speculative_s, one.speculative_tokens = ours_s, len(ours.response_ids)
            if self.sampling.temperature == 0:
                gap = difference(self.target, self.traces[index].prompt_ids, plain, ours)
                one.identical = gap is None
                if gap is not None:
                    differing.append({"prompt_hash": one.prompt_hash, **gap})
        return differing

    def _row(
        self, name: str, counters: list[PromptCounters], cost: Cost, measured_by: str
    ) -> dict[str, Any]:
        config = self.config
        summary = summarise(counters, draws=config.bootstrap_draws, seed=config.seed)
        tokens, rounds = summary["tokens_per_round"], summary["num_rounds"]
        known = tokens is not None
        # drafted per round: K, unless a stop rule or a copy ends earlier
        drafted = sum(one.submitted for one in counters) / rounds if rounds else 0.0
        drafted = drafted or config.K
        return summary | {
            "drafter": name,
            "prompts": self.prompts,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "verifier": config.verifier,
            "policy": config.policy,
            "K": config.K,
            "counting": COUNTING,
            "bonus_counted": True,
            "lossless": True,
            "measured_by": measured_by,
            "cost_ratio": cost.time_ratio,
            "verify_cost": cost.verify,
            "modelled_speedup": modelled_speedup(tokens, drafted, cost.time_ratio, cost.verify)
            if known
            else None,
            "mbsu": mbsu(tokens, drafted, cost.byte_ratio) if known else None,
            "mbsu_params": mbsu(tokens, drafted, cost.parameter_ratio) if known else None,
            "tokens_per_round_iid": expected_tokens_iid(summary["alpha_hat"], config.K)
            if summary["alpha_hat"] is not None
            else None,
            "max_new_tokens": config.max_new_tokens,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "by_domain": per_domain(counters),
        }


def timed(call: Any, target: Target) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


@torch.inference_mode()
def plain_generate(
    target: Target, prompt_ids: list[int], sampling: Sampling, max_new_tokens: int
) -> list[int]:
    """transformers' own generate at batch 1: the plain decoding that ours must equal at T=0."""
    # whatever the model's generation config adds to the law is switched off: ours has none of it
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
    options["no_repeat_ngram_size"] = 0
    if sampling.temperature > 0:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": None,
        }
    ids = torch.tensor([prompt_ids], device=target.device)
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        # ids without a token: their logits are padding
        suppress_tokens=list(range(target.vocab_size, target.logits_width)) or None, **options,
    )  # fmt: skip
    return output[0, len(prompt_ids) :].tolist()


def difference(
    target: Target, prompt_ids: list[int], plain: list[int], ours: Speculated
) -> dict[str, Any] | None:
    """None if equal; else where they part and how far apart the two best logits are there."""
    mine = ours.response_ids
    if plain == mine:
        return None
    where = next(
        (i for i, (a, b) in enumerate(zip(plain, mine, strict=False)) if a != b),
        min(len(plain), len(mine)),
    )
    ids = torch.tensor([prompt_ids + plain[:where]], device=target.device)
    logits = target.outputs(ids).logits
    assert logits is not None
    best = logits[0, -1].float().topk(2).values
    gap = float(best[0] - best[1])
    return {"position": where, "logit_gap": gap, "near_tie": gap < NEAR_TIE}
