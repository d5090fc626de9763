"""The random numbers of a round are independent of each other: the target's law, by counting rows.

Tests that enumerate outcomes ask for each outcome by itself and cannot see that two of them come
from one random number. Here `KeyedRandom` draws for many rows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters.round import Budget, DraftState
from drafters.trees.static import static_tree
from drafters.trees.tree import CHAIN, TOP, WITHOUT_REPLACEMENT
from eval.verifiers.base import Verification
from eval.verifiers.block import Block
from eval.verifiers.multi_round import MultiRound
from eval.verifiers.token import Token
from target.sampling import KeyedRandom
from tests.eval.verifiers.test_tree import PLAIN, Tabular
from tests.helpers.tabular import dirichlet_table

V, ROWS, LENGTH = 3, 200_000, 3
# A chi-squared variable of 26 degrees of freedom (27 texts, whose sum is given) exceeds 75 with
# probability 1.2e-6.
LIMIT = 75
PAIRS = static_tree([[0], [1], [0, 0], [0, 1]])
DRAWN = dataclasses.replace(PAIRS, siblings=WITHOUT_REPLACEMENT)


@pytest.mark.parametrize(
    ("budget", "verify"),
    [
        (Budget(2), Token()),
        (Budget(2), Block()),
        (Budget.of(PAIRS), Token()),
        (Budget.of(DRAWN), MultiRound()),
    ],
    ids=[CHAIN, "block", TOP, WITHOUT_REPLACEMENT],
)
def test_the_text_of_many_rows_has_the_targets_law(budget, verify):
    """Three tokens: those of a round, completed by draws of the target's own."""
    target, own = dirichlet_table([V] * 3, 3), dirichlet_table([V] * 2, 4)
    random = KeyedRandom(torch.arange(ROWS))
    ids = torch.tensor([[0, 1, *[0] * 4]]).expand(ROWS, -1)
    lengths = torch.full((ROWS,), 2)
    tree = Tabular(own).propose(DraftState(ids, lengths, 2, PLAIN, random), budget)
    assert tree.form == budget.form
    # the target's law depends on the last two tokens: a node and the one above it
    tokens = torch.cat([torch.tensor([[0, 1]]).expand(ROWS, -1), tree.tokens], 1)
    above = tokens.gather(1, tree.parents + 2)
    logits = target[torch.cat([tokens[:, :1], above], 1), tokens[:, 1:]].log()
    verdict = verify(Verification(tree, logits, PLAIN, random, lengths))
    nodes = torch.arange(2).expand(ROWS, -1) if verdict.path is None else verdict.path
    text = tree.tokens.gather(1, nodes.clamp(min=0))
    text = torch.cat([torch.tensor([[0, 1]]).expand(ROWS, -1), text, text[:, :1]], 1)
    text.scatter_(1, 2 + verdict.accepted[:, None], verdict.emitted[:, None])
    for i in range(1, LENGTH):
        drawn = random.choice(target[text[:, i], text[:, i + 1]], lengths + i, "rest")
        text[:, i + 2] = torch.where(i > verdict.accepted, drawn, text[:, i + 2])
    expected = ROWS * target[0, 1][:, None, None] * target[1][:, :, None] * target
    found = torch.zeros(V**LENGTH).index_add(
        0, text[:, 2:] @ torch.tensor([V * V, V, 1]), torch.ones(ROWS)
    )
    assert ((found - expected.flatten()).square() / expected.flatten()).sum() < LIMIT
