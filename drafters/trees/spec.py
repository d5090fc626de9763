"""Values of `eval.tree`: a shape, or a builder of one for a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from drafters.round import Shape
from drafters.trees.tree import TOP

# [depth][rank]: how often that token is the target's, or draw accepted
Accuracy = Sequence[Sequence[float]]


@dataclass(frozen=True)
class TreeSpec(ABC):
    """A tree that `eval.tree` names.

    `siblings`: how the children of a node are chosen at temperatures above 0, where there is a
    choice; `needs_accuracy`: whether it is built from the accuracies of a drafter's ranks;
    `drafter_alone`: whether all its tokens are the drafter's; `needs_slots`: whether it is grown
    from the distributions of all depths at once, which some drafters have.
    """

    name: ClassVar[str]
    siblings: str = field(default=TOP, init=False)
    needs_accuracy: ClassVar[bool] = False
    drafter_alone: ClassVar[bool] = True
    needs_slots: ClassVar[bool] = False

    @abstractmethod
    def deepest(self, K: int) -> int:
        """The longest path possible beside chains of K tokens; UserError for settings out of
        range."""

    @abstractmethod
    def shape(self, accuracy: Accuracy | None, K: int) -> Shape:
        """The shape for a drafter with these accuracies; UserError where they are missing."""
