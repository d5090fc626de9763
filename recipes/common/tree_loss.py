"""The policy-gradient loss along accepted paths of drafted trees (GTO, arXiv:2509.22134).

The drafter's distributions along a path come from the unroll that training and drafting share, fed
with the path's own tokens, for all prefixes of a batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from drafters.text import Text
from recipes.base import unwrapped
from target.outputs import TargetOutputs
from trainer.chunked import chunked_divergence
from trainer.divergence import CE_HARD
from trainer.logits import OutputHead

Score = TypeVar("Score")


@dataclass
class Paths:
    """A path behind each of P prefixes, all int64: rows [P] of the batch; starts [P], the lengths
    of the prefixes in tokens; tokens [P, D] of the paths, 0 past the end; lengths [P] of the paths.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def none(cls, depth: int, device: torch.device) -> Paths:
        """Make a set without any prefix, for paths of `depth` tokens."""
        empty = torch.zeros(0, dtype=torch.long, device=device)
        return cls(empty, empty, empty.view(0, depth), empty)

    def add(
        self, row: int, starts: Sequence[int], tokens: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Add the paths of one row: `starts` [p], tokens [p, d], lengths [p]."""
        begun = torch.tensor(starts, device=tokens.device)
        tokens = F.pad(tokens, (0, self.tokens.shape[1] - tokens.shape[1]))
        self.rows = torch.cat([self.rows, torch.full_like(begun, row)])
        self.starts = torch.cat([self.starts, begun])
        self.tokens = torch.cat([self.tokens, tokens])
        self.lengths = torch.cat([self.lengths, lengths])


def advantages(rewards: torch.Tensor, std_floor: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn rewards [G, m] into advantages [G, m]; the second value says whether all rewards of a
    group are the same, [G] bool. Advantages are standardised within the group by the population's
    standard deviation plus `std_floor`; with None, rewards are taken as they are."""
    flat = (rewards == rewards[:, :1]).all(1)
    if std_floor is None:
        return rewards, flat
    centred = rewards - rewards.mean(1, keepdim=True)
    # a mean of equal numbers may be off by rounding, which division by a small number would blow up
    centred = torch.where(flat.unsqueeze(1), 0.0, centred)
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + std_floor), flat


def tree_loss(
    drafter: nn.Module,
    reference: nn.Module,
    ids: torch.Tensor,
    outputs: TargetOutputs,
    paths: Paths,
    advantage: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the prefixes -min(s A, clip(s, 1 - epsilon, 1 + epsilon) A), [] float with a
    gradient; the second value says whether the clip stops a prefix's gradient, [P] bool. s is the
    ratio of drafter and reference along the path, the geometric mean per token; without a path it
    is 1.

    ids [B, L], outputs.hidden[layer] [B, L, H]; advantage [P], no gradient. `drafter` may be
    wrapped for several processes, so the pass through it is made even where there is no path.
    """
    with torch.no_grad():
        former = _along(reference, ids, outputs, paths, _log_q)
    owner = (paths.lengths.unsqueeze(1) > _depths(paths)).nonzero(as_tuple=True)[0]

    def surrogate(log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        change = torch.zeros_like(advantage).index_add(0, owner, log_q - former)
        ratio = (change / paths.lengths.clamp(min=1)).exp()
        plain, bounded = ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage
        return -torch.minimum(plain, bounded).sum(), bounded < plain

    def score(
        states: torch.Tensor, head: OutputHead, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            log_q = _log_q(states, head, labels).requires_grad_()
            value, clipped = surrogate(log_q)
            (slope,) = torch.autograd.grad(value, log_q)
        # the value's gradient by log q is known now, so that one pass in chunks carries it
        carrier = chunked_divergence(CE_HARD, states, head, None, labels, -slope).total
        return value.detach() + carrier - carrier.detach(), clipped

    return _along(drafter, ids, outputs, paths, score)


def _depths(paths: Paths) -> torch.Tensor:
    return torch.arange(paths.tokens.shape[1], device=paths.tokens.device)


def _log_q(states: torch.Tensor, head: OutputHead, labels: torch.Tensor) -> torch.Tensor:
    """log q of the labels, [T] float32, detached; the labels are tokens that the head can draft."""
    with torch.no_grad():
        return -chunked_divergence(CE_HARD, states, head, None, labels).values


def _along(
    drafter: nn.Module,
    ids: torch.Tensor,
    outputs: TargetOutputs,
    paths: Paths,
    score: Callable[[torch.Tensor, OutputHead, torch.Tensor], Score],
) -> Score:
    """Return score(states [T, d], head, labels [T]) of all tokens of the paths, prefix by prefix,
    computed inside of the drafter's forward pass."""
    batch, length = ids.shape
    depth = paths.tokens.shape[1]
    # a path may reach beyond the text
    hidden = {layer: F.pad(states, (0, 0, 0, depth)) for layer, states in outputs.hidden.items()}
    column = paths.starts - 2  # holds the last state that the target knows, and the anchor
    columns = torch.zeros(batch, length + depth, dtype=torch.bool, device=ids.device)
    columns[paths.rows, column] = True
    fed = ids.new_zeros(batch, length + depth, max(1, depth - 1))
    fed[paths.rows, column, : depth - 1] = paths.tokens[:, : depth - 1]
    places = column.unsqueeze(1) + 1 + _depths(paths)  # logit index of each depth
    known = paths.lengths.unsqueeze(1) > _depths(paths)

    def collected(unrolled: Iterator[torch.Tensor]) -> Score:
        steps = enumerate(unrolled)
        along = [states[paths.rows, places[:, number]] for number, states in steps]
        head = unwrapped(drafter).output_head(1)
        return score(torch.stack(along, 1)[known], head, paths.tokens[known])

    text = Text(F.pad(ids, (0, depth)), columns=columns, paths=fed)
    return drafter(text, TargetOutputs(hidden), depth, collected)
