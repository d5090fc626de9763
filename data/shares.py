"""Batches whose texts several processes share: each trains some columns of every text."""

from __future__ import annotations

from dataclasses import dataclass

from data.batches import Batch
from target.shared_text import TextGroup
from trainer.objective import BatchSource


@dataclass
class TextShares:
    """`batches.at(index)` of a group, whose processes all read the same texts, with the share of
    this process, see `Batch.shared`."""

    batches: BatchSource[Batch]
    group: TextGroup

    def at(self, index: int) -> Batch:
        return self.batches.at(index).shared(self.group)
