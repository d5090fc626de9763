"""Traces in batches of like length, and the target's states of them, read once for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data.traces import Trace
from target.model import Target
from target.outputs import LayerId
from target.padding import by_length, right_padded

HELD_BYTES = 1 << 30  # most memory for states of the target between two replays of the same texts


class Texts:
    """The texts of some traces: prompt, response and up to `lookahead` tokens behind it.

    `groups`: the traces in batches. The target reads a batch when its states are first asked for;
    they are held on its device for whoever asks next, as far as HELD_BYTES go. Batches beyond that
    are read again each time.
    """

    def __init__(
        self, target: Target, traces: Sequence[Trace], lookahead: int, batch_size: int = 16
    ):
        self.target, self.lookahead = target, lookahead
        self.groups = list(by_length(traces, lambda t: t.num_tokens, batch_size))
        self._held: list[dict[LayerId, torch.Tensor]] = [{} for _ in self.groups]
        self._room = HELD_BYTES

    def ids(self, index: int) -> torch.Tensor:
        """Token ids [B, L] int64 of a group, right-padded with 0."""
        rows = [
            trace.prompt_ids + trace.response_ids + trace.lookahead_ids[: self.lookahead]
            for trace in self.groups[index]
        ]
        return right_padded(rows)[0].to(self.target.device)

    def states(self, index: int, layers: Sequence[LayerId]) -> dict[LayerId, torch.Tensor]:
        """The target's states [B, L, H] of a group at each of `layers`."""
        held = self._held[index]
        missing = [layer for layer in layers if layer not in held]
        found = held
        if missing:
            read = self.target.outputs(self.ids(index), layers=missing, logits=False).hidden
            size = sum(states.numel() * states.element_size() for states in read.values())
            if size <= self._room:
                self._room -= size
                held.update(read)
            found = held | read
        return {layer: found[layer] for layer in layers}
