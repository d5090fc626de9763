"""What speculation is worth under load, from what servers did: the best draft length by the number
of requests under way, and the schedules in which engines take it.

A round of K drafted tokens at some load takes the seconds that were measured; without drafts the
step of the server without a drafter; lengths between the two lie on the line between them. Of the
positions that were measured, the first k give 1 + the sum of how often each was reached (Liu et al.
2024, arXiv:2406.14066, goodput).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engines.load import LoadRun
from eval.row import Json


@dataclass(frozen=True)
class Level:
    """One load. `reach`: share of rounds that accept at least i tokens; `gain`: tokens per second
    over those without the drafter; `best_K`: the length with the highest modelled gain, 0 for none,
    and `best_gain`; null where no server without the drafter was measured."""

    concurrency: int
    requests: int
    tokens_per_s: float
    token_s: float
    round_s: float
    tokens_per_round: float
    reach: list[float]
    plain_tokens_per_s: float | None = None
    plain_token_s: float | None = None
    gain: float | None = None
    best_K: int | None = None
    best_gain: float | None = None


def level(drafted: LoadRun, plain: LoadRun | None) -> Level:
    """The load that both were measured at."""
    counters = drafted.counters
    rounds = max(1, counters.drafts)
    reach = [count / rounds for count in counters.accepted_per_position]
    found = Level(
        drafted.concurrency, drafted.requests, drafted.tokens_per_s, drafted.token_s,
        drafted.round_s, counters.tokens_per_round or 1.0, reach,
    )  # fmt: skip
    if plain is None:
        return found
    best = best_length(reach, plain.token_s, drafted.round_s)
    more = {"plain_tokens_per_s": plain.tokens_per_s, "plain_token_s": plain.token_s,
            "gain": drafted.tokens_per_s / plain.tokens_per_s,
            "best_K": best[0], "best_gain": best[1]}  # fmt: skip
    return Level(**{**asdict(found), **more})


def best_length(reach: Sequence[float], step_s: float, round_s: float) -> tuple[int, float]:
    """The number of drafted tokens, 0 for none, with the most tokens per second, and how many times
    those of plain steps that is. `step_s`, `round_s`: seconds of a step without drafts and of a
    round with all of them."""
    best, tokens = (0, 1.0), 1.0
    for k, share in enumerate(reach, start=1):
        tokens += share
        gain = tokens * step_s / (step_s + (round_s - step_s) * k / len(reach))
        if gain > best[1]:
            best = k, gain
    return best


def pays_up_to(levels: Sequence[Level]) -> int | None:
    """The highest load up to which the drafter was faster at every one; None if at none."""
    paid = None
    for one in levels:
        if one.gain is None or one.gain <= 1:
            break
        paid = one.concurrency
    return paid


def schedule(levels: Sequence[Level]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, K] of ranges of the batch size.
    A range ends at the load that its K is the best at, and vLLM goes on with the last K."""
    found: list[list[int]] = []
    for one in levels:
        assert one.best_K is not None, "without a server without the drafter there is no schedule"
        first = found[-1][1] + 1 if found else 1
        if found and found[-1][2] == one.best_K:
            found[-1][1] = one.concurrency
        else:
            found.append([first, one.concurrency, one.best_K])
    return found


def sglang_schedule(ranges: Sequence[Sequence[int]]) -> dict[str, dict[str, list[int]]]:
    """The same for SGLang's --speculative-adaptive-config, steps by the smallest batch size that
    they are for. It drafts one token at least."""
    return {str(first): {"candidate_steps": [max(1, K)]} for first, _, K in ranges}


def load_part(
    temperature: float, K: int, source: str, levels: Sequence[Level], named: bool
) -> Json:
    """An entry of the report's part `load`. `named`: whether the user named the servers, without
    which no schedule is recommended."""
    found: Json = {
        "temperature": temperature, "K": K, "source": source,
        "levels": [asdict(one) for one in levels], "pays_up_to": pays_up_to(levels),
    }  # fmt: skip
    if named and all(one.best_K is not None for one in levels):
        ranges = schedule(levels)
        found["schedules"] = {"vllm": ranges, "sglang": sglang_schedule(ranges)}
    return found
