"""EAGLE-2's tree, whose shape depends on how sure the drafter is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.round import Budget, DraftState, Steps
from drafters.trees.spec import Accuracy, TreeSpec
from drafters.trees.tree import TokenTree
from trainer.checks import SIDE_BY_SIDE
from trainer.errors import UserError, require


@dataclass(frozen=True)
class DynamicTree(TreeSpec):
    """EAGLE-2 (Li et al. 2024, arXiv:2406.16858, Sec. 4): expand by confidence, then re-rank.

    The `top_k` best nodes of each level are expanded to their `top_k` best children, and of all
    candidates the `num_nodes` with the highest cumulative probability remain. The tree depends on
    the prefix alone, so it is verified as a deterministic tree.
    """

    name: ClassVar[str] = "dynamic"
    num_nodes: int
    depth: int
    top_k: int = 10

    def __post_init__(self) -> None:
        for name in ("num_nodes", "depth", "top_k"):
            value = getattr(self, name)
            require(1 <= value <= SIDE_BY_SIDE, name, f"lie in 1..{SIDE_BY_SIDE}", value)
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_nodes > most:
            raise UserError(
                f"{self.num_nodes} nodes are more than the {most} candidates of depth "
                f"{self.depth} and top_k {self.top_k}"
            )

    @property
    def num_fed(self) -> int:
        return self.top_k * (self.depth - 1)

    @property
    def width(self) -> int:
        return self.top_k

    def describe(self) -> str:
        return f"dynamic, {self.num_nodes} nodes, depth {self.depth}, top {self.top_k}"

    def deepest(self, K: int) -> int:
        return self.depth

    def shape(self, accuracy: Accuracy | None, K: int) -> DynamicTree:
        return self

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree:
        batch, k = len(state.lengths), self.top_k
        rows = torch.arange(batch, device=state.ids.device).unsqueeze(1)
        scores, tokens = drafter.start(state, Budget.of(self)).float().log_softmax(-1).topk(k, -1)
        parents = torch.full_like(tokens, -1)  # among all candidates, in the order of creation
        all_scores, all_tokens, all_parents = [scores], [tokens], [parents]
        frontier = torch.arange(k, device=tokens.device).expand(batch, -1)  # candidates to expand
        above = torch.full_like(tokens, -1)  # their parents among the nodes fed
        created = k
        for depth in range(1, self.depth):
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
        best_nodes = candidates.sort(descending=True, stable=True).indices[:, : self.num_nodes]
        best_nodes = best_nodes.sort().values
        place = torch.full_like(candidates, -1, dtype=torch.long)
        place[rows, best_nodes] = torch.arange(self.num_nodes, device=place.device).expand(
            batch, -1
        )
        old_parents = torch.cat(all_parents, 1)[rows, best_nodes]
        new = torch.where(old_parents >= 0, place[rows, old_parents.clamp(min=0)], -1)
        return TokenTree(
            torch.cat(all_tokens, 1)[rows, best_nodes],
            new,
            None,
            torch.full_like(state.lengths, self.num_nodes),
            draft_forwards=self.depth,
            draft_tokens=drafter.start_width + k * (self.depth - 1),
        )
