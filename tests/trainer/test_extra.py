"""Corrections of low rank in an output head: logits and gradients, in every form of the head."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.helpers.losses import chunked_divergence
from trainer.chunked import JointGradients
from trainer.errors import UserError
from trainer.logits import OutputHead

N, D, R, V = 6, 5, 3, 11
KEPT = torch.tensor([1, 2, 5, 9])


def cap(logits):
    return 2 * torch.tanh(logits / 2)


def problem(padding=0, **options):
    torch.manual_seed(0)
    weight, bias, extra = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((V + padding, D), (V + padding,), (V, R))
    )
    states = torch.randn(N, D + R, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(N, V, dtype=torch.float64)
    return states, OutputHead(weight, bias, extra=extra, **options), teacher


def by_hand(states, head):
    plain = states[..., :D] @ head.weight.T + head.bias
    return plain[..., :V] + states[..., D:] @ head.extra.T


def test_logits_are_those_of_both_parts_before_the_transform():
    states, head, _ = problem(transform=cap)
    expected = cap(by_hand(states, head))
    torch.testing.assert_close(head.logits(states), expected)
    base = head.base(states[:, :D])
    torch.testing.assert_close(head.finished(base, states[:, D:]), expected)
    torch.testing.assert_close(
        head.plain().logits(states[:, :D]), cap(states[:, :D] @ head.weight.T + head.bias)
    )
    torch.testing.assert_close(head.rows(KEPT).logits(states), expected[:, KEPT])
    states, padded, _ = problem(padding=2, vocab_size=V)
    torch.testing.assert_close(padded.logits(states), by_hand(states, padded))


def test_a_correction_has_a_row_for_each_of_the_heads():
    _, head, _ = problem()
    with pytest.raises(UserError, match="extra must have 11 rows"):
        dataclasses.replace(head, extra=head.extra[1:])


@pytest.mark.parametrize("kept", [None, KEPT])
def test_a_term_without_the_correction_shares_the_gradient_of_the_weight(kept):
    """The heads with and without it have the same weight, and each parameter one gradient."""
    states, head, teacher = problem()
    if kept is not None:
        leaves = (head.weight, head.bias, head.extra)
        weight, bias, extra = (x.detach()[kept].requires_grad_() for x in leaves)
        head = OutputHead(weight, bias, kept, extra=extra)
    labels = torch.full((N,), 2)
    inputs = states, head.weight, head.bias, head.extra

    def gradients(joint):
        parts = [(head.plain(), states[:, :D], 0.5), (head, states, 3.0), (head, 2 * states, 1.0)]
        loss = torch.zeros((), dtype=torch.float64)
        for own, rows, factor in parts:
            made = chunked_divergence(
                "jsd", rows, own, teacher.__getitem__, labels, chunk_positions=4, joint=joint,
                factor=factor,
            )  # fmt: skip
            loss = loss + factor * made.total
        return torch.autograd.grad(2 * loss, inputs)

    found, expected = gradients(JointGradients()), gradients(None)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(bool(one.any()) for one in expected)


def test_a_frozen_weight_leaves_the_correction_its_gradient():
    states, head, teacher = problem()
    frozen = dataclasses.replace(head, weight=head.weight.detach(), bias=None)
    labels = torch.zeros(N, dtype=torch.long)
    chunked_divergence("fkl", states, frozen, teacher.__getitem__, labels).total.backward()
    assert bool(head.extra.grad.any())
    assert head.weight.grad is None
