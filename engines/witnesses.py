"""What servers of one model say of each other's answers, for a run that has no weights of it.

Each answer comes with the log-probabilities that its server gives to the tokens. Another server
scores the same tokens as a prompt. Where both serve one model the two differ by rounding, the
greedy tokens are the likeliest ones for both, and drawn ones are as likely as the entropy says, of
which the likeliest TOPS tokens tell an upper bound. Which of two servers is another model cannot be
told, of three it can. What is not seen: that all of them serve another model; the target's own
forward sees it, when it is loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Collection, Sequence

import torch

from engines.completions import DELAYS_S, RESUME, ask, served_model
from engines.distribution_check import TIE, TILTS, Evidence, counted, judged
from engines.web import ServerError, answer_limits, server_root
from target.decode import Continuation
from target.model import Target
from trainer.errors import RunFault

TOPS = 20  # tokens at each place whose log-probabilities are asked for, the most that vLLM gives
SCORED_TOKENS = 16  # a scored token has the bytes of so many of an answer: TOPS are named beside it


def distinct(addresses: Sequence[str]) -> int:
    """How many servers these are: one that is named twice gets twice the requests."""
    return len({server_root(address) for address in addresses})


class Witnesses:
    """Scores the answers of a server of the target by others. `count`: of these servers; nobody
    scores those of a single one."""

    def __init__(self, target: Target, count: int):
        self.target, self.count = target, count
        self._names: dict[str, str] = {}
        self._turn = itertools.count()

    def measure(
        self, root: str, in_use: Collection[str], rows: Sequence[Continuation]
    ) -> list[Evidence]:
        """The evidence of each row of the server `root`: of the first of the other servers that
        agrees with it, else of the last. Raises RunFault where none of them answers."""
        if self.count == 1:
            return []
        others = sorted(set(in_use) - {root})
        first = next(self._turn) % max(1, len(others))
        failed: ServerError | None = None
        found: list[Evidence] | None = None
        for other in [*others[first:], *others[:first]]:
            try:
                found = [one for row in rows for one in self._evidence(other, row)]
            except ServerError as error:
                failed = error
                continue
            if not judged(found):
                break
        if found is None:
            raise RunFault(
                f"data.servers: no other server scores the answers of {root} "
                f"({failed or 'none is left'}); {RESUME}, "
                "with the servers that are left in data.servers"
            )
        return found

    def _evidence(self, other: str, row: Continuation) -> list[Evidence]:
        """What `other` says of a row: how many of its tokens it finds as likely as their own server
        did, or of a greedy row, how many are likely enough to be its own; and what drawn ones
        cost."""
        start, temperature = len(row.request.prompt_ids), row.request.sampling.temperature
        ids = [*row.request.prompt_ids, *row.response_ids][: self.target.context - 1]
        if len(ids) == start:
            return []
        own, tops = self._scored(other, ids, start)
        behind = tops.amax(-1) - own
        if temperature:
            behind = (torch.tensor(row.logprobs[: len(own)], dtype=torch.float64) - own).abs()
        found = [counted(len(own), int((~(behind <= TIE)).sum()))]
        if temperature:
            found.append(drawn(own, tops, self.target.logits_width, temperature))
        return found

    def _scored(self, root: str, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`scored` of a server, which is asked again as long as it may come back."""
        for delay in (*DELAYS_S, None):
            try:
                self._names[root] = self._names.get(root) or served_model(root)
                return scored(root, self._names[root], ids, start)
            except ServerError as error:
                if delay is None or not error.transient:
                    raise
                time.sleep(delay)
        raise AssertionError


def scored(
    root: str, model: str, ids: Sequence[int], start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities that a server gives to each of the n tokens ids[start:], [n] float64,
    and to the likeliest ones in its place, [n, TOPS], descending, in nats. Raises ServerError."""
    content = {
        "model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "echo": True,
        "logprobs": TOPS, "add_special_tokens": False, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = ask(f"{root}/v1/completions", content, answer_limits(1, SCORED_TOKENS * len(ids)))
    own, tops = torch.empty(0), torch.empty(0)
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError, AttributeError):
        table = answer["choices"][0]["logprobs"]
        own = torch.tensor(table["token_logprobs"][start : len(ids)], dtype=torch.float64)
        # a token that is none of the likeliest stands among them, too
        rows = [
            sorted(one.values(), reverse=True) for one in table["top_logprobs"][start : len(ids)]
        ]
        least = min(TOPS, *map(len, rows)) if rows else 0  # by text, two may have one name
        tops = torch.tensor([row[:least] for row in rows], dtype=torch.float64)
    shaped = own.shape == (len(ids) - start,) and tops.dim() == 2 and tops.shape[:1] == own.shape
    if not (shaped and tops.numel() and own.isfinite().all() and tops.isfinite().all()):
        said = "it does not score a prompt (echo with logprobs), as vLLM and SGLang do"
        raise ServerError(root, said, False)
    return own, tops


def drawn(own: torch.Tensor, tops: torch.Tensor, width: int, temperature: float) -> Evidence:
    """The evidence of drawn tokens with the log-probabilities `own` [n], where the likeliest have
    `tops` [n, k] of `width` tokens, both at temperature 1: what they cost beyond the most that
    tokens cost which are drawn at `temperature` from any distribution with these likeliest tokens.

    The cost is -log p at temperature 1. A token is drawn with a chance of p^power / sum p^power. Of
    the other tokens the number and the mass are known, and that none is likelier than these."""
    power, rest = 1 / temperature, width - tops.shape[-1]
    mass = (1 - tops.exp().sum(-1)).clamp(min=0) * (rest > 0)
    alike, peaked = mass.log() - math.log(max(1, rest)), tops[:, -1]  # log p: all alike, at most

    def others(exponent: float, log_p: torch.Tensor) -> torch.Tensor:
        """The sum of p^exponent over the others, if each had this log p, [n]."""
        return mass * ((exponent - 1) * log_p).exp().where(mass > 0, 0.0)

    most, fewest = (peaked, alike) if power >= 1 else (alike, peaked)
    chances = (power * tops).exp()
    total = chances.sum(-1) + others(power, fewest)
    costs = -(chances * tops).sum(-1) - (others(power, most) * alike).where(mass > 0, 0.0)
    nats = torch.zeros(len(TILTS))
    for i, tilt in enumerate(TILTS):
        exponent = power - tilt
        if exponent < 0:  # no bound
            nats[i] = -math.inf
            continue
        sums = (exponent * tops).exp().sum(-1)
        sums = sums + others(exponent, peaked if exponent >= 1 else alike)
        nats[i] = float((-tilt * own - (sums / total).log()).sum())
    return Evidence(False, len(own), float((-own - costs / total).sum()), nats)
