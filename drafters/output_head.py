"""Output heads of a drafter's own, over the target's vocabulary or some tokens `kept` of it, and
the residual blocks before them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from target.layout import blocked
from target.model import Target
from trainer.errors import UserError
from trainer.logits import OutputHead

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


def own_heads(target: Target, count: int, bias: bool, kept: torch.Tensor | None) -> nn.ModuleList:
    """Output matrices in the shape of the target's, over its true vocabulary or the ids `kept`.

    Raises UserError where the target's head does not read its last layer's width.
    """
    width = target.head.weight.shape[1]
    if width != target.hidden_size:
        raise UserError(
            f"the target's head reads states {width} wide, its last layer gives "
            f"{target.hidden_size}: heads on its states cannot start from it"
        )
    rows = target.vocab_size if kept is None else len(kept)
    return nn.ModuleList(nn.Linear(width, rows, bias=bias) for _ in range(count))


def copy_head(target: Target, heads: nn.ModuleList, kept: torch.Tensor | None) -> None:
    """Copy the target's head into `heads`, also where it is one tensor with the embedding."""
    for head in heads:
        assert isinstance(head, nn.Linear)
        copy_rows(target, head, kept)


def head_of(
    target: Target, heads: nn.ModuleList | None, depth: int, kept: torch.Tensor | None
) -> OutputHead:
    """The output head of a depth; the target's where `heads` is None."""
    if heads is None:
        return target.head
    head = heads[depth - 1]
    assert isinstance(head, nn.Linear)
    return head_over(head, kept, target.head.transform)


class ResidualLayers(nn.Module):
    """`count` layers z + SiLU(A z + b), with dropout before each.

    A and b start at zero, so that z passes unchanged. `tie`: one module for all layers.
    """

    def __init__(self, width: int, count: int, tie: bool = False, dropout: float = 0.0):
        super().__init__()
        made = [zero_linear(width, width) for _ in range(min(count, 1) if tie else count)]
        self.layers = nn.ModuleList(made * count if tie else made)
        self.dropout = dropout

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Map z [..., width] to [..., width] in the dtype of the weights."""
        if len(self.layers):
            z = z.to(self.layers[0].weight.dtype)  # type: ignore[arg-type]
        for layer in self.layers:
            z = F.dropout(z, self.dropout, self.training)
            z = z + F.silu(layer(z))
        return z


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer of zeros."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
