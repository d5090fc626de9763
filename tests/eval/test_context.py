"""Texts that are longer than what a drafter or a target knows: rounds without drafts, and costs."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig

from drafters.causal_lm import CausalLMDrafter
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.round import Budget
from drafters.trees.dynamic import DynamicTree
from drafters.trees.static import StaticTree
from eval.costs import cost_of, timed_context
from eval.engine import SpeculativeDecoder
from eval.offline import OfflineEvaluator
from eval.policies.rollouts import draw
from eval.replay import TreeReplay
from eval.report.tables import notes
from target.cache import CachedModel
from target.decode import Request
from target.rotary import served_context
from target.sampling import Sampling
from tests.eval.test_measure import COST, bench_of
from tests.eval.test_offline import K, decoded, numbers, traces_of
from tests.helpers.eagle import build_eagle
from tests.helpers.heads import BUSHY, GREEDY, PROMPTS, fitted
from tests.helpers.tiny import generated
from trainer.errors import UserError

CONTEXT = 24  # of the head: some prompts leave room for rounds, others do not
SAMPLED = Sampling(1.0)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def whole(target):
    settings = Eagle3Settings([0, 1, "final_norm"], target.hidden_size)
    return fitted(build_eagle(target, settings), target, K)


@pytest.fixture(scope="module")
def head(whole, target):
    """The same head with fewer positions."""
    config = LlamaConfig(**{**whole.config.to_dict(), "max_position_embeddings": CONTEXT})
    short = Eagle3Drafter(whole.settings, config, target)
    short.load_state_dict(whole.state_dict())
    return short.eval()


@pytest.fixture(scope="module")
def traces(target):
    return traces_of(target, PROMPTS, GREEDY)


def test_a_round_that_ends_beyond_the_context_drafts_nothing(target, head, traces):
    decoder = SpeculativeDecoder(
        CachedModel(target.model), head, sampling=GREEDY, budget=Budget(K), eos_ids=(),
        max_new_tokens=24, batch_size=3,
    )  # fmt: skip
    rounds, accepted = [], 0
    for one in decoder.run([Request(p, 0, GREEDY, i) for i, p in enumerate(PROMPTS)]):
        assert one.response_ids == generated(target.model, one.request.prompt_ids, 24)
        rounds += one.rounds
    for one in rounds:
        drafts = one.ctx_len + K <= CONTEXT
        assert one.submitted == (K if drafts else 0)
        assert drafts or (one.depth, one.emitted, one.rejected) == (0, 1, False)
        accepted += one.accepted
    assert {one.submitted for one in rounds} == {0, K}
    assert accepted > 10


def test_counters_of_chains_are_those_of_decoding(target, head, traces):
    real, _ = decoded(target, traces, head, GREEDY)
    result = OfflineEvaluator(target, traces, GREEDY, Budget(K))(head)
    for one in result.counters:
        assert numbers(one) == numbers(real[one.prompt_hash])
        # alpha is of the positions at which something is drafted
        prompt = len(PROMPTS[int(one.prompt_hash)])
        assert one.overlap_count == sum(1 for t in range(1, 24) if prompt + t + K <= CONTEXT)
    drafts, rounds = (
        sum(getattr(c, n) for c in real.values()) for n in ("engine_drafts", "rounds")
    )
    assert 0 < drafts < rounds


def test_alpha_by_depth_is_of_rounds_that_draft(target, head, whole, traces):
    """Of the whole head on the positions that are left."""
    counts = [result.alpha_by_depth for result in (
        OfflineEvaluator(target, traces, GREEDY, Budget(K))(one) for one in (head, whole)
    )]  # fmt: skip
    assert counts[0] != counts[1]
    ids, wanted, number = target, [0.0] * K, [0] * K
    for trace in traces:
        text = torch.tensor([trace.prompt_ids + trace.response_ids])
        outputs = ids.outputs(text, layers=whole.target_layers)
        for depth in range(1, K + 1):
            with torch.no_grad():
                best = whole.draft_logits(text, outputs, depth)[0].argmax(-1)
            for place in range(len(trace.prompt_ids) + depth, text.shape[1]):
                if place - depth + 1 + K <= CONTEXT:
                    wanted[depth - 1] += int(best[place - 1] == text[0, place])
                    number[depth - 1] += 1
    found = [w / n for w, n in zip(wanted, number, strict=True)]
    assert counts[0] == pytest.approx(found)


@pytest.mark.parametrize("shape", [BUSHY, DynamicTree(4, 3, 2)], ids=["static", "dynamic"])
def test_counters_of_trees_are_those_of_decoding(target, head, traces, shape):
    budget = Budget(shape.depth, tree=shape)
    real, _ = decoded(target, traces, head, GREEDY, budget)
    for one in TreeReplay(target, traces, GREEDY, budget)(head):
        assert numbers(one) == numbers(real[one.prompt_hash])
    drafts, rounds = (
        sum(getattr(c, n) for c in real.values()) for n in ("engine_drafts", "rounds")
    )
    assert 0 < drafts < rounds


def test_rollouts_begin_where_a_whole_draft_fits(target, head, whole, traces):
    bank = draw(target, head, traces, GREEDY, K, starts=24)  # more than there are places
    assert 0 < len(bank.traces) < len(traces)
    ends = []
    for trace, room, rounds in zip(bank.traces, bank.room.tolist(), bank.rounds, strict=True):
        begins = [len(trace.prompt_ids) + len(trace.response_ids) - one for one in room]
        assert all(head.fits(one, K) for one in begins)
        ends.append(max(begins) + K)
        assert rounds == min(CONTEXT - K - len(trace.prompt_ids), len(trace.response_ids) - 1)
    assert max(ends) == CONTEXT
    assert len(draw(target, whole, traces, GREEDY, K, starts=3).traces) == len(traces)
    long = [t for t in traces if len(t.prompt_ids) > CONTEXT - K]
    with pytest.raises(UserError, match=f"in the first {CONTEXT - K} positions"):
        draw(target, head, long, GREEDY, K)


def test_expected_counters_hold_rounds_without_drafts(target, head):
    """Sampled: one token for each round that begins beyond the context, whatever the coins say."""
    drawn = traces_of(target, PROMPTS, SAMPLED)
    for one in OfflineEvaluator(target, drawn, SAMPLED, Budget(K))(head).counters:
        prompt = len(PROMPTS[int(one.prompt_hash)])
        alone = sum(1 for t in range(1, 24) if prompt + t + K > CONTEXT + K)
        assert one.rounds - one.engine_drafts >= alone - 1e-9
        assert one.engine_drafted == pytest.approx(K * one.engine_drafts)


@pytest.mark.parametrize("tree", [None, BUSHY])
def test_a_row_says_which_share_of_its_rounds_drafts_nothing(target, head, whole, tree):
    drawn = traces_of(target, PROMPTS, GREEDY)
    bench = bench_of(target, drawn, 0.0)
    budget = None if tree is None else Budget.of(tree)
    rows = [bench.decoded("after", one, COST, budget).row for one in (head, whole)]
    if tree is None:
        rows += [bench.replayed("after", one, COST).row for one in (head, whole)]
    else:
        rows += [bench.replayed_tree("after", one, COST, budget).row for one in (head, whole)]
    for short, full in (rows[:2], rows[2:]):
        assert full.beyond_context is None
        share = 1 - short.engine_drafts / short.num_rounds
        assert short.beyond_context == {"context": CONTEXT, "share": pytest.approx(share)}
        (said,) = [one for one in notes([short]) if "draft nothing" in one]
        assert f"{share:.1%} of its rounds" in said
        assert short.mbsu > short.tokens_per_round / (full.tokens_per_round / full.mbsu)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32,
             "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            64,
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
    ],
)  # fmt: skip
def test_the_positions_of_a_head_are_those_that_vllm_gives_it(rope, positions):
    config = LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})
    assert served_context(config) == positions


# --- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [12, 40, 64])
@pytest.mark.parametrize("kind", ["eagle3", "causal_lm"])
def test_costs_are_timed_behind_as_many_tokens_as_the_models_see(seen, kind, tiny_target):
    """GPT-2 has a table of positions, beyond which there is none."""
    target = tiny_target("gpt2", layers=4, max_position_embeddings=seen)
    if kind == "eagle3":
        drafter = build_eagle(target, Eagle3Settings([0, 1, 2], target.hidden_size))
    else:
        drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    wide = StaticTree(tuple((i,) for i in range(seen)))  # more nodes than positions
    for budget in (Budget(3), Budget.of(wide)):
        cost = cost_of(drafter, target, budget)
        behind = max(4, min(64, seen - budget.max_tokens - 1))
        assert cost.source.endswith(f"context {behind}")
        assert cost.round_time > 0


def test_costs_of_a_drafter_that_sees_less_than_the_target(target, tiny_target):
    short = tiny_target("gpt2", max_position_embeddings=20)
    drafter = copy.copy(CausalLMDrafter.of_target(short))
    assert timed_context(drafter, target, 3) == 16
    assert timed_context(CausalLMDrafter.of_target(target), target, 3) == 64
    assert cost_of(drafter, target, Budget(3)).round_time > 0
