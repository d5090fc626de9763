"""Prompt lookup: which earlier place it copies from, and what it submits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafters.round import Budget, Drafter, DraftState
from drafters.training_free.lookup import PromptLookup
from target.sampling import Sampling


def reference(context: list[int], count: int) -> list[int]:
    """What followed the latest earlier occurrence of the last 3, else 2, else 1 tokens."""
    for n in (3, 2, 1):
        for start in range(len(context) - n - 1, -1, -1):
            if context[start : start + n] == context[-n:]:
                return context[start + n : start + n + count]
    return []


@pytest.mark.parametrize(
    ("context", "copied"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [5, 1, 2]),  # the latest of two matches
        ([7, 3, 8, 2, 3, 9, 5, 3], [9, 5, 3]),  # one token matches, no more
        ([2, 3, 8, 3, 9, 2, 3], [8, 3, 9]),  # two tokens before one, though earlier
        ([5, 5, 5, 5], [5]),  # overlapping match: shorter than asked
        ([5, 5], [5]),
        ([4, 5], []),
        ([4], []),
        ([1, 2, 3, 4], []),
    ],
)
def test_copies_what_followed_the_latest_longest_match(context, copied):
    assert PromptLookup().continuation(np.array(context), 3) == copied


def test_equals_the_plain_definition_on_random_texts():
    generator = np.random.default_rng(0)
    for _ in range(500):
        context = generator.integers(0, 4, generator.integers(1, 30)).tolist()
        count = int(generator.integers(1, 6))
        assert PromptLookup().continuation(np.array(context), count) == reference(context, count)


def test_proposes_per_row_whatever_lies_behind_the_committed_tokens():
    texts = [[1, 2, 3, 4, 9, 1, 2, 3], [4, 5], [6, 6, 6]]
    ids = torch.full((3, 12), 3)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    drafter = PromptLookup()
    assert isinstance(drafter, Drafter)
    state = DraftState(ids, lengths, 8, Sampling(1.0), random=None)
    tree = drafter.propose(state, Budget(4))
    assert tree.is_chain
    assert tree.probs is None  # deterministic: a point mass
    assert tree.lengths.tolist() == [3 + 1, 0, 1]
    assert tree.tokens[0].tolist() == [4, 9, 1, 2]
    assert int(tree.tokens[2, 0]) == 6
    assert (tree.draft_forwards, tree.draft_tokens) == (0, 0)


def test_proposes_nothing_on_any_row_without_failing():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    state = DraftState(ids, torch.tensor([3, 3]), 3, Sampling(0.0), random=None)
    tree = PromptLookup().propose(state, Budget(4))
    assert tree.lengths.tolist() == [0, 0]
    assert tree.tokens.shape == (2, 1)
