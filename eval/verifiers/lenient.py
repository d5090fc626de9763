"""Lenience, which is lossy (Leviathan et al. 2023, App. A.5; DistillSpec, Zhou et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drafters.trees.tree import CHAIN
from eval.verifiers.base import Verdict, Verification, Verifier
from eval.verifiers.token import verify_chain
from target.sampling import Sampling
from trainer.errors import require


@dataclass(frozen=True)
class Lenient(Verifier):
    """Accept x of a chain with min(1, p(x) / (lenience q(x))).

    A rejection emits a token from norm((p - lenience q)+). No token is emitted with more than
    p(x) / lenience. At temperature 0, where p is one-hot, nothing changes.
    """

    name: ClassVar[str] = "lenient"
    judges: ClassVar[tuple[str, ...]] = (CHAIN,)
    lenience: float

    def __post_init__(self) -> None:
        require(0 < self.lenience <= 1, "lenience", "lie in (0, 1]", self.lenience)

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0 or self.lenience == 1

    def replayable(self, sampling: Sampling) -> bool:
        # else its own output is no sample of the target
        return self.lossless(sampling)

    def __call__(self, round: Verification) -> Verdict:
        return verify_chain(round, self.lenience)
