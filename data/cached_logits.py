"""The target's logits on stored text, in memory: a row that comes again costs no second forward.

Full logits are never written to disk. They are computed once, in an order that depends on the
traces alone, so that a resumed run sees the same numbers to the last bit; where they would not fit
in `limit_bytes`, the target runs live at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from data.batches import Batch, response_of
from data.traces import Trace
from target.model import Target
from target.outputs import TargetOutputs
from target.padding import by_length, right_padded

LIMIT_BYTES = 4 << 30
GROUP = 32

_Row: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response


class CachedLogits:
    """Answers like `Target.outputs(...).logits` for batches whose rows are all stored text."""

    def __init__(self, target: Target, traces: Sequence[Trace], sources: Iterable[str]):
        """`sources`: of the responses that batches will hold, "target" and "fixed"."""
        self.target = target
        self.traces, self.sources = traces, sorted(set(sources) - {"draft"})
        self._logits: dict[_Row, torch.Tensor] = {}

    def fits(self, limit_bytes: int = LIMIT_BYTES) -> bool:
        """Whether the logits at response positions, which are kept, take at most `limit_bytes`."""
        width = self.target.vocab_size * self.target.model.dtype.itemsize
        most, total = limit_bytes // width, 0
        for _, response in self._rows():
            total += len(response)
            if total > most:  # what is left may be a store of any size: it is not read
                return False
        return total > 0

    def _rows(self) -> Iterator[_Row]:
        """Each distinct text once."""
        seen: set[_Row] = set()
        for trace in self.traces:
            for source in self.sources:
                row = tuple(trace.prompt_ids), tuple(response_of(trace, source))
                if row not in seen:
                    seen.add(row)
                    yield row

    @torch.no_grad()
    def _fill(self) -> None:
        """Compute the logits that score a response token, by one parallel pass over all rows."""
        rows = sorted(self._rows())
        for group in by_length(rows, lambda row: len(row[0]) + len(row[1]), GROUP):
            ids, _ = right_padded([[*prompt, *response] for prompt, response in group])
            logits = self.target.outputs(ids.to(self.target.device), project_later=True).logits
            assert logits is not None
            for j, (prompt, response) in enumerate(group):
                first = len(prompt) - 1
                own = logits[j, slice(first, first + len(response))]
                self._logits[prompt, response] = own.contiguous()  # without a padded head's columns

    def outputs(self, batch: Batch) -> TargetOutputs | None:
        """Logits [B, L, V], zero where nothing is supervised; None if a row is no stored text."""
        if not self._logits:
            self._fill()
        keys = [(tuple(p), tuple(r)) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        if not all(key in self._logits for key in keys):
            return None
        logits = torch.zeros(
            *batch.input_ids.shape,
            self.target.vocab_size,
            dtype=self.target.model.dtype,
            device=self.target.device,
        )
        for (prompt, response), (row, begin) in zip(keys, batch.starts(), strict=True):
            first = begin + len(prompt) - 1
            logits[row, first : first + len(response)] = self._logits[prompt, response]
        return TargetOutputs(logits=logits)
