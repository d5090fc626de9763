"""Validates that a server's answers have the target's distribution, by the target's own forward.

If another model were behind the address, from the start or since a restart in the middle of a run,
the drafter would be trained for that model. The rows of a server therefore wait in a window until a
check covers them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from target.decode import Continuation, Request
from target.model import Target
from target.outputs import Logits
from target.padding import by_length, right_padded
from target.sampling import LEAST, warp
from trainer.logits import chunk_rows

UNLIKE, SURPRISE = 0.1, 0.5  # share of greedy tokens that differ; nats beyond the entropy
# A greedy token differs where the target's own is more likely by this much, in nats. Closer ones
# may be swapped by the server's precision, again and again in the loop that a greedy answer may
# end in.
TIE = 0.25
# A mean over its limit counts if a correct server, PRECISION of whose greedy tokens differ, would
# give it by chance less than once in 50,000 checks (Chernoff's bound, the best of TILTS). That is 3
# greedy tokens of 3, 5 of 12 or 12 of 96, so that a few short answers do not exclude it.
PRECISION = 0.02
LIMIT = math.log(50_000)
TILTS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
CHECKED = 8  # rows of a check; the first check of a server covers all its rows
ENOUGH = 64  # tokens of a check, if the window has them
# The target reads the CHECKED rows of a check, 1 row in 32, and decodes no token.
WINDOW = 32 * CHECKED
HOLD_S = 60.0  # then a slow server's rows are checked: unchecked ones are lost if a run is killed


class Evidence(NamedTuple):
    """What one row says about its server: over its tokens, the sum of the number that is limited,
    and for each of TILTS the nats against a correct server, [8] float. Both add up over rows."""

    greedy: bool
    num_tokens: int
    total: float
    nats: torch.Tensor


# what rows say about their server: by the target's own forward (`measured`), or by other servers
Measure = Callable[[Sequence[Continuation]], list[Evidence]]
DIFFER = "of the greedy tokens differ"


class UncheckedRows:
    """The rows of one server that no check has covered yet. `differ`: what their evidence counts,
    in words.

    They are judged in the order of their requests, and the last of them always: a server whose last
    answers are the target's served no other model before, except for a time in between."""

    def __init__(self, measure: Measure, differ: str = DIFFER):
        self.measure, self.differ = measure, differ
        self.rows: list[tuple[int, Continuation]] = []
        self.passed: list[Evidence] = []  # of earlier windows, so that short ones add up
        self.began = 0.0

    def add(self, number: int, row: Continuation) -> None:
        """Add a row. `number`: its place in the order of the requests."""
        if not self.rows:
            self.began = time.monotonic()
        self.rows.append((number, row))

    def due(self) -> bool:
        """Whether there are enough rows for a check, or some have waited for HOLD_S."""
        enough = sum(len(row.response_ids) for _, row in self.rows) >= ENOUGH
        full = len(self.rows) >= (WINDOW if self.passed else CHECKED) and enough
        return full or (bool(self.passed) and time.monotonic() - self.began > HOLD_S)

    def check(self) -> str | None:
        """How the rows differ from the target's distribution, in words; None where they do not. A
        sample is checked first; if it differs, the whole window decides."""
        rows = [row for _, row in sorted(self.rows, key=lambda one: one[0])]
        sample = sampled(rows)
        evidence = self.measure(sample)
        difference = judged([*self.passed, *evidence], self.differ)
        if difference and len(sample) < len(rows):
            evidence = self.measure(rows)
            difference = judged([*self.passed, *evidence], self.differ)
        if not difference:
            self.passed = [*self.passed, *evidence][-CHECKED:]
        return difference

    def release(self) -> list[Continuation]:
        """Remove all rows and return them."""
        rows, self.rows = [row for _, row in self.rows], []
        return rows


def sampled(rows: Sequence[Continuation]) -> Sequence[Continuation]:
    """CHECKED of the rows: half of them the last ones, more until they have ENOUGH tokens, the
    others spread over the rest."""
    if len(rows) <= CHECKED:
        return rows
    last = CHECKED // 2
    while last < len(rows) and sum(len(row.response_ids) for row in rows[-last:]) < ENOUGH:
        last += 1
    earlier = rows[:-last]
    return [*earlier[:: math.ceil(2 * len(earlier) / CHECKED) or 1], *rows[-last:]]


def unlike(target: Target, rows: Sequence[Continuation]) -> str | None:
    """How the answers differ from the target's distribution, in words; None where they do not.

    Greedy tokens must be the target's own, and drawn ones as likely as its entropy says. Small
    differences are allowed: the server computes in another order, perhaps in another precision."""
    return judged(measured(target, rows))


def judged(rows: Sequence[Evidence], differ: str = DIFFER) -> str | None:
    """The number that is over its limit since any one of the rows, in words; None without one. A
    server may change its model between two rows. `differ`: what greedy tokens do."""
    for greedy, limit, what in (
        (True, UNLIKE, differ),
        (False, SURPRISE, "nats beyond the entropy is what drawn tokens cost"),
    ):
        count, total, nats = 0, 0.0, torch.zeros(len(TILTS))
        for row in reversed([row for row in rows if row.greedy == greedy and row.num_tokens]):
            count, total, nats = count + row.num_tokens, total + row.total, nats + row.nats
            mean = total / count
            # NaN, of a broken target, fails both comparisons
            if not (mean <= limit or bool((nats <= LIMIT).all())):
                return f"{mean:.2f} {what}"
    return None


@torch.inference_mode()
def measured(
    target: Target, rows: Sequence[Continuation], tie: float | None = None
) -> list[Evidence]:
    """The evidence of each row, from forwards of the target over at most CHECKED rows. The
    distributions of a row are computed in chunks. `tie`: logits of greedy tokens as close as this
    are equal, by default TIE."""
    found = dict[int, Evidence]()
    texts = [[*row.request.prompt_ids, *row.response_ids] for row in rows]
    for group in by_length(range(len(rows)), lambda i: len(texts[i]), CHECKED):
        ids, positions = right_padded([texts[i] for i in group])
        ids = ids.to(target.device)
        places = positions.to(target.device)
        logits = target.outputs(ids, places, project_later=True).logits
        assert logits is not None
        chunk = chunk_rows(target.device, target.vocab_size)
        for place, i in enumerate(group):
            response = ids[place, len(rows[i].request.prompt_ids) : len(texts[i])]
            found[i] = evidence_of(logits, place, rows[i].request, response, chunk, tie)
    return [found[i] for i in range(len(rows))]


def evidence_of(
    logits: Logits,
    place: int,
    request: Request,
    response: torch.Tensor,
    chunk: int,
    tie: float | None = None,
) -> Evidence:
    """The evidence of a row, whose text has the target's logits [L, V] at `place`. `response` [n]
    int64: its answer, or a beginning of it, whose distributions are computed for `chunk` tokens at
    a time."""
    greedy, total, nats = request.sampling.temperature == 0, 0.0, torch.zeros(len(TILTS))
    at = len(request.prompt_ids)
    for tokens in response.split(chunk):
        own = logits[place, slice(at - 1, at - 1 + len(tokens))].float()
        part = _greedy(own, tokens, tie) if greedy else _drawn(warp(own, request.sampling), tokens)
        total, nats, at = total + part.total, nats + part.nats, at + len(tokens)
    return Evidence(greedy, len(response), total, nats)


def _greedy(logits: torch.Tensor, tokens: torch.Tensor, tie: float | None = None) -> Evidence:
    """The evidence of greedy tokens [n] int64, of target logits [n, V] float."""
    behind = logits.amax(-1) - logits.gather(-1, tokens[:, None])[:, 0]
    return counted(len(tokens), int((~(behind <= (TIE if tie is None else tie))).sum()))


def counted(count: int, differing: int) -> Evidence:
    """The evidence of `count` tokens, of which so many are not what they should be."""
    tilts = torch.tensor(TILTS)
    nats = tilts * differing - count * (1 - PRECISION + PRECISION * tilts.exp()).log()
    return Evidence(True, count, differing, nats)


def _drawn(probs: torch.Tensor, tokens: torch.Tensor) -> Evidence:
    """The evidence of drawn tokens [n] int64, of target probabilities [n, V] float.

    How much -log p of a token varies by chance follows from the distribution itself."""
    cost = -probs.clamp(min=LEAST).log()
    beyond = cost - (probs * cost).sum(-1, keepdim=True)
    found = beyond.gather(-1, tokens[:, None])[:, 0]
    nats = torch.zeros(len(TILTS))
    for i, tilt in enumerate(TILTS):
        chance = (probs * (tilt * beyond).exp()).sum(-1).log()
        nats[i] = float((tilt * found - chance).sum())
    return Evidence(False, len(tokens), float(found.sum()), nats)
