"""The layers of a drafter that map states to states: what LoRA adapts and Muon updates."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D


def hidden_layers(drafter: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers that are trained, with their names, but for output heads."""
    heads = _head_weights(drafter)
    for name, module in drafter.named_modules():
        linear = isinstance(module, nn.Linear | Conv1D)
        if linear and module.weight.requires_grad and id(module.weight) not in heads:
            yield name, module


def _head_weights(drafter: nn.Module) -> set[int]:
    """The `id` of each weight that a loss reads through an output head."""
    found: set[int] = set()
    for module in drafter.modules():
        output_head = getattr(module, "output_head", None)
        if output_head is not None:
            depths = range(1, (getattr(module, "max_depth", None) or 1) + 1)
            heads = [output_head(depth) for depth in depths]
            found |= {id(weight) for head in heads for weight in (head.weight, head.extra)}
    return found
