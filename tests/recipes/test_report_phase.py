"""What eval.* may ask of a drafter: refused in one line, before anything is trained."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from drafters.causal_lm import CausalLMDrafter
from drafters.eagle1 import Eagle1Settings
from drafters.hydra import HydraDrafter, HydraSettings
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.training_free.lookup import PromptLookup
from eval.config import EvalConfig, tree_depth
from phases.check import check_context, check_drafter
from phases.measure import shapes_of
from phases.report import facts
from tests.helpers.eagle import build_eagle
from tests.helpers.tiny import CONTEXT
from trainer.errors import UserError

TABLE = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def medusa(target):
    return MedusaDrafter.build(target, MedusaSettings(num_heads=2))


@pytest.mark.parametrize(
    "options", [{"K": 3}, {"K": 1, "tree": ["eagle"]}, {"K": 2, "tree": ["dynamic:9:3:3"]}]
)
def test_more_depths_than_heads_are_refused(medusa, target, options):
    with pytest.raises(UserError, match="has 2 heads, so it drafts at most 2 tokens deep"):
        check_drafter(medusa, target, EvalConfig(**options))
    check_drafter(medusa, target, EvalConfig(K=2, tree=["dynamic:9:2:3"]))


def test_drafting_beyond_the_context_is_refused(target):
    eagle = build_eagle(target, Eagle1Settings(["final_norm"], target.hidden_size))
    with pytest.raises(UserError, match=rf"eval\.K must be below the target's context {CONTEXT}"):
        check_drafter(eagle, target, EvalConfig(K=CONTEXT))


def test_a_language_model_that_sees_less_than_the_prompts_is_refused(target):
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    traces = [SimpleNamespace(prompt_ids=[1] * n) for n in (3, 20)]
    config = EvalConfig(K=2, tree=["dynamic:9:3:3"], max_new_tokens=8)
    drafter.model.config.max_position_embeddings = 31  # 20 + 8 + a path of 3
    check_context(drafter, traces, config)
    drafter.model.config.max_position_embeddings = 30
    with pytest.raises(UserError, match=r"the drafter sees 30 tokens; an evaluation prompt of 20"):
        check_context(drafter, traces, config)
    check_context(PromptLookup(), traces, config)


def test_hydra_is_not_asked_of_an_engine(target):
    hydra = HydraDrafter.build(target, HydraSettings())
    with pytest.raises(UserError, match="of kind 'hydra'; engines serve causal_lm: "):
        check_drafter(hydra, target, EvalConfig(engine="vllm"))


def test_a_missing_engine_is_said_before_training(medusa, target, monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"bash scripts/engine_env\.sh"):
        check_drafter(medusa, target, EvalConfig(K=2, engine="vllm"))


def test_a_calibrated_tree_needs_accuracies(medusa):
    assert shapes_of(medusa, EvalConfig(K=2), 0.0) == []
    assert shapes_of(PromptLookup(), EvalConfig(tree=["calibrated:3"]), 0.0) == []
    with pytest.raises(UserError, match="holds no accuracies"):
        shapes_of(medusa, EvalConfig(K=2, tree=["calibrated:3"]), 0.0)
    medusa.rank_accuracy = {"0": TABLE}
    assert shapes_of(medusa, EvalConfig(K=2, tree=["calibrated:3"]), 0.0)[0].num_nodes == 3
    (shallow,) = shapes_of(medusa, EvalConfig(K=1, tree=["calibrated:3"]), 0.0)
    assert shallow.depth == 1  # as eval.K asks


def test_a_calibrated_tree_is_that_of_the_rows_own_temperature(medusa, monkeypatch, capsys):
    deep, wide = [[0.9, 0.1], [0.9, 0.1]], [[0.5, 0.4], [0.1, 0.1]]
    monkeypatch.setattr(medusa, "rank_accuracy", {"0": deep, "1": deep, "1, drawn": wide})
    config = EvalConfig(K=2, tree=["calibrated:2"])
    paths = {t: shapes_of(medusa, config, t)[0].paths for t in (0.0, 1.0)}
    assert paths == {0.0: ((0,), (0, 0)), 1.0: ((0,), (1,))}
    assert capsys.readouterr().out == ""
    assert shapes_of(medusa, config, 0.7)[0].paths == paths[1.0]
    assert (
        "no accuracies at T=0.7, drawn, so the tree is built from those at T=1, drawn"
        in capsys.readouterr().out
    )
    top = EvalConfig(K=2, tree=["calibrated:2,siblings=top"])
    assert shapes_of(medusa, top, 1.0)[0].paths == paths[0.0]
    assert capsys.readouterr().out == ""
    medusa.rank_accuracy = {"0": wide, "1": deep}  # as a version stored it that had no draws
    assert shapes_of(medusa, config, 1.0)[0].paths == paths[0.0]
    assert "at T=1, drawn, so the tree is built from those at T=1\n" in capsys.readouterr().out
    medusa.rank_accuracy = deep  # as an earlier version stored it
    assert {shapes_of(medusa, config, t)[0].paths for t in (0.0, 1.0)} == {paths[0.0]}


def test_equal_trees_are_measured_once(medusa, monkeypatch, tmp_path):
    monkeypatch.setattr(medusa, "rank_accuracy", {"0": TABLE, "1": TABLE, "1, drawn": TABLE})
    words = ["calibrated:2", "calibrated:2,siblings=top", "dynamic:4:2:2", "eagle2:5:1:2"]
    config = EvalConfig(K=2, tree=words)
    found = {t: [(s.num_nodes, s.siblings) for s in shapes_of(medusa, config, t)] for t in (0, 1)}
    drawn, top = (2, "without_replacement"), (2, "top")
    assert found == {0: [drawn, (4, "top")], 1: [drawn, top, (4, "top")]}
    files = [tmp_path / name / "tree.json" for name in "ab"]
    for file, paths in zip(files, ([[0], [1]], [[0], [0, 0]]), strict=True):
        file.parent.mkdir()
        file.write_text(json.dumps(paths))
    EvalConfig(tree=[f"static:{file}" for file in files])  # of other depths
    files[1].write_text("[[0], [1]]")
    EvalConfig(tree=[f"static:{files[0]}", f"static:{files[0]},siblings=top"])
    with pytest.raises(UserError, match="hold no two trees that the report calls 'tree, 2 nodes"):
        EvalConfig(tree=[f"static:{file}" for file in files])
    with pytest.raises(UserError, match=r"eval\.tree must name each tree once"):
        EvalConfig(tree=["eagle", "eagle"])
    with pytest.raises(UserError, match="got 'siblings=top': quote one that has a comma"):
        EvalConfig(tree=["eagle", "siblings=top"])
    with pytest.raises(UserError, match=r"these drafts \(eval\.tree=dynamic:9:3, top"):
        EvalConfig(tree=["eagle", "dynamic:9:3"], verifier="multi_round")


@pytest.mark.parametrize(("text", "K"), [("", 4), ("x", 4), ("0", 4), ("11", 1), ("11111", 4)])
def test_a_calibrated_tree_that_cannot_be_is_refused_before_a_model_is_loaded(text, K):
    rule = rf"num_nodes must (lie in 1..\d+ for depth {K}|be a whole number)"
    with pytest.raises(UserError, match=rf"eval\.tree='calibrated:{text}': {rule}"):
        EvalConfig(K=K, tree=[f"calibrated:{text}"])
    with pytest.raises(UserError, match=r"lie in 1..111110 for depth 100000000000"):
        EvalConfig(K=10**11, tree=["calibrated:111111"])
    with pytest.raises(UserError, match=r"num_nodes must be a whole number of at most twelve"):
        EvalConfig(K=10**11, tree=["calibrated:" + "9" * 5000])
    assert tree_depth(EvalConfig(K=1, tree=["calibrated:10"])) == 1


def test_a_calibrated_tree_is_not_asked_of_a_language_model(target):
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    with pytest.raises(UserError, match="not of a language model: name another tree"):
        check_drafter(drafter, target, EvalConfig(tree=["calibrated:3"]))


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(target):
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    with pytest.raises(UserError, match="at most 100 children"):
        shapes_of(drafter, EvalConfig(tree=["dynamic:120:2:101"]), 0.0)


def test_facts_count_what_is_read(target, medusa):
    found = facts(medusa, target)
    assert found["kind"] == "medusa"
    assert found["parameters"] == found["trained_parameters"]
    assert found["active_parameters"] == found["parameters"] / 2  # one head a step
    assert found["feature_bytes_per_token"] == 2 * target.hidden_size
    reduced = MedusaDrafter.build(target, MedusaSettings(2), torch.arange(20))
    assert facts(reduced, target)["feature_bytes_per_token"] == 2 * target.hidden_size + 8
    eagle = build_eagle(target, Eagle1Settings(["final_norm"], target.hidden_size))
    head = target.head.weight.numel()
    assert facts(eagle, target)["active_parameters"] == eagle.num_parameters + head
