"""What a computation allocates, and what it waits for."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operators whose result, or its size, the host needs to go on
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal",
         "aten._unique2", "aten.unique_consecutive", "aten.unique_dim")  # fmt: skip
# methods that read a tensor's numbers, and dispatch nothing where these are on the host already
READS = ("tolist", "numpy", "cpu")
INDEXED = ("aten.index", "aten.index_put", "aten.index_put_")  # where an index is a mask


class Watch(TorchDispatchMode):
    """Shapes of every tensor made while it is on."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


class Reads(Watch):
    """And how much of its text a target reads at a time. `forwards`: the tokens of each forward."""

    def __init__(self, target):
        super().__init__()
        self.target, self.forwards = target, []

    def __enter__(self) -> Reads:
        self.hook = self.target.model.register_forward_pre_hook(
            lambda _, __, given: self.forwards.append(given["input_ids"].numel()), with_kwargs=True
        )
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
        super().__exit__(*error)

    @property
    def positions(self) -> int:
        """The most positions whose logits or probabilities were in one tensor."""
        matrix = self.target.head.weight.T[:, : self.target.vocab_size].shape
        over = [s for s in self.shapes if s[-1:] == matrix[-1:] and s[-2:] != matrix]
        return max(math.prod(shape[:-1]) for shape in over)


def waiting(func, args) -> str | None:
    """The name of an operator for which the host waits, None where it does not."""
    name = func.name().replace("::", ".").partition(".")[2]
    name = "aten." + name.partition(".")[0]
    masks = name in INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1])
    return name if name in WAITS or masks else None


class Waits(TorchDispatchMode):
    """Counts what the host waits for: operators, and the methods `READS`.

    A copy by `Tensor.to` is not counted: where there are only CPUs, both directions look alike.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = defaultdict(int)
        self._patch, self._entered = pytest.MonkeyPatch(), 0

    def __enter__(self) -> Waits:
        if not self._entered:
            for name in READS:
                read = self._counted(name, getattr(torch.Tensor, name))
                self._patch.setattr(torch.Tensor, name, read)
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._entered -= 1
        if not self._entered:
            self._patch.undo()

    def _counted(self, name, method):
        def read(tensor, *args, **kwargs):
            self.found[name] += 1
            return method(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # a kernel of its own
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # operators that are made of others arrive whole
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        name = waiting(func, args)
        if name is not None:
            self.found[name] += 1
        return func(*args, **kwargs)
