"""Stop by an acceptance head (SpecDec++)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from drafters.round import Budget, Signals
from eval.policies.base import MIDDLE, RunningProduct, Threshold

# a head trained to overrate rejections needs those close to 1
HIGH = (0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999)


@dataclass
class HeadPolicy(Threshold, RunningProduct):
    """Stop once the acceptance head expects a rejection among the drafted tokens with more than the
    probability `threshold` (Huang et al. 2024, SpecDec++, Algorithm 1): a larger threshold drafts
    longer. The head has a `K_min` too, and the larger one counts.

    As in the published code the newest token is not judged, since its state is known only once it
    is fed for the next one; `HeadLast` feeds it first, as the paper's text has it.
    """

    name: ClassVar[str] = "head"
    THRESHOLDS: ClassVar[tuple[float, ...]] = MIDDLE + HIGH
    uses_head = True
    judges_last = False
    head_K_min: int = field(default=1, init=False)

    @property
    def least(self) -> int:
        return max(self.K_min, self.head_K_min)

    def budget(self, K: int, K_min: int = 1) -> Budget:
        self.head_K_min = K_min
        return Budget(K, self)

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        one = torch.ones_like(signals.confidence)
        # without `judges_last` the first token of a round has nothing to be judged by
        known = signals.score if depth > 1 or self.judges_last else None
        product = self.times(one if known is None else known.to(one), depth)
        return 1 - product > self.threshold


@dataclass
class HeadLast(HeadPolicy):
    """`HeadPolicy` that feeds the newest token before it judges it."""

    name: ClassVar[str] = "head_last"
    judges_last = True
