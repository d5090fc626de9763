"""The frozen target's outputs for a batch: read from disk, held in memory, or computed now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from data.batches import Batch
from data.cached_logits import CachedLogits
from data.features import FeaturesStore
from data.served_states import ServedStates
from data.traces import Trace
from target.model import Target
from target.outputs import TargetOutputs, TargetRequest


class Teacher:
    """Source of target outputs.

    `stored`: the target's states of the training text, on disk or from an engine. Logits of the
    text in `mix` are held in memory from their first use on, where all of them fit.
    """

    def __init__(
        self,
        target: Target,
        traces: Sequence[Trace],
        mix: Mapping[str, float],
        stored: FeaturesStore | ServedStates | None,
        device: torch.device,
    ):
        self.target, self.stored, self.device = target, stored, device
        cached = CachedLogits(target, traces, mix)
        self.cached = cached if cached.fits() else None

    def outputs(self, batch: Batch, request: TargetRequest | None) -> TargetOutputs | None:
        """The outputs that `request` names, for a batch on any device; None without a request."""
        if request is None:
            return None
        found = None
        if self.stored is not None:
            found = self.stored.outputs(batch, self.device)
            if found is not None and request.logits:
                found = self.target.projected(found)
        elif self.cached is not None and request.logits and not request.layers:
            found = self.cached.outputs(batch)
        return found or self.target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
            project_later=True, group=batch.group,
        )  # fmt: skip
