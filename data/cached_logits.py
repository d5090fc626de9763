"""The target's logits on stored text, in memory: a row that comes again costs no second forward.

Full logits are never written to disk. They are computed once, in an order that depends on the
traces alone, so that a resumed run sees the same numbers to the last bit; where they would not fit
in `limit_bytes`, the target runs live at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from data.batches import Batch
from data.traces import Trace
from target.model import Target, TargetOutputs

LIMIT_BYTES = 4 << 30
GROUP = 32


class CachedLogits:
    """Answers like `Target.outputs(...).logits` for batches whose rows are all stored text."""

    def __init__(self, target: Target, traces: Sequence[Trace], sources: Iterable[str]):
        """`sources`: of the responses that batches will hold, "target" and "fixed"."""
        self.target = target
        fields = {"target": "response_ids", "fixed": "fixed_ids"}
        wanted = [fields[source] for source in sorted(sources) if source in fields]
        rows = {(tuple(t.prompt_ids), tuple(getattr(t, f))) for t in traces for f in wanted}
        self.rows = sorted(rows, key=lambda row: (len(row[0]) + len(row[1]), row))
        self._logits: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def fits(self, limit_bytes: int = LIMIT_BYTES) -> bool:
        """Whether the logits at response positions take at most `limit_bytes`."""
        width = self.target.vocab_size * self.target.model.dtype.itemsize
        return 0 < sum(len(response) for _, response in self.rows) * width <= limit_bytes

    def _fill(self) -> None:
        """Compute the logits that score a response token, by one parallel pass over all rows."""
        for i in range(0, len(self.rows), GROUP):
            group = self.rows[i : i + GROUP]
            ids = torch.zeros(len(group), max(len(p) + len(r) for p, r in group), dtype=torch.long)
            for j, (prompt, response) in enumerate(group):
                ids[j, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            logits = self.target.outputs(ids.to(self.target.device)).logits
            assert logits is not None
            for j, (prompt, response) in enumerate(group):
                first = len(prompt) - 1
                own = logits[j, first : first + len(response), : self.target.vocab_size]
                self._logits[group[j]] = own.clone()

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
