"""The frozen weights of a model on a CPU, laid out for products with a few rows.

Speculative decoding multiplies 1 to 60 rows at a time: the tokens of a round, or of a batch. For
rows that few PyTorch's float32 product rearranges a matrix at every call, which takes as long as
multiplying by it. oneDNN's blocked layout, the one that torch.compile gives a frozen model, is made
once (`benchmarks/layout.py`). The operators are PyTorch's, without a promise that they stay; where
they are missing the weights stay as they are. So do smaller matrices on an Intel processor: there
PyTorch's own product, of MKL, is faster for one row and as fast for five.

- The decoder's matrices exist in that layout alone. A state dict, and a deep copy, have them in the
  usual one; other readers ask for `weight.to_dense()`, which is exact.
- The output matrix, which the embedding and the losses read by rows, has a second copy in it, and
  so have the matrices of a drafter while it is measured (`laid_out`): it may train on afterwards.

Products differ from those of the usual layout by rounding in float32.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from target.devices import decoder_of, device_of
from trainer.logits import blocked_linear

BLOCKED = 100_000  # elements of a matrix; smaller ones gain nothing
PACKED = 2**22  # the same on an Intel processor, and of an output matrix, which is stored twice
ROWS = 8  # that the blocked layout is made for; it serves all others
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")

# by layer, not in it: a copy of the layer, in which the weight may change, has none
_BLOCKED: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def lay_out(model: PreTrainedModel) -> None:
    """Lay out the weights of a frozen model for products with a few rows, in place. A model that is
    not in float32 on a CPU stays as it is."""
    if device_of(model).type == "cpu":
        # with a mask, transformers repeats the keys and values of grouped heads in every layer;
        # the kernel of the CPU needs no copies, and gives the same numbers
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    head, least = model.get_output_embeddings(), least_elements()
    wide = [layer for layer in _plain_layers(decoder_of(model)) if layer.weight.numel() >= least]
    outer = [] if head is None else [n for n in _plain_layers(head) if n.weight.numel() >= PACKED]
    if not (wide or outer):
        return
    if not can_pack():
        if torch.backends.mkldnn.is_available():
            print(f"PyTorch {torch.__version__} lacks mkldnn.{OPERATORS[0]}: verifying a few "
                  "tokens takes up to twice as long", flush=True)  # fmt: skip
        return
    for layer in wide:
        layer.weight = _Blocked(_blocked(layer.weight), requires_grad=False)
        layer.__class__ = _BlockedLayer
    for layer in outer:
        layer.__class__ = _TwiceStored
        _BLOCKED[layer] = _blocked(layer.weight)


@contextmanager
def laid_out(*drafters: object) -> Iterator[None]:
    """Inside the block, drafters in float32 on a CPU multiply by blocked copies of their weights,
    which must not change meanwhile. Drafters without weights, and others, stay as they are."""
    least = least_elements()
    layers = {
        layer
        for drafter in drafters
        if isinstance(drafter, nn.Module) and can_pack()
        for layer in _plain_layers(drafter, trained=True)
        if layer.weight.numel() >= least
    }
    try:
        for layer in layers:
            layer.__class__ = _TwiceStored
            _BLOCKED[layer] = _blocked(layer.weight)
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            _BLOCKED.pop(layer, None)


def _blocked(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.data.contiguous(), ROWS)


def can_pack() -> bool:
    """Whether this PyTorch has oneDNN and the operators of its blocked layout."""
    have = torch.backends.mkldnn.is_available()
    return have and all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)


def least_elements() -> int:
    """Elements from which a matrix gains by the blocked layout, on this processor."""
    return PACKED if torch.backends.mkl.is_available() and made_by_intel() else BLOCKED


def made_by_intel() -> bool:
    return "Intel" in str(torch.cpu.get_capabilities().get("cpu_name"))


def blocked(layer: nn.Module) -> torch.Tensor | None:
    """The copy of a layer's weight in the blocked layout, None where it has none."""
    return _BLOCKED.get(layer)


def _plain_layers(module: nn.Module, trained: bool = False) -> Iterator[nn.Linear]:
    """The linear layers of a module whose weights lie whole in float32 on the CPU and are frozen,
    or `trained`."""
    for layer in module.modules():
        if type(layer) is nn.Linear and not hasattr(layer, "_hf_hook"):
            weight = layer.weight
            plain = type(weight) is nn.Parameter and (trained or not weight.requires_grad)
            if plain and weight.dtype == torch.float32 and weight.device.type == "cpu":
                yield layer


class _Blocked(nn.Parameter):
    """A weight [out, in] in the blocked layout; a deep copy of it is in the usual one."""

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        made = memo[id(self)] = nn.Parameter(self.to_dense(), requires_grad=False)
        return made


class _BlockedLayer(nn.Linear):
    """A frozen linear layer whose weight lies in the blocked layout, unless it was copied."""

    @torch.compiler.disable  # a compiler cannot look into the layout
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not self.weight.is_mkldnn:
            return super().forward(input)
        input = input.to(self.weight.dtype)  # autocast does not know the product
        if torch.is_grad_enabled() and input.requires_grad:
            return _Product.apply(input, self.weight, self.bias)  # type: ignore[return-value]
        return blocked_linear(input, self.weight, self.bias)

    def _save_to_state_dict(
        self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight.is_mkldnn:
            destination[f"{prefix}weight"] = self.weight.to_dense()


class _Product(torch.autograd.Function):
    """A blocked product with a gradient of its input, for which no weight is kept twice."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.weight = weight  # type: ignore[attr-defined]
        return blocked_linear(input, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] @ ctx.weight.to_dense(), None, None  # type: ignore[attr-defined]


class _TwiceStored(nn.Linear):
    """A linear layer that multiplies by its blocked copy; with gradient, by its weight."""

    @torch.compiler.disable  # a compiler cannot look into the layout
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight = _BLOCKED.get(self)
        if weight is None or torch.is_grad_enabled():
            return super().forward(input)
        return blocked_linear(input.to(weight.dtype), weight, self.bias)
