"""The text that a drafter reads in its teacher-forced pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from target.shared_text import TextGroup


@dataclass(frozen=True)
class Text:
    """Texts for `TrainedDrafter.states`; a drafter ignores what does not concern it.

    `ids` [B, L] int64, right-padded; `position_ids` [B, L] int64, None: 0..L-1; `columns` [B, L]
    bool: the positions that rounds may begin from, each the one before a round's anchor, None: all.
    They bind a drafter with `one_pass`, whose states are 0 elsewhere, and may save others work;
    `documents` [B, L] int64: the number of the text that a token belongs to, where a row holds
    several, of which none sees another; `group`: the processes that read the texts together;
    `paths` [B, L, depth - 1] int64: the tokens that the later steps of each column feed instead of
    the true ones, like a round that drafts along another branch.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    group: TextGroup | None = None
    paths: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        """The positions [B, L] int64, counted where they are not given."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
