"""Stop by the newest token's own probability, as transformers does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.round import Signals
from eval.policies.base import Threshold


@dataclass
class Drafted(Threshold):
    """Stop once the drafted token's own probability falls below the threshold: transformers' rule
    (assistant_confidence_threshold). At T=0 that of `confidence`."""

    name: ClassVar[str] = "drafted"
    THRESHOLDS: ClassVar[tuple[float, ...]] = tuple(i / 50 for i in range(1, 50))

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        return signals.probability < self.threshold
