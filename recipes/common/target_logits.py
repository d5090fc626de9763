"""The target's logits at positions of a batch, made from its final-normed states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.device import free_bytes
from trainer.logits import LogitsSummary, OutputHead, ReducedLogits, TeacherLogits, chunk_rows

HOLD_BYTES = 1 << 28  # where free memory is not known; otherwise a quarter of that


class TargetLogits:
    """The logits that `head` gives the target's states `final` [B, L, H]."""

    def __init__(self, head: OutputHead, final: torch.Tensor):
        self.head, self.final = head, final
        self.width = head.target_width  # of the logits of a position
        # [B, L-1] int64: the rows of logits that are held, and these
        self._held: tuple[torch.Tensor, TeacherLogits] | None = None

    def logits(self, rows: torch.Tensor, index: torch.Tensor) -> TeacherLogits:
        """The logits [n, V] at these rows and logit indices, [n] int64."""
        if self._held is None:
            return self.read(rows, index)
        place, held = self._held
        return held[place[rows, index]]

    def at(self, rows: torch.Tensor, index: torch.Tensor) -> Positions:
        """The same as a function of a span of these N positions."""
        return Positions(self, rows, index)

    @torch.no_grad()
    def hold(self, where: torch.Tensor) -> None:
        """Compute the logits `where` [B, L-1] bool, which several depths ask for, once for all,
        if they fit into memory."""
        rows, index = where.nonzero(as_tuple=True)
        free, size = free_bytes(where.device), len(rows) * self.width * self.final.element_size()
        if size > (HOLD_BYTES if free is None else free // 4):
            return
        place = torch.zeros(where.shape, dtype=torch.long, device=where.device)
        place[rows, index] = torch.arange(len(rows), device=where.device)
        self._held = place, self.read_all(rows, index)

    def read(self, rows: torch.Tensor, index: torch.Tensor) -> TeacherLogits:
        """Compute the logits of some positions, as many as a chunk has."""
        return self.head.teacher_logits(self.final[rows, index])

    def read_all(self, rows: torch.Tensor, index: torch.Tensor) -> TeacherLogits:
        """Compute the logits of any number of positions."""
        return self.read(rows, index)


class ReducedTargetLogits(TargetLogits):
    """What the tokens `kept` [W] int64 of a reduced vocabulary need of the target's logits. With a
    `summary` of them only those rows of the head, `kept_head`, are read."""

    def __init__(
        self,
        head: OutputHead,
        final: torch.Tensor,
        kept: torch.Tensor,
        summary: LogitsSummary | None = None,
        kept_head: OutputHead | None = None,
    ):
        super().__init__(head, final)
        self.width = len(kept)
        self.kept, self.summary, self.kept_head = kept, summary, kept_head

    def read(self, rows: torch.Tensor, index: torch.Tensor) -> ReducedLogits:
        states, summary = self.final[rows, index], self.summary
        if summary is None:
            return ReducedLogits.of(self.head.teacher_logits(states), self.kept)
        assert self.kept_head is not None
        logits = self.kept_head.teacher_logits(states)
        return ReducedLogits(logits, summary.log_z[rows, index], summary.first[rows, index])

    def read_all(self, rows: torch.Tensor, index: torch.Tensor) -> ReducedLogits:
        step = chunk_rows(rows.device, self.head.target_width)  # goes through all of V
        spans = zip(rows.split(step), index.split(step), strict=True)
        return ReducedLogits.joined([self.read(row, at) for row, at in spans])


@dataclass(frozen=True)
class Positions:
    """N positions, `rows` and logit `index` [N] int64 each, whose logits are asked for by spans."""

    of: TargetLogits
    rows: torch.Tensor
    index: torch.Tensor

    @property
    def states(self) -> torch.Tensor:
        """The target's final-normed states there, [N, H]."""
        return self.of.final[self.rows, self.index]

    def __call__(self, span: slice) -> TeacherLogits:
        return self.of.logits(self.rows[span], self.index[span])
