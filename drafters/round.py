"""A round of drafting: the face of a drafter, what it is given, and the shapes of what it proposes.

A shape grows itself out of the two steps of a drafter, `start` and `extend`, or of all slots of one
that makes them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from drafters.trees.tree import CHAIN, TokenTree
from target.model import Target
from target.outputs import LayerId, TargetOutputs
from target.sampling import Sampling
from trainer.errors import UserError


class RandomSource(Protocol):
    """The only source of randomness in a round, so that a test can enumerate every path.

    `target.sampling.KeyedRandom` is the one used for decoding.
    """

    def choice(self, probs: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
        """Draw a token per row: probs [B, V] float, positions [B] int64 -> [B] int64."""
        ...

    def flip(self, probability: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
        """Flip a coin per row: probability, positions [B] -> [B] bool."""
        ...


class Drafter:
    """The face of every drafter; `drafters.base` says what its methods do.

    A drafter without state of its own need not implement `begin`, `prefill` and `keep`.
    """

    target_layers: tuple[LayerId, ...] = ()  # ids of the target outputs it reads

    def begin(self, rows: int, capacity: int) -> None: ...

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        """Draft a round: a chain, or the tree of `budget`."""
        raise NotImplementedError

    def routed(self, prompts: Sequence[Sequence[int]]) -> None:
        """Receive the prompts of the rows that `states` reads next; a bank routes by them."""

    def served_target(self) -> Target | None:
        """The target that verifies, if it was trained with the drafter; None: the one in use."""
        return None


@dataclass
class Signals:
    """What a stop rule sees of the token just drafted, each [B] float.

    `confidence`: the largest probability of the drafter's distribution, at temperature 1 for greedy
    decoding, else at the sampling's; `probability`: that of the drafted token; `score`: the
    acceptance head's probability of the token before it, or of the drafted token where the rule
    judges the last one; None where there is no token to judge, or no rule reads it.
    """

    confidence: torch.Tensor
    probability: torch.Tensor
    score: torch.Tensor | None = None


class StopRule:
    """A rule that ends a row's chain; `eval/policies` holds the rules that have a name.

    It sees drafted tokens only, and the token after which it stops is verified: so every rule is
    lossless. One object serves the rows of one decoding loop: `begin` and `keep` are called like a
    drafter's, `renew` for rows that begin another answer, `verified` after each round. Depth 1
    begins a round.
    """

    uses_head: bool = False
    judges_last: bool = False  # reads the score of the token just drafted: one more forward pass
    replayable: bool = True  # a round depends only on the position at which it starts

    @property
    def policy(self) -> str:
        """The rule as `eval.policy` spells it."""
        raise NotImplementedError

    def begin(self, rows: int, device: torch.device) -> None: ...

    def renew(self, rows: torch.Tensor) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def verified(self, accepted: torch.Tensor, submitted: torch.Tensor) -> None: ...

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        """[B] bool: the rows that stop after the token of this depth, counted from 1."""
        raise NotImplementedError


class Shape(Protocol):
    """The shape of what is drafted in a round.

    `depth`: tokens of its longest path; `num_nodes`: tokens that are verified; `num_fed`: nodes
    that are fed to the drafter, those with children; `width`: the largest number of children of a
    node; `siblings`: how they are chosen at temperatures above 0 (at 0 they are the most likely
    tokens).
    """

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
        """The name of the shape in reports."""
        ...

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree:
        """Draft a tree of this shape."""
        ...


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
        """The budget of this tree."""
        return cls(tree.depth, tree=tree)

    @property
    def policy(self) -> str:
        """The stop rule as `eval.policy` spells it."""
        return "fixed" if self.stop is None else self.stop.policy

    @property
    def form(self) -> str:
        """The form of drafts that a verifier must be able to judge at temperatures above 0."""
        return CHAIN if self.tree is None else self.tree.siblings

    @property
    def max_nodes(self) -> int:
        """Number of tokens that are verified."""
        return self.tree.num_nodes if self.tree else self.max_tokens

    @property
    def max_slots(self) -> int:
        """Cache slots that target and drafter need after the committed text.

        A dynamic tree feeds more nodes to the drafter than remain in the tree.
        """
        return max(self.max_nodes, self.tree.num_fed if self.tree else 0)


@dataclass
class DraftState:
    """What a drafter sees of the decoding loop at the start of a round.

    `ids`: [B, S] int64 committed tokens, right-padded; `lengths`: [B] int64, their numbers, at
    least two (a prompt and the token of its prefill); `max_length`: the largest, known on the host;
    `sampling`: the drafter's; `outputs`: the target's states of the drafter's `target_layers`,
    hidden[layer] [B, S, H], valid at the positions 0..lengths-2 (the target has not read the last
    committed token).
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    sampling: Sampling
    random: RandomSource
    outputs: TargetOutputs | None = None


class Steps(Protocol):
    """The two steps of a drafter by which a shape grows, see `drafters.base.TrainedDrafter`."""

    start_width: int

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor: ...

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor: ...


class Slots(Protocol):
    """A drafter whose tokens of a round do not depend on each other, see `has_slots` of
    `drafters.base.TrainedDrafter`."""

    start_width: int

    def slot_logits(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Begin a round: logits [B, K, vocab_size] of all its tokens, K those of the budget."""
        ...


class ChainSteps(Steps, Protocol):
    """The steps of a drafter whose chains an acceptance head may end."""

    def acceptance_score(self) -> torch.Tensor: ...


class Branching(Protocol):
    """A drafter that drafts at many prefixes of one text, which it reads once."""

    target_layers: tuple[LayerId, ...]

    def branches(self, ids: torch.Tensor, outputs: TargetOutputs) -> Steps:
        """Read the text, ids [1, S] int64 with the target's states of it; what is returned drafts
        at prefixes of it, a row for each."""
        ...
