"""Verification: which drafted tokens are accepted, and which token follows them.

Chains: exact speculative sampling (Leviathan et al. 2023; Chen et al. 2023). Trees: for
deterministic candidates "draw from the target, follow the matching child", for children drawn
without replacement multi-round rejection (Miao et al. 2024, SpecInfer; Chen et al. 2024, Sequoia);
both exact. Medusa's typical acceptance is lossy and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data.sampling import Sampling, warp
from drafters.base import RandomSource
from drafters.tree import TokenTree
from trainer.config import RunFault

VERIFIERS = ("token", "typical")


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
class Typical:
    """Medusa's lossy rule (Cai et al. 2024, Sec. 2.3.1): accept x where
    p(x) > min(epsilon, delta exp(-H(p))), H in nats."""

    epsilon: float = 0.09
    delta: float = 0.3


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


def verify_tree(
    tree: TokenTree,
    target_logits: torch.Tensor,
    sampling: Sampling,
    random: RandomSource,
    first_position: torch.Tensor,
    typical: Typical | None = None,
) -> Verdict:
    """target_logits [B, N+1, W]: after the last committed token and after each node;
    first_position [B]: position of the nodes of depth 1."""
    if sampling.temperature == 0:
        best = target_logits.argmax(-1)
        return _follow(tree, lambda node, depth: best.gather(1, node + 1).squeeze(1))
    p = warp(target_logits, sampling)
    if typical is not None:
        return _typical(tree, p, typical, random, first_position)
    if tree.laws is not None:
        return _multi_round(tree, p, random, first_position)

    def draw(node: torch.Tensor, depth: int) -> torch.Tensor:
        return random.choice(_at(p, node + 1), first_position + depth, "target")

    return _follow(tree, draw)


def _at(laws: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """[B, N, W], node [B, 1] -> [B, W]"""
    return laws.gather(1, node.unsqueeze(-1).expand(-1, 1, laws.shape[-1])).squeeze(1)


class _Walk:
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


def _follow(tree: TokenTree, draw: Callable[[torch.Tensor, int], torch.Tensor]) -> Verdict:
    """Draw the target's own token, go to the child that equals it, or emit it. Exact for any tree
    that was built without looking at the draw."""
    walk = _Walk(tree)
    for depth in range(walk.depth + 1):
        token = draw(walk.node, depth)
        match = walk.children() & (tree.tokens == token.unsqueeze(1))
        walk.step(depth, match.long().argmax(1), match.any(1), token)
    return walk.verdict()


def _multi_round(
    tree: TokenTree, p: torch.Tensor, random: RandomSource, first_position: torch.Tensor
) -> Verdict:
    """Children in the order in which they were drawn from d without replacement: accept x with
    min(1, r(x)/d(x)); on rejection r becomes norm((r - d)+) and x leaves d."""
    assert tree.laws is not None
    walk = _Walk(tree)
    laws = torch.nn.functional.pad(tree.laws, (0, p.shape[-1] - tree.laws.shape[-1]))
    rows = torch.arange(len(p), device=p.device)
    for depth in range(walk.depth + 1):
        residual = _at(p, walk.node + 1).clone()
        children = walk.children()
        order = children.long().cumsum(1)
        chosen = torch.zeros_like(walk.emitted)
        found = torch.zeros_like(walk.live)
        law = None
        for turn in range(1, int(order.max()) + 1):
            here = children & (order == turn)
            child = here.long().argmax(1)
            if law is None:  # that of their parent, the same for all siblings
                law = laws[rows, child].clone()
            token = tree.tokens[rows, child]
            mass, wanted = law[rows, token], residual[rows, token]
            tried = here.any(1) & ~found & (mass > 0)
            probability = torch.where(tried, (wanted / mass.clamp_min(1e-38)).clamp(max=1.0), 0.0)
            flip = random.flip(probability, first_position + depth, f"accept {turn}") & tried
            chosen = torch.where(flip, child, chosen)
            found = found | flip
            failed = (tried & ~flip).unsqueeze(1)
            left = (residual - law).clamp_min(0)
            total = left.sum(-1, keepdim=True)
            # p = q up to rounding leaves nothing: then it stays as it was
            residual = torch.where(failed & (total > 0), left / total.clamp_min(1e-38), residual)
            taken = law.scatter(1, token.unsqueeze(1), 0.0)
            total = taken.sum(-1, keepdim=True)
            law = torch.where(failed, taken / total.clamp_min(1e-38), law)
        residual = residual / residual.sum(-1, keepdim=True)
        walk.step(depth, chosen, found, random.choice(residual, first_position + depth, "target"))
    return walk.verdict()


def _typical(
    tree: TokenTree,
    p: torch.Tensor,
    rule: Typical,
    random: RandomSource,
    first_position: torch.Tensor,
) -> Verdict:
    """The longest path of accepted tokens, ties by their summed log p; then a token from p."""
    entropy = -(p * p.clamp_min(1e-38).log()).sum(-1)
    limit = (rule.delta * torch.exp(-entropy)).clamp(max=rule.epsilon)
    parents = tree.parents + 1
    scored = p.gather(1, parents.unsqueeze(-1).expand(-1, -1, p.shape[-1]))
    probability = scored.gather(-1, tree.tokens.unsqueeze(-1)).squeeze(-1)
    walk = _Walk(tree)
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
    emitted = random.choice(_at(p, end + 1), first_position + accepted, "target")
    children = (tree.parents == end) & walk.submitted
    return Verdict(accepted, emitted, path=path, rejected=children.any(1))
