"""A round of drafting: what a drafter is given, and the shapes of what it proposes.

A shape grows itself out of the two steps of a drafter, `start` and `extend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from drafters.trees.tree import CHAIN, TokenTree
from target.model import TargetOutputs
from target.sampling import Sampling
from trainer.config import UserError


class RandomSource(Protocol):
    """All randomness of drafter and verifier goes through these two calls, so that a test can
    enumerate every path; `target.sampling.KeyedRandom` is the one used for decoding."""

    def choice(self, probs: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor: ...

    def flip(
        self, probability: torch.Tensor, positions: torch.Tensor, stream: str
    ) -> torch.Tensor: ...


@dataclass
class Signals:
    """What a stop rule sees of the token just drafted, each [B] float. `confidence`: the largest
    probability of the drafter's law, at temperature 1 or the sampling's; `probability`: the drafted
    token's own; `score`: what the acceptance head gives the token before it, or itself where the
    rule judges the last one; None where there is none to judge, or no rule asks."""

    confidence: torch.Tensor
    probability: torch.Tensor
    score: torch.Tensor | None = None


class StopRule:
    """When a row drafts no further; `eval/policies` holds those with a name. It sees drafted tokens
    only, and the token after which it stops is verified: so every rule is lossless.

    One object serves the rows of one decoding loop: `begin` and `keep` as of a drafter, `renew` for
    rows that begin another answer, `verified` after each round. Depth 1 begins a round."""

    uses_head: bool = False
    judges_last: bool = False  # sees the head's score of the token just drafted: one forward more
    replayable: bool = True  # a round depends on nothing but where it starts

    @property
    def policy(self) -> str:
        """As `eval.policy` spells it."""
        raise NotImplementedError

    def begin(self, rows: int, device: torch.device) -> None: ...

    def renew(self, rows: torch.Tensor) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def verified(self, accepted: torch.Tensor, submitted: torch.Tensor) -> None: ...

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        """bool [B]: rows that stop after the token of this depth (from 1)."""
        raise NotImplementedError


class Shape(Protocol):
    """The shape of what is drafted in a round. `depth`: tokens of its longest path; `num_nodes`:
    tokens that are verified; `num_fed`: nodes that a drafter is fed, those with children; `width`:
    the largest number of children of one node; `siblings`: how they come about at temperatures
    above 0, at 0 they are the most likely tokens."""

    @property
    def depth(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_fed(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def siblings(self) -> str: ...

    def describe(self) -> str:
        """As reports name it."""
        ...

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree: ...


@dataclass(frozen=True)
class Budget:
    """How much to draft this round: a chain of `max_tokens`, or a tree of that depth.

    `stop`: ends a chain early, row by row. `tree`: its shape, None for a chain.
    """

    max_tokens: int
    stop: StopRule | None = None
    tree: Shape | None = None

    def __post_init__(self) -> None:
        if self.tree is not None and self.tree.depth > self.max_tokens:
            raise UserError(
                f"a tree of depth {self.tree.depth} needs a budget of as many tokens, got "
                f"{self.max_tokens}"
            )

    @classmethod
    def of(cls, tree: Shape) -> Budget:
        return cls(tree.depth, tree=tree)

    @property
    def policy(self) -> str:
        """As `eval.policy` spells it."""
        return "fixed" if self.stop is None else self.stop.policy

    @property
    def form(self) -> str:
        """What a verifier must be able to judge at temperatures above 0."""
        return CHAIN if self.tree is None else self.tree.siblings

    @property
    def max_nodes(self) -> int:
        """Of what is verified."""
        return self.tree.num_nodes if self.tree else self.max_tokens

    @property
    def max_slots(self) -> int:
        """Of target and drafter behind the committed text: a dynamic tree feeds more nodes to the
        drafter than it keeps."""
        return max(self.max_nodes, self.tree.num_fed if self.tree else 0)


@dataclass
class DraftState:
    """What a drafter sees of the decoding loop at the start of a round.

    ids: [B, S] int64 committed tokens, right-padded; lengths: [B] int64 how many are committed,
    always at least two (a prompt and the token of its prefill); max_length: their maximum, known
    on the host; `sampling`: of the drafter; `outputs`: the target's states it asked for,
    hidden[layer] [B, S, H], valid at the positions 0..lengths-2 (the last committed token has not
    been through the target).
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    sampling: Sampling
    random: RandomSource
    outputs: TargetOutputs | None = None


class Steps(Protocol):
    """What a shape grows out of: the two steps of a drafter, see `drafters.base.TrainedDrafter`."""

    start_width: int

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor: ...

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor: ...

    def acceptance_score(self) -> torch.Tensor: ...
