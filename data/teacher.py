"""What the frozen target says of a batch: read from disk, kept in memory, or computed now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from data.batches import Batch
from data.features import FeaturesStore
from data.kept import KeptLogits
from data.traces import Trace
from target.model import Target, TargetOutputs, TargetRequest


class Teacher:
    """`stored`: the target's states of the training text, if they are on disk. Logits of the text
    in `mix` are kept in memory after the first epoch, where all of them fit."""

    def __init__(
        self,
        target: Target,
        traces: Sequence[Trace],
        mix: Mapping[str, float],
        stored: FeaturesStore | None,
        device: torch.device,
    ):
        self.target, self.stored, self.device = target, stored, device
        kept = KeptLogits(target, traces, mix)
        self.kept = kept if kept.fits() else None

    def outputs(self, batch: Batch, request: TargetRequest | None) -> TargetOutputs | None:
        """None where nothing is asked for."""
        if request is None:
            return None
        found = None
        if self.stored is not None:
            found = self.stored.outputs(batch, self.device)
        elif self.kept is not None and request.logits and not request.layers:
            found = self.kept.outputs(batch)
        return found or self.target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
            project_later=True,
        )  # fmt: skip
