"""Output heads of a drafter's own, over the target's vocabulary or over the tokens `kept` of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from target.layout import blocked
from target.model import Target
from trainer.logits import OutputHead

if TYPE_CHECKING:
    from drafters.base import TrainedDrafter

RIDGE = 1e-4  # of the mean square

_MADE: weakref.WeakKeyDictionary[nn.Module, OutputHead] = weakref.WeakKeyDictionary()


def head_over(
    layer: nn.Linear,
    kept: torch.Tensor | None,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> OutputHead:
    """The output head of a layer whose rows score the ids `kept` [Vd] int64, all where None.

    It is made once for a layer, because checking `kept` waits for the device.
    """
    head, copied = _MADE.get(layer), blocked(layer)
    if head is not None and (head.blocked is not copied or head.bias is not layer.bias):
        head = None
    if head is None or head.weight is not layer.weight or head.kept is not kept:
        head = OutputHead(layer.weight, layer.bias, kept, transform, blocked=copied)
        _MADE[layer] = head
    return head


@torch.no_grad()
def copy_rows(target: Target, layer: nn.Linear, kept: torch.Tensor | None) -> None:
    """Start a layer as the target's output head, over the ids `kept` alone where they are given."""
    source = target.head
    rows = slice(target.vocab_size) if kept is None else kept.to(target.device)
    layer.weight.copy_(source.weight[rows])
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
        if source.bias is not None:
            layer.bias.copy_(source.bias[rows])


@torch.no_grad()
def widen(drafter: TrainedDrafter, kept: torch.Tensor | None, target: Target) -> None:
    """Let a trained drafter score the ids `kept` [Vd] int64, ascending, None for all; those that it
    scores so far are among them, and keep their rows.

    A row has moved in training from the target's, much of it in the same way for every token. So a
    new row is the target's moved by the affine map of the target's rows that fits the movements of
    the known ones best (least squares; a little is added to the diagonal, for few rows).
    """
    known = drafter.output_head(1).kept
    assert known is not None, "there are tokens to add"
    kept_or_all = torch.arange(target.vocab_size) if kept is None else kept
    places = torch.searchsorted(kept_or_all, known.cpu())
    assert torch.equal(kept_or_all[places], known.cpu()), "no token is lost"
    for layer in drafter.output_layers():
        wide = nn.Linear(
            layer.in_features, len(kept_or_all), layer.bias is not None,
            device=layer.weight.device, dtype=layer.weight.dtype,
        )  # fmt: skip
        copy_rows(target, wide, kept)
        rows = _rows(wide)
        start = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        seen, moved = start[places], _rows(layer) - rows[places]
        products = seen.T @ seen
        products.diagonal().add_(RIDGE * products.diagonal().mean())
        rows += start @ torch.linalg.solve(products, seen.T @ moved)
        rows[places] = _rows(layer)
        layer.weight = nn.Parameter(rows[:, : layer.in_features].to(layer.weight))
        if layer.bias is not None:
            layer.bias = nn.Parameter(rows[:, -1].to(layer.bias))
        layer.out_features = len(kept_or_all)
    drafter.register_buffer("kept", None if kept is None else kept.to(known.device))


def _rows(layer: nn.Linear) -> torch.Tensor:
    """A row for each token, with its bias behind, float64 on the CPU."""
    parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias.unsqueeze(1)]
    return torch.cat([part.detach().cpu().double() for part in parts], 1)
