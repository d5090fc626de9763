"""Stop by the newest token's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.round import Signals
from eval.policies.base import MIDDLE, Policy, Threshold
from trainer.errors import require


@dataclass
class Confidence(Threshold):
    """Stop once the drafter's largest probability falls below the threshold."""

    name: ClassVar[str] = "confidence"
    THRESHOLDS: ClassVar[tuple[float, ...]] = MIDDLE

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        require(0 <= self.threshold <= 1, "threshold", "lie in [0, 1]", self.threshold)

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        return signals.confidence < self.threshold
