"""Counters of speculative decoding: sums over the rounds of one prompt.

They come from decoding (`counters_from_rounds`) or, as expected numbers, from a teacher-forced pass
(`eval.offline`); `eval.metrics` makes metrics of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.rounds import Round

# lists with an entry for each position of a draft
POSITIONS = ("reach", "tested", "engine_accepted_per_position")
# lists with an entry for each range of positions in the answer
RANGES = ("rounds_from", "emitted_from")
NUM_RANGES = 12  # 0-31, 32-63, 64-127, ...; the last one has no end
FIRST_RANGE = 32


@dataclass
class PromptCounters:
    """Sums over the rounds of one prompt; expected numbers when measured without decoding."""

    prompt_hash: str
    domain: str
    K: int
    rounds: float = 0.0  # target forwards after the prefill
    truncated_rounds: float = 0.0
    emitted: float = 0.0  # cut at EOS and length, token of the prefill excluded
    submitted: float = 0.0
    judging: float = 0.0  # drafting steps that only judged the newest token and drafted nothing
    accepted: float = 0.0  # cut
    rejections: float = 0.0  # rounds with a rejection
    reach: list[float] = field(default_factory=list)  # [K] rounds with at least i accepted (cut)
    tested: list[float] = field(default_factory=list)  # [K] rounds that decided position i
    overlap_sum: float = 0.0  # sum_v min(p_v, q_v) over response or verified positions
    overlap_count: float = 0.0
    greedy_sum: float = 0.0  # positions where drafter argmax = target argmax
    greedy_count: float = 0.0
    engine_drafts: float = 0.0  # as vLLM counts: not cut, rounds without drafts left out
    engine_drafted: float = 0.0
    engine_accepted: float = 0.0
    engine_accepted_per_position: list[float] = field(default_factory=list)  # [K]
    # [NUM_RANGES] rounds that begin in each range of the answer, and the tokens that they emit
    rounds_from: list[float] = field(default_factory=list)
    emitted_from: list[float] = field(default_factory=list)
    identical: bool | None = None  # greedy: the same tokens as plain decoding
    plain_s: float = 0.0  # 0: not timed
    plain_tokens: float = 0.0
    speculative_s: float = 0.0
    speculative_tokens: float = 0.0

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(POSITIONS, self.K) | dict.fromkeys(RANGES, NUM_RANGES)
        for name, size in sizes.items():
            values = getattr(self, name) or [0.0] * size
            assert len(values) == size, f"{name} must have {size} entries, got {len(values)}"
            setattr(self, name, [float(value) for value in values])


def range_of(position: int) -> int:
    """The range of a position in the answer, of which position 0 is the token of the prefill."""
    return min((position // FIRST_RANGE).bit_length(), NUM_RANGES - 1)


def range_bounds(index: int) -> tuple[int, int | None]:
    """The first and the last position of a range; None: no end."""
    first = FIRST_RANGE << (index - 1) if index else 0
    return first, None if index == NUM_RANGES - 1 else (FIRST_RANGE << index) - 1


def counters_from_rounds(
    rounds: Sequence[Round], prompt_hash: str, domain: str, K: int, judges_last: bool = False
) -> PromptCounters:
    """Add up the rounds of one prompt, given in their order.

    Greedy match and timings are left to the caller. `judges_last`: a round that stopped early had
    fed its newest token to the drafter.
    """
    total = PromptCounters(prompt_hash, domain, K)
    for round_ in rounds:
        assert round_.prompt_hash == prompt_hash, (round_.prompt_hash, prompt_hash)
        assert max(round_.depth, round_.engine_accepted) <= K, round_
        begins = range_of(1 + int(total.emitted))
        total.rounds_from[begins] += 1
        total.emitted_from[begins] += round_.emitted
        total.rounds += 1
        total.truncated_rounds += round_.truncated
        total.emitted += round_.emitted
        total.submitted += round_.submitted
        total.judging += judges_last and 0 < round_.submitted < K
        total.accepted += round_.accepted
        total.rejections += round_.rejected
        for i in range(round_.accepted):
            total.reach[i] += 1
            total.tested[i] += 1
        if round_.rejected:
            total.tested[round_.accepted] += 1
        total.overlap_sum += sum(round_.overlap)
        total.overlap_count += len(round_.overlap)
        total.engine_drafts += round_.submitted > 0
        total.engine_drafted += round_.submitted
        total.engine_accepted += round_.engine_accepted
        for i in range(round_.engine_accepted):
            total.engine_accepted_per_position[i] += 1
    return total


def check_invariants(rounds: Sequence[Round], output_length: int) -> None:
    """Assert that the rounds of one request add up to its output of `output_length` tokens."""
    emitted = sum(round_.emitted for round_ in rounds)
    assert emitted + 1 == output_length, (
        f"rounds emitted {emitted} tokens + 1 of the prefill, the output has {output_length}"
    )
    for index, round_ in enumerate(rounds):
        where = f"round {index}: {round_}"
        assert 0 <= round_.accepted <= round_.engine_accepted <= round_.submitted, where
        assert round_.accepted <= round_.emitted <= round_.accepted + 1, where
        assert round_.truncated or round_.emitted == round_.accepted + 1, where
        assert not round_.rejected or round_.first_reject_pos == round_.accepted + 1, where
        assert len(round_.overlap) <= round_.submitted, where
