"""The benchmark of training on a GPU, through the kernels that a GPU has."""

from __future__ import annotations

import contextlib

import pytest
import torch

from benchmarks.gpu import SHAPES, random_target
from benchmarks.gpu_training import METHODS, make_batch, measure
from tests.kernels import chosen_as_on_a_gpu


@pytest.mark.parametrize("kernel", [contextlib.nullcontext, chosen_as_on_a_gpu])
@pytest.mark.parametrize(("name", "options"), METHODS["tiny"].items())
def test_an_arm_is_measured_whichever_kernel_computes_attention(name, options, kernel):
    """torch's counter of FLOPs raises at flex attention, which it does not know."""
    torch.manual_seed(0)
    target = random_target(SHAPES["tiny"], "tiny", "cpu", torch.float32)
    batch = make_batch("chat", 2, 64, target.vocab_size)
    with kernel():
        found = measure(target, name, options, batch, "as it ships")
    assert found["tokens_per_s"] > 0
    uncounted = kernel is chosen_as_on_a_gpu and name == "eagle3"
    assert (found["useful_share"] is None) == uncounted
