"""The frozen weights of a model on a CPU, laid out for products with a few rows.

Speculative decoding multiplies 1 to 60 rows at a time: the tokens of a round, or of a batch. Rows
that few cost PyTorch's float32 product as much in rearranging a large matrix as in multiplying by
it. Two remedies, of which each is the faster one where it stands (`benchmarks/layout.py`):

- The decoder's matrices are stored by columns instead of rows. No weight exists twice, and whoever
  reads or saves one sees what it was.
- The output matrix, which the embedding and the losses read by rows, gets a second copy in
  oneDNN's blocked layout, the one that torch.compile gives a frozen model. The operators are
  PyTorch's, without a promise that they stay; where they are missing there is one copy.

Products differ from those of the usual layout by rounding in float32.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from target.devices import decoder_of, device_of
from trainer.chunked import blocked_linear

BY_COLUMNS = 100_000  # elements; smaller matrices gain nothing
PACKED = 2**22  # elements; a blocked product takes 20 microseconds longer to call
ROWS = 8  # that the blocked layout is made for; it serves all others
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")

# by output layer, not in it: a copy of the layer, in which the weight may change, has none
_BLOCKED: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def lay_out(model: PreTrainedModel) -> None:
    """Lay out the weights of a frozen model for products with a few rows, in place. A model that is
    not in float32 on a CPU stays as it is."""
    if device_of(model).type == "cpu":
        # with a mask, transformers repeats the keys and values of grouped heads in every layer;
        # the kernel of the CPU needs no copies, and gives the same numbers
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    for layer in _plain_layers(decoder_of(model)):
        if layer.weight.numel() >= BY_COLUMNS:
            layer.weight.data = layer.weight.data.t().contiguous().t()
    head = model.get_output_embeddings()
    for layer in [] if head is None else _plain_layers(head):
        if layer.weight.numel() >= PACKED and can_pack():
            layer.__class__ = _OutputLayer
            _BLOCKED[layer] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, ROWS)


def can_pack() -> bool:
    """Whether this PyTorch has oneDNN and the operators of its blocked layout; a line says so where
    it has the former alone."""
    if not torch.backends.mkldnn.is_available():
        return False
    missing = [name for name in OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        print(f"PyTorch {torch.__version__} lacks mkldnn.{missing[0]}: verifying is slower by "
              "some per cent", flush=True)  # fmt: skip
    return not missing


def blocked(layer: nn.Module) -> torch.Tensor | None:
    """The weight of an output layer in the blocked layout, None where it has none."""
    return _BLOCKED.get(layer)


def _plain_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers of a module whose weights lie whole in float32 on the CPU."""
    for layer in module.modules():
        if type(layer) is nn.Linear and not hasattr(layer, "_hf_hook"):
            weight = layer.weight
            plain = type(weight) is nn.Parameter and not weight.requires_grad
            if plain and weight.dtype == torch.float32 and weight.device.type == "cpu":
                yield layer


class _OutputLayer(nn.Linear):
    """A frozen linear layer that multiplies by its blocked copy; with gradient, by its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = _BLOCKED.get(self)
        if weight is None or (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        return blocked_linear(input, weight, self.bias)
