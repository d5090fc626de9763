"""EAGLE-2's tree in the numbers of its published code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drafters.trees.dynamic import DynamicTree
from drafters.trees.spec import Accuracy, TreeSpec
from trainer.errors import require


@dataclass(frozen=True)
class Eagle2Tree(TreeSpec):
    """`total_tokens`, `depth` and `top_k` as the published code has them: the root is counted among
    the tokens, and one level is drafted before the first of `depth`. `eagle2:60:7:10` is
    `dynamic:59:8:10`."""

    name: ClassVar[str] = "eagle2"
    total_tokens: int
    depth: int
    top_k: int = 10

    def __post_init__(self) -> None:
        require(self.total_tokens >= 2, "total_tokens", "be >= 2", self.total_tokens)
        require(self.depth >= 0, "depth", "be >= 0", self.depth)
        self.shape(None, 1)

    def deepest(self, K: int) -> int:
        return self.depth + 1

    def shape(self, accuracy: Accuracy | None, K: int) -> DynamicTree:
        return DynamicTree(self.total_tokens - 1, self.depth + 1, self.top_k)
