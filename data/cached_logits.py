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
from target.outputs import KeptLogits, TargetOutputs
from target.padding import by_length, right_padded
from trainer.device import sent

LIMIT_BYTES = 4 << 30
GROUP = 32

_Row: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response


class CachedLogits:
    """Answers like `Target.outputs(...).logits` for batches whose rows are all stored text."""

    def __init__(self, target: Target, traces: Sequence[Trace], sources: Iterable[str]):
        """`sources`: of the responses that batches will hold, "target" and "fixed"."""
        self.target = target
        self.traces, self.sources = traces, sorted(set(sources) - {"draft"})
        self._first: dict[_Row, int] = {}  # where each text's logits begin in the table
        self._table: torch.Tensor | None = None  # [tokens of all responses, vocab_size]

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
    def _fill(self) -> torch.Tensor:
        """Compute the logits that score a response token, by one parallel pass over all rows."""
        rows, device = sorted(self._rows()), self.target.device
        shape = sum(len(response) for _, response in rows), self.target.vocab_size
        table, used = torch.empty(shape, dtype=self.target.model.dtype, device=device), 0
        for group in by_length(rows, lambda row: len(row[0]) + len(row[1]), GROUP):
            ids, _ = right_padded([[*prompt, *response] for prompt, response in group])
            logits = self.target.outputs(ids.to(device), project_later=True).logits
            assert logits is not None
            for j, (prompt, response) in enumerate(group):
                first, count = len(prompt) - 1, len(response)
                table[used : used + count] = logits[j, slice(first, first + count)]
                self._first[prompt, response] = used
                used += count
        return table

    def outputs(self, batch: Batch) -> TargetOutputs | None:
        """Logits [B, L, V], of any text where nothing is supervised; None if a row is no stored
        text."""
        if self._table is None:
            self._table = self._fill()
        keys = [(tuple(p), tuple(r)) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        if not all(key in self._first for key in keys):
            return None
        places = torch.zeros(batch.input_ids.shape, dtype=torch.long)
        for (prompt, response), (row, begin) in zip(keys, batch.starts(), strict=True):
            first, count = begin + len(prompt) - 1, len(response)
            own = self._first[prompt, response]
            places[row, first : first + count] = torch.arange(own, own + count)
        return TargetOutputs(logits=KeptLogits(self._table, sent(places, self.target.device)))
