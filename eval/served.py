"""Rows of the report from the counters of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from data.traces import Trace
from drafters.round import Budget
from engines.distribution_check import CHECKED, unlike
from engines.llamacpp_run import LlamaRun, plain_steps
from engines.vllm_run import EngineCounters, EngineRun, Timing
from eval.costs import Cost
from eval.counters import PromptCounters, check_invariants, counters_from_rounds
from eval.engine import Speculated
from eval.measure import Bench, DifferingPrompt, Measurement
from eval.plain import difference
from eval.rounds import Round
from eval.row import Row
from target.decode import Continuation
from trainer.errors import RunFault


def prompt_counters(served: EngineRun, index: int, trace: Trace, K: int) -> PromptCounters:
    """Counters of one prompt, the engine's and those cut at the end of its answer."""
    left, rounds = len(served.tokens[index]) - 1, []
    for drafted, accepted in served.rounds[index]:
        emitted = min(accepted + 1, left)
        left -= emitted
        one = Round(
            prompt_hash=trace.prompt_hash, submitted=drafted, depth=drafted,
            accepted=min(accepted, emitted), emitted=emitted,
            first_reject_pos=accepted + 1 if accepted < min(drafted, emitted) else None,
            draft_forwards=0, draft_tokens=0, t_draft=0.0, t_verify=0.0, t_other=0.0, ctx_len=0,
            overlap=[], truncated=emitted <= accepted, engine_accepted=accepted,
        )  # fmt: skip
        rounds.append(one)
    if left or not all(one.emitted for one in rounds):
        raise RunFault(
            f"prompt {trace.prompt_hash[:12]}: the rounds of vLLM do not add up to its answer "
            "(no room to draft, or a request started anew): lower eval.batch_size or the lengths"
        )
    check_invariants(rounds, len(served.tokens[index]))
    return counters_from_rounds(rounds, trace.prompt_hash, trace.domain, K)


def engine_costs(plain: Iterable[Timing], drafted: Iterable[Timing], source: str) -> dict[str, Any]:
    """What decoding costs in the engine at batch 1: [lower quartile, median, upper quartile] over
    answers, of the seconds per token without a drafter (`token_s`) and per round with it
    (`round_s`), and the ratio of the medians (`round_cost`); null where nothing was timed.

    A round holds the drafting, the target's forward on all drafts and the engine's own work. They
    are not told apart: one K gives one number, and the speed-up at that K needs no more.
    """
    token_s, round_s = _quartiles(plain), _quartiles(drafted)
    return {
        "token_s": token_s,
        "round_s": round_s,
        "round_cost": round_s[1] / token_s[1] if token_s and round_s else None,
        "cost_source": f"{source}, batch 1",
    }


def _quartiles(timings: Iterable[Timing]) -> list[float] | None:
    """Of the seconds of a round; None without an answer of two tokens."""
    found = [one.seconds / one.rounds for one in timings if one.rounds]
    return np.quantile(found, [0.25, 0.5, 0.75]).tolist() if found else None


def served_row(
    bench: Bench, name: str, served: EngineRun, plain: EngineRun, cost: Cost
) -> Measurement:
    """A row of the report, measured by vLLM on the traces in their order.

    `plain`: the run of vLLM without a drafter.
    """
    assert served.drafter is not None, "plain decoding is no row of a drafter"
    K = served.drafter.K
    counters = [prompt_counters(served, i, trace, K) for i, trace in enumerate(bench.traces)]
    for index, ours in served.alone.items():
        one, other = counters[index], plain.alone[index]
        one.plain_s, one.plain_tokens = other.seconds, other.tokens
        one.speculative_s, one.speculative_tokens = ours.seconds, ours.tokens
    about = {"engine": served.engine, "draft_sampled": served.drafter.sampled} | engine_costs(
        plain.alone.values(), served.alone.values(), f"{served.engine} in {served.machine}"
    )
    return engine_row(bench, name, counters, served.tokens, plain.tokens, cost, about, "vllm")


def llamacpp_row(
    bench: Bench,
    name: str,
    served: LlamaRun,
    plain: LlamaRun,
    cost: Cost,
    by_rows: Mapping[int, list[float]] | None,
    dtype: torch.dtype,
) -> Measurement:
    """A row of the report, measured by llama.cpp on the traces in their order. `by_rows`: seconds
    of a round without drafting and of drafting, by the tokens that it verifies; `dtype`: that
    rounds as llama.cpp does."""
    drafting = served.drafter
    assert drafting is not None, "plain decoding is no row of a drafter"
    counters = [
        answer_counters(counted, tokens, trace, drafting.K, always=drafting.always)
        for counted, tokens, trace in zip(served.counters, served.tokens, bench.traces, strict=True)
    ]
    timed = bench.timed_prompts()
    for index in timed:
        one, theirs, ours = counters[index], plain.timing(index), served.timing(index)
        one.plain_s, one.plain_tokens = theirs.seconds, theirs.tokens
        one.speculative_s, one.speculative_tokens = ours.seconds, ours.tokens
    about = {
        "engine": served.engine,
        "draft_sampled": False,
        "draft_time_share": served.drafting_share(),
        "seconds_by_rows": {str(rows): spent for rows, spent in by_rows.items()}
        if by_rows
        else None,
    } | engine_costs(
        map(plain.timing, timed), map(served.timing, timed), f"{served.engine} in {served.machine}"
    )
    measured = engine_row(
        bench, name, counters, served.tokens, plain.tokens, cost, about, "llamacpp", dtype
    )
    asked_one_by_one(measured.row)
    if len(drafting.types) > 1:  # how often the drafter was asked is not counted
        measured.row.mbsu = measured.row.mbsu_params = measured.row.modelled_speedup_at = None
    return measured


def asked_one_by_one(row: Row) -> None:
    """Of an engine that counts by answer: what needs each round is null."""
    row.batch_size = 1
    row.alpha_hat = row.alpha_hat_ci95 = row.tokens_per_round_iid = None
    row.alpha_pos, row.reach_pos = [], []
    assert row.by_domain is not None
    domains = row.by_domain
    for place in (domains["mean"], domains["worst"], *domains["domains"].values()):
        place["alpha_hat"] = None


def answer_counters(
    new: EngineCounters, tokens: list[int], trace: Trace, K: int, *, always: bool = True
) -> PromptCounters:
    """Counters of one answer of which the engine counted no rounds one by one.

    Only its last round can have been cut, at EOS or at the limit, and a cut round emits no token of
    the target's own; or it had no draft, which llama.cpp does not count. `always`: only there; what
    copies has no draft in any round. Raises RunFault where the counters exceed the answer."""
    emitted = len(tokens) - 1
    cut, plain = new.drafts + new.accepted - emitted, plain_steps(new, emitted)
    if cut > K or (always and plain > 1):
        raise RunFault(
            f"the engine counted {new.drafts + new.accepted} tokens for one answer of {emitted}: "
            "another client uses it, or it did not draft in every round (give it room)"
        )
    rounds = new.drafts + plain
    return PromptCounters(
        trace.prompt_hash, trace.domain, K, rounds=rounds, truncated_rounds=float(cut > 0),
        emitted=emitted, submitted=new.drafted, accepted=emitted - rounds + (cut > 0),
        engine_drafts=new.drafts, engine_drafted=new.drafted, engine_accepted=new.accepted,
        engine_accepted_per_position=[float(n) for n in new.accepted_per_position],
    )  # fmt: skip


def engine_row(
    bench: Bench,
    name: str,
    counters: list[PromptCounters],
    answers: Sequence[list[int]],
    plain: Sequence[list[int]],
    cost: Cost,
    about: Mapping[str, Any],
    measured_by: str,
    dtype: torch.dtype | None = None,
) -> Measurement:
    """A row of the report from counters and answers of an engine.

    Greedy answers are compared with `plain`, the first sampled ones with the target's distribution.
    `about`: further fields of the row, with `engine_costs`, from which the speed-up is modelled.
    `dtype`: that rounds as the engine does; None: as the target.
    `cost` gives the bytes read alone: its times are of this project's decoding. Metrics that need
    the drafter's distribution (alpha) or such times stay null.
    """
    differing, note = list[DifferingPrompt](), None
    greedy = bench.sampling.temperature == 0
    if not (greedy or bench.target.has_layers):
        note = "the engine's sampled answers were not compared with the target's distribution"
    elif not greedy:
        drawn = zip(bench.requests(), answers, strict=True)
        answered = [Continuation(request, tokens, "") for request, tokens in drawn]
        if strange := unlike(bench.target, answered[:CHECKED]):
            note = f"the engine does not sample the target's distribution ({strange})"
    else:
        for i, (one, request) in enumerate(zip(counters, bench.requests(), strict=True)):
            trace = bench.traces[i]
            answer = Speculated(request, answers[i], trace.finish_reason, [])
            gap = difference(bench.target, trace.prompt_ids, plain[i], answer, dtype)
            one.identical = gap is None
            if gap is not None:
                differing.append({**gap, "prompt_hash": one.prompt_hash})
    row = bench.row(name, counters, cost, measured_by, Budget(counters[0].K))
    # the rule and the times that `bench` knows are of this project's decoding
    row = dataclasses.replace(row, policy="fixed", cost_ratio=None, verify_cost=None)
    row = dataclasses.replace(row, modelled_speedup=None, **about)
    if row.tokens_per_round and row.round_cost:
        row.modelled_speedup = row.tokens_per_round / row.round_cost
    if greedy:
        row.num_compared, row.differing_prompts = len(counters), differing
        row.lossless = all(one["near_tie"] for one in differing)
    elif note:
        row.lossless = row.lossless and not bench.target.has_layers
        row.note = "; ".join(filter(None, [row.note, note]))
    return Measurement(row, counters)
