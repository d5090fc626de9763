"""What a row is measured on: prompts, costs, and transformers' own decoding beside ours."""

from __future__ import annotations

import pytest
import torch

from drafters.causal_lm import CausalLMDrafter
from eval import costs, measure
from eval.policies.table import make_budget
from target.sampling import Sampling


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
    costs.draft_seconds(drafter, target, make_budget(policy, 8))
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
