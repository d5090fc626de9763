"""The face every drafter shows: how it is asked for tokens, and with which randomness.

- `target_layers`: ids of the target outputs it consumes, () for none;
- `begin(rows, capacity)`: forget everything, make room for `rows` sequences of `capacity` slots;
- `prefill(rows, ids, lengths, outputs)`: take in whole prompts for these batch rows, right-padded
  ids [R, P] (rows are refilled while others go on);
- `keep(rows)`: only these batch rows go on, in this order;
- `propose(state, budget) -> TokenTree`: draft; commits and rolls back its own slots.

Trained drafters are `nn.Module`s that also offer
- `draft_logits(ids, target_outputs, depth) -> [B, L, V]`: the teacher-forced law at depth j for
  all positions at once: the training unroll, the loss and acceptance without decoding use this one
  method, so they cannot drift apart;
- `save_pretrained(folder)`: the project's own format.
Training-free drafters offer `continuation(context, count)` instead: what they copy after a context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from data.sampling import Sampling
from data.target import LayerId, TargetOutputs
from drafters.tree import TokenTree


class RandomSource(Protocol):
    """All randomness of drafter and verifier goes through these two calls, so that a test can
    enumerate every path; `data.sampling.KeyedRandom` is the one used for decoding."""

    def choice(self, probs: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor: ...

    def flip(
        self, probability: torch.Tensor, positions: torch.Tensor, stream: str
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Budget:
    """How much to draft this round. `stop(probs, chosen, depth) -> bool [B]`, made by
    `eval.policies`, sees the drafter's law [B, V] at temperature 1 or the sampling's, the token
    just drafted [B] and its depth from 1; a row it stops keeps that token and drafts no further."""

    max_tokens: int
    stop: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None


@dataclass
class DraftState:
    """What a drafter sees of the decoding loop at the start of a round.

    ids: [B, S] int64 committed tokens, right-padded; lengths: [B] int64 how many are committed,
    always at least two (a prompt and the token of its prefill); max_length: their maximum, known
    on the host; `sampling`: of the drafter; `outputs`: the target outputs it asked for, or None.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    sampling: Sampling
    random: RandomSource
    outputs: TargetOutputs | None = None


@runtime_checkable
class Drafter(Protocol):
    """See the module's docstring for what each method owes."""

    target_layers: tuple[LayerId, ...]

    def begin(self, rows: int, capacity: int) -> None: ...

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None,
    ) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def propose(self, state: DraftState, budget: Budget) -> TokenTree: ...
