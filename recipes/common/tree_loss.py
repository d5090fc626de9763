"""The policy-gradient loss along accepted paths of drafted trees (GTO, arXiv:2509.22134).

The drafter's law of a path comes from the unroll that training and drafting share, fed with the
path's own tokens, for all prefixes of a batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from recipes.base import unwrapped
from target.model import TargetOutputs
from trainer.chunked import chunked_divergence
from trainer.divergence import DIVERGENCES

CE_HARD = DIVERGENCES["ce_hard"]()


@dataclass
class Paths:
    """Of P prefixes: rows [P] of the batch, starts [P] their lengths in tokens, tokens [P, D] of
    the path behind each, 0 past its end, and how long that is, lengths [P]; all int64."""

    rows: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def none(cls, depth: int, device: torch.device) -> Paths:
        empty = torch.zeros(0, dtype=torch.long, device=device)
        return cls(empty, empty, empty.view(0, depth), empty)

    def add(
        self, row: int, starts: Sequence[int], tokens: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        begun = torch.tensor(starts, device=tokens.device)
        tokens = F.pad(tokens, (0, self.tokens.shape[1] - tokens.shape[1]))
        self.rows = torch.cat([self.rows, torch.full_like(begun, row)])
        self.starts = torch.cat([self.starts, begun])
        self.tokens = torch.cat([self.tokens, tokens])
        self.lengths = torch.cat([self.lengths, lengths])


def advantages(rewards: torch.Tensor, std_floor: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """rewards [G, m] -> advantages [G, m], and whether all rewards of a group are the same [G].
    Standardised within the group by the population's deviation; None: taken as they are."""
    flat = (rewards == rewards[:, :1]).all(1)
    if std_floor is None:
        return rewards, flat
    centred = rewards - rewards.mean(1, keepdim=True)
    # a mean of equal numbers may be off by a rounding, which the small deviation would blow up
    centred = torch.where(flat.unsqueeze(1), 0.0, centred)
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + std_floor), flat


def tree_loss(
    drafter: Any,
    reference: Any,
    ids: torch.Tensor,
    outputs: TargetOutputs,
    paths: Paths,
    advantage: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the prefixes of -min(s A, clip(s, 1 - epsilon, 1 + epsilon) A), [] float with a
    gradient, and whether the clip stops a prefix's gradient, [P] bool. s is the ratio of drafter
    and reference along the path, the geometric mean per token; without a path it is 1.

    ids [B, L], outputs.hidden[layer] [B, L, H]; advantage [P], no gradient. `drafter` may be
    wrapped; the pass through it is made whether or not there is a path, as its wrapper may want.
    """
    with torch.no_grad():
        (former,) = _along(reference, ids, outputs, paths, _log_q)
    owner = (paths.lengths.unsqueeze(1) > _depths(paths)).nonzero(as_tuple=True)[0]

    def surrogate(log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        change = torch.zeros_like(advantage).index_add(0, owner, log_q - former)
        ratio = (change / paths.lengths.clamp(min=1)).exp()
        plain, bounded = ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage
        return -torch.minimum(plain, bounded).sum(), bounded < plain

    def score(states: torch.Tensor, head: Any, labels: torch.Tensor) -> Any:
        with torch.enable_grad():
            log_q = _log_q(states, head, labels).requires_grad_()
            value, clipped = surrogate(log_q)
            (slope,) = torch.autograd.grad(value, log_q)
        # the value's gradient by log q is known now, so that one pass in chunks carries it
        carrier = chunked_divergence(CE_HARD, states, head, None, labels, -slope).total
        return value.detach() + carrier - carrier.detach(), clipped

    (found,) = _along(drafter, ids, outputs, paths, score)
    return found


def _depths(paths: Paths) -> torch.Tensor:
    return torch.arange(paths.tokens.shape[1], device=paths.tokens.device)


def _log_q(states: torch.Tensor, head: Any, labels: torch.Tensor) -> torch.Tensor:
    """[T] float32, detached; the labels are tokens that the head can draft."""
    with torch.no_grad():
        return -chunked_divergence(CE_HARD, states, head, None, labels).values


def _along(
    drafter: Any, ids: torch.Tensor, outputs: TargetOutputs, paths: Paths, score: Any
) -> list[Any]:
    """score(states [T, d], head, labels [T]) of all tokens of the paths, prefix by prefix, inside
    of the drafter's forward pass."""
    batch, length = ids.shape
    depth = paths.tokens.shape[1]
    # a path may go on behind the text
    hidden = {layer: F.pad(states, (0, 0, 0, depth)) for layer, states in outputs.hidden.items()}
    column = paths.starts - 2  # holds the last state that the target knows, and the anchor
    columns = torch.zeros(batch, length + depth, dtype=torch.bool, device=ids.device)
    columns[paths.rows, column] = True
    fed = ids.new_zeros(batch, length + depth, max(1, depth - 1))
    fed[paths.rows, column, : depth - 1] = paths.tokens[:, : depth - 1]
    places = column.unsqueeze(1) + 1 + _depths(paths)  # logit index of each depth
    known = paths.lengths.unsqueeze(1) > _depths(paths)
    unrolled: list[torch.Tensor] = []

    def collect(number: int, states: torch.Tensor) -> Any:
        unrolled.append(states[paths.rows, places[:, number - 1]])
        if number < depth:
            return None
        head = unwrapped(drafter).output_head(1)
        return score(torch.stack(unrolled, 1)[known], head, paths.tokens[known])

    padded = F.pad(ids, (0, depth))
    found = drafter(padded, TargetOutputs(hidden), depth, collect, columns=columns, paths=fed)
    return found[-1:]
