"""Exact verification of siblings drawn without replacement.

Multi-round rejection (Miao et al. 2024, SpecInfer; Chen et al. 2024, Sequoia).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.trees.tree import WITHOUT_REPLACEMENT
from eval.verifiers.base import Verdict, Verification, Verifier, Walk, at, follow_best
from target.sampling import Sampling, warp


@dataclass(frozen=True)
class MultiRound(Verifier):
    """Verify siblings in the order in which they were drawn from d without replacement.

    Accept x with min(1, r(x)/d(x)); on rejection r becomes norm((r - d)+) and x leaves d.
    """

    name: ClassVar[str] = "multi_round"
    judges: ClassVar[tuple[str, ...]] = (WITHOUT_REPLACEMENT,)

    def replayable(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0

    def __call__(self, round: Verification) -> Verdict:
        if round.sampling.temperature == 0:
            return follow_best(round)
        tree, logits = round.tree, round.logits
        random, first_position = round.random, round.first_position
        assert tree.probs is not None
        walk = Walk(tree)
        beyond = logits.shape[-1] - tree.probs.shape[-1]
        drawn_from = torch.nn.functional.pad(tree.probs, (0, beyond))
        rows = torch.arange(len(logits), device=logits.device)
        for depth in range(walk.depth + 1):
            # of the visited nodes alone
            residual = warp(at(logits, walk.node + 1), round.sampling)
            children = walk.children()
            order = children.long().cumsum(1)
            chosen = torch.zeros_like(walk.emitted)
            found = torch.zeros_like(walk.live)
            q = None
            for turn in range(1, int(order.max()) + 1):
                here = children & (order == turn)
                child = here.long().argmax(1)
                if q is None:  # the parent's, the same for all siblings
                    q = drawn_from[rows, child].clone()
                token = tree.tokens[rows, child]
                mass, wanted = q[rows, token], residual[rows, token]
                tried = here.any(1) & ~found & (mass > 0)
                probability = torch.where(
                    tried, (wanted / mass.clamp_min(1e-38)).clamp(max=1.0), 0.0
                )
                flip = random.flip(probability, first_position + depth, f"accept {turn}") & tried
                chosen = torch.where(flip, child, chosen)
                found = found | flip
                failed = (tried & ~flip).unsqueeze(1)
                left = (residual - q).clamp_min(0)
                total = left.sum(-1, keepdim=True)
                # p = q up to rounding leaves nothing: then it stays as it was
                residual = torch.where(
                    failed & (total > 0), left / total.clamp_min(1e-38), residual
                )
                taken = q.scatter(1, token.unsqueeze(1), 0.0)
                total = taken.sum(-1, keepdim=True)
                q = torch.where(failed, taken / total.clamp_min(1e-38), q)
            residual = residual / residual.sum(-1, keepdim=True)
            walk.step(
                depth, chosen, found, random.choice(residual, first_position + depth, "target")
            )
        return walk.verdict()
