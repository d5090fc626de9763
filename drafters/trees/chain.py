"""Chains, the trees with one path: a token at a time, until a stop rule ends the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.round import Budget, DraftState, Signals, Steps, StopRule
from drafters.trees.tree import TokenTree
from target.sampling import warp


@dataclass(frozen=True)
class Chain:
    depth: int
    stop: StopRule | None = None

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree:
        """`depth` tokens, each drawn from the drafter's law (its best one at T=0), fewer
        where `stop` ends a row."""
        greedy, rule = state.sampling.temperature == 0, self.stop
        tokens, laws = [], []
        stops = Stops(state.lengths)
        score = None  # of the token fed last
        logits, fed = drafter.start(state, Budget(self.depth, rule)), 0
        parents = torch.full_like(state.lengths, -1).unsqueeze(1)
        for depth in range(1, self.depth + 1):
            if greedy:
                chosen = logits.argmax(-1)
            else:
                laws.append(warp(logits, state.sampling))
                chosen = state.random.choice(laws[-1], state.lengths + (depth - 1), "draft")
            tokens.append(chosen)
            seen = None
            if rule is not None:
                law = logits.float().softmax(-1) if greedy else laws[-1]
                seen = law.amax(-1), law.gather(-1, chosen.unsqueeze(-1))[..., 0]
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
            torch.stack(laws, 1) if laws else None,
            stops.lengths.clamp(max=drafted),
            draft_forwards=1 + fed,
            draft_tokens=drafter.start_width + fed,
        )


class Stops:
    """Which rows of a round a stop rule has ended, and after how many tokens; `like` [B]."""

    def __init__(self, like: torch.Tensor):
        self.stopped = torch.zeros_like(like, dtype=torch.bool)
        self.lengths = torch.full_like(like, torch.iinfo(torch.long).max)
        self.depth = 0

    def all(self, now: torch.Tensor) -> bool:
        """Take in what the rule says at the next depth; whether no row goes on."""
        self.depth += 1
        ends = now & ~self.stopped
        self.lengths = torch.where(ends, self.depth, self.lengths)
        self.stopped = self.stopped | now
        return bool(self.stopped.all())
