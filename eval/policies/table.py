"""The policies that have a name, and their budgets for a drafter."""

from __future__ import annotations

from drafters.base import TrainedDrafter
from drafters.round import Budget
from eval.policies.base import Policy
from eval.policies.confidence import Confidence
from eval.policies.drafted import Drafted
from eval.policies.fixed import Fixed
from eval.policies.head import HeadLast, HeadPolicy
from eval.policies.heuristic import Heuristic
from eval.policies.product import Product
from trainer.specs import parse

POLICIES: dict[str, type[Policy]] = {
    one.name: one for one in (Fixed, Confidence, Drafted, Product, Heuristic, HeadPolicy, HeadLast)
}


def parse_policy(text: str) -> Policy:
    """The policy that `text` names; UserError where it names none."""
    return parse("eval.policy", text, POLICIES)


def make_budget(policy: str, K: int, K_min: int = 1) -> Budget:
    """Chains of at most K under `eval.policy`, of `K_min` tokens at least where an acceptance head
    decides."""
    return parse_policy(policy).budget(K, K_min)


def budget_for(drafter: object, policy: str, K: int) -> Budget:
    """`make_budget` for this drafter; chains of fixed length where the policy does not apply.

    Baselines may not judge their tokens, and copied ones have no distribution.
    """
    rule = parse_policy(policy)
    if not isinstance(drafter, TrainedDrafter):
        return Budget(K)
    if not rule.uses_head:
        return rule.budget(K)
    if not drafter.judges:
        return Budget(K)
    head = drafter.acceptance
    return rule.budget(K) if head is None else rule.budget(K, head.settings.K_min)
