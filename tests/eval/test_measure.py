"""What a row is measured on: prompts, costs, and transformers' own decoding beside ours."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters.causal_lm import CausalLMDrafter
from drafters.round import Budget
from eval import costs, measure
from eval.config import EvalConfig
from eval.costs import Cost
from eval.engine import SpeculativeDecoder
from eval.measure import Bench
from eval.plain import next_token_loss
from eval.policies.table import make_budget
from eval.report.rows import label
from eval.report.tables import notes
from target.cache import CachedModel
from target.model import Target
from target.sampling import Sampling
from tests.eval.test_offline import drafter_of, offline, traces_of
from tests.helpers.tiny import perturbed, prompts_of
from trainer.errors import RunFault

K = 4
COST = Cost(0.4, 1.1, 0.4, 0.4)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.mark.parametrize("policy", ["heuristic", "confidence:0.999", "product:0.999"])
def test_drafting_costs_what_a_whole_round_costs_whatever_the_rule(target, policy, monkeypatch):
    """The rule would stop at once on the text that is timed, and a step look 8 times as cheap."""
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    drafted, real = [], drafter.propose

    def propose(state, budget):
        tree = real(state, budget)
        drafted.append(int(tree.tokens.shape[1]))
        return tree

    monkeypatch.setattr(drafter, "propose", propose)
    costs.cost_of(drafter, target, make_budget(policy, 8))
    assert set(drafted) == {8}
    drafted.clear()
    costs.draft_seconds(drafter, target, make_budget(policy, 8), costs.CONTEXT)
    assert min(drafted) < 8  # control: it does stop there


def test_what_is_timed_comes_from_every_domain():
    domains = ["code"] * 5 + ["math"] * 3 + ["prose"]
    assert measure.spread(domains, 4) == [0, 1, 5, 8]
    assert measure.spread(domains, 99) == list(range(9))
    assert measure.spread(["a", "b", "c"] * 4, 6) == list(range(6))  # mixed ones: the first
    assert measure.spread([], 4) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_has_none_of_what_a_generation_config_adds(target, temperature, monkeypatch):
    prompt, sampling = [5, 6, 7, 5, 6, 7], Sampling(temperature)

    def plain():
        torch.manual_seed(0)
        return measure.plain_generate(target, prompt, sampling, 16)

    expected = plain()
    config = target.model.generation_config
    monkeypatch.setattr(config, "repetition_penalty", 5.0)
    monkeypatch.setattr(config, "no_repeat_ngram_size", 1)
    assert plain() == expected


# --- the rows of a bench -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(target):
    return traces_of(target, prompts_of([3, 17, 9, 5] * 4), Sampling(1.0))


def bench_of(target, traces, sampling=1.0, **settings):
    config = EvalConfig(
        max_new_tokens=24, timing_prompts=0, bootstrap_draws=20, K=K, **settings
    )  # fmt: skip
    return Bench(target, traces, Sampling(sampling), config, {"name": "tiny", "hash": ""})


@pytest.mark.slow
def test_a_drafter_has_its_own_temperature_in_replay_and_in_decoding(target, drawn):
    """Both see the tempered distribution; at T=0 there is none."""
    drafter = drafter_of(perturbed(target.model, 0.1), target)
    tempered = Sampling(0.4)
    bench = bench_of(target, drawn, draft_temperature=0.4)
    plain = bench_of(target, drawn)
    row = bench.replayed("after", drafter, COST).row
    expected = offline(target, drawn, drafter, Sampling(1.0), draft_sampling=tempered)
    emitted, rounds = (sum(getattr(c, n) for c in expected.values()) for n in ("emitted", "rounds"))
    assert row.tokens_per_round == pytest.approx(emitted / rounds)
    other = plain.replayed("after", drafter, COST).row
    assert abs(row.alpha - other.alpha) > 0.01
    assert (row.draft_temperature, row.lossless) == (0.4, True)
    assert other.draft_temperature is None
    assert label(row) == f"after (K {K}, drafted at T=0.4)"
    real = bench.decoded("after", drafter, COST)
    requests = bench.requests()
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=Sampling(1.0), draft_sampling=tempered,
        budget=Budget(K), eos_ids=target.eos_ids, max_new_tokens=24, batch_size=8,
    )  # fmt: skip
    direct = {one.request.tag: one.rounds for one in decoder.run(requests)}
    assert sum(len(own) for own in direct.values()) == real.row.num_rounds
    assert real.row.draft_temperature == 0.4
    assert EvalConfig(draft_temperature=0.4).draft_sampling(Sampling(0.0)) == Sampling(0.0)


def test_a_target_that_gives_nan_has_no_next_token_loss(tiny_folder, drawn, monkeypatch):
    """Nor on a GPU, where the loss in chunks does not look."""
    monkeypatch.setattr("trainer.chunked.shows_numbers_at_once", lambda device: False)
    broken = Target.load(str(tiny_folder("llama")))
    with torch.no_grad():
        broken.head.weight[0, 0] = torch.nan
    with pytest.raises(RunFault, match="logits of the target contain NaN or Inf"):
        next_token_loss(broken, drawn)


def test_a_lenient_row_is_decoded_and_carries_its_quality(target, drawn):
    drafter = drafter_of(perturbed(target.model, 0.3), target)
    lossy, exact = (bench_of(target, drawn, verifier=v) for v in ("lenient:0.2", "token"))
    assert lossy.replayed("after", drafter, COST).row.verifier == "token"
    row, other = (one.decoded("after", drafter, COST).row for one in (lossy, exact))
    assert (row.verifier, row.lossless) == ("lenient:0.2", False)
    assert row.tokens_per_round > other.tokens_per_round
    own = next_token_loss(target, drawn)
    assert row.quality > own  # less likely tokens than the target's own pass
    assert row.quality_metric == f"nats per token under the target, whose own text has {own:.3f}"
    assert other.quality is None
    (note,) = [one for one in notes([row]) if "nats" in one]
    assert note == f"after: its answers have {row.quality:.3f} {row.quality_metric}."


def test_a_stop_rule_saves_nothing_of_a_round_that_one_pass_drafts(target, drawn):
    bench = bench_of(target, drawn, policy="confidence:0.999")
    drafter = drafter_of(perturbed(target.model, 0.1), target)
    one, each = (
        bench.decoded("after", drafter, dataclasses.replace(COST, one_pass=one_pass)).row
        for one_pass in (True, False)
    )
    assert one.tokens_per_round == each.tokens_per_round
    assert one.mbsu == pytest.approx(one.tokens_per_round / (1 + COST.round_bytes))
    assert each.mbsu > one.mbsu
    assert each.modelled_speedup > one.modelled_speedup


def test_a_row_says_where_its_costs_were_timed(target, drawn):
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    cost = costs.cost_of(drafter, target, make_budget("fixed", 2))
    row = bench_of(target, drawn).replayed("after", drafter, cost).row
    threads = torch.get_num_threads()
    assert row.cost_source == (
        f"this project's decoding in float32 on {threads} threads of a CPU, batch 1, context 64"
    )
    (note,) = [one for one in notes([row, row]) if one.startswith("modelled")]
    assert note == f"modelled: with costs of {row.cost_source}. An engine has others."


def test_rows_stand_by_domain_and_by_position(target, drawn):
    for index, trace in enumerate(drawn):
        trace.domain = ("code", "prose")[index % 2]
    row = bench_of(target, drawn).replayed("after", drafter_of(target.model, target), COST).row
    assert set(row.by_domain["domains"]) == {"code", "prose"}
    assert len(row.by_domain["domains"]["code"]["tokens_per_round_ci95"]) == 2
    (place,) = row.by_position
    assert (place["first"], place["last"]) == (0, 31)
    assert place["tokens_per_round"] == pytest.approx(row.tokens_per_round)
    assert len(place["tokens_per_round_ci95"]) == 2
