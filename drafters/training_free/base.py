"""Drafters without weights, which copy what they expect to follow a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from drafters.round import Budget, Drafter, DraftState
from drafters.trees.tree import TokenTree


@dataclass
class TrainingFree(Drafter):
    """A drafter that implements only `continuation`.

    A copied token has no distribution, so that chains are deterministic and no stop rule ends them.
    """

    name: ClassVar[str]

    @property
    def in_llamacpp(self) -> tuple[str, int] | None:
        """llama.cpp's --spec-type that drafts by this rule, and the tokens of its n-gram; None: it
        has none."""
        return None

    def continuation(self, context: np.ndarray, count: int) -> list[int]:
        """Up to `count` ids that may follow `context` [S] int64; [] where there are none."""
        raise NotImplementedError

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        rows = [
            self.continuation(row[:length], budget.max_tokens)
            for row, length in zip(state.ids.cpu().numpy(), state.lengths.tolist(), strict=True)
        ]
        width = max(1, max(map(len, rows)))
        tokens = torch.tensor(
            [row + [0] * (width - len(row)) for row in rows], device=state.ids.device
        )
        return TokenTree.chain(
            tokens, None, torch.tensor([len(row) for row in rows], device=state.ids.device)
        )
