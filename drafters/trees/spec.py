"""What `eval.tree` may name: a shape, or what builds one for a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from drafters.round import Shape
from drafters.trees.tree import TOP

Accuracy = Sequence[Sequence[float]]  # [depth][rank]: how often that token is the target's


@dataclass(frozen=True)
class TreeSpec(ABC):
    """`siblings`: how the children of a node come about at temperatures above 0, where there is a
    choice; `needs_accuracy`: it is built from the accuracies of a drafter's ranks."""

    name: ClassVar[str]
    siblings: str = field(default=TOP, init=False)
    needs_accuracy: ClassVar[bool] = False

    @abstractmethod
    def deepest(self, K: int) -> int:
        """The longest path there may be beside chains of K tokens; UserError if it cannot be."""

    @abstractmethod
    def shape(self, accuracy: Accuracy | None, K: int) -> Shape: ...
