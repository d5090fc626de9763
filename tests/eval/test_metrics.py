"""Metrics against hand-computed numbers, and their intervals against known laws."""

import numpy as np
import pytest

from eval.counters import (
    PromptCounters,
    check_invariants,
    counters_from_rounds,
    range_bounds,
    range_of,
)
from eval.metrics import (
    bootstrap_p,
    hierarchical_difference,
    holm,
    paired_difference,
    per_domain,
    per_position,
    summarise,
)
from eval.rounds import Round
from eval.speed_model import (
    BATCH_SIZES,
    best_K,
    best_K_at,
    expected_tokens_iid,
    expected_tokens_positions,
    goodput,
    mbsu,
    modelled_speedup,
    roofline,
)
from trainer.errors import UserError


def a_round(submitted, accepted, emitted, reject=None, *, engine=None, truncated=False, prompt="p"):
    return Round(
        prompt_hash=prompt,
        submitted=submitted,
        depth=submitted,
        accepted=accepted,
        emitted=emitted,
        first_reject_pos=reject,
        draft_forwards=submitted,
        draft_tokens=submitted,
        t_draft=0.0,
        t_verify=0.0,
        t_other=0.0,
        ctx_len=10,
        overlap=[0.5] * submitted,
        truncated=truncated,
        engine_accepted=accepted if engine is None else engine,
    )


# K = 3: all accepted; second rejected; first rejected; no drafts; all accepted but cut after one
HAND_ROUNDS = [
    a_round(3, 3, 4),
    a_round(3, 1, 2, 2),
    a_round(3, 0, 1, 1),
    a_round(0, 0, 1),
    a_round(3, 1, 1, None, engine=3, truncated=True),
]


def chain(rng, alpha, K, rounds, prompt):
    """Simulated counters of one prompt with i.i.d. acceptance."""
    accepted = np.minimum(rng.geometric(1 - alpha, size=rounds) - 1, K)
    reach = [float((accepted >= i).sum()) for i in range(1, K + 1)]
    return PromptCounters(
        prompt,
        "d",
        K,
        rounds=rounds,
        emitted=float(accepted.sum() + rounds),
        submitted=K * rounds,
        accepted=float(accepted.sum()),
        rejections=float((accepted < K).sum()),
        reach=reach,
        tested=[float(rounds), *reach[:-1]],
    )


def test_counters_of_hand_made_rounds():
    c = counters_from_rounds(HAND_ROUNDS, "p", "code", 3)
    assert (c.rounds, c.truncated_rounds, c.emitted) == (5, 1, 9)
    assert (c.submitted, c.accepted, c.rejections) == (12, 5, 2)
    assert c.reach == [3, 1, 1]
    assert c.tested == [4, 2, 1]  # the cut round decides position 1 only
    assert (c.engine_drafts, c.engine_drafted, c.engine_accepted) == (4, 12, 7)
    assert c.engine_accepted_per_position == [3, 2, 2]
    assert (c.overlap_sum, c.overlap_count) == (6.0, 12)
    check_invariants(HAND_ROUNDS, output_length=10)


def test_summary_of_hand_made_rounds():
    row = summarise([counters_from_rounds(HAND_ROUNDS, "p", "code", 3)], draws=100, seed=0)
    assert row.num_prompts == 1
    assert row.num_rounds == 5
    assert row.tokens_per_round == 9 / 5
    assert row.accepted_per_round == 1.0 == sum(row.reach_pos)
    assert row.draft_acceptance_rate == 5 / 12
    assert row.discard_rate == 7 / 12
    assert row.verification_rate == 5 / 9
    assert row.alpha == 0.5
    assert row.alpha_hat == 5 / 7
    assert row.alpha_pos == [3 / 4, 1 / 2, 1.0]
    assert row.engine_tokens_per_round == 1 + 7 / 4
    assert row.tokens_per_round_ci95 is None  # one prompt says nothing about the spread


def test_undefined_metrics_are_null():
    row = summarise([PromptCounters("p", "d", 2), PromptCounters("q", "d", 2)], draws=10, seed=0)
    for name in ("tokens_per_round", "alpha", "alpha_hat", "greedy_match", "speedup"):
        assert getattr(row, name) is None
        assert getattr(row, f"{name}_ci95") is None
    for name in ("identical_to_plain", "plain_tokens_per_s", "engine_tokens_per_round"):
        assert getattr(row, name) is None
    assert row.alpha_pos == [None, None] == row.reach_pos
    with pytest.raises(UserError, match="no prompts"):
        summarise([], draws=10, seed=0)


def test_ratio_of_sums_is_the_headline_and_the_prompt_mean_stands_beside_it():
    short = PromptCounters("a", "d", 1, rounds=1, emitted=2)
    long = PromptCounters("b", "d", 1, rounds=9, emitted=9)
    row = summarise([short, long], draws=10, seed=0)
    assert row.tokens_per_round == 1.1
    assert row.tokens_per_round_prompt_mean == 1.5


def test_speedup_uses_prompts_timed_both_ways():
    timed = PromptCounters(
        "a", "d", 1, plain_s=4, plain_tokens=40, speculative_s=2, speculative_tokens=50
    )
    half = PromptCounters("b", "d", 1, plain_s=100, plain_tokens=1)
    row = summarise([timed, half, PromptCounters("c", "d", 1, identical=True)], draws=50, seed=0)
    assert row.speedup == 2.5
    assert row.speculative_tokens_per_s == 25
    assert row.identical_to_plain == 1.0
    assert row.speedup_ci95 is None  # only one prompt was timed


@pytest.mark.parametrize(
    ("rounds", "length"),
    [
        (HAND_ROUNDS, 9),
        ([a_round(3, 1, 3, 2)], 4),
        ([a_round(3, 1, 1, None)], 2),
        ([a_round(2, 2, 3, engine=1)], 4),
        ([a_round(3, 1, 2, 1)], 3),
    ],
)
def test_logs_that_do_not_add_up_are_caught(rounds, length):
    with pytest.raises(AssertionError):
        check_invariants(rounds, length)


def test_rejection_cut_away_is_no_rejection():
    cut = a_round(3, 1, 1, 3, engine=2, truncated=True)
    check_invariants([cut], 2)
    c = counters_from_rounds([cut], "p", "d", 3)
    assert c.rejections == 0
    assert c.tested == [1, 0, 0]


def test_bootstrap_interval_covers_the_truth_and_is_seeded():
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(100):
        prompts = [PromptCounters(str(i), "d", 4, rounds=10, emitted=e)
                   for i, e in enumerate(rng.normal(25, 4, size=40))]  # fmt: skip
        low, high = summarise(prompts, draws=300, seed=1).tokens_per_round_ci95
        inside += low <= 2.5 <= high
    assert inside >= 86  # 95 % nominal; four binomial standard deviations below
    assert summarise(prompts, draws=300, seed=1) == summarise(prompts, draws=300, seed=1)
    other = summarise(prompts, draws=300, seed=2).tokens_per_round_ci95
    assert other != [low, high]


@pytest.mark.parametrize(
    ("emitted", "interval"),
    [
        # all draws are one prompt in 1/27 = 3.7 % of the resamples, more than 2.5 %
        ([1, 2, 4], [1, 4]),
        # all draws are of one half in 1/64 = 1.6 % of them, all but one in 10.9 %
        ([1, 1, 1, 4, 4, 4], [1.5, 3.5]),
    ],
)
def test_an_interval_leaves_out_a_fortieth_at_each_end(emitted, interval):
    prompts = [PromptCounters(str(i), "d", 4, rounds=1, emitted=e) for i, e in enumerate(emitted)]
    # 10,000 resamples: these shares are known to 0.2 %
    assert summarise(prompts, draws=10_000).tokens_per_round_ci95 == interval


def test_prompts_that_differ_raise_alpha_pos_and_beat_the_closed_form():
    """Per-prompt alpha 0.70 +- 0.20, K = 6: survivors of later positions are the easy prompts."""
    rng = np.random.default_rng(0)
    alphas = np.clip(rng.normal(0.7, 0.2, size=3000), 0.01, 0.99)
    row = summarise([chain(rng, a, 6, 50, str(i)) for i, a in enumerate(alphas)], draws=0)
    assert row.alpha_pos == sorted(row.alpha_pos)
    assert row.alpha_pos[0] == pytest.approx(0.69, abs=0.01)
    assert row.alpha_pos[-1] == pytest.approx(0.86, abs=0.015)
    assert row.tokens_per_round == pytest.approx(3.42, abs=0.06)
    assert expected_tokens_iid(float(alphas.mean()), 6) == pytest.approx(3.0, abs=0.05)
    assert expected_tokens_positions(row.alpha_pos) == pytest.approx(row.tokens_per_round)
    assert row.alpha_hat > alphas.mean()  # biased upward when prompts differ


def two_drafters(num_prompts=60, gain=0.05, seed=0):
    rng = np.random.default_rng(seed)
    alphas = np.clip(rng.normal(0.6, 0.15, size=num_prompts), 0.05, 0.95)
    after = [chain(rng, min(a + gain, 0.97), 4, 80, str(i)) for i, a in enumerate(alphas)]
    before = [chain(rng, a, 4, 80, str(i)) for i, a in enumerate(alphas)]
    return after, before


def test_paired_interval_is_narrower_than_the_unpaired_one():
    after, before = two_drafters()
    paired = paired_difference(after, list(reversed(before)), "tokens_per_round", 500, 1)
    a, b = (summarise(c, draws=500, seed=1).tokens_per_round_ci95 for c in (after, before))
    unpaired_width = np.hypot(a[1] - a[0], b[1] - b[0])
    assert paired["ci95"][1] - paired["ci95"][0] < 0.6 * unpaired_width
    assert paired["ci95"][0] > 0
    assert paired["p"] < 0.01
    assert paired["num_prompts"] == 60
    assert paired["metric"] == "tokens_per_round"
    flipped = paired_difference(before, after, "tokens_per_round", 500, 1)
    assert flipped["diff"] == pytest.approx(-paired["diff"])
    same = paired_difference(after, after, "alpha_hat", 100, 1)
    assert same["diff"] == 0
    assert same["ci95"] == [0, 0]
    assert same["p"] == 1.0


def test_different_prompts_and_unknown_metrics_are_refused():
    after, before = two_drafters(5)
    with pytest.raises(UserError, match="same prompts"):
        paired_difference(after, before[:-1], "tokens_per_round", 10, 0)
    with pytest.raises(UserError, match="one of tokens_per_round"):
        paired_difference(after, before, "tau", 10, 0)
    with pytest.raises(UserError, match="same prompts"):
        hierarchical_difference([(after, before), (after[1:], before[1:])], "alpha_hat", 10, 0)
    assert paired_difference(after, before, "speedup", 10, 0)["diff"] is None  # nothing was timed


def test_seeds_that_disagree_widen_the_interval():
    pairs = [two_drafters(gain=gain, seed=4) for gain in (-0.1, 0.0, 0.1, 0.2)]
    row = hierarchical_difference(pairs, "tokens_per_round", 500, 1)
    assert row["seeds"] == 4
    assert len(row["diff_per_seed"]) == 4
    assert row["diff"] == pytest.approx(np.mean(row["diff_per_seed"]))
    one = paired_difference(*pairs[3], "tokens_per_round", 500, 1)
    assert row["ci95"][1] - row["ci95"][0] > 2 * (one["ci95"][1] - one["ci95"][0])
    assert row["ci95"][0] < 0 < one["ci95"][0]


def test_same_seed_twice_keeps_the_spread_of_the_prompts():
    pair = two_drafters()
    once = paired_difference(*pair, "tokens_per_round", 2000, 1)
    twice = hierarchical_difference([pair, pair], "tokens_per_round", 2000, 1)
    width = [row["ci95"][1] - row["ci95"][0] for row in (once, twice)]
    assert width[1] == pytest.approx(width[0], rel=0.1)


def test_holm_and_bootstrap_p():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert bootstrap_p(np.arange(1, 100.0)) == pytest.approx(2 / 100)
    assert bootstrap_p(np.array([-1.0, 1.0])) == 1.0


def test_domains_report_mean_and_worst():
    counters = [
        PromptCounters("a", "code", 1, rounds=10, emitted=20),
        PromptCounters("b", "prose", 1, rounds=10, emitted=12),
        PromptCounters("c", "prose", 1, rounds=30, emitted=36),
    ]
    table = per_domain(counters)
    assert table["domains"]["code"]["tokens_per_round"] == 2.0
    assert table["domains"]["prose"]["num_prompts"] == 2
    assert table["mean"]["tokens_per_round"] == pytest.approx(1.6)
    assert table["worst"]["tokens_per_round"] == {"domain": "prose", "value": 1.2}
    assert table["worst"]["alpha"] is None
    drawn = per_domain(counters, draws=200)["domains"]
    assert drawn["code"]["tokens_per_round_ci95"] is None  # of one prompt
    assert drawn["prose"]["tokens_per_round_ci95"] == [1.2, 1.2]


def test_tokens_per_round_stand_by_the_range_in_which_rounds_begin():
    """Ranges double: 0-31, 32-63, 64-127, ...; a round belongs to the one that it begins in."""
    assert [range_of(t) for t in (1, 31, 32, 63, 64, 127, 128, 1 << 40)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        11,
    ]
    assert [range_bounds(i) for i in (0, 1, 2, 11)] == [(0, 31), (32, 63), (64, 127), (32768, None)]
    rounds = [a_round(3, 2, 3, 3)] * 10 + [a_round(3, 0, 1, 1)] + [a_round(3, 3, 4)] * 2
    one = counters_from_rounds(rounds, "p", "code", 3)  # begin at 1, 4, ..., 28, 31, 32, 36
    other = PromptCounters("q", "code", 3, rounds_from=[4.0] * 12, emitted_from=[8.0] * 12)
    first, second = per_position([one])
    assert (first["first"], first["last"], first["num_rounds"]) == (0, 31, 11)
    assert first["tokens_per_round"] == pytest.approx(31 / 11)
    assert (second["first"], second["last"], second["num_rounds"]) == (32, 63, 2)
    assert second["tokens_per_round"] == 4.0
    assert second["tokens_per_round_ci95"] is None
    both = per_position([one, other], draws=500)
    assert len(both) == 12
    assert both[1]["tokens_per_round"] == pytest.approx(16 / 6)
    assert both[1]["tokens_per_round_ci95"] == [2.0, 4.0]
    assert both[11]["last"] is None


BEST = {
    0.02: [(1.79, 5), (2.17, 6), (2.76, 8), (3.82, 11), (6.37, 19)],
    0.05: [(1.63, 3), (1.92, 4), (2.35, 6), (3.09, 8), (4.67, 14)],
    0.10: [(1.46, 2), (1.67, 3), (1.98, 4), (2.47, 6), (3.43, 10)],
    0.20: [(1.25, 2), (1.40, 2), (1.58, 3), (1.87, 4), (2.37, 7)],
    0.30: [(1.15, 1), (1.23, 1), (1.37, 2), (1.55, 3), (1.87, 5)],
}


@pytest.mark.parametrize("cost_ratio", BEST)
def test_best_speedup_of_the_closed_form(cost_ratio):
    """The best K is flat: the K tabulated may be any whose speed-up agrees to two digits."""
    for alpha, (speedup, K) in zip((0.5, 0.6, 0.7, 0.8, 0.9), BEST[cost_ratio], strict=True):
        found_K, found = best_K(alpha, cost_ratio)
        assert found == pytest.approx(speedup, abs=0.005), (alpha, cost_ratio)
        tabulated = modelled_speedup(expected_tokens_iid(alpha, K), K, cost_ratio)
        assert 0 <= found - tabulated < 0.005
        assert abs(found_K - K) <= 1


def test_speed_model_formulas():
    assert [best_K(0.6, c)[0] for c in (0.01, 0.02, 0.05, 0.1)] == [7, 6, 4, 3]
    assert best_K(0.2, 0.3) == (0, 1.0)  # alpha below the cost: do not speculate
    assert best_K([0.9, 0.1], 0.05)[0] == 1
    assert best_K(0.9, 0.05, v=lambda n: float(n))[0] == 0  # compute-bound
    assert expected_tokens_iid(1.0, 4) == 5
    assert expected_tokens_iid(0.0, 4) == 1
    assert expected_tokens_iid(0.7, 6) == pytest.approx(3.05, abs=0.01)
    assert expected_tokens_positions([0.7] * 6) == pytest.approx(expected_tokens_iid(0.7, 6))
    assert modelled_speedup(3.0, 4, 0.1) == pytest.approx(3 / 1.4)
    assert modelled_speedup(3.0, 4, 0.1, 1.2, 0.4) == pytest.approx(1.5)
    assert mbsu(3.0, 4, 0.25) == 1.5


def test_goodput_of_plain_decoding_grows_with_the_batch_up_to_the_knee():
    assert [goodput(1.0, 0, 0, 0.1, batch) for batch in (1, 64, 200, 400)] == [1, 64, 200, 200]
    assert [roofline(n, knee=100) for n in (1, 100, 250)] == [1, 1, 2.5]


def test_goodput_at_batch_one_is_the_modelled_speedup():
    assert goodput(3.0, 4, 4, 0.1, 1) == pytest.approx(modelled_speedup(3.0, 4, 0.1))
    # 65 tokens to verify, 16 to draft on in each of 4 steps: both past a knee of 10
    by_hand = 2 * 3.0 / (4 * 0.1 * 32 / 10 + 130 / 10)
    assert goodput(3.0, 4, 64, 0.1, 2, knee=10) == pytest.approx(by_hand)


@pytest.mark.parametrize("knee", [8, 200])
@pytest.mark.parametrize("batch", BATCH_SIZES)
def test_best_K_of_a_batch_has_the_highest_goodput(batch, knee):
    alpha_pos = [0.8, 0.75, 0.7, 0.72, 0.7]
    K, ratio = best_K_at(alpha_pos, 0.05, batch, knee)
    plain = goodput(1.0, 0, 0, 0.05, batch, knee)
    tokens = [expected_tokens_positions(alpha_pos[:k]) for k in range(6)]
    all_K = [goodput(tokens[k], k, k, 0.05, batch, knee) / plain for k in range(6)]
    assert ratio == pytest.approx(max(all_K))
    assert all_K[K] == pytest.approx(ratio)


def test_best_K_falls_with_the_batch_and_reaches_zero():
    found = [best_K_at([0.6] * 20, 0.05, batch)[0] for batch in (1, 64, 100, 400)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (4, 0)


def test_the_turns_of_a_conversation_are_one_unit():
    rng = np.random.default_rng(0)

    def of(name, accepted):
        return PromptCounters(name, "chat", 4, rounds=10, emitted=10 + accepted, submitted=40)

    counts = rng.integers(0, 40, 30)
    first = [of(f"{i:04x}", n) for i, n in enumerate(counts)]
    same = [of(f"{i:04x}-1", n) for i, n in enumerate(counts)]  # a turn that is like the first
    alone, both = (summarise(rows, draws=500) for rows in (first, first + same))
    assert both.num_prompts == alone.num_prompts == 30
    assert both.tokens_per_round_ci95 == pytest.approx(alone.tokens_per_round_ci95)
    zero = [of(c.prompt_hash, 0) for c in first + same]
    assert paired_difference(first + same, zero, "tokens_per_round")["num_prompts"] == 30
