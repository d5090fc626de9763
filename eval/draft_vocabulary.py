"""What a reduced draft vocabulary costs, along target traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch

from eval.walk import replay


class DraftVocabulary(TypedDict):
    """What a reduced draft vocabulary costs.

    `tokens_outside`: share of the target's tokens that are not in it; `alpha_lost`: the target's
    probability outside of it, which bounds the alpha that it costs; `tokens_per_round_lost`: what
    the same rounds would emit more if every token outside of it were accepted.
    """

    size: int
    tokens_outside: float
    alpha_lost: float
    tokens_per_round_lost: float


@dataclass(frozen=True)
class Outside:
    """Of a batch: `mass` [B, N+K] float64, the target's probability outside of the vocabulary at
    each token, 1 or 0 at T=0; `tokens` [B, N+K] bool, whether the trace's own token is; `size` of
    the vocabulary."""

    size: int
    mass: np.ndarray
    tokens: np.ndarray

    missing: torch.Tensor  # [V] bool, the ids outside

    @classmethod
    def of(cls, kept: torch.Tensor, tokens: torch.Tensor, vocab_size: int) -> Outside:
        """`kept` [Vd] int64: the vocabulary; `tokens` [B, N+K] int64."""
        missing = torch.ones(vocab_size, dtype=torch.bool, device=tokens.device)
        missing[kept] = False
        outside = missing[tokens].cpu().numpy()
        return cls(len(kept), outside.astype(np.float64), outside, missing)

    def add_mass(self, span: slice, p: torch.Tensor) -> None:
        """Above T=0: the target's distributions `p` [B, n, V] at a span of the tokens."""
        self.mass[:, span] = (p @ self.missing.to(p)).double().cpu().numpy()


class VocabularyCost:
    """Adds up what a draft vocabulary costs."""

    def __init__(self) -> None:
        self.size = self.positions = 0
        self.outside = self.mass = self.emitted = self.rounds = 0.0
        self.whole_rounds = 0.0  # were every token outside accepted

    def add(
        self,
        outside: Outside,
        real: np.ndarray,
        accept: np.ndarray,
        drafted: np.ndarray,
        lengths: np.ndarray,
        sums: dict[str, np.ndarray],
    ) -> None:
        """Add a batch: `real` [B, N] bool, the positions that count; what `eval.walk.replay` was
        given, and its result `sums`."""
        _, width, K = accept.shape
        at_depth = outside.tokens[:, np.arange(width)[:, None] + np.arange(K)]
        whole = replay(np.where(at_depth, 1.0, accept), drafted, lengths, K)
        self.size = outside.size
        self.positions += int(real.sum())
        self.outside += float(outside.tokens[:, :width][real].sum())
        self.mass += float(outside.mass[:, :width][real].sum())
        self.emitted += float(sums["emitted"].sum())
        self.rounds += float(sums["rounds"].sum())
        self.whole_rounds += float(whole["rounds"].sum())

    def found(self) -> DraftVocabulary | None:
        """The cost; None without a round."""
        if not self.rounds:
            return None
        return {
            "size": self.size,
            "tokens_outside": self.outside / self.positions,
            "alpha_lost": self.mass / self.positions,
            "tokens_per_round_lost": self.emitted * (1 / self.whole_rounds - 1 / self.rounds),
        }
