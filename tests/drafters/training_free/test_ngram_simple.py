"""llama.cpp's own copies: where they may begin, and what they leave out."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.training_free.ngram_simple import NgramSimple
from drafters.training_free.table import parse_training_free
from trainer.errors import UserError


def reference(context: list[int], size: int, count: int) -> list[int]:
    """Place by place from the end, as the engine searches."""
    verified, newest = context[:-1], context[-1]
    if len(verified) <= size + count + 1:
        return []
    pattern = [*verified[len(verified) - size + 1 :], newest]
    for place in range(len(verified) - size - 1, 0, -1):
        if verified[place : place + size] == pattern:
            copied = verified[place + size : place + size + count]
            return copied if len(copied) >= size else []
    return []


@pytest.mark.parametrize(
    ("context", "copied"),
    [
        ([9, 1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], []),  # the first place is not looked at
        ([9, 1, 2, 3, 1, 2], []),  # shorter than a match and a draft
        ([9, 8, 7, 6, 5, 4, 1, 2, 3, 1, 2], [3, 1]),  # never the newest token
        ([9, 8, 7, 6, 5, 4, 3, 1, 2, 1, 2], []),  # one token follows, fewer than an n-gram
    ],
)
def test_copies_what_followed_the_latest_place(context, copied):
    assert NgramSimple(2).continuation(np.array(context), 3) == copied


def test_equals_the_plain_definition_on_random_texts():
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(2000):
        context = generator.integers(0, 3, generator.integers(1, 30)).tolist()
        size, count = generator.integers(1, 5, 2).tolist()
        expected = reference(context, size, count)
        assert NgramSimple(size).continuation(np.array(context), count) == expected
        found += len(expected) > 0
    assert found > 200


def test_a_size_below_one_is_refused():
    with pytest.raises(UserError, match="size must be >= 1"):
        parse_training_free("ngram_simple:0", "eval.drafter")
