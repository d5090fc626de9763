"""What an objective asks of the target for a batch, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trainer.logits import LogitsSummary, OutputHead

Index = torch.Tensor | slice | int
LayerId = int | str  # output of decoder layer i counted from 0, or "final_norm"


@dataclass
class ProjectedLogits:
    """Logits of final-normed states [B, L, H], computed when they are indexed: those of all
    positions of a long text would take most of the memory."""

    head: OutputHead
    states: torch.Tensor

    def __getitem__(self, at: Index | tuple[Index, ...]) -> torch.Tensor:
        """`at`: rows [N] and indices [N], or another index of [B, L] -> logits [N, vocab_size]."""
        return self.head.teacher_logits(self.states[at])


@dataclass(frozen=True)
class KeptLogits:
    """Logits of a batch in a table [N, vocab_size] of those of many texts; `places` [B, L] int64:
    where each position's are in it. They are read when they are indexed."""

    table: torch.Tensor
    places: torch.Tensor

    def __getitem__(self, at: Index | tuple[Index, ...]) -> torch.Tensor:
        """`at`: rows [N] and indices [N], or another index of [B, L] -> logits [N, vocab_size]."""
        return self.table[self.places[at]]


Logits = torch.Tensor | ProjectedLogits | KeptLogits  # of a batch [B, L], to be indexed


@dataclass(frozen=True)
class TargetRequest:
    """What an objective needs of the target for a batch: hidden states of `layers`, and logits.
    `summary`: it reads the logits of a reduced vocabulary, and their summary where one is stored
    beside the states."""

    layers: tuple[LayerId, ...] = ()
    logits: bool = True
    summary: bool = False

    @property
    def states(self) -> tuple[LayerId, ...]:
        """The layers whose states answer it: logits are computed from those behind the final
        norm."""
        return tuple(dict.fromkeys((*self.layers, *["final_norm"] * self.logits)))


@dataclass
class TargetOutputs:
    """The answer to a `TargetRequest`. hidden[layer]: [B, L, H]; logits: [B, L, width], or computed
    or read when they are indexed by row and position; summary: [B, L], of the logits that the
    drafter is trained on, NaN elsewhere in a text, or None where the logits have to be computed."""

    hidden: dict[LayerId, torch.Tensor] = field(default_factory=dict)
    logits: Logits | None = None
    summary: LogitsSummary | None = None
