"""Drafters without weights: they copy what they expect to follow a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from drafters.round import Budget, DraftState
from drafters.trees.tree import TokenTree
from target.model import LayerId, TargetOutputs


@dataclass
class TrainingFree:
    """`continuation` is all that one has of its own: what it copies has no law, so its chains are
    deterministic and no stop rule ends them."""

    name: ClassVar[str]
    target_layers: ClassVar[tuple[LayerId, ...]] = ()

    def continuation(self, context: np.ndarray, count: int) -> list[int]:
        """Up to `count` ids that may follow the ids of `context` [S]; [] where it knows none."""
        raise NotImplementedError

    def begin(self, rows: int, capacity: int) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None: ...

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
