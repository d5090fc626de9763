"""Let a trained head draft further tokens of the target's vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from drafters.base import TrainedDrafter
from drafters.output_head import copy_rows
from target.model import Target
from trainer.errors import UserError

RIDGE = 1e-4  # of the mean square
ROWS = 8192  # of a matrix that are held in float64 at a time


@torch.no_grad()
def widen(drafter: TrainedDrafter, kept: torch.Tensor | None, target: Target) -> None:
    """Let a trained drafter score the ids `kept` [Vd] int64, ascending, None for all; those that it
    scores so far are among them, and keep their rows.

    A row has moved in training from the target's, much of it in the same way for every token. So a
    new row is the target's moved by the affine map of the target's rows that fits the movements of
    the known ones best (least squares; a little is added to the diagonal, for few rows).
    """
    buffer = drafter.output_head(1).kept
    if drafter.output_head(1).extra is not None:
        raise UserError(
            "a drafter with method.correction keeps the tokens that it drafts: leave "
            "method.draft_vocab_size out"
        )
    assert buffer is not None, "there are tokens to add"
    known = buffer.cpu()
    ids = torch.arange(target.vocab_size) if kept is None else kept
    places = torch.searchsorted(ids, known)
    assert torch.equal(ids[places], known), "no token is lost"
    is_new = torch.ones(len(ids), dtype=torch.bool)
    is_new[places] = False
    for layer in drafter.output_layers():
        weight, bias = layer.weight, layer.bias
        wide = nn.Linear(
            layer.in_features, len(ids), bias is not None, device=weight.device, dtype=weight.dtype
        )
        copy_rows(target, wide, kept)
        moved = _movement(layer, wide, places)
        for chosen in is_new.nonzero().squeeze(1).split(ROWS):
            _set_rows(wide, chosen, _rows(wide, chosen) + _with_one(_rows(wide, chosen)) @ moved)
        wide.weight[places.to(weight.device)] = weight
        layer.weight = wide.weight
        if bias is not None:
            wide.bias[places.to(bias.device)] = bias
            layer.bias = wide.bias
        layer.out_features = len(ids)
    drafter.register_buffer("kept", None if kept is None else kept.to(buffer.device))


def _movement(layer: nn.Linear, start: nn.Linear, places: torch.Tensor) -> torch.Tensor:
    """The map [W + 1, W] float64 that moves rows of `start` with a one behind, at `places` [n]
    int64, as the rows [n, W] of the layer have moved from them."""
    products = moves = torch.zeros((), dtype=torch.float64)
    for own, chosen in zip(torch.arange(len(places)).split(ROWS), places.split(ROWS), strict=True):
        rows = _rows(start, chosen)
        ones = _with_one(rows)
        products = products + ones.T @ ones
        moves = moves + ones.T @ (_rows(layer, own) - rows)
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    return torch.linalg.solve(products, moves)


def _rows(layer: nn.Linear, chosen: torch.Tensor) -> torch.Tensor:
    """The rows of these outputs, each with its bias behind, float64 on the CPU."""
    chosen = chosen.to(layer.weight.device)
    rows = layer.weight[chosen]
    if layer.bias is not None:
        rows = torch.cat([rows, layer.bias[chosen].unsqueeze(1)], 1)
    return rows.cpu().double()


def _with_one(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def _set_rows(layer: nn.Linear, chosen: torch.Tensor, rows: torch.Tensor) -> None:
    chosen, rows = chosen.to(layer.weight.device), rows.to(layer.weight)
    layer.weight[chosen] = rows[:, : layer.in_features]
    if layer.bias is not None:
        layer.bias[chosen] = rows[:, -1]
