"""Prompt lookup: copy what followed the last occurrence of the current n-gram (Saxena 2023).

Every trained drafter must beat it. Takes the most recent match and allows copies shorter than
asked; the reference takes the earliest and wants the full length, which accepts less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from drafters.training_free.base import TrainingFree
from trainer.checks import require


@dataclass
class PromptLookup(TrainingFree):
    name: ClassVar[str] = "lookup"
    max_ngram: int = 3

    def __post_init__(self) -> None:
        require(self.max_ngram >= 1, "max_ngram", "be >= 1", self.max_ngram)

    def continuation(self, context: np.ndarray, count: int) -> list[int]:
        """Copied from after the latest earlier occurrence of the context's last `max_ngram` tokens,
        of fewer where they have none."""
        size = len(context)
        for n in range(min(self.max_ngram, size - 1), 0, -1):
            gram = context[size - n :]
            matches = np.ones(
                size - n, dtype=bool
            )  # start positions 0..size-n-1: earlier ones only
            for offset in range(n):
                matches &= context[offset : offset + size - n] == gram[offset]
            found = np.flatnonzero(matches)
            if len(found):
                start = int(found[-1]) + n
                return context[start : start + count].tolist()
        return []
