"""llama.cpp's `ngram-simple` (build b11549): copy what followed the last earlier n-gram, where
enough did.

Read from its source: the place must not be the first of the text, n tokens at least must follow it
before the newest token, which is not copied itself, and the text must be longer than a match and a
draft. Where any of these fails nothing is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from drafters.training_free.base import TrainingFree
from trainer.errors import require


@dataclass
class NgramSimple(TrainingFree):
    """`size`: tokens of the n-gram that is looked up; llama.cpp's default is 12."""

    name: ClassVar[str] = "ngram_simple"
    size: int = 12

    def __post_init__(self) -> None:
        require(self.size >= 1, "size", "be >= 1", self.size)

    @property
    def in_llamacpp(self) -> tuple[str, int]:
        return "ngram-simple", self.size

    def continuation(self, context: np.ndarray, count: int) -> list[int]:
        """The ids after the latest earlier occurrence of the last `size` ids of `context`, `count`
        of them or those before the newest id; [] where they are fewer than `size`."""
        known = len(context) - 1  # all but the newest, which llama.cpp has not verified yet
        if known <= self.size + count + 1:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(context[1 : known - 1], self.size)
        found = np.flatnonzero((windows == context[-self.size :]).all(axis=1))
        if not len(found):
            return []
        start = int(found[-1]) + 1 + self.size
        copied = context[start : min(start + count, known)].tolist()
        return copied if len(copied) >= self.size else []
