"""The best paths through the distributions of a block, which a drafter makes in one pass.

A drafter whose tokens do not depend on each other gives every path the product of its slots'
probabilities: these are marginal, so every parent at one depth has the same children. The nodes
with the largest products are found one after the other (DDTree, arXiv:2604.12989), where JetSpec
(arXiv:2606.18394) expands every node that it takes to as many children and cuts at the budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from drafters.round import Budget, DraftState, Slots, Steps
from drafters.trees.spec import Accuracy, TreeSpec
from drafters.trees.tree import TOP, TokenTree
from trainer.checks import SIDE_BY_SIDE
from trainer.errors import require


@dataclass(frozen=True)
class BestFirstTree(TreeSpec):
    """The `num_nodes` likeliest nodes of all paths of up to eval.K tokens, of which each is among
    the `top_k` likeliest of its slot. 0: as many as nodes, of which no slot can need more."""

    name: ClassVar[str] = "best_first"
    needs_slots: ClassVar[bool] = True
    num_nodes: int
    top_k: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_nodes", 1), ("top_k", 0)):
            value, rule = getattr(self, name), f"lie in {least}..{SIDE_BY_SIDE}"
            require(least <= value <= SIDE_BY_SIDE, name, rule, value)

    def deepest(self, K: int) -> int:
        width, most = self.top_k or self.num_nodes, 0
        for _ in range(K):  # one level more above those that are counted
            most = width * (1 + most)
            if most >= self.num_nodes:
                break
        rule = f"be at most {most}, the nodes of {K} levels with {width} children each"
        require(self.num_nodes <= most, "num_nodes", rule, self.num_nodes)
        return min(K, self.num_nodes)

    def shape(self, accuracy: Accuracy | None, K: int) -> BestFirst:
        return BestFirst(self.num_nodes, self.top_k or self.num_nodes, self.deepest(K))


@dataclass(frozen=True)
class BestFirst:
    """The shape that `BestFirstTree` names: `top_k` candidates for each of `depth` slots.

    The tree depends on the prefix alone, so it is verified as a deterministic tree.
    """

    num_nodes: int
    top_k: int
    depth: int

    @property
    def siblings(self) -> str:
        return TOP

    @property
    def width(self) -> int:
        return self.top_k

    @property
    def num_fed(self) -> int:
        return 0

    def describe(self) -> str:
        of = "" if self.top_k == self.num_nodes else f", top {self.top_k}"
        return f"best_first, {self.num_nodes} nodes, depth {self.depth}{of}"

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree:
        logits = cast(Slots, drafter).slot_logits(state, Budget.of(self)).float()
        best = logits.topk(self.top_k, -1)  # [B, depth, top_k]
        scores = best.values - logits.logsumexp(-1, keepdim=True)
        # the only copy to the host in a round
        grown = [best_nodes(row, self.num_nodes) for row in scores.tolist()]
        parents, depths, ranks = torch.tensor(grown, device=logits.device).unbind(-1)  # [B, N]
        rows = torch.arange(len(grown), device=logits.device).unsqueeze(1)
        return TokenTree(
            best.indices[rows, depths, ranks],
            parents,
            None,
            torch.full_like(state.lengths, self.num_nodes),
            draft_forwards=1,
            draft_tokens=drafter.start_width,
        )


def best_nodes(scores: Sequence[Sequence[float]], count: int) -> list[tuple[int, int, int]]:
    """The `count` nodes with the largest sums of scores along their paths, best first, each as
    (parent, depth from 0, rank); a parent is the index of a node, -1 for the root.

    scores[depth][rank]: log-probabilities, falling with the rank. A node is worth no more than its
    parent and the sibling before it, so that these two lead to it: taking a node adds its first
    child and its next sibling to the heap, which holds at most one more than were taken.
    """
    # (minus the sum, number, sum at the parent, parent, depth, rank); the number decides ties
    heap = [(-scores[0][0], 0, 0.0, -1, 0, 0)]
    pushed, taken = 1, list[tuple[int, int, int]]()
    while len(taken) < count:
        minus, _, above, parent, depth, rank = heapq.heappop(heap)
        if rank + 1 < len(scores[depth]):
            worth = above + scores[depth][rank + 1]
            heapq.heappush(heap, (-worth, pushed, above, parent, depth, rank + 1))
            pushed += 1
        if depth + 1 < len(scores):
            worth = -minus + scores[depth + 1][0]
            heapq.heappush(heap, (-worth, pushed, -minus, len(taken), depth + 1, 0))
            pushed += 1
        taken.append((parent, depth, rank))
    return taken
