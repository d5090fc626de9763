"""How long to draft: the rules that end a chain early.

Whether another token is drafted depends on tokens already drafted and never on the coins that
verify them, and the token after which a rule stops is kept: which token it was decides what
follows, not whether it is submitted. So all rules leave the target's law as it is.
"""

from __future__ import annotations

import torch

from drafters.base import Budget, Signals, StopRule
from drafters.lookup import PromptLookup
from drafters.tree import TreeShape

FIRST_K = 5  # of a heuristic answer


def tree_budget(tree: TreeShape, children: str = "top") -> Budget:
    """`children`: "top", or "sampled" from the drafter's law without replacement (at T>0)."""
    return Budget(tree.depth, tree=tree, sample_children=children == "sampled")


class Confidence(StopRule):
    """Stop once the drafter's largest probability falls below `limit`."""

    def __init__(self, limit: float):
        self.limit, self.name = limit, f"confidence:{limit:g}"

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        return signals.confidence < self.limit


class Drafted(StopRule):
    """Stop once the drafted token's own probability falls below `limit`: transformers' rule
    (assistant_confidence_threshold). At T=0 that of `Confidence`."""

    def __init__(self, limit: float):
        self.limit, self.name = limit, f"drafted:{limit:g}"

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        return signals.probability < self.limit


class _Product(StopRule):
    """Whose decision is a product over the tokens of the round."""

    product: torch.Tensor

    def _times(self, factor: torch.Tensor, depth: int) -> torch.Tensor:
        """The product so far; a round's first token begins anew."""
        self.product = factor if depth == 1 else self.product * factor
        return self.product


class Product(_Product):
    """Stop once the drafter's probability of all it drafted this round falls below `limit`."""

    def __init__(self, limit: float):
        self.limit, self.name = limit, f"product:{limit:g}"

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        return self._times(signals.probability, depth) < self.limit


class Head(_Product):
    """Stop once the acceptance head expects a rejection among the drafted tokens with more than the
    probability `threshold` (Huang et al. 2024, SpecDec++, Algorithm 1), after `K_min` tokens at the
    earliest: a larger threshold drafts longer.

    As in the published code the newest token is not judged, since its state is known only once it
    is fed for the next one; `judges_last` feeds it first, as the paper's text has it.
    """

    uses_head = True

    def __init__(self, threshold: float, K_min: int = 1, judges_last: bool = False):
        self.threshold, self.K_min, self.judges_last = threshold, K_min, judges_last
        self.name = f"head{'_last' * judges_last}:{threshold:g}"

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        one = torch.ones_like(signals.confidence)
        # without `judges_last` the first token of a round has nothing to be judged by
        known = signals.score if depth > 1 or self.judges_last else None
        product = self._times(one if known is None else known.to(one), depth)
        return (1 - product > self.threshold) & (depth >= self.K_min)


class Heuristic(StopRule):
    """Two tokens more after a round that was accepted whole, one less after any other, from
    `FIRST_K` in every answer (the schedule of transformers' assisted generation)."""

    name = "heuristic"
    replayable = False

    def __init__(self, K: int):
        self.K = K

    def begin(self, rows: int, device: torch.device) -> None:
        self.lengths = torch.full((rows,), min(FIRST_K, self.K), device=device)

    def renew(self, rows: torch.Tensor) -> None:
        self.lengths[rows] = min(FIRST_K, self.K)

    def keep(self, rows: torch.Tensor) -> None:
        self.lengths = self.lengths[rows]

    def verified(self, accepted: torch.Tensor, submitted: torch.Tensor) -> None:
        change = torch.where(accepted >= submitted, 2, -1)
        self.lengths = (self.lengths + change).clamp(1, self.K)

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        return self.lengths <= depth


class Recorder(StopRule):
    """Never stops and notes what a rule would have seen."""

    name = "recorded"

    def __init__(self, uses_head: bool = False):
        self.uses_head = uses_head
        self.seen: list[Signals] = []

    def __call__(self, signals: Signals, depth: int) -> torch.Tensor:
        self.seen.append(signals)
        return torch.zeros_like(signals.confidence, dtype=torch.bool)


def make_budget(policy: str, K: int, K_min: int = 1) -> Budget:
    """`eval.policy` for chains of at most K: `fixed`; `confidence:<t>`, of the newest token's law;
    `product:<t>`, of all drafted tokens; `heuristic`; `head:<h>`, of an acceptance head, with
    `K_min` tokens at least; `head_last:<h>`, which judges the newest token too."""
    name, _, threshold = policy.partition(":")
    if name == "fixed":
        return Budget(K)
    if name == "heuristic":
        return Budget(K, Heuristic(K))
    limit = float(threshold)
    if name == "confidence":
        return Budget(K, Confidence(limit))
    if name == "product":
        return Budget(K, Product(limit))
    assert name in ("head", "head_last"), policy
    return Budget(K, Head(limit, K_min, judges_last=name == "head_last"))


def budget_for(drafter: object, policy: str, K: int) -> Budget:
    """`make_budget` for this drafter. Chains of fixed length where it has not what the policy asks
    for: baselines have no acceptance head, and what is copied from the prompt has no law."""
    if isinstance(drafter, PromptLookup):
        return Budget(K)
    if not policy.startswith("head"):
        return make_budget(policy, K)
    head = getattr(drafter, "acceptance", None)
    return Budget(K) if head is None else make_budget(policy, K, head.settings.K_min)
