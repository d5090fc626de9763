"""Verification: which drafted tokens are accepted, and which token follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.round import RandomSource
from drafters.trees.tree import TokenTree
from target.sampling import Sampling


@dataclass
class Verdict:
    """accepted: [B] accepted drafts; emitted: [B] the correction or bonus token that follows them;
    overlap: [B, N] sum_v min(p, q) at each drafted position (at T=0: 1 where the token matches),
    of chains only; path: [B, D] the accepted nodes of a tree, -1 behind them; rejected: [B]
    whether there was a candidate after the accepted ones."""

    accepted: torch.Tensor
    emitted: torch.Tensor
    overlap: torch.Tensor | None = None
    path: torch.Tensor | None = None
    rejected: torch.Tensor | None = None


@dataclass(frozen=True)
class Verifier:
    """A rule. `judges`: chains, and trees by how the siblings in them came about, which at
    temperature 0 are the most likely tokens whatever the tree."""

    name: ClassVar[str]
    judges: ClassVar[tuple[str, ...]]

    def lossless(self, sampling: Sampling) -> bool:
        """Whether the output has the target's distribution."""
        return True

    def replayable(self, sampling: Sampling) -> bool:
        """Whether acceptance without decoding holds for it: min(1, p/q) for a token of a chain, the
        path that the target's own text takes through a tree."""
        return True

    def __call__(
        self,
        tree: TokenTree,
        target_logits: torch.Tensor,
        sampling: Sampling,
        random: RandomSource,
        first_position: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> Verdict:
        """target_logits [B, N+1, W] float: after the last committed token and after each node;
        `sampling`: of the target; first_position [B] int64: of the nodes of depth 1; live [B] bool:
        rows that are decoded, None for all."""
        raise NotImplementedError


# --- what rules for trees share ------------------------------------------------------------------


def at(laws: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """[B, N, W], node [B, 1] -> [B, W]"""
    return laws.gather(1, node.unsqueeze(-1).expand(-1, 1, laws.shape[-1])).squeeze(1)


class Walk:
    """Down a tree, all batch rows in step; a row that has stopped stays where it is."""

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
        """[B, N] bool"""
        return (self.tree.parents == self.node) & self.submitted

    def step(
        self, depth: int, child: torch.Tensor, found: torch.Tensor, emitted: torch.Tensor
    ) -> None:
        """Rows with `found` go on to `child` [B]; the others stop and emit."""
        stops = self.live & ~found
        self.emitted = torch.where(stops, emitted, self.emitted)
        self.rejected = torch.where(stops, self.children().any(1), self.rejected)
        self.live = self.live & found
        self.node = torch.where(self.live, child, self.node.squeeze(1)).unsqueeze(1)
        if depth < self.depth:
            self.path[:, depth] = torch.where(self.live, child, -1)

    def verdict(self) -> Verdict:
        accepted = (self.path >= 0).sum(1)
        return Verdict(accepted, self.emitted, path=self.path, rejected=self.rejected)


def follow(tree: TokenTree, draw: Callable[[torch.Tensor, int], torch.Tensor]) -> Verdict:
    """Draw the target's own token, go to the child that equals it, or emit it. Exact for any tree
    that was built without looking at the draw."""
    walk = Walk(tree)
    for depth in range(walk.depth + 1):
        token = draw(walk.node, depth)
        match = walk.children() & (tree.tokens == token.unsqueeze(1))
        walk.step(depth, match.long().argmax(1), match.any(1), token)
    return walk.verdict()


def follow_best(tree: TokenTree, logits: torch.Tensor) -> Verdict:
    """The path of the target's own choices, at temperature 0."""
    best = logits.argmax(-1)
    return follow(tree, lambda node, depth: best.gather(1, node + 1).squeeze(1))
