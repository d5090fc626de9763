"""How long to draft: makers of the `stop` rule of a Budget.

Every rule here looks at the drafter's distribution and stops *after* keeping the token just
drawn, so which token was drawn never decides whether it is submitted: all are lossless.
"""

from __future__ import annotations

import torch

from drafters.base import Budget
from drafters.tree import TreeShape


def tree_budget(tree: TreeShape, children: str = "top") -> Budget:
    """`children`: "top", or "sampled" from the drafter's law without replacement (at T>0)."""
    return Budget(tree.depth, tree=tree, sample_children=children == "sampled")


def make_budget(policy: str, K: int) -> Budget:
    """`fixed`, or `confidence:<t>`: stop once the drafter's largest probability falls below t."""
    name, _, threshold = policy.partition(":")
    if name == "fixed":
        return Budget(K)
    limit = float(threshold)

    def stop(probs: torch.Tensor, chosen: torch.Tensor, depth: int) -> torch.Tensor:
        return probs.amax(-1) < limit

    return Budget(K, stop)
