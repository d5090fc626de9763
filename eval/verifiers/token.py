"""Exact verification token by token.

Chains: speculative sampling (Leviathan et al. 2023; Chen et al. 2023). Trees of deterministic
candidates: a token is drawn from the target, and the child that equals it is followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.trees.tree import CHAIN, TOP
from eval.verifiers.base import Verdict, Verification, Verifier, at, follow, follow_best
from target.sampling import warp
from trainer.errors import RunFault


@dataclass(frozen=True)
class Token(Verifier):
    """Verification token by token, of chains and of deterministic trees."""

    name: ClassVar[str] = "token"
    judges: ClassVar[tuple[str, ...]] = (CHAIN, TOP)

    def __call__(self, round: Verification) -> Verdict:
        if round.tree.is_chain:
            return verify_chain(round)
        if round.sampling.temperature == 0:
            return follow_best(round)

        def draw(node: torch.Tensor, depth: int) -> torch.Tensor:
            p = warp(at(round.logits, node + 1), round.sampling)  # of the visited nodes alone
            return round.random.choice(p, round.first_position + depth, "target")

        return follow(round.tree, draw)


def verify_chain(round: Verification, lenience: float = 1.0) -> Verdict:
    """Accept draft i with probability min(1, p/q).

    The first rejection emits a token from norm((p - q)+), full acceptance one from p. A token
    chosen deterministically has the point mass as its q, whatever the drafter's softmax was.
    `lenience`: what q is multiplied by in both; below 1 the result is lossy.
    """
    tree, random, first_position = round.tree, round.random, round.first_position
    depth = tree.tokens.shape[1]
    index = torch.arange(depth, device=tree.tokens.device)
    submitted = index < tree.lengths.unsqueeze(1)
    if round.sampling.temperature == 0:
        best = round.logits.argmax(-1)
        match = (tree.tokens == best[:, :depth]) & submitted
        accepted = match.long().cumprod(1).sum(1)
        return Verdict(accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1), match.float())

    p = warp(round.logits, round.sampling)
    width = p.shape[-1]
    drafted = tree.tokens.unsqueeze(-1)
    p_drafted = p[:, :depth].gather(-1, drafted).squeeze(-1)
    if tree.probs is None:
        q = torch.zeros_like(p[:, :depth]).scatter_(-1, drafted, 1.0)
    else:
        q = torch.nn.functional.pad(tree.probs, (0, width - tree.probs.shape[-1]))
    q_drafted = q.gather(-1, drafted).squeeze(-1)
    checked = submitted if round.live is None else submitted & round.live.unsqueeze(1)
    if bool(((q_drafted <= 0) & checked).any()):
        raise RunFault("a drafted token has probability 0 under the distribution it was drawn from")
    probability = (p_drafted / (lenience * q_drafted).clamp_min(1e-38)).clamp(max=1.0)
    flips = [random.flip(probability[:, i], first_position + i, "accept") for i in range(depth)]
    accepted = (torch.stack(flips, 1) & submitted).long().cumprod(1).sum(1)

    # the token after the accepted ones comes from p, or from the residual after a rejection
    row = torch.arange(len(accepted), device=accepted.device)
    final = p[row, accepted]
    rejected = accepted < tree.lengths
    residual = (final - lenience * q[row, accepted.clamp(max=depth - 1)]).clamp_min(0)
    usable = rejected & (residual.sum(-1) > 0)  # p = q up to rounding leaves nothing: p it is
    final = torch.where(usable.unsqueeze(-1), residual, final)
    emitted = random.choice(
        final / final.sum(-1, keepdim=True), first_position + accepted, "target"
    )
    return Verdict(accepted, emitted, torch.minimum(p[:, :depth], q).sum(-1))
