"""Rules that end a chain early: each leaves the target's text and law as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters.acceptance_head import AcceptanceHead, AcceptanceSettings
from drafters.base import TrainedDrafter
from drafters.round import Budget, Signals
from drafters.training_free.lookup import PromptLookup
from eval.config import EvalConfig
from eval.counters import counters_from_rounds
from eval.policies.table import budget_for, make_budget
from tests.drafters.test_acceptance_head import judged
from tests.eval.test_engine import drafter_of, speculated
from tests.eval.test_offline import GREEDY, NOT_UNDER_A_STOP_RULE, K, decoded, numbers, offline
from tests.eval.test_offline import drafters as offline_drafters
from tests.eval.test_offline import greedy as greedy
from tests.eval.verifiers.test_chain import _Changed, error
from tests.helpers.tabular import TabularDrafter
from tests.helpers.tiny import generated, perturbed, prompts_of, tiny_model
from trainer.errors import UserError

V = 3


def signals(confidence=1.0, probability=1.0, score=None):
    values = (confidence, probability, score)
    made = [None if v is None else torch.tensor(v, dtype=torch.double).reshape(-1) for v in values]
    return Signals(*made)


# --- what each rule says ----------------------------------------------------------------------


def told(rule, rows):
    """Depth at which the rule first stops a row that gives these signals, None: never."""
    depths = (d for d, one in enumerate(rows, start=1) if bool(rule(one, d)))
    return next(depths, None)


def test_confidence_sees_the_law_and_product_what_was_drafted():
    rows = [signals(0.9, 0.9), signals(0.5, 0.2), signals(0.3, 0.3)]
    assert told(make_budget("confidence:0.4", 9).stop, rows) == 3
    assert told(make_budget("product:0.4", 9).stop, rows) == 2
    assert told(make_budget("product:0.1", 9).stop, rows) == 3
    assert told(make_budget("product:0.05", 9).stop, rows) is None


@pytest.mark.parametrize("policy", ["product:0.5", "head:0.5"])
def test_a_product_begins_anew_with_every_round(policy):
    rule = make_budget(policy, 9).stop
    rows = [signals(1, 0.8, None), signals(1, 0.8, 0.8), signals(1, 0.7, 0.7)]
    first = [bool(rule(one, d)) for d, one in enumerate(rows, start=1)]
    assert [bool(rule(one, d)) for d, one in enumerate(rows, start=1)] == first


def test_the_head_stops_where_a_rejection_is_likely_enough():
    """Scores of tokens 1, 2, 3 are .9, .6, .5: products .9, .54, .27. The last is never judged."""
    rows = [signals(), signals(score=0.9), signals(score=0.6), signals(score=0.5)]
    found = {h: told(make_budget(f"head:{h}", 9).stop, rows) for h in (0.05, 0.3, 0.6, 0.8)}
    assert found == {0.05: 2, 0.3: 3, 0.6: 4, 0.8: None}  # a larger threshold drafts longer
    rows = [signals(score=score) for score in (0.9, 0.6, 0.5)]
    found = {h: told(make_budget(f"head_last:{h}", 9).stop, rows) for h in (0.05, 0.3, 0.6, 0.8)}
    assert found == {0.05: 1, 0.3: 2, 0.6: 3, 0.8: None}
    assert told(make_budget("head_last:0.05", 9, K_min=3).stop, rows) == 3


def test_the_heuristic_follows_each_row_through_refills():
    rule = make_budget("heuristic", 8).stop
    rule.begin(3, torch.device("cpu"))
    assert rule.lengths.tolist() == [5, 5, 5]
    rule.verified(torch.tensor([5, 4, 0]), torch.tensor([5, 5, 5]))
    assert rule.lengths.tolist() == [7, 4, 4]
    assert rule(signals(), 4).tolist() == [False, True, True]
    rule.renew(torch.tensor([0]))
    rule.keep(torch.tensor([2, 0]))
    assert rule.lengths.tolist() == [4, 5]
    for _ in range(6):
        rule.verified(torch.tensor([0, 8]), torch.tensor([4, 8]))
    assert rule.lengths.tolist() == [1, 8]  # within 1 and K


@pytest.mark.parametrize("policy", ["confidence:0.9", "drafted:0.9", "product:0.9", "head:0.1",
                                    "head_last:0.1"])  # fmt: skip
def test_no_policy_stops_before_its_K_min(policy):
    rows = [signals(0.5, 0.5, score) for score in (None, 0.5, 0.5, 0.5)]
    if policy.startswith("head_last"):
        rows[0] = signals(0.5, 0.5, 0.5)
    first = told(make_budget(policy, 9).stop, rows)
    assert first == (2 if policy == "head:0.1" else 1)
    for K_min in (1, 2, 3, 4):
        budget = make_budget(f"{policy},K_min={K_min}", 9)
        assert told(budget.stop, rows) == max(first, K_min)
        assert budget.policy == (policy if K_min == 1 else f"{policy},K_min={K_min}")
    if policy.startswith("head"):  # the acceptance head has one too
        assert told(make_budget(f"{policy},K_min=2", 9, K_min=3).stop, rows) == 3


def test_the_heuristic_never_goes_below_its_K_min():
    rule = make_budget("heuristic,K_min=3", 8).stop
    rule.begin(1, torch.device("cpu"))
    for _ in range(6):
        rule.verified(torch.tensor([0]), torch.tensor([4]))
    assert rule.lengths.tolist() == [3]
    assert [bool(rule(signals(), depth)) for depth in (1, 2, 3)] == [False, False, True]
    high = make_budget("heuristic,K_min=7", 8).stop
    high.begin(1, torch.device("cpu"))
    assert high.lengths.tolist() == [7]


def test_without_a_head_a_drafter_drafts_chains_of_fixed_length():
    assert budget_for(TrainedDrafter(), "head:0.5", 6) == Budget(6)
    assert budget_for(TrainedDrafter(), "confidence:0.5", 6).policy == "confidence:0.5"
    assert budget_for(PromptLookup(), "confidence:0.5", 6) == Budget(6)  # a copy has no law
    assert Budget(3).policy == "fixed"


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("head:0", r"eval\.policy='head:0': threshold must lie in \(0, 1\), got 0\.0"),
        ("head:1", r"eval\.policy='head:1': threshold must lie in \(0, 1\), got 1\.0"),
        ("head", r"eval\.policy must be head:<threshold>\[,K_min=<K_min>\], got 'head'"),
        (
            "head:0.5:2",
            r"eval\.policy must be head:<threshold>\[,K_min=<K_min>\], got 'head:0\.5:2'",
        ),
        ("head:0.5,K_min=0", r"eval\.policy='head:0\.5,K_min=0': K_min must be >= 1, got 0"),
        (
            "heuristic,K_min=5",
            r"eval\.policy must have K_min <= eval\.K=4, got 'heuri",
        ),
        ("fixed,K_min=2", r"eval\.policy must be fixed, got 'fixed,K_min=2'"),
        ("head_last:1.5", r"eval\.policy='head_last:1\.5': threshold must lie in \(0, 1\)"),
        ("product:0", r"eval\.policy='product:0': threshold must lie in \(0, 1\)"),
        ("heuristic:2", r"eval\.policy must be heuristic\[,K_min=<K_min>\], got 'heuristic:2'"),
        ("fixed:3", r"eval\.policy must be fixed, got 'fixed:3'"),
        ("oracle:0.5", r"eval\.policy must be one of fixed, confidence:<threshold>\[,K_min="),
    ],
)
def test_a_wrong_policy_is_named(policy, says):
    with pytest.raises(UserError, match=says):
        EvalConfig(policy=policy)


def test_a_head_is_asked_of_a_drafter_that_has_one():
    model = tiny_model("llama")
    with pytest.raises(UserError, match=r"CapabilityError: eval\.policy=head"):
        speculated(model, drafter_of(model, model), [[5, 6]], budget=make_budget("head:0.5", 3))


# --- the law ----------------------------------------------------------------------------------


class Shown(TabularDrafter):
    """A tabular drafter whose state is the token it was fed: its head judges by the very token, the
    case in which a wrong rule would bias the output most."""

    def _forward(self, ids, positions, used):
        self.hidden = torch.nn.functional.one_hot(ids[:, -1], V).float()
        self._judged = False
        return super()._forward(ids, positions, used)


def shown(drafter):
    inner = drafter._cached
    made = Shown(None, None, V, {})
    made._cached = inner
    made.acceptance = AcceptanceHead(AcceptanceSettings(V, 0))
    with torch.no_grad():
        made.acceptance.out.bias.zero_()
        made.acceptance.out.weight.copy_(torch.tensor([[0.0] * V, [-2.0, 0.0, 2.0]]))
    return made.eval()


@pytest.mark.parametrize(
    "policy",
    ["product:0.3", "heuristic", "head:0.3", "head:0.8", "head_last:0.3", "product:0.9,K_min=2"],
)
@torch.no_grad()
def test_every_rule_leaves_the_targets_law(policy, monkeypatch):
    lengths = set()

    def spied(drafter):
        def note(tree, state):
            lengths.update(tree.lengths.tolist())
            return tree

        return _Changed(shown(drafter), note)

    if policy == "heuristic":  # from one token on, so that rounds of this test differ in length
        monkeypatch.setattr("eval.policies.heuristic.FIRST_K", 2)
    for seed in range(2):
        budget = make_budget(policy, 3)
        assert error(monkeypatch, seed=seed, gamma=3, budget=budget, change=spied) < 1e-12
    assert lengths & {1, 2}


@torch.no_grad()
def test_control_dropping_the_token_that_made_it_stop_is_seen(monkeypatch):
    def drop(tree, state):
        return dataclasses.replace(tree, lengths=torch.where(tree.lengths < 3, tree.lengths - 1, 3))

    budget = make_budget("product:0.3", 3)
    broken = error(monkeypatch, gamma=3, budget=budget, change=lambda d: _Changed(d, drop))
    assert broken > 0.01


# --- decoding ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    """A model, prompts, and its own text."""
    model, prompts = tiny_model("llama"), prompts_of([1, 21, 4, 9, 33])
    return model, prompts, [generated(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("policy", ["heuristic", "head:0.6", "head_last:0.6"])
def test_batched_greedy_text_is_the_targets_and_rows_do_not_meet(policy, plain):
    """Alone and three by three: rows are refilled and dropped, and each drafts as much as it does
    alone."""
    model, prompts, texts = plain
    drafter = judged(drafter_of(perturbed(model, 0.1), model), seed=3)
    with torch.no_grad():
        drafter.acceptance.out.bias += torch.tensor([0.0, 1.5])
    budget = make_budget(policy, 6, K_min=2)
    alone = None
    for batch_size in (1, 3):
        found = speculated(model, drafter, prompts, budget=budget, batch_size=batch_size)
        assert [found[i].response_ids for i in range(5)] == texts
        rounds = {i: [(r.submitted, r.accepted) for r in one.rounds] for i, one in found.items()}
        alone = alone or rounds
        assert rounds == alone
    assert len({submitted for own in alone.values() for submitted, _ in own}) > 2
    lowest = min(submitted for own in alone.values() for submitted, _ in own)
    assert lowest >= (2 if policy.startswith("head") else 1)


def test_judging_the_last_token_costs_the_forward_that_shows_it():
    model = tiny_model("llama")
    drafter = judged(drafter_of(perturbed(model, 0.1), model), seed=3)
    for policy, more in (("head:0.5", 0), ("head_last:0.5", 1)):
        found = speculated(
            model, drafter, prompts_of([5]), budget=make_budget(policy, 6), batch_size=1
        )
        rounds = [dataclasses.replace(one, prompt_hash="") for one in found[0].rounds]
        for one in rounds:
            assert one.draft_forwards == one.submitted + (more if one.submitted < 6 else 0)
        counted = counters_from_rounds(rounds, "", "", 6, judges_last=bool(more))
        forwards = sum(one.draft_forwards for one in rounds)
        assert counted.submitted + counted.judging == forwards


@pytest.mark.parametrize("policy", ["product:0.3", "head:0.5", "head_last:0.5"])
def test_replay_without_decoding_counts_the_same(policy, greedy):
    target, traces = greedy
    drafter = judged(offline_drafters(target)["causal_lm"], seed=3)
    with torch.no_grad():
        drafter.acceptance.out.bias += torch.tensor([0.0, 1.0])
    budget = make_budget(policy, K, K_min=1)
    expected = offline(target, traces, drafter, GREEDY, budget)
    real, _ = decoded(target, traces, drafter, GREEDY, budget)
    fixed, _ = decoded(target, traces, drafter, GREEDY)
    for tag, counters in real.items():
        ours = numbers(expected[tag], NOT_UNDER_A_STOP_RULE)
        assert ours == numbers(counters, NOT_UNDER_A_STOP_RULE), tag
    assert any(real[tag].rounds > fixed[tag].rounds for tag in real)  # the rule did stop


def test_a_rule_with_a_memory_cannot_be_replayed(greedy):
    target, traces = greedy
    drafter = offline_drafters(target)["causal_lm"]
    with pytest.raises(UserError, match="rounds depend on those before"):
        offline(target, traces, drafter, GREEDY, make_budget("heuristic", K))
