"""Verification: the drafted tokens that are accepted, and the token that follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.round import RandomSource
from drafters.trees.tree import TokenTree
from target.sampling import Sampling


@dataclass(frozen=True)
class Verification:
    """A round to verify.

    `tree`: what was drafted; `logits`: [B, N+1, W] float, the target's after the last committed
    token and after each node; `sampling`: the target's; `random`: the only source of randomness;
    `first_position`: [B] int64, position of the nodes of depth 1; `live`: [B] bool, rows that are
    decoded, None for all.
    """

    tree: TokenTree
    logits: torch.Tensor
    sampling: Sampling
    random: RandomSource
    first_position: torch.Tensor
    live: torch.Tensor | None = None


@dataclass
class Verdict:
    """The result of verifying a round.

    `accepted`: [B] int64, number of accepted drafts; `emitted`: [B] int64, the correction or bonus
    token after them; `overlap`: [B, N] sum_v min(p, q) at each drafted position (at T=0: 1 where
    the token matches), for chains only; `path`: [B, D] the accepted nodes of a tree, -1 after them;
    `rejected`: [B] bool, whether there was a candidate after the accepted ones.
    """

    accepted: torch.Tensor
    emitted: torch.Tensor
    overlap: torch.Tensor | None = None
    path: torch.Tensor | None = None
    rejected: torch.Tensor | None = None


@dataclass(frozen=True)
class Verifier:
    """A rule that decides which drafted tokens are accepted.

    `judges`: chains, and trees by how their siblings were chosen, which at temperature 0 are the
    most likely tokens in every tree.
    """

    name: ClassVar[str]
    judges: ClassVar[tuple[str, ...]]

    def lossless(self, sampling: Sampling) -> bool:
        """Whether the output has the target's distribution."""
        return True

    def replayable(self, sampling: Sampling) -> bool:
        """Whether acceptance without decoding is valid for this rule.

        That is min(1, p/q) for a token of a chain, or the path of the target's text through a tree.
        """
        return True

    def __call__(self, round: Verification) -> Verdict:
        """Verify a round.

        Raises RunFault where a drafted token has probability 0 under the distribution it was drawn
        from.
        """
        raise NotImplementedError


# --- shared by rules for trees -------------------------------------------------------------------


def at(probs: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """The distributions [B, W] of node [B, 1] among probs [B, N, W]."""
    return probs.gather(1, node.unsqueeze(-1).expand(-1, 1, probs.shape[-1])).squeeze(1)


class Walk:
    """A walk down a tree, all batch rows in step; a row that has stopped stays at its node."""

    def __init__(self, tree: TokenTree):
        self.tree = tree
        batch, self.size = tree.tokens.shape
        device = tree.tokens.device
        index = torch.arange(self.size, device=device)
        self.submitted = index < tree.lengths.unsqueeze(1)
        self.node = torch.full((batch, 1), -1, dtype=torch.long, device=device)
        self.live = torch.ones(batch, dtype=torch.bool, device=device)
        self.emitted = torch.zeros(batch, dtype=torch.long, device=device)
        self.rejected = torch.zeros(batch, dtype=torch.bool, device=device)
        self.depth = int(tree.depths.max())
        self.path = torch.full((batch, self.depth), -1, dtype=torch.long, device=device)

    def children(self) -> torch.Tensor:
        """Submitted children of the current nodes, [B, N] bool."""
        return (self.tree.parents == self.node) & self.submitted

    def step(
        self, depth: int, child: torch.Tensor, found: torch.Tensor, emitted: torch.Tensor
    ) -> None:
        """Move rows with `found` [B] bool to `child` [B]; the others stop and emit."""
        stops = self.live & ~found
        self.emitted = torch.where(stops, emitted, self.emitted)
        self.rejected = torch.where(stops, self.children().any(1), self.rejected)
        self.live = self.live & found
        self.node = torch.where(self.live, child, self.node.squeeze(1)).unsqueeze(1)
        if depth < self.depth:
            self.path[:, depth] = torch.where(self.live, child, -1)

    def verdict(self) -> Verdict:
        """The verdict of the whole walk."""
        accepted = (self.path >= 0).sum(1)
        return Verdict(accepted, self.emitted, path=self.path, rejected=self.rejected)


def follow(tree: TokenTree, draw: Callable[[torch.Tensor, int], torch.Tensor]) -> Verdict:
    """Draw the target's own token and go to the child that equals it, or emit the token.

    This is exact for any tree that was built independently of the draw.
    """
    walk = Walk(tree)
    for depth in range(walk.depth + 1):
        token = draw(walk.node, depth)
        match = walk.children() & (tree.tokens == token.unsqueeze(1))
        walk.step(depth, match.long().argmax(1), match.any(1), token)
    return walk.verdict()


def follow_best(round: Verification) -> Verdict:
    """Follow the target's own choices, at temperature 0."""
    best = round.logits.argmax(-1)
    return follow(round.tree, lambda node, depth: best.gather(1, node + 1).squeeze(1))
