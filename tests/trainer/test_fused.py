"""The passes over a large vocabulary through torch.compile: the same losses, and what happens where
the compiler fails."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.exc import TritonMissing

from tests.helpers.losses import chunked_divergence
from trainer import fused as module
from trainer.fused import FROM_VOCABULARY, _fused, fused
from trainer.logits import OutputHead

N, D, W = 7, 8, FROM_VOCABULARY


def problem(reduced, N=N):
    """States, head and the target's logits at N positions; a third of the vocabulary is not kept
    if `reduced`."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = W + W // 2 if reduced else W
    kept = torch.randperm(vocabulary, generator=generator)[:W].sort().values if reduced else None
    states = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(W, D, generator=generator).requires_grad_()
    target = 2 * torch.randn(N, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (N,), generator=generator)
    return states, OutputHead(weight, kept=kept), target, labels


def loss(name, reduced):
    """Every output of the loss and its gradients, in chunks of three positions and one of one."""
    states, head, target, labels = problem(reduced)
    weights = torch.arange(1.0, N + 1)
    found = chunked_divergence(
        name, states, head, lambda span: target[span], labels, weights, chunk_positions=3
    )
    found.total.backward()
    parts = vars(found) | {"by states": states.grad, "by weight": head.weight.grad}
    return {name: part.detach() for name, part in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reduced"), [("fkl", False), ("nla", True), ("tvd_pp", True)])
def test_a_fused_loss_is_the_plain_one(name, reduced, monkeypatch):
    monkeypatch.setattr(module, "FROM_VOCABULARY", 2**62)
    expected = loss(name, reduced)
    monkeypatch.undo()
    counters.clear()
    found = loss(name, reduced)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert found.keys() == expected.keys()
    for part, value in expected.items():
        torch.testing.assert_close(found[part], value, rtol=1e-4, atol=1e-5, msg=part)


@pytest.mark.slow
def test_any_number_of_positions_is_compiled_together():
    graphs = []
    counters.clear()
    torch._dynamo.reset()
    for number in (5, 6, 9, 14, 40):
        states, head, target, labels = problem(False, number)
        chunked_divergence("fkl", states, head, target.__getitem__, labels)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[-1] == graphs[0]
    assert not counters["graph_break"]


def test_a_small_vocabulary_is_not_compiled():
    assert fused(loss, FROM_VOCABULARY - 1) is loss
    assert fused(loss, FROM_VOCABULARY) is not loss


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            BackendCompilerFailed(len, RuntimeError("no C++\ncompiler found"), None),
            "no C.. compiler",
        ),
        (TritonMissing(None), "Cannot find a working triton"),  # raised by inductor as it is
    ],
)
def test_without_a_compiler_the_function_runs_as_it_is(error, reason, monkeypatch):
    _fused.cache_clear()

    tried = []

    def compile_to_nothing(function, dynamic):
        def fails(*arguments):
            tried.append(arguments)
            raise error

        return fails

    monkeypatch.setattr(torch, "compile", compile_to_nothing)
    run = fused(lambda a, b: a + b, FROM_VOCABULARY)
    with pytest.warns(UserWarning, match=rf"does not work on this machine \({reason}"):
        assert run(1, 2) == 3
    assert run(3, 4) == 7  # and says it once
    assert tried == [(1, 2)]  # a compiler may take minutes to fail
