"""Chains, the trees with one path: a token at a time, until a stop rule ends the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.round import Budget, ChainSteps, DraftState, Signals, StopRule
from drafters.trees.tree import TokenTree
from target.sampling import warp


@dataclass(frozen=True)
class Chain:
    """A chain of `depth` tokens, which `stop` may end earlier, row by row."""

    depth: int
    stop: StopRule | None = None

    def grow(self, drafter: ChainSteps, state: DraftState) -> TokenTree:
        """Draft `depth` tokens, each drawn from the drafter's distribution, or its best one at T=0.

        A row has fewer where `stop` ends it.
        """
        return self.behind(drafter.start(state, Budget(self.depth, self.stop)), drafter, state)

    def behind(self, logits: torch.Tensor, drafter: ChainSteps, state: DraftState) -> TokenTree:
        """The chain that begins with a token of `logits` [B, V], those of the drafter's `start`."""
        greedy, rule = state.sampling.temperature == 0, self.stop
        tokens, drawn_from = [], []
        stops = Stops(state.lengths)
        score = None  # of the token fed last
        fed = 0
        parents = torch.full_like(state.lengths, -1).unsqueeze(1)
        for depth in range(1, self.depth + 1):
            if greedy:
                chosen = logits.argmax(-1)
            else:
                drawn_from.append(warp(logits, state.sampling))
                chosen = state.random.choice(drawn_from[-1], state.lengths + (depth - 1), "draft")
            tokens.append(chosen)
            seen = None
            if rule is not None:
                probs = logits.float().softmax(-1) if greedy else drawn_from[-1]
                seen = probs.amax(-1), probs.gather(-1, chosen.unsqueeze(-1))[..., 0]
                if not rule.judges_last and stops.all(rule(Signals(*seen, score), depth)):
                    break
            if depth < self.depth:
                logits = drafter.extend(chosen.unsqueeze(1), parents, depth)[:, 0]
                parents, fed = parents + 1, fed + 1
                if rule is not None and rule.uses_head:
                    score = drafter.acceptance_score()
                if rule is not None and rule.judges_last:
                    assert seen is not None
                    if stops.all(rule(Signals(*seen, score), depth)):
                        break
        drafted = len(tokens)
        return TokenTree.chain(
            torch.stack(tokens, 1),
            torch.stack(drawn_from, 1) if drawn_from else None,
            stops.lengths.clamp(max=drafted),
            draft_forwards=1 + fed,
            draft_tokens=drafter.start_width + fed,
        )


class Stops:
    """The rows that a stop rule has ended, and after how many tokens; `like`: any [B] tensor."""

    def __init__(self, like: torch.Tensor):
        self.stopped = torch.zeros_like(like, dtype=torch.bool)
        self.lengths = torch.full_like(like, torch.iinfo(torch.long).max)
        self.depth = 0

    def all(self, now: torch.Tensor) -> bool:
        """Record the rule's decision `now` [B] bool at the next depth; return whether all rows
        ended."""
        self.depth += 1
        ends = now & ~self.stopped
        self.lengths = torch.where(ends, self.depth, self.lengths)
        self.stopped = self.stopped | now
        return bool(self.stopped.all())
