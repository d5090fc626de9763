"""Where a stop rule ends the rounds that start at each token of a text."""

from __future__ import annotations

import numpy as np
import torch

from drafters.round import Signals, StopRule
from drafters.trees.chain import Stops


class SignalsByDepth:
    """Signals of a stop rule for rounds from every position of the traces, [B, N+K] at each depth.

    As long as a round goes on, the drafted token is the trace's own.
    """

    def __init__(self, uses_head: bool):
        self.uses_head = uses_head
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # confidence, probability
        self.scores: list[torch.Tensor | None] = []  # entry d: of tokens drafted at depth d

    def add(self, seen: tuple[torch.Tensor, torch.Tensor], score: torch.Tensor | None) -> None:
        self.seen.append(seen)
        self.scores.append(score)

    def by_start(self, width: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Confidence, probability and score [B, width, K] of the tokens of the round that starts at
        each response index; the score of the last one is NaN, and all without a head."""
        device = self.seen[0][0].device
        at = torch.arange(width, device=device).unsqueeze(1) + torch.arange(K, device=device)
        parts = [torch.stack(own, -1) for own in zip(*self.seen, strict=True)]
        unknown = torch.full_like(parts[0][..., 0], torch.nan)
        known = [unknown if one is None else one.to(unknown) for one in self.scores[1:]]
        parts.append(torch.stack([*known, unknown], -1))
        depth = torch.arange(K, device=device)
        confidence, probability, score = (one[:, at, depth] for one in parts)
        return confidence, probability, score


def drafted_lengths(
    rule: StopRule, confidence: torch.Tensor, probability: torch.Tensor, score: torch.Tensor
) -> torch.Tensor:
    """Lengths [n] at which the rule ends rounds of at most K tokens with these signals, [n, K].

    `score` is that of each token itself.
    """
    stops, K = Stops(torch.zeros_like(confidence[:, 0], dtype=torch.long)), confidence.shape[-1]
    for depth in range(1, K):
        at = depth - 1
        judged = at if rule.judges_last else at - 1
        known = score[:, judged] if rule.uses_head and judged >= 0 else None
        if stops.all(rule(Signals(confidence[:, at], probability[:, at], known), depth)):
            break
    return stops.lengths.clamp(max=K)


def lengths_by_start(
    rule: StopRule, confidence: torch.Tensor, probability: torch.Tensor, score: torch.Tensor
) -> np.ndarray:
    """Tokens, [B, N], that a round drafts from each start; signals [B, N, K]."""
    flat = [one.flatten(0, 1) for one in (confidence, probability, score)]
    rule.begin(len(flat[0]), confidence.device)
    return drafted_lengths(rule, *flat).view(confidence.shape[:2]).cpu().numpy()
