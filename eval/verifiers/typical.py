"""Medusa's typical acceptance (Cai et al. 2024, Sec. 2.3.1), which is lossy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.trees.tree import IID, TOP, WITHOUT_REPLACEMENT
from eval.verifiers.base import Verdict, Verification, Verifier, Walk, at, follow_best
from target.sampling import Sampling, warp
from trainer.errors import require


@dataclass(frozen=True)
class Typical(Verifier):
    """Accept x where p(x) > min(epsilon, delta exp(-H(p))), with H in nats.

    The longest path of accepted tokens counts, ties by their summed log p; then follows a token
    from p.
    """

    name: ClassVar[str] = "typical"
    judges: ClassVar[tuple[str, ...]] = (TOP, WITHOUT_REPLACEMENT, IID)
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            require(getattr(self, name) > 0, name, "be > 0", getattr(self, name))

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0

    def replayable(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0

    def __call__(self, round: Verification) -> Verdict:
        if round.sampling.temperature == 0:
            return follow_best(round)
        tree, p = round.tree, warp(round.logits, round.sampling)
        entropy = -(p * p.clamp_min(1e-38).log()).sum(-1)
        limit = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        parents = tree.parents + 1
        scored = p.gather(1, parents.unsqueeze(-1).expand(-1, -1, p.shape[-1]))
        probability = scored.gather(-1, tree.tokens.unsqueeze(-1)).squeeze(-1)
        walk = Walk(tree)
        passed = (probability > limit.gather(1, parents)) & walk.submitted
        above = tree.ancestors.to(p.dtype)
        whole = (above * (~passed).to(p.dtype).unsqueeze(1)).sum(-1) == 0
        worth = (above @ probability.clamp_min(1e-38).log().unsqueeze(-1)).squeeze(-1)
        # depth first, then likelihood squeezed into (0, 1)
        score = torch.where(whole, tree.depths.to(p.dtype) + worth.sigmoid(), -1.0)
        value, last = score.max(1)
        batch = torch.arange(len(p), device=p.device)
        any_path = value > 0
        accepted = torch.where(any_path, tree.depths[batch, last], 0)
        on_path = tree.ancestors[batch, last] & any_path.unsqueeze(1)
        path = torch.full_like(walk.path, -1)
        # ancestors come in index order, which is their depth order
        places = (on_path.long().cumsum(1) - 1).clamp(min=0)
        nodes = torch.arange(walk.size, device=p.device).expand_as(places)
        path.scatter_(1, torch.where(on_path, places, 0), torch.where(on_path, nodes, -1))
        path[:, :1] = torch.where(any_path.unsqueeze(1), on_path.long().argmax(1, keepdim=True), -1)
        end = torch.where(any_path, last, -1).unsqueeze(1)
        emitted = round.random.choice(at(p, end + 1), round.first_position + accepted, "target")
        children = (tree.parents == end) & walk.submitted
        return Verdict(accepted, emitted, path=path, rejected=children.any(1))
