"""The hash of a drafter's weights: the same numbers as ever, and little memory on the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drafters import acceptance, base


class Known(nn.Module):
    """Every kind of tensor: turned, rounded, without dimensions, without entries, of integers."""

    def __init__(self) -> None:
        super().__init__()
        grid = torch.arange(12.0).reshape(3, 4) / 8 - 0.5
        self.matrix = nn.Parameter(grid)
        self.turned = nn.Parameter(grid.T * 2)
        self.rounded = nn.Parameter(grid.bfloat16())
        self.register_buffer("scale", torch.tensor(0.75))
        self.register_buffer("ids", torch.tensor([0, 2, 5]))
        self.register_buffer("kept", torch.tensor([True, False]))
        self.register_buffer("none", torch.zeros(0))

    def draft_weights(self):
        return self.state_dict()


class Doubles(TorchDispatchMode):
    """The number of entries of each float64 tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("together", [5, 1 << 20])
def test_a_hash_stays_what_it_was(together, monkeypatch):
    """Stored texts and acceptance heads name the weights that they were made with."""
    monkeypatch.setattr(base, "HASHED_TOGETHER", together)
    assert base.weights_hash(Known()) == "f4c2b61c271195c8"
    assert acceptance.weights_hash(Known()) == "04de659f19fc433f"


@pytest.mark.parametrize("hashed", [base.weights_hash, acceptance.weights_hash])
def test_only_a_part_of_a_tensor_is_ever_float64(hashed, monkeypatch):
    monkeypatch.setattr(base, "HASHED_TOGETHER", 5)
    with Doubles() as doubles:
        hashed(Known())
    assert max(doubles.sizes) == 5


@pytest.mark.parametrize("hashed", [base.weights_hash, acceptance.weights_hash])
def test_the_device_makes_no_float64(hashed):
    """A meta tensor cannot be copied to the CPU: what comes before the copy is of the device."""
    with Doubles() as doubles, pytest.raises(NotImplementedError):
        hashed(Known().to("meta"))
    assert doubles.sizes == []
