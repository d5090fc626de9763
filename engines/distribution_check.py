"""Whether a server answers as the target does: the target's own forward over some of the answers.

Another model behind the address, from the start or since a restart in the middle of a run, would
train a drafter for that one. So the rows of a server wait in a window until a check covers them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from target.decode import Continuation
from target.model import Target
from target.padding import right_padded
from target.sampling import LEAST, warp

UNLIKE, SURPRISE = 0.1, 0.5  # share of greedy tokens that differ; nats beyond the entropy
# A greedy token differs where the target's own is so much more likely, in nats. Nearer ones are
# swapped by the server's precision, at every turn of a loop that a greedy answer may end in.
TIE = 0.25
# A mean over its limit counts where a good server, of whose greedy tokens PRECISION differ, gives
# it by chance less than once in 50,000 checks (Chernoff's bound, the best of TILTS). That takes 3
# greedy tokens of 3, 5 of 12 or 12 of 96: a few short answers cost no good server its place.
PRECISION = 0.02
EVIDENCE = math.log(50_000)
TILTS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
CHECKED = 8  # rows of a check; of the first answers of a server, all
ENOUGH = 64  # tokens of a check, if the window has them
# A check is one forward of the target over CHECKED rows: 1 row in 32, and no token is decoded.
WINDOW = 32 * CHECKED
HOLD_S = 60.0  # a slow server's rows are checked earlier: what waits is lost when a run is killed


class Seen(NamedTuple):
    """One row: the sum over its tokens of what is limited, and for each of TILTS the nats against
    a good server, which add up over rows."""

    greedy: bool
    count: int
    total: float
    nats: torch.Tensor


class Window:
    """The rows of one server that no check has covered yet.

    They are judged in the order in which they were asked for, and the last of them always: a server
    that answered these as the target does had no other model before, unless for a while."""

    def __init__(self, target: Target):
        self.target = target
        self.rows: list[tuple[int, Continuation]] = []
        self.passed: list[Seen] = []  # so that many short windows add up
        self.began = 0.0

    def add(self, number: int, row: Continuation) -> None:
        """`number`: its place in the order of asking."""
        if not self.rows:
            self.began = time.monotonic()
        self.rows.append((number, row))

    def due(self) -> bool:
        """Whether there are rows enough for a check, or some have waited for long."""
        enough = sum(len(row.response_ids) for _, row in self.rows) >= ENOUGH
        full = len(self.rows) >= (WINDOW if self.passed else CHECKED) and enough
        return full or (bool(self.passed) and time.monotonic() - self.began > HOLD_S)

    def check(self) -> str | None:
        """In what the rows differ from the target's law. A suspicion that the sample raises is
        confirmed on the whole window."""
        rows = [row for _, row in sorted(self.rows, key=lambda one: one[0])]
        sample = sampled(rows)
        seen = measured(self.target, sample)
        said = judged([*self.passed, *seen])
        if said and len(sample) < len(rows):
            seen = measured(self.target, rows)
            said = judged([*self.passed, *seen])
        if not said:
            self.passed = [*self.passed, *seen][-CHECKED:]
        return said

    def take(self) -> list[Continuation]:
        """All rows; the window is empty then."""
        rows, self.rows = [row for _, row in self.rows], []
        return rows


def sampled(rows: Sequence[Continuation]) -> Sequence[Continuation]:
    """CHECKED of them: the last half next to each other, with ENOUGH tokens, the others spread."""
    if len(rows) <= CHECKED:
        return rows
    last = CHECKED // 2
    while last < len(rows) and sum(len(row.response_ids) for row in rows[-last:]) < ENOUGH:
        last += 1
    earlier = rows[:-last]
    return [*earlier[:: math.ceil(2 * len(earlier) / CHECKED) or 1], *rows[-last:]]


def unlike(target: Target, rows: Sequence[Continuation]) -> str | None:
    """In what the answers differ from the target's law. Greedy tokens must be its own, drawn ones
    as likely as its entropy says (a difference of numbers is allowed for: the server computes in
    another order, maybe in another precision)."""
    return judged(measured(target, rows))


def judged(rows: Sequence[Seen]) -> str | None:
    """What is over its limit since any one of the rows: a server may change in between."""
    for greedy, limit, what in (
        (True, UNLIKE, "of the greedy tokens differ"),
        (False, SURPRISE, "nats beyond the entropy is what drawn tokens cost"),
    ):
        count, total, nats = 0, 0.0, torch.zeros(len(TILTS))
        for row in reversed([row for row in rows if row.greedy == greedy and row.count]):
            count, total, nats = count + row.count, total + row.total, nats + row.nats
            mean = total / count
            # written so that NaN, of a target that is broken, is like no server
            if not (mean <= limit or bool((nats <= EVIDENCE).all())):
                return f"{mean:.2f} {what}"
    return None


@torch.inference_mode()
def measured(target: Target, rows: Sequence[Continuation]) -> list[Seen]:
    """Each row, from one forward of the target for CHECKED of them."""
    found = list[Seen]()
    for begin in range(0, len(rows), CHECKED):
        group = rows[begin : begin + CHECKED]
        ids, positions = right_padded([[*r.request.prompt_ids, *r.response_ids] for r in group])
        ids = ids.to(target.device)
        logits = target.outputs(ids, positions.to(target.device)).logits
        assert logits is not None
        for i, row in enumerate(group):
            first, count = len(row.request.prompt_ids) - 1, len(row.response_ids)
            own = logits[i, first : first + count, : target.vocab_size].float()
            tokens = ids[i, first + 1 : first + 1 + count]
            if row.request.sampling.temperature == 0:
                found.append(_greedy(own, tokens))
            else:
                found.append(_drawn(warp(own, row.request.sampling), tokens))
    return found


def _greedy(logits: torch.Tensor, tokens: torch.Tensor) -> Seen:
    """logits [n, V], tokens [n]"""
    behind = logits.amax(-1) - logits.gather(-1, tokens[:, None])[:, 0]
    count, differing = len(tokens), int((~(behind <= TIE)).sum())
    tilts = torch.tensor(TILTS)
    nats = tilts * differing - count * (1 - PRECISION + PRECISION * tilts.exp()).log()
    return Seen(True, count, differing, nats)


def _drawn(law: torch.Tensor, tokens: torch.Tensor) -> Seen:
    """law [n, V], tokens [n]; how far a token's cost strays by chance is read off the law itself.
    Some tokens at a time: a whole vocabulary for each of thousands is much memory."""
    total, nats = 0.0, torch.zeros(len(TILTS))
    for p, ids in zip(law.split(64), tokens.split(64), strict=True):
        cost = -p.clamp(min=LEAST).log()
        beyond = cost - (p * cost).sum(-1, keepdim=True)
        found = beyond.gather(-1, ids[:, None])[:, 0]
        total += float(found.sum())
        for i, tilt in enumerate(TILTS):
            chance = (p * (tilt * beyond).exp()).sum(-1).log()
            nats[i] += float((tilt * found - chance).sum())
    return Seen(False, len(tokens), total, nats)
