"""Captured graphs on a CPU: a tape of operators, with the tensors that each read and wrote.

A replay runs these operators on these tensors again, and nothing of Python. So it shows what a CUDA
graph would: inputs that are not copied in, numbers of the capture, buffers that were replaced.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from target.graphs import Weights
from tests.helpers.watch import waiting

GPU = Weights(frozenset([torch.device("cuda", 0)]), sharded=False)


def tensors_of(tree) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def same_storage(one: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(one.untyped_storage()._cdata == o.untyped_storage()._cdata for o in others)


class Recording(TorchDispatchMode):
    """Records the operators that run while it is on; RuntimeError at one that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # of an operator that is made of others, those
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if func.namespace != "aten" or waiting(func, args) is not None:
            raise RuntimeError(f"{func.name()} waits for the device")
        out = func(*args, **kwargs)
        read = tensors_of((args, kwargs))
        made = [not same_storage(one, read) for one in tensors_of(out)]
        if any(made) or func._schema.is_mutable:  # else a view
            self.calls.append((func, args, kwargs, out, made))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out, made in self.calls:
            again = tensors_of(func(*args, **kwargs))
            for one, new, own in zip(tensors_of(out), again, made, strict=True):
                if own:
                    one.copy_(new)


class Tape:
    """Stands for `target.graphs.Capture`."""

    def __init__(self, device: torch.device, made: list[Tape]):
        self.graphs = 0
        made.append(self)

    def __call__(
        self, run: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        with Recording() as recording:
            outputs = run()
        for one in outputs:  # a capture computes nothing
            one.fill_(torch.nan)
        self.graphs += 1
        return recording.replay, outputs


@contextlib.contextmanager
def decoding_as_on_a_gpu() -> Iterator[list[Tape]]:
    """Inside the block, forwards are captured as where all weights lie on a GPU. Yields the tapes:
    one for each set of buffers of a model. A model that cannot be captured is an error."""
    made: list[Tape] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* without CUDA graphs")
        patch.setattr(Weights, "of", lambda model: GPU)
        patch.setattr("target.graphs.Capture", lambda device: Tape(device, made))
        yield made
