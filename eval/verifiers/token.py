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


@dataclass(frozen=True)
class ChainLaws:
    """The distributions of a sampled round of chains.

    `p`: [B, N+1, W], the target's after the last committed token and after each draft; `q`: [B, N,
    W], those that the drafts were drawn from, point masses where they were chosen without a draw;
    `p_drafted`, `q_drafted`: [B, N], of the drafts under them; `submitted`: [B, N] bool.
    """

    p: torch.Tensor
    q: torch.Tensor
    p_drafted: torch.Tensor
    q_drafted: torch.Tensor
    submitted: torch.Tensor

    @classmethod
    def of(cls, round: Verification) -> ChainLaws:
        """Raises RunFault where a draft has probability 0 under the distribution it was drawn
        from."""
        tree, depth = round.tree, round.tree.tokens.shape[1]
        p = warp(round.logits, round.sampling)
        drafted = tree.tokens.unsqueeze(-1)
        if tree.probs is None:
            q = torch.zeros_like(p[:, :depth]).scatter_(-1, drafted, 1.0)
        else:
            q = torch.nn.functional.pad(tree.probs, (0, p.shape[-1] - tree.probs.shape[-1]))
        p_drafted, q_drafted = (one[:, :depth].gather(-1, drafted).squeeze(-1) for one in (p, q))
        submitted = _submitted(round)
        checked = submitted if round.live is None else submitted & round.live.unsqueeze(1)
        if bool(((q_drafted <= 0) & checked).any()):
            raise RunFault(
                "a drafted token has probability 0 under the distribution it was drawn from"
            )
        return cls(p, q, p_drafted, q_drafted, submitted)

    def verdict(
        self,
        round: Verification,
        accepted: torch.Tensor,
        kept: torch.Tensor | float,
        lenience: float,
    ) -> Verdict:
        """Emit a token from p after full acceptance, else from norm((kept p - lenience q)+);
        `accepted` [B] int64, `kept` [B, 1] or a number."""
        row = torch.arange(len(accepted), device=accepted.device)
        final = self.p[row, accepted]
        rejected = accepted < round.tree.lengths
        behind = self.q[row, accepted.clamp(max=self.q.shape[1] - 1)]
        residual = (kept * final - lenience * behind).clamp_min(0)
        usable = rejected & (residual.sum(-1) > 0)  # p = q up to rounding leaves nothing: p it is
        final = torch.where(usable.unsqueeze(-1), residual, final)
        final = final / final.sum(-1, keepdim=True)
        emitted = round.random.choice(final, round.first_position + accepted, "target")
        overlap = torch.minimum(self.p[:, : self.q.shape[1]], self.q).sum(-1)
        return Verdict(accepted, emitted, overlap)


def _submitted(round: Verification) -> torch.Tensor:
    index = torch.arange(round.tree.tokens.shape[1], device=round.tree.tokens.device)
    return index < round.tree.lengths.unsqueeze(1)


def verify_chain(round: Verification, lenience: float = 1.0) -> Verdict:
    """Accept draft i with probability min(1, p/q).

    The first rejection emits a token from norm((p - q)+), full acceptance one from p. A token
    chosen deterministically has the point mass as its q, whatever the drafter's softmax was.
    `lenience`: what q is multiplied by in both; below 1 the result is lossy.
    """
    tokens = round.tree.tokens
    if round.sampling.temperature == 0:
        best = round.logits.argmax(-1)
        match = (tokens == best[:, : tokens.shape[1]]) & _submitted(round)
        accepted = match.long().cumprod(1).sum(1)
        return Verdict(accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1), match.float())

    laws = ChainLaws.of(round)
    probability = laws.p_drafted / (lenience * laws.q_drafted).clamp_min(1e-38)
    flips = [
        round.random.flip(probability[:, i].clamp(max=1.0), round.first_position + i, "accept")
        for i in range(tokens.shape[1])
    ]
    accepted = (torch.stack(flips, 1) & laws.submitted).long().cumprod(1).sum(1)
    return laws.verdict(round, accepted, 1.0, lenience)
