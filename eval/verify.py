"""Chain verification: exact speculative sampling (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.sampling import Sampling, warp
from drafters.base import RandomSource
from drafters.tree import TokenTree
from trainer.config import RunFault


@dataclass
class Verdict:
    """accepted: [B] accepted drafts; emitted: [B] the correction or bonus token that follows them;
    overlap: [B, N] sum_v min(p, q) at each drafted position (at T=0: 1 where the token matches)."""

    accepted: torch.Tensor
    emitted: torch.Tensor
    overlap: torch.Tensor


def verify_chain(
    tree: TokenTree,
    target_logits: torch.Tensor,
    sampling: Sampling,
    random: RandomSource,
    first_position: torch.Tensor,
    check: torch.Tensor | None = None,
) -> Verdict:
    """target_logits [B, N+1, W]: the target's logits after the last committed token and after each
    draft; first_position [B]: position of the first draft; check [B] bool: rows that are live.

    Draft i is accepted with probability min(1, p/q); the first rejection emits a token from
    norm((p - q)+), full acceptance one from p. A token chosen deterministically has the point mass
    as its q, whatever the drafter's softmax was.
    """
    depth = tree.tokens.shape[1]
    index = torch.arange(depth, device=tree.tokens.device)
    submitted = index < tree.lengths.unsqueeze(1)
    if sampling.temperature == 0:
        best = target_logits.argmax(-1)
        match = (tree.tokens == best[:, :depth]) & submitted
        accepted = match.long().cumprod(1).sum(1)
        return Verdict(accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1), match.float())

    p = warp(target_logits, sampling)
    width = p.shape[-1]
    drafted = tree.tokens.unsqueeze(-1)
    p_drafted = p[:, :depth].gather(-1, drafted).squeeze(-1)
    if tree.laws is None:
        q = torch.zeros_like(p[:, :depth]).scatter_(-1, drafted, 1.0)
    else:
        q = torch.nn.functional.pad(tree.laws, (0, width - tree.laws.shape[-1]))
    q_drafted = q.gather(-1, drafted).squeeze(-1)
    live = submitted if check is None else submitted & check.unsqueeze(1)
    if bool(((q_drafted <= 0) & live).any()):
        raise RunFault("a drafted token has probability 0 under the law it was drawn from")
    probability = (p_drafted / q_drafted.clamp_min(1e-38)).clamp(max=1.0)
    flips = [random.flip(probability[:, i], first_position + i, "accept") for i in range(depth)]
    accepted = (torch.stack(flips, 1) & submitted).long().cumprod(1).sum(1)

    # the law of the token after the accepted ones: p itself, or the residual where a draft failed
    row = torch.arange(len(accepted), device=accepted.device)
    law = p[row, accepted]
    rejected = accepted < tree.lengths
    residual = (law - q[row, accepted.clamp(max=depth - 1)]).clamp_min(0)
    usable = rejected & (residual.sum(-1) > 0)  # p = q up to rounding leaves nothing: p it is
    law = torch.where(usable.unsqueeze(-1), residual, law)
    emitted = random.choice(law / law.sum(-1, keepdim=True), first_position + accepted, "target")
    return Verdict(accepted, emitted, torch.minimum(p[:, :depth], q).sum(-1))
