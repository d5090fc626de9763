"""Stop by the probability of all drafted tokens of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.round import Signals
from eval.policies.base import MIDDLE, RunningProduct, Threshold

LOW = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02)  # where drafts are cheap


@dataclass
class Product(Threshold, RunningProduct):
    """Stop once the drafter's probability of all tokens of this round falls below the
    threshold."""

    name: ClassVar[str] = "product"
    THRESHOLDS: ClassVar[tuple[float, ...]] = LOW + MIDDLE

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        return self.times(signals.probability, depth) < self.threshold
