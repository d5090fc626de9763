"""Prompt lookup: copy what followed the last occurrence of the current n-gram (Saxena 2023).

Every trained drafter must beat it. Takes the most recent match and allows copies shorter than
asked; the reference takes the earliest and wants the full length, which accepts less.
"""

from __future__ import annotations

import numpy as np
import torch

from data.target import LayerId, TargetOutputs
from drafters.base import Budget, DraftState
from drafters.tree import TokenTree

MAX_NGRAM = 3


class PromptLookup:
    target_layers: tuple[LayerId, ...] = ()

    def begin(self, rows: int, capacity: int) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None: ...

    def continuation(self, context: np.ndarray, count: int) -> list[int]:
        """Up to `count` ids copied from after the latest earlier occurrence of the context's last
        3, 2 or 1 tokens, longest first; [] where there is none."""
        size = len(context)
        for n in range(min(MAX_NGRAM, size - 1), 0, -1):
            gram = context[size - n :]
            matches = np.ones(
                size - n, dtype=bool
            )  # start positions 0..size-n-1: earlier ones only
            for offset in range(n):
                matches &= context[offset : offset + size - n] == gram[offset]
            found = np.flatnonzero(matches)
            if len(found):
                start = int(found[-1]) + n
                return context[start : start + count].tolist()
        return []

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
