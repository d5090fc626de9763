"""The schedule of transformers' assisted generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from drafters.round import Budget, Signals
from eval.policies.base import Policy

FIRST_K = 5  # of an answer


@dataclass
class Heuristic(Policy):
    """Two tokens more after a round that was accepted whole, one less after any other, from
    `FIRST_K` in every answer."""

    name: ClassVar[str] = "heuristic"
    replayable = False
    K: int = field(default=FIRST_K, init=False)

    def budget(self, K: int, K_min: int = 1) -> Budget:
        self.K = K
        return Budget(K, self)

    @property
    def first(self) -> int:
        """The length of the first round of an answer."""
        return min(max(FIRST_K, self.K_min), self.K)

    def begin(self, rows: int, device: torch.device) -> None:
        self.lengths = torch.full((rows,), self.first, device=device)

    def renew(self, rows: torch.Tensor) -> None:
        self.lengths[rows] = self.first

    def keep(self, rows: torch.Tensor) -> None:
        self.lengths = self.lengths[rows]

    def verified(self, accepted: torch.Tensor, submitted: torch.Tensor) -> None:
        change = torch.where(accepted >= submitted, 2, -1)
        self.lengths = (self.lengths + change).clamp(min(self.K_min, self.K), self.K)

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        return self.lengths <= depth
