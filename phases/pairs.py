"""Comparisons of two measurements of the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise

from eval.config import EvalConfig
from eval.counters import PromptCounters
from eval.measure import Measurement
from eval.metrics import paired_difference
from eval.report.rows import STAGES, draft_shape
from eval.row import Json, Timing


def merge(offline: Measurement, real: Measurement, temperature: float, config: EvalConfig) -> None:
    """Copy what only decoding measures to the row that was measured without it, if both have the
    same policy and verifier."""
    replayed, decoded = offline.row, real.row
    if (replayed.policy, replayed.verifier) != (decoded.policy, decoded.verifier):
        return
    timing = {field.name: getattr(decoded, field.name) for field in fields(Timing)}
    offline.row = replace(replayed, lossless=decoded.lossless, **timing)
    if temperature == 0 and config.policy == "fixed":
        offline.row.replay_differs_from_decoding = differing_prompts(offline, real)


def against(
    tree: Measurement, chain: Measurement, temperature: float, config: EvalConfig
) -> list[Json]:
    """Compare a tree with the chain of the same drafter."""
    diff = paired_difference(
        tree.counters, chain.counters, "tokens_per_round", draws=config.bootstrap_draws,
        seed=config.seed,
    )  # fmt: skip
    name = tree.row.drafter
    roles = {"a_role": tree.row.role, "b_role": chain.row.role}
    pair = {"a": f"{name}, {draft_shape(tree.row)}", "b": name, **roles}
    return [{**pair, "temperature": temperature, **diff}]


def compare(
    name: str, measured: Mapping[str, Measurement], temperature: float, config: EvalConfig
) -> list[Json]:
    """Compare drafter `name` with the rows before, control and offline, and each stage with the one
    before it."""
    rows = []
    pairs = [(name, other) for other in ("before", "control", "offline") if other in measured]
    stages = [one for one in STAGES if one in measured]
    # each stage of several against the one before; the first starts from "before"
    pairs += [(b, a) for a, b in pairwise(["before", *stages, name] if stages else [])]
    for a, b in dict.fromkeys(pairs):
        for metric in ("alpha", "tokens_per_round"):
            if a != b:
                pair = _of_both(measured[a], measured[b])
                diff = paired_difference(
                    *pair, metric, draws=config.bootstrap_draws, seed=config.seed
                )
                roles = {"a_role": measured[a].row.role, "b_role": measured[b].row.role}
                rows.append({"a": a, "b": b, **roles, "temperature": temperature, **diff})
    return rows


def _of_both(a: Measurement, b: Measurement) -> tuple[list[PromptCounters], list[PromptCounters]]:
    """The counters of the prompts that both measured. Targets that write different answers leave
    out different later turns of a conversation, those that have grown too long."""
    if not (a.row.target_changed or b.row.target_changed):
        return a.counters, b.counters
    both = {c.prompt_hash for c in a.counters} & {c.prompt_hash for c in b.counters}
    mine, others = ([c for c in one.counters if c.prompt_hash in both] for one in (a, b))
    return mine, others


def differing_prompts(offline: Measurement, real: Measurement) -> int:
    """Count the prompts whose counters differ between replay and decoding. At T=0 there should be
    none: a difference means near-ties (float32) and is printed."""
    fields = (
        "rounds",
        "emitted",
        "accepted",
        "engine_drafts",
        "engine_accepted",
        "engine_accepted_per_position",
    )
    decoded = {c.prompt_hash: c for c in real.counters}
    differing = [
        c.prompt_hash
        for c in offline.counters
        if any(getattr(c, field) != getattr(decoded[c.prompt_hash], field) for field in fields)
    ]
    if differing:
        print(
            f"{len(differing)} prompts decode differently from their traces (near-ties), "
            f"first {differing[0][:12]}"
        )
    return len(differing)
