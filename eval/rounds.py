"""Records of the rounds of speculative decoding, the lines of rounds.jsonl."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class RoundIds:
    """The token ids of a round.

    `emitted` is cut at EOS and at the length limit; `drafted` is not. A tree has `parents`, the
    index of each node's parent (-1: none), and `path`, the accepted nodes, uncut.
    """

    drafted: list[int]
    emitted: list[int]
    parents: list[int] | None = None
    path: list[int] | None = None


@dataclass
class Round:
    """One target forward of one request: a line of rounds.jsonl.

    `accepted` and `emitted` are counted after cutting at EOS and at the length limit,
    `engine_accepted` before. `first_reject_pos` is 1-based. `overlap`: sum_v min(p_v, q_v) at each
    verified position. The token of the prefill belongs to no round.
    """

    prompt_hash: str
    submitted: int  # draft tokens the target scored
    depth: int  # longest submitted path; = submitted for chains
    accepted: int
    emitted: int
    first_reject_pos: int | None
    draft_forwards: int
    draft_tokens: int  # fed to the drafter
    t_draft: float  # seconds, device-synchronised; so are the next two
    t_verify: float
    t_other: float
    ctx_len: int  # at the start of the round
    overlap: list[float]
    truncated: bool  # EOS or the limit cut this round
    engine_accepted: int
    ids: RoundIds | None = None  # only for prompts whose answers the report shows

    def line(self) -> dict[str, object]:
        """The line of rounds.jsonl."""
        fields = dataclasses.asdict(self)
        if self.ids is None:
            del fields["ids"]
        return fields

    @property
    def rejected(self) -> bool:
        """Whether a rejection lies within the output, i.e. was not cut away."""
        return self.first_reject_pos is not None and self.emitted >= self.first_reject_pos
