"""The kernels that a GPU has, run on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import flex_attention

from target.attention import Capability

GPU = Capability("cuda", torch.bfloat16, 128, compiles=True)


@contextlib.contextmanager
def chosen_as_on_a_gpu() -> Iterator[None]:
    """Inside the block, attention goes through the kernel that a GPU would choose, uncompiled.

    torch refuses flex attention's gradient on a CPU because no fused kernel computes it there; the
    dense formulas that stand for the kernel do.
    """
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(Capability, "here", lambda *where: GPU)
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        patch.setattr(flex_attention, "_warn_once", lambda *what, **how: None)
        yield


def without(**changed: object) -> Capability:
    """A GPU that differs in these fields."""
    return dataclasses.replace(GPU, **changed)
