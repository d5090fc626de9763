"""EAGLE-1's tree: 25 nodes of depth 5 (Li et al. 2024), their published default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from drafters.trees.static import Ranks, StaticTree
from drafters.trees.tree import WITHOUT_REPLACEMENT

PATHS = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"


@dataclass(frozen=True)
class EagleTree(StaticTree):
    name: ClassVar[str] = "eagle"
    paths: tuple[Ranks, ...] = field(
        init=False, default=tuple(tuple(map(int, word)) for word in PATHS.split())
    )
    title: str = field(init=False, default="eagle")
    siblings: str = field(default=WITHOUT_REPLACEMENT, kw_only=True)
