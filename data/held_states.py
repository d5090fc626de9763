"""Stored states of held-out texts, found by their tokens: for a target without layers.

Whatever reads a text with the target asks `Target.outputs` for padded rows of ids, without saying
which text they are or where it ends: an evaluation during training, the replay of a report.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np
import torch

from data.batches import collate
from data.features import FeaturesStore
from data.traces import Trace
from target.outputs import LayerId

ID = np.dtype(">i8")  # whose bytes have the order of the numbers


class HeldStates:
    """Answers for `traces`, and for beginnings of them, from a store that holds each as a row."""

    def __init__(self, store: FeaturesStore, traces: Sequence[Trace]):
        self.store = store
        rows = [(_bytes(trace.prompt_ids + trace.response_ids), trace) for trace in traces]
        self._rows = sorted(rows, key=lambda row: row[0])
        self._keys = [key for key, _ in self._rows]

    def hidden(
        self, ids: torch.Tensor, layers: Sequence[LayerId]
    ) -> dict[LayerId, torch.Tensor] | None:
        """States [B, L, H] by layer of rows [B, L] int64, which are padded with 0 on the right;
        zeros behind the end of a text. None where a text or a layer is not stored."""
        found = [self._find(row) for row in ids.cpu().numpy()]
        texts = [trace for trace in found if trace is not None]
        if len(texts) < len(found) or not {*layers} <= {*self.store.layers}:
            return None
        prompts, responses = [t.prompt_ids for t in texts], [t.response_ids for t in texts]
        batch, width = collate(prompts, responses, ["target"] * len(texts)), ids.shape[1]
        read = self.store.outputs(batch, ids.device)
        assert read is not None, "the store was made of these texts"
        states = {layer: read.hidden[layer][:, :width] for layer in layers}
        return {
            layer: torch.nn.functional.pad(own, (0, 0, 0, width - own.shape[1]))
            for layer, own in states.items()
        }

    def _find(self, row: np.ndarray) -> Trace | None:
        """The text that begins with the ids [L] of a row, but for its padding: of all texts the one
        that agrees with it longest, which stands beside its place in their order."""
        real = int(np.flatnonzero(row).max(initial=-1)) + 1
        place, best, longest = bisect(self._keys, _bytes(row)), None, max(real, 1)
        for key, trace in self._rows[max(0, place - 1) : place + 1]:
            text = np.frombuffer(key, ID)[: len(row)]
            same = text == row[: len(text)]
            length = len(text) if same.all() else int(same.argmin())
            if length >= longest:
                best, longest = trace, length
        return best


def _bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, ID).tobytes()
