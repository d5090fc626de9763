"""The target's logits at positions of a batch, made from its final-normed states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.device import free_bytes
from trainer.logits import LogitsSummary, OutputHead, ReducedLogits, TeacherLogits, chunk_rows

HOLD_BYTES = 1 << 28  # where free memory is not known; otherwise a quarter of that


class TargetLogits:
    """The logits that `head` gives the target's states `final` [B, L, H]; of a reduced vocabulary
    what its tokens `kept` need of them. With a `summary` of them only those rows of the head,
    `kept_head`, are read."""

    def __init__(
        self,
        head: OutputHead,
        final: torch.Tensor,
        kept: torch.Tensor | None = None,
        summary: LogitsSummary | None = None,
        kept_head: OutputHead | None = None,
    ):
        self.head, self.final, self.kept = head, final, kept
        self.summary, self.kept_head = summary, kept_head
        self._held: TeacherLogits | None = None
        self._place: torch.Tensor | None = None  # [B, L-1] int64: the row of `_held`

    def logits(self, rows: torch.Tensor, index: torch.Tensor) -> TeacherLogits:
        """The logits [n, V] at these rows and logit indices, [n] int64."""
        if self._held is not None:
            assert self._place is not None
            return self._held[self._place[rows, index]]
        return self._read(rows, index)

    def at(self, rows: torch.Tensor, index: torch.Tensor) -> Positions:
        """The same as a function of a span of these N positions."""
        return Positions(self, rows, index)

    @torch.no_grad()
    def hold(self, where: torch.Tensor, vocab_size: int) -> None:
        """Compute the logits `where` [B, L-1] bool, which several depths ask for, once for all,
        if they fit into memory. `vocab_size`: of the target."""
        rows, index = where.nonzero(as_tuple=True)
        width = vocab_size if self.kept is None else len(self.kept)
        free, size = free_bytes(where.device), len(rows) * width * self.final.element_size()
        if size > (HOLD_BYTES if free is None else free // 4):
            return
        self._place = torch.zeros(where.shape, dtype=torch.long, device=where.device)
        self._place[rows, index] = torch.arange(len(rows), device=where.device)
        if self.kept is None:
            self._held = self._read(rows, index)
            return
        step = chunk_rows(where.device, vocab_size)
        spans = zip(rows.split(step), index.split(step), strict=True)
        self._held = ReducedLogits.joined([self._reduced(row, at) for row, at in spans])

    def _read(self, rows: torch.Tensor, index: torch.Tensor) -> TeacherLogits:
        if self.kept is not None:
            return self._reduced(rows, index)
        return self.head.teacher_logits(self.final[rows, index])

    def _reduced(self, rows: torch.Tensor, index: torch.Tensor) -> ReducedLogits:
        assert self.kept is not None
        states, summary = self.final[rows, index], self.summary
        if summary is None:
            return ReducedLogits.of(self.head.teacher_logits(states), self.kept)
        assert self.kept_head is not None
        logits = self.kept_head.teacher_logits(states)
        return ReducedLogits(logits, summary.log_z[rows, index], summary.first[rows, index])


@dataclass(frozen=True)
class Positions:
    """N positions, `rows` and logit `index` [N] int64 each, whose logits are asked for by spans."""

    of: TargetLogits
    rows: torch.Tensor
    index: torch.Tensor

    def __call__(self, span: slice) -> TeacherLogits:
        return self.of.logits(self.rows[span], self.index[span])
