"""Counters of speculative decoding, the metrics made of them, and their uncertainty.

Everything is a ratio of sums over prompts, and prompts are what is resampled: rounds of one
prompt resemble each other, so resampling rounds would give intervals that are too narrow.
Counters (`eval.counters`) of decoding and expected ones go through `summarise` alike.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from eval.counters import NUM_RANGES, POSITIONS, RANGES, PromptCounters, range_bounds
from eval.row import AtPosition, ByDomain, Summary, Worst
from trainer.errors import UserError


class Difference(TypedDict):
    """The difference of a metric on the same prompts, a - b."""

    metric: str
    diff: float | None
    ci95: list[float] | None
    p: float | None
    seeds: int
    num_prompts: int


class SeedDifference(Difference):
    """A difference over several training seeds."""

    diff_per_seed: list[float]


_SCALARS = [
    f.name
    for f in dataclasses.fields(PromptCounters)
    if f.name not in (*POSITIONS, *RANGES, "prompt_hash", "domain", "K", "identical")
]
_COLUMNS = [*_SCALARS, "tries"]  # tries = accepted + rejections

# metric: product of the first sums / product of the second sums
_RATIOS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tokens_per_round": (("emitted",), ("rounds",)),
    "accepted_per_round": (("accepted",), ("rounds",)),
    "draft_acceptance_rate": (("accepted",), ("submitted",)),
    "alpha": (("overlap_sum",), ("overlap_count",)),
    "alpha_hat": (("accepted",), ("tries",)),
    "greedy_match": (("greedy_sum",), ("greedy_count",)),
    "speedup": (("plain_s", "speculative_tokens"), ("plain_tokens", "speculative_s")),
}
HEADLINE = tuple(_RATIOS)


def summarise(counters: Sequence[PromptCounters], *, draws: int = 1000, seed: int = 0) -> Summary:
    """Every metric of a report row that counters determine; None where a denominator is zero.

    `<metric>_ci95` is a percentile bootstrap over prompts, None below two prompts.
    """
    if not counters:
        raise UserError("no prompts were measured: eval.num_prompts must leave at least one")
    table = _by_prompt(counters)
    sums = table.sum(axis=0)
    total = {name: float(sums[i]) for i, name in enumerate(_COLUMNS)}
    reach, tested, engine = (_sum_positions(counters, name) for name in POSITIONS)
    identical = [c.identical for c in counters if c.identical is not None]
    emitted, rounds = (table[:, _COLUMNS.index(name)] for name in ("emitted", "rounds"))
    per_prompt = emitted[rounds > 0] / rounds[rounds > 0]
    headline: dict[str, Any] = {}
    for name in HEADLINE:
        headline[name] = _number(_ratio(_usable(table, name).sum(axis=0), name))
        headline[f"{name}_ci95"] = _interval(_bootstrap(table, name, draws, seed))
    drafts = total["engine_drafts"]
    return Summary(
        num_prompts=len(table),
        num_rounds=_whole(total["rounds"]),
        **headline,
        tokens_per_round_prompt_mean=float(per_prompt.mean()) if len(per_prompt) else None,
        truncated_rounds=_whole(total["truncated_rounds"]),
        alpha_pos=[_divide(r, t) for r, t in zip(reach, tested, strict=True)],
        reach_pos=[_divide(r, total["rounds"]) for r in reach],
        discard_rate=_divide(total["submitted"] - total["accepted"], total["submitted"]),
        verification_rate=_divide(total["rounds"], total["emitted"]),
        engine_drafts=_whole(drafts),
        # replay does not know what a stop rule drafts past a rejection
        engine_drafted=_whole(total["engine_drafted"])
        if total["engine_drafted"] or not drafts
        else None,
        engine_accepted=_whole(total["engine_accepted"]),
        engine_accepted_per_position=[_whole(value) for value in engine],
        engine_tokens_per_round=1 + total["engine_accepted"] / drafts if drafts else None,
        identical_to_plain=float(np.mean(identical)) if identical else None,
        plain_tokens_per_s=_divide(total["plain_tokens"], total["plain_s"]),
        speculative_tokens_per_s=_divide(total["speculative_tokens"], total["speculative_s"]),
    )


def per_domain(counters: Sequence[PromptCounters], *, draws: int = 0, seed: int = 0) -> ByDomain:
    """Headline metrics by domain, their mean over domains, and the worst domain of each.

    `draws`: resamples for the interval of tokens per round in each domain.
    """
    domains: dict[str, dict[str, Any]] = {}
    for domain in sorted({c.domain for c in counters}):
        own = [c for c in counters if c.domain == domain]
        row, names = summarise(own, draws=0), ("num_prompts", "num_rounds", *HEADLINE)
        domains[domain] = {name: getattr(row, name) for name in names}
        drawn = _bootstrap(_by_prompt(own), "tokens_per_round", draws, seed)
        domains[domain]["tokens_per_round_ci95"] = _interval(drawn)
    mean: dict[str, float | None] = {}
    worst: dict[str, Worst | None] = {}
    for name in HEADLINE:
        known = {domain: row[name] for domain, row in domains.items() if row[name] is not None}
        lowest = min(known, key=lambda domain: known[domain]) if known else None
        mean[name] = float(np.mean(list(known.values()))) if known else None
        worst[name] = {"domain": lowest, "value": known[lowest]} if lowest is not None else None
    return {"domains": domains, "mean": mean, "worst": worst}


def per_position(
    counters: Sequence[PromptCounters], *, draws: int = 0, seed: int = 0
) -> list[AtPosition]:
    """Tokens per round by the place in the answer at which rounds begin; ranges without a round
    are left out."""
    order = {name: i for i, name in enumerate(sorted({_first_turn(c) for c in counters}))}
    table = np.zeros((2, len(order), NUM_RANGES))  # rounds and tokens
    for c in counters:
        table[:, order[_first_turn(c)]] += [c.rounds_from, c.emitted_from]
    rounds, emitted = table
    weights = np.zeros((0, len(order)))
    if draws and len(order) > 1:
        weights = _resample(np.random.default_rng(seed), len(order), draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (weights @ emitted) / (weights @ rounds)
    found: list[AtPosition] = []
    for index in np.flatnonzero(rounds.sum(0)):
        first, last = range_bounds(int(index))
        total = float(rounds[:, index].sum())
        found.append(
            {
                "first": first,
                "last": last,
                "num_rounds": _whole(total),
                "tokens_per_round": float(emitted[:, index].sum()) / total,
                "tokens_per_round_ci95": _interval(drawn[:, index]),
            }
        )
    return found


def paired_difference(
    a: Sequence[PromptCounters],
    b: Sequence[PromptCounters],
    metric: str,
    draws: int = 1000,
    seed: int = 0,
) -> Difference:
    """metric(a) - metric(b) on the same prompts; prompts are resampled for both together.

    `p` is two-sided, from the bootstrap (not below 2 / (draws + 1)). Raises UserError where the
    prompts differ.
    """
    found = hierarchical_difference([(a, b)], metric, draws, seed)
    return {
        "metric": found["metric"],
        "diff": found["diff"],
        "ci95": found["ci95"],
        "p": found["p"],
        "seeds": found["seeds"],
        "num_prompts": found["num_prompts"],
    }


def hierarchical_difference(
    pairs: Sequence[tuple[Sequence[PromptCounters], Sequence[PromptCounters]]],
    metric: str,
    draws: int = 1000,
    seed: int = 0,
) -> SeedDifference:
    """Mean over training seeds of metric(a) - metric(b); seeds and prompts are both resampled.

    Each resample draws training seeds, then one set of prompts for all of them: every seed is
    measured on the same prompts, and drawing prompts anew for each seed would average their spread
    away. Raises UserError where the prompts differ or the metric is unknown.
    """
    if metric not in _RATIOS:
        raise UserError(f"metric must be one of {', '.join(HEADLINE)}, got {metric!r}")
    if not pairs:
        raise UserError("a comparison needs at least one pair of measurements")
    lists = [counters for pair in pairs for counters in pair]
    hashes = [Counter(c.prompt_hash for c in counters) for counters in lists]
    for other in hashes[1:]:
        if other != hashes[0]:
            count = sum(((other - hashes[0]) + (hashes[0] - other)).values())
            raise UserError(
                f"a paired comparison needs the same prompts on both sides, {count} differ: "
                "measure both with the same eval.prompts, eval.num_prompts and eval.seed"
            )
    tables = [_by_prompt(counters) for counters in lists]
    usable = np.logical_and.reduce([_usable_mask(table, metric) for table in tables])
    tables = [table[usable] for table in tables]
    num_prompts = int(usable.sum())
    result: SeedDifference = {
        "metric": metric,
        "diff": None,
        "ci95": None,
        "p": None,
        "seeds": len(pairs),
        "diff_per_seed": [],
        "num_prompts": num_prompts,
    }
    if not num_prompts:
        return result
    totals = [_number(_ratio(table.sum(axis=0), metric)) for table in tables]
    known = [value for value in totals if value is not None]
    if len(known) < len(totals):
        return result
    per_seed = [known[i] - known[i + 1] for i in range(0, len(known), 2)]
    rng = np.random.default_rng(seed)
    weights = _resample(rng, num_prompts, draws)
    values = [_ratio(weights @ table, metric) for table in tables]
    drawn = np.stack([values[i] - values[i + 1] for i in range(0, len(values), 2)], axis=1)
    seed_weights = _resample(rng, len(pairs), draws) / len(pairs)
    diffs = (drawn * seed_weights).sum(axis=1)
    enough = num_prompts > 1
    return {
        **result,
        "diff": float(np.mean(per_seed)),
        "diff_per_seed": per_seed,
        "ci95": _interval(diffs) if enough else None,
        "p": bootstrap_p(diffs) if enough else None,
    }


def bootstrap_p(diffs: np.ndarray) -> float | None:
    """Two-sided p of "no difference": twice the smaller share of draws on one side of zero."""
    diffs = diffs[np.isfinite(diffs)]
    if not len(diffs):
        return None
    tail = min(int((diffs <= 0).sum()), int((diffs >= 0).sum()))
    return min(1.0, 2 * (tail + 1) / (len(diffs) + 1))


def holm(pvalues: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment for several comparisons, in the order given."""
    adjusted = [0.0] * len(pvalues)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(pvalues)), key=lambda i: pvalues[i])):
        highest = max(highest, min(1.0, (len(pvalues) - rank) * pvalues[index]))
        adjusted[index] = highest
    return adjusted


def _by_prompt(counters: Sequence[PromptCounters]) -> np.ndarray:
    """Counters [prompts, columns] float64, sorted by hash.

    A prompt that was measured twice is one unit, and so are the turns of a conversation, because
    the later ones depend on those before.
    """
    order = {name: i for i, name in enumerate(sorted({_first_turn(c) for c in counters}))}
    table = np.zeros((len(order), len(_COLUMNS)))
    for c in counters:
        values = [getattr(c, name) for name in _SCALARS]
        table[order[_first_turn(c)]] += [*values, c.accepted + c.rejections]
    return table


def _first_turn(counters: PromptCounters) -> str:
    return counters.prompt_hash.partition("-")[0]  # turn n of a prompt is <hash>-<n>


def _sum_positions(counters: Sequence[PromptCounters], name: str) -> list[float]:
    sums = [0.0] * max(c.K for c in counters)
    for c in counters:
        for i, value in enumerate(getattr(c, name)):
            sums[i] += value
    return sums


def _usable_mask(table: np.ndarray, metric: str) -> np.ndarray:
    """The prompts of a metric: for speed-ups those timed both ways, else all."""
    if metric != "speedup":
        return np.ones(len(table), dtype=bool)
    timed = [_COLUMNS.index(name) for name in ("plain_s", "speculative_s")]
    return np.all(table[:, timed] > 0, axis=1)


def _usable(table: np.ndarray, metric: str) -> np.ndarray:
    return table[_usable_mask(table, metric)]


def _ratio(sums: np.ndarray, metric: str) -> np.ndarray:
    """The metric [...] of sums [..., columns], nan where its denominator is zero."""
    above, below = _RATIOS[metric]
    numerator = np.prod([sums[..., _COLUMNS.index(name)] for name in above], axis=0)
    denominator = np.prod([sums[..., _COLUMNS.index(name)] for name in below], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def _resample(rng: np.random.Generator, num: int, draws: int) -> np.ndarray:
    """Counts [draws, num] of each unit when `num` are drawn with replacement."""
    return rng.multinomial(num, np.full(num, 1 / num), size=draws).astype(np.float64)


def _bootstrap(table: np.ndarray, metric: str, draws: int, seed: int) -> np.ndarray:
    usable = _usable(table, metric)
    if len(usable) < 2 or not draws:
        return np.zeros(0)
    return _ratio(_resample(np.random.default_rng(seed), len(usable), draws) @ usable, metric)


def _interval(draws: np.ndarray) -> list[float] | None:
    draws = draws[np.isfinite(draws)]
    return [float(edge) for edge in np.percentile(draws, [2.5, 97.5])] if len(draws) else None


def _number(value: np.ndarray) -> float | None:
    return float(value) if np.isfinite(value) else None


def _divide(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _whole(value: float) -> int | float:
    """Counts as integers, expected counts as they are."""
    return int(value) if float(value).is_integer() else float(value)
