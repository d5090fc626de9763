"""Draft length: named rules that end a chain early.

Whether another token is drafted depends on tokens already drafted and never on the coins that
verify them, and the token after which a rule stops is verified. So all rules leave the target's
distribution unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from drafters.round import Budget, Signals, StopRule
from trainer.errors import require
from trainer.specs import spelled

MIDDLE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass
class Policy(StopRule):
    """A stop rule with a name, which ends no round before `K_min` tokens.

    A rule says in `stops` where it would; that is asked after every token.
    """

    name: ClassVar[str]
    K_min: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        require(self.K_min >= 1, "K_min", "be >= 1", self.K_min)

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        """[B] bool: the rows that the rule would stop after the token of this depth."""
        raise NotImplementedError

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        stopped = self.stops(signals, depth)  # also before K_min: some rules add up over tokens
        return stopped & (depth >= self.least)

    @property
    def least(self) -> int:
        """Fewest tokens of a round."""
        return self.K_min

    @property
    def policy(self) -> str:
        return spelled(self)

    def budget(self, K: int, K_min: int = 1) -> Budget:
        """Chains of at most K tokens; `K_min`: that of the acceptance head, where one decides."""
        return Budget(K, self)

    @classmethod
    def grid(cls, K: int, K_min: int = 1) -> list[Budget]:
        """The settings of this family that a report compares."""
        return [cls().budget(K, K_min)]


@dataclass
class Threshold(Policy):
    """A rule that compares with `threshold`, which lies in (0, 1)."""

    THRESHOLDS: ClassVar[tuple[float, ...]]
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.threshold < 1, "threshold", "lie in (0, 1)", self.threshold)

    @classmethod
    def grid(cls, K: int, K_min: int = 1) -> list[Budget]:
        return [cls(threshold).budget(K, K_min) for threshold in cls.THRESHOLDS]


class RunningProduct:
    """A running product over the tokens of a round."""

    product: torch.Tensor

    def times(self, factor: torch.Tensor, depth: int) -> torch.Tensor:
        """The product so far, [B]; it begins again with the first token of a round."""
        self.product = factor if depth == 1 else self.product * factor
        return self.product


class Recorder(StopRule):
    """A rule that never stops and records the signals of every token."""

    def __init__(self, uses_head: bool = False):
        self.uses_head = uses_head
        self.seen: list[Signals] = []

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        self.seen.append(signals)
        return torch.zeros_like(signals.confidence, dtype=torch.bool)
