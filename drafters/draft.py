"""From a drafter's two steps to what it proposes: a chain, a static tree, EAGLE-2's dynamic tree.

The drafter answers `start` and `extend` with logits; which tokens are drafted, and from which law,
is decided here and only here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from data.sampling import warp
from drafters.base import Signals
from drafters.tree import DynamicTree, StaticTree, TokenTree
from trainer.config import UserError

if TYPE_CHECKING:
    from drafters.acceptance_head import AcceptanceHead
    from drafters.base import Budget, DraftState, TrainedDrafter


def draft(drafter: TrainedDrafter, state: DraftState, budget: Budget) -> TokenTree:
    if isinstance(budget.tree, StaticTree):
        return static(drafter, state, budget, budget.tree)
    if isinstance(budget.tree, DynamicTree):
        return dynamic(drafter, state, budget, budget.tree)
    return chain(drafter, state, budget)


def chain(drafter: TrainedDrafter, state: DraftState, budget: Budget) -> TokenTree:
    """`budget.max_tokens` tokens, each drawn from the drafter's law (its best one at T=0), fewer
    where `budget.stop` ends a row."""
    greedy, rule = state.sampling.temperature == 0, budget.stop
    tokens, laws = [], []
    stops = Stops(state.lengths)
    score = None  # of the token fed last
    logits, fed = drafter.start(state, budget), 0
    parents = torch.full_like(state.lengths, -1).unsqueeze(1)
    for depth in range(1, budget.max_tokens + 1):
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
        if depth < budget.max_tokens:
            logits = drafter.extend(chosen.unsqueeze(1), parents, depth)[:, 0]
            parents, fed = parents + 1, fed + 1
            if rule is not None and rule.uses_head:
                score = acceptance_of(drafter).probability(drafter.hidden)
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


def acceptance_of(drafter: TrainedDrafter) -> AcceptanceHead:
    if drafter.acceptance is None:
        raise UserError(
            "CapabilityError: eval.policy=head:... needs a drafter with an acceptance head, which "
            f"this one, of kind {drafter.kind!r}, has not: train it with recipe=specdecpp"
        )
    return drafter.acceptance


def static(
    drafter: TrainedDrafter, state: DraftState, budget: Budget, shape: StaticTree
) -> TokenTree:
    """Children of a node are the most likely tokens under it; or, if asked for under sampling,
    drawn from its law without replacement."""
    sampled = budget.sample_children and state.sampling.temperature > 0
    index = {path: i for i, path in enumerate(shape.paths)}
    parents = torch.tensor(
        [index.get(path[:-1], -1) for path in shape.paths], device=state.ids.device
    )
    batch = len(state.lengths)
    tokens = torch.zeros(batch, shape.num_nodes, dtype=torch.long, device=state.ids.device)
    laws: list[torch.Tensor] = []
    logits = drafter.start(state, budget).unsqueeze(1)
    expanded: list[tuple[int, ...]] = [()]  # the nodes that `logits` belong to, one level
    fed: dict[tuple[int, ...], int] = {(): -1}  # path -> its number among the nodes fed
    forwards, num_fed = 1, 0
    for depth in range(1, shape.depth + 1):
        level = [path for path in shape.paths if len(path) == depth]
        families: dict[tuple[int, ...], list[int]] = {}
        for path in level:
            families.setdefault(path[:-1], []).append(index[path])
        for place, parent in enumerate(expanded):
            children = families[parent]
            if sampled:
                law = warp(logits[:, place], state.sampling)
                laws += [law] * len(children)
                drawn = _without_replacement(law, state, depth, children)
            else:
                drawn = logits[:, place].topk(len(children), -1).indices
            tokens[:, children] = drawn
        inner = {path[:-1] for path in shape.paths if len(path) == depth + 1}
        expanded = [path for path in level if path in inner]
        if expanded:
            places = torch.tensor([index[path] for path in expanded], device=tokens.device)
            above = torch.tensor([fed[path[:-1]] for path in expanded], device=tokens.device)
            logits = drafter.extend(tokens[:, places], above.expand(batch, -1), depth)
            for path in expanded:
                fed[path] = num_fed
                num_fed += 1
            forwards += 1
    return TokenTree(
        tokens,
        parents.expand(batch, -1),
        torch.stack(laws, 1) if laws else None,
        torch.full_like(state.lengths, shape.num_nodes),
        draft_forwards=forwards,
        draft_tokens=drafter.start_width + num_fed,
    )


def _without_replacement(
    law: torch.Tensor, state: DraftState, depth: int, children: list[int]
) -> torch.Tensor:
    """[B, len(children)] distinct tokens; where the law's mass runs out, token 0 with no mass left,
    which the verifier passes over."""
    left, drawn = law.clone(), []
    for node in children:
        total = left.sum(-1, keepdim=True)
        alive = total > 0
        usable = torch.where(alive, left / total.clamp_min(1e-38), torch.ones_like(left))
        usable = usable / usable.sum(-1, keepdim=True)
        token = state.random.choice(usable, state.lengths + (depth - 1), f"draft {node}")
        token = torch.where(alive.squeeze(-1), token, 0)
        drawn.append(token)
        left.scatter_(-1, token.unsqueeze(-1), 0.0)
    return torch.stack(drawn, 1)


def dynamic(
    drafter: TrainedDrafter, state: DraftState, budget: Budget, shape: DynamicTree
) -> TokenTree:
    """EAGLE-2 (Li et al. 2024, arXiv:2406.16858, Sec. 4): expand by confidence, then re-rank."""
    batch, k = len(state.lengths), shape.top_k
    rows = torch.arange(batch, device=state.ids.device).unsqueeze(1)
    scores, tokens = drafter.start(state, budget).float().log_softmax(-1).topk(k, -1)
    parents = torch.full_like(tokens, -1)  # among all candidates, in the order of creation
    all_scores, all_tokens, all_parents = [scores], [tokens], [parents]
    frontier = torch.arange(k, device=tokens.device).expand(batch, -1)  # candidates to expand
    above = torch.full_like(tokens, -1)  # their parents among the nodes fed
    created = k
    for depth in range(1, shape.depth):
        logits = drafter.extend(tokens, above, depth).float().log_softmax(-1)
        step, children = logits.topk(k, -1)  # [B, k, k]
        new_scores = (scores.unsqueeze(-1) + step).flatten(1)
        new_parents = frontier.unsqueeze(-1).expand(-1, -1, k).flatten(1)
        all_scores.append(new_scores)
        all_tokens.append(children.flatten(1))
        all_parents.append(new_parents)
        best = new_scores.sort(descending=True, stable=True).indices[:, :k]
        scores, tokens = new_scores[rows, best], children.flatten(1)[rows, best]
        frontier = created + best
        above = (depth - 1) * k + best // k
        created += k * k
    candidates = torch.cat(all_scores, 1)
    # a child never scores above its parent and is created later: a stable sort keeps the parent
    kept = candidates.sort(descending=True, stable=True).indices[:, : shape.num_nodes]
    kept = kept.sort().values
    place = torch.full_like(candidates, -1, dtype=torch.long)
    place[rows, kept] = torch.arange(shape.num_nodes, device=kept.device).expand(batch, -1)
    old_parents = torch.cat(all_parents, 1)[rows, kept]
    new = torch.where(old_parents >= 0, place[rows, old_parents.clamp(min=0)], -1)
    return TokenTree(
        torch.cat(all_tokens, 1)[rows, kept],
        new,
        None,
        torch.full_like(state.lengths, shape.num_nodes),
        draft_forwards=shape.depth,
        draft_tokens=drafter.start_width + k * (shape.depth - 1),
    )
