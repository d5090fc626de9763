"""Chains of fixed length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from drafters.round import Budget
from eval.policies.base import Policy


@dataclass
class Fixed(Policy):
    """No rule ends them; the grid is over their length."""

    name: ClassVar[str] = "fixed"
    K_min: int = field(default=1, init=False)  # every round has eval.K tokens

    def budget(self, K: int, K_min: int = 1) -> Budget:
        return Budget(K)

    @classmethod
    def grid(cls, K: int, K_min: int = 1) -> list[Budget]:
        return [Budget(k) for k in range(1, K + 1)]
