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


def test_from_stored_states_only_the_drafted_rows_of_the_targets_head_are_useful():
    """The useful share of the operations is as live, few of which are attention here: on a CPU
    torch does not count it."""
    torch.manual_seed(0)
    shapes = {**SHAPES["tiny"], "common": {**SHAPES["tiny"]["common"], "vocab_size": 3000}}
    target = random_target(shapes, "tiny", "cpu", torch.float32)
    batch = make_batch("chat", 2, 64, target.vocab_size)
    options = {**METHODS["tiny"]["eagle3"], "draft_vocab_size": 20}
    live, stored = (
        measure(target, "eagle3", options, batch, arm)["useful_share"]
        for arm in ("as it ships", "stored states")
    )
    assert 0.8 < live < 1
    assert stored == pytest.approx(live, abs=0.03)
