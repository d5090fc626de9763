"""Batches whose texts several processes share: each trains some positions of every text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from data.batches import Batch
from target.attention import BLOCK
from trainer.objective import BatchSource


@dataclass
class TextShares:
    """`batches.at(index)` of a group of `parts` processes, with the share of process `part`.

    Every process of the group reads the same texts. Rounds that begin in one of its blocks are its
    own: they see the keys of the whole text, while queries, later steps, heads and losses, which
    take most of the memory, are computed for its own rounds alone. Blocks are dealt back and forth,
    because later ones see more keys.
    """

    batches: BatchSource[Batch]
    part: int
    parts: int

    def at(self, index: int) -> Batch:
        batch = self.batches.at(index)
        turn = torch.arange(batch.loss_mask.shape[1]) // BLOCK % (2 * self.parts)
        own = torch.minimum(turn, 2 * self.parts - 1 - turn) == self.part
        anchors = batch.loss_mask & own
        return dataclasses.replace(batch, anchors=anchors, num_supervised=int(anchors.sum()))
