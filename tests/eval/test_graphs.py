"""Speculative decoding with captured forwards, on a tape in place of a GPU."""

from __future__ import annotations

import pytest

from drafters.round import Budget
from drafters.trees.table import parse_shape
from eval.policies.table import make_budget
from eval.verifiers.multi_round import MultiRound
from eval.verifiers.token import Token
from target.model import Target
from target.sampling import Sampling
from tests.eval.test_engine import EOS, drafter_of, requests_for, speculated, target_of
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.heads import randomised
from tests.helpers.tape import decoding_as_on_a_gpu
from tests.helpers.tiny import ARCHITECTURES, perturbed, prompts_of, tiny_model

LENGTHS = [1, 21, 4, 9, 33, 14]
TREE, DYNAMIC = "eagle", "dynamic:6:3:2"


def results(model, drafter, temperature, **options):
    """Text and counters of each request; overlaps are sums over the vocabulary, which round."""
    sampling = Sampling(temperature)
    requests = requests_for(prompts_of(LENGTHS), sampling)
    options = {"eos_ids": (EOS, 7, 8), "shown": range(6), "max_new_tokens": 40} | options
    found = speculated(model, drafter, [], sampling, requests=requests, **options)
    lines = {tag: [r.line() for r in one.rounds] for tag, one in found.items()}
    overlaps = []
    for line in (line for tag in sorted(lines) for line in lines[tag]):
        overlaps += line.pop("overlap")
        for seconds in ("t_draft", "t_verify", "t_other"):
            del line[seconds]
    texts = {tag: (one.response_ids, one.finish_reason) for tag, one in found.items()}
    return texts, lines, overlaps


def assert_same_as_eager(model, drafter, temperature, **options):
    """Returns the number of graphs for each set of buffers."""
    usual = results(model, drafter, temperature, **options)
    with decoding_as_on_a_gpu() as tapes:
        found = results(model, drafter, temperature, **options)
    assert found[:2] == usual[:2]
    assert found[2] == pytest.approx(usual[2], abs=1e-4)
    return [tape.graphs for tape in tapes]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tree", [None, TREE, DYNAMIC])
def test_text_and_counters_are_those_of_eager_decoding(tree, batch_size, temperature):
    """Six prompts: rows are refilled and dropped."""
    model = tiny_model("llama")
    drafter = drafter_of(perturbed(model, 0.1), model)
    budget = Budget(3) if tree is None else Budget.of(parse_shape(tree))
    verifier = MultiRound() if tree == TREE and temperature else Token()
    graphs = assert_same_as_eager(
        model, drafter, temperature, budget=budget, batch_size=batch_size, verifier=verifier
    )
    assert len(graphs) > 1, "target and drafter"
    assert sum(graphs) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama"])
def test_every_architecture_is_captured(name):
    model = tiny_model(name)
    drafter = drafter_of(perturbed(model, 0.1), model)
    tree = Budget.of(parse_shape(DYNAMIC))
    assert assert_same_as_eager(model, drafter, 1.0, budget=Budget(3), batch_size=4)
    assert assert_same_as_eager(model, drafter, 0.0, budget=tree, batch_size=2)


def test_chains_of_changing_length_are_captured():
    model = tiny_model("llama")
    drafter = drafter_of(perturbed(model, 0.1), model)
    budget = make_budget("confidence:0.5", 4)
    assert assert_same_as_eager(model, drafter, 0.0, budget=budget, batch_size=2)


@pytest.mark.parametrize("tree", [None, DYNAMIC])
@pytest.mark.parametrize("version", [1, 3])
def test_a_head_reads_the_states_of_captured_forwards(version, tree):
    """They are outputs of the graph: the hooks that read them do not run when it does."""
    model = tiny_model("llama", layers=4)
    target: Target = target_of(model)
    captures = ["final_norm"] if version == 1 else [0, 1, 3]
    settings = eagle_settings(version, captures, 32)
    drafter = randomised(build_eagle(target, settings)).eval()
    budget = Budget(3) if tree is None else Budget.of(parse_shape(tree))
    options = {"budget": budget, "batch_size": 3, "max_new_tokens": 24}
    assert assert_same_as_eager(model, drafter, 0.0, **options)
