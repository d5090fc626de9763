"""The bank of rollouts: its numbers, its identity, and what it is for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from drafters.round import Budget
from eval.metrics import paired_difference, summarise
from eval.offline import OfflineEvaluator
from eval.policies import rollouts
from eval.policies.drafted import Drafted
from eval.policies.head import HeadPolicy
from eval.policies.rollouts import Rollouts
from eval.policies.table import POLICIES, make_budget
from eval.speed_model import modelled_speedup
from phases.policies import best, matching
from tests.drafters.test_acceptance_head import judged
from tests.eval.test_engine import speculated
from tests.eval.test_offline import (
    GREEDY,
    SAMPLED,
    drafter_of,
    negated,
    offline,
    target_of,
    traces_of,
)
from tests.helpers.tiny import perturbed, prompts_of, tiny_model
from tests.helpers.watch import Reads
from trainer.errors import UserError

K = 6


@pytest.fixture(scope="module")
def target():
    return target_of(tiny_model("llama"), ())


@pytest.fixture(scope="module")
def traces(target):
    return traces_of(target, prompts_of([3, 17, 9, 30, 1, 5]), GREEDY)


@pytest.fixture(scope="module")
def drafter(target):
    return judged(drafter_of(perturbed(target.model, 0.1), target), seed=3)


def test_at_temperature_0_a_rollout_is_the_round_of_decoding_from_there(target, traces, drafter):
    """Each place of each trace, decoded as a prompt of its own: the first round has the bank's
    numbers."""
    bank = rollouts.draw(target, drafter, traces, GREEDY, K, starts=3)
    assert bank.scored
    for policy in ("fixed", "product:0.3", "head:0.6", "head_last:0.6"):
        budget = make_budget(policy, K)
        lengths = torch.stack([bank._lengths(budget, turn) for turn in range(3)], 1)
        accepted = torch.stack([bank.accepted(turn) for turn in range(3)], 1)
        contexts, expected = [], []
        for row, trace in enumerate(bank.traces):
            for turn in range(3):
                place = len(trace.response_ids) - int(bank.room[row, turn])
                # decoding draws the newest token itself, in its prefill
                contexts.append(trace.prompt_ids + trace.response_ids[: place - 1])
                drafted = int(lengths[row, turn])
                expected.append((drafted, min(drafted, int(accepted[row, turn]))))
        found = speculated(
            target.model, drafter, contexts, budget=budget, max_new_tokens=K + 2, batch_size=6
        )
        first = [found[i].rounds[0] for i in range(len(contexts))]
        assert [(one.submitted, one.engine_accepted) for one in first] == expected, policy


def test_the_target_accepts_itself_and_never_its_opposite(target, traces):
    for model, ratio in ((target.model, 1.0), (negated(target.model), 0.0)):
        bank = rollouts.draw(target, drafter_of(model, target), traces, GREEDY, K)
        assert not bank.scored
        assert bool((bank.ratio == ratio).all())
    bank = rollouts.draw(target, drafter_of(target.model, target), traces, SAMPLED, K)
    torch.testing.assert_close(bank.ratio, torch.ones_like(bank.ratio), atol=1e-4, rtol=0)


def test_drafts_are_accepted_as_often_as_the_laws_overlap(target, drafter):
    """The mean of min(1, p/q) over drafts is the mean overlap of the two laws, and coins follow."""
    traces = traces_of(target, prompts_of([3, 17, 9, 30, 1, 5] * 4), SAMPLED)
    replayed = offline(target, traces, drafter, SAMPLED).values()
    alpha = sum(c.overlap_sum for c in replayed) / sum(c.overlap_count for c in replayed)
    banks = [
        rollouts.draw(target, drafter, traces, SAMPLED, 1, starts=23, seed=seed) for seed in (0, 1)
    ]
    assert not torch.equal(banks[0].ratio, banks[1].ratio)
    for bank in banks:  # 552 drafts: three standard errors
        assert float(bank.ratio.mean()) == pytest.approx(alpha, abs=0.06)
        coins = (bank.uniform < bank.ratio).double().mean()
        assert float(coins) == pytest.approx(float(bank.ratio.mean()), abs=0.06)


def test_long_texts_are_read_a_few_at_a_time(target, drafter, monkeypatch):
    """Thirty-two texts of 32,000 tokens are a million."""
    traces = traces_of(target, prompts_of([3, 17, 9, 30, 1, 5]), SAMPLED)
    whole, tokens = rollouts.draw(target, drafter, traces, SAMPLED, K), 200
    monkeypatch.setattr("target.padding.MOST_TOKENS", tokens)
    with Reads(target) as reads:
        parts = rollouts.draw(target, drafter, traces, SAMPLED, K)
    assert tokens / 2 < max(reads.forwards) <= tokens
    for name in ("confidence", "probability", "score", "ratio", "uniform"):
        ours, theirs = getattr(parts, name), getattr(whole, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, equal_nan=True)
    assert torch.equal(parts.ends, whole.ends)
    assert torch.equal(parts.room, whole.room)


# --- counters ---------------------------------------------------------------------------------


def simulated(num_prompts=5, starts=4, K=6, seed=0, room=99, ends=None):
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(6, num_prompts, starts, K, generator=generator, dtype=torch.double)
    prompts = [[i] for i in range(num_prompts)]
    target = target_of(tiny_model("llama"), ())
    traces = traces_of(target, prompts, GREEDY)
    ratio = made[0].sqrt()
    score = made[1].sqrt()
    none = torch.zeros_like(ratio, dtype=torch.bool)
    rooms = torch.full((num_prompts, starts), room)
    return Rollouts(
        traces,
        made[2],
        made[3],
        score,
        ratio,
        made[4],
        none if ends is None else ends,
        rooms,
        [float(len(t.response_ids) - 1) for t in traces],
    )


@pytest.mark.parametrize("policy", ["fixed", "confidence:0.3", "product:0.1", "heuristic",
                                    "head:0.6", "head_last:0.6"])  # fmt: skip
def test_what_is_drafted_is_discarded_or_emitted(policy):
    """N_d = N_disc + N - N_t, exactly; and what `eval.metrics` makes of the counters."""
    bank = simulated()
    counters = bank.counters(make_budget(policy, 6))
    for one in counters:
        discarded = one.submitted - one.accepted
        assert one.submitted == pytest.approx(discarded + one.emitted - one.rounds, abs=1e-9)
        assert one.rounds == len(bank.traces[0].response_ids) - 1  # a round from every place
    row = summarise(counters, draws=0)
    found = rollouts.rates(counters)
    assert found["verification_rate"] == pytest.approx(row.verification_rate)
    assert found["tokens_per_round"] == pytest.approx(row.tokens_per_round)
    share = found["discards_per_token"] / found["submitted_per_round"] * found["tokens_per_round"]
    assert share == pytest.approx(row.discard_rate)


def test_rounds_are_cut_at_the_end_of_text_and_at_the_limit():
    """As the engine's counters are: the accepted tokens after the cut do not count."""
    bank = simulated(room=2)
    assert max(one.emitted / one.rounds for one in bank.counters(Budget(6))) <= 2
    ends = torch.zeros(5, 4, 6, dtype=torch.bool)
    ends[..., 0] = True
    for one in simulated(ends=ends).counters(Budget(6)):
        assert one.emitted == pytest.approx(one.rounds)
        assert one.submitted == pytest.approx(6 * one.rounds)
    free = simulated().counters(Budget(6))
    assert sum(one.emitted for one in free) > 5 * 2


def test_the_heuristic_goes_from_round_to_round():
    bank = simulated()
    bank.ratio[:] = 1.0
    own = [one.submitted / one.rounds for one in bank.counters(make_budget("heuristic", 6))]
    assert own == pytest.approx([(5 + 6 + 6 + 6) / 4] * 5)
    bank.ratio[:] = 0.0
    own = [one.submitted / one.rounds for one in bank.counters(make_budget("heuristic", 6))]
    assert own == pytest.approx([(5 + 4 + 3 + 2) / 4] * 5)


def test_a_larger_threshold_of_the_head_drafts_longer_and_discards_more():
    bank = simulated(num_prompts=40, starts=8)
    found = [rollouts.rates(bank.counters(budget)) for budget in HeadPolicy.grid(6, 2)]
    drafted = [one["submitted_per_round"] for one in found]
    assert drafted == sorted(drafted)
    assert drafted[0] >= 2
    assert found[-1]["discards_per_token"] > found[0]["discards_per_token"]


def test_time_in_place_of_rounds_gives_the_modelled_speedup():
    counters = simulated().counters(make_budget("head:0.6", 6))
    found = rollouts.rates(counters)
    expected = modelled_speedup(found["tokens_per_round"], found["submitted_per_round"], 0.1)
    assert rollouts.speed(counters, 0.1) == pytest.approx(expected)
    timed = rollouts.at_cost(counters, 0.1)
    assert summarise(timed, draws=0).tokens_per_round == pytest.approx(expected)
    assert paired_difference(timed, counters, "tokens_per_round")["diff"] < 0


def test_a_policy_deeper_than_the_rollouts_is_refused():
    with pytest.raises(UserError, match="rollouts hold 6 tokens, a policy needs 7"):
        simulated().counters(Budget(7))


def test_the_matching_confidence_verifies_as_often_as_the_head():
    bank = simulated(num_prompts=40, starts=8)
    bank.confidence = bank.confidence.sqrt()
    head = make_budget("head:0.6", 6, 2)
    threshold = matching(bank, head)
    rates = [
        rollouts.rates(bank.counters(budget))["verification_rate"]
        for budget in (
            head,
            Budget(6, Drafted(threshold)),
            make_budget(f"confidence:{threshold}", 6),
        )
    ]
    assert rates[0] == pytest.approx(rates[1], abs=0.01)
    assert rates[0] != pytest.approx(rates[2], abs=0.01)  # the law's largest is another number


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "prompts"), [(GREEDY, 24), (SAMPLED, 360)])
def test_the_bank_gives_what_replay_gives_exactly(sampling, prompts, target, drafter):
    """From all places alike, or from those of chains of fixed length, it is off by several
    percent. At T=1 both are estimates: their difference has a standard error of one percent with
    360 prompts, of four with 24, whose outcome depended on the processor's rounding."""
    traces = traces_of(target, prompts_of([3, 17, 9, 30, 1, 5] * (prompts // 6)), sampling)
    places = len(traces[0].response_ids) - 1
    bank = rollouts.draw(target, drafter, traces, sampling, K, starts=places)
    for policy in ("fixed", "product:0.3", "head:0.6"):
        budget = make_budget(policy, K)
        exact = OfflineEvaluator(target, traces, sampling, budget, engine_counters=False)
        expected = rollouts.rates(exact(drafter).counters)["tokens_per_round"]
        banked = rollouts.rates(bank.counters(budget))["tokens_per_round"]
        assert banked == pytest.approx(expected, rel=0.01 if sampling is GREEDY else 0.03), policy


@pytest.mark.slow
def test_every_policy_has_rounds_of_its_own(target, drafter):
    """With every place of greedy text the bank's numbers are those of decoding, whatever the
    policy; counted as often as chains of fixed length start there, they are not."""
    prompts = prompts_of([3, 17, 9, 30, 1, 5])
    traces = traces_of(target, prompts, GREEDY)
    places = len(traces[0].response_ids) - 1
    bank = rollouts.draw(target, drafter, traces, GREEDY, K, starts=places)
    assert bank.own is not None
    fixed = bank.own.visits(Budget(K))
    for policy in ("fixed", "product:0.3", "confidence:0.1", "head:0.6", "heuristic"):
        found = speculated(
            target.model, drafter, prompts, budget=make_budget(policy, K), batch_size=1,
            max_new_tokens=places + 1,
        )  # fmt: skip
        rounds = [one for answer in found.values() for one in answer.rounds]
        tokens = sum(one.emitted for one in rounds) / len(rounds)
        visits = bank.own.visits(make_budget(policy, K))
        assert int(visits.sum()) == len(rounds)
        if policy == "heuristic":  # the rollouts between its rounds are not its own
            continue
        rates = rollouts.rates(bank.counters(make_budget(policy, K)))
        assert rates["tokens_per_round"] == pytest.approx(tokens)
        drafted = sum(one.submitted for one in rounds) / len(rounds)
        assert rates["submitted_per_round"] == pytest.approx(drafted)
        if policy != "fixed":
            assert not torch.equal(visits, fixed)


def test_visits_are_those_of_replay_and_of_walks(target, drafter):
    """At T=1: exact where rounds do not depend on those before, else the mean of walks."""
    traces = traces_of(target, prompts_of([3, 17, 9, 30, 1, 5]), SAMPLED)
    own = rollouts.draw(target, drafter, traces, SAMPLED, K).own
    assert own is not None
    for policy in ("fixed", "product:0.3", "head:0.6"):
        budget = make_budget(policy, K)
        exact = OfflineEvaluator(target, traces, SAMPLED, budget, engine_counters=False)
        result = exact(drafter)
        order = {one.prompt_hash: visits for one, visits in zip(
            result.counters, result.visits, strict=True)}  # fmt: skip
        expected = np.stack([order[trace.prompt_hash] for trace in traces])
        np.testing.assert_allclose(own.visits(budget).numpy(), expected, atol=1e-6)
    own.uniform = torch.rand(len(traces), 400, own.uniform.shape[2], dtype=torch.double,
                             generator=torch.Generator().manual_seed(0))  # fmt: skip
    budget = make_budget("product:0.3", K)
    torch.testing.assert_close(own._walked(budget), own.visits(budget), atol=0.1, rtol=0)


def test_places_lie_evenly_and_keep_their_order():
    found = rollouts._places(6, 10, 0.5)
    assert np.bincount(found, minlength=6).tolist() == [0, 2, 2, 2, 2, 2]
    assert found.tolist() == sorted(found.tolist())
    assert rollouts._places(6, 1, 0.0).tolist() == [1]
    assert rollouts._places(6, 1, 0.999).tolist() == [5]
    assert rollouts._places(2, 3, 0.999).tolist() == [1, 1, 1]


def test_text_of_another_sampling_says_nothing_about_where_rounds_start(target, drafter):
    traces = traces_of(target, prompts_of([3, 17]), SAMPLED)
    traces[1] = dataclasses.replace(traces[1], temperature=0.5)
    own = rollouts.draw(target, drafter, traces, SAMPLED, K).own
    assert own is not None
    for policy in ("fixed", "product:0.3", "heuristic"):
        same, other = own.visits(make_budget(policy, K))
        assert other.tolist() == [0.0] + [1.0] * (len(traces[1].response_ids) - 1)
        assert same[:2].tolist() == [0.0, 1.0]
        assert 1 < same.sum() < other.sum()


@pytest.mark.parametrize("cost_ratio", [0.02, 0.3])
def test_a_familys_best_policy_has_the_highest_modelled_speedup(cost_ratio):
    bank = simulated()
    for family in ("fixed", "head"):
        chosen = best(bank, family, 1, cost_ratio)
        speeds = {
            budget.policy + str(budget.max_tokens): rollouts.speed(
                bank.counters(budget), cost_ratio
            )
            for budget in POLICIES[family].grid(bank.K)
        }
        assert speeds[chosen.policy + str(chosen.max_tokens)] == max(speeds.values())
        assert min(speeds.values()) < max(speeds.values())


def test_a_step_that_only_judges_costs_what_a_drafting_step_costs():
    bank = simulated()
    free, paid = (bank.counters(make_budget(policy, 6)) for policy in ("head:0.6", "head_last:0.6"))
    assert sum(one.judging for one in free) == 0
    lengths = torch.stack([bank._lengths(make_budget("head_last:0.6", 6), t) for t in range(4)], 1)
    stopped = (lengths < 6).double().mean(1)
    assert [one.judging / one.rounds for one in paid] == pytest.approx(stopped.tolist())
    found = rollouts.rates(paid)
    steps = found["submitted_per_round"] + float(stopped.mean())
    assert found["draft_steps_per_round"] == pytest.approx(steps)
    expected = modelled_speedup(found["tokens_per_round"], steps, 0.1)
    assert rollouts.speed(paid, 0.1) == pytest.approx(expected)
    timed = rollouts.at_cost(paid, 0.1)
    assert summarise(timed, draws=0).tokens_per_round == pytest.approx(expected)


# --- the tabular oracle -----------------------------------------------------------------------


def oracle_bank(seed, size=32, num_prompts=150, starts=6, K=16):
    """Rollouts of a random chain whose sharpness and draft error differ from state to state; the
    head is the exact chance of acceptance."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.double)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    sharp, wrong = 0.5 + 4 * rand(size, 1), 3 * rand(size, 1) ** 2
    logits = randn(size, size)
    p = (sharp * logits).softmax(-1)
    q = (sharp * (logits + wrong * randn(size, size))).softmax(-1)
    state = torch.randint(size, (num_prompts * starts,), generator=generator)
    ratios, confidences, probabilities = [], [], []
    for _ in range(K):
        drawn = torch.multinomial(q[state], 1, generator=generator)[:, 0]
        mass = q[state, drawn]
        ratios.append((p[state, drawn] / mass).clamp(max=1))
        confidences.append(q[state].amax(-1))
        probabilities.append(mass)
        state = drawn
    shape = (num_prompts, starts, K)
    ratio, confidence, probability = (
        torch.stack(one, 1).view(shape) for one in (ratios, confidences, probabilities)
    )
    one = simulated(num_prompts=1, starts=1).traces[0]
    traces = [dataclasses.replace(one, prompt_ids=[i]) for i in range(num_prompts)]
    return Rollouts(
        traces, confidence, probability, ratio, ratio, rand(*shape),
        torch.zeros(shape, dtype=torch.bool), torch.full(shape[:2], 99), [1.0] * num_prompts,
    )  # fmt: skip


@pytest.mark.slow
def test_an_exact_head_gains_over_every_fixed_length():
    """Five chains: at least 5 % more modelled throughput in the mean, at both costs."""
    banks = [oracle_bank(seed) for seed in range(5)]
    for cost in (0.05, 0.1):
        gains = []
        for bank in banks:
            fixed, head = (
                rollouts.speed(bank.counters(best(bank, family, 2, cost)), cost)
                for family in ("fixed", "head")
            )
            gains.append(head / fixed - 1)
        assert sum(gains) / 5 >= 0.05, (cost, gains)
        assert min(gains) > 0
