"""Prompt lookup: copy what followed the last occurrence of the current n-gram (Saxena 2023).

Every trained drafter must beat it. It takes the most recent match and allows shorter copies; the
reference takes the earliest match and requires the full length, which accepts less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from drafters.training_free.base import TrainingFree
from trainer.errors import require


@dataclass
class PromptLookup(TrainingFree):
    """`max_ngram`: tokens of the longest n-gram that is looked up."""

    name: ClassVar[str] = "lookup"
    max_ngram: int = 3

    def __post_init__(self) -> None:
        require(self.max_ngram >= 1, "max_ngram", "be >= 1", self.max_ngram)

    def continuation(self, context: np.ndarray, count: int) -> list[int]:
        """The ids after the latest earlier occurrence of the last `max_ngram` ids of `context`.

        Shorter n-grams are looked up where these do not occur earlier.
        """
        size = len(context)
        for n in range(min(self.max_ngram, size - 1), 0, -1):
            gram = context[size - n :]
            matches = np.ones(size - n, dtype=bool)  # by where they start, all before the last one
            for offset in range(n):
                matches &= context[offset : offset + size - n] == gram[offset]
            found = np.flatnonzero(matches)
            if len(found):
                start = int(found[-1]) + n
                return context[start : start + count].tolist()
        return []
