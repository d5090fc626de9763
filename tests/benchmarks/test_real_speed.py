"""The chat model's clock: what it refuses before a minute is spent; several drafters in one run."""

import json
import shutil

import pytest

from benchmarks import real_speed
from benchmarks.real_speed import budgets_of, main
from drafters.acceptance import fresh_head
from drafters.load import load_drafter
from eval.policies.head import HeadPolicy
from target.model import Target
from trainer.errors import UserError

pytestmark = pytest.mark.tools


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["K=4"], "error: name a drafter: drafter="),
        (["drafter=x", "prompt=y"], "error: unknown key 'prompt'; did you mean 'prompts'?"),
        (["drafter=x", "count=0"], "error: count must be a whole number above 0, got '0'"),
        (["drafter=x", "batch=1,b"], "error: batch must be a whole number above 0, got 'b'"),
        (["drafter=a/x,b/a/x"], "error: drafter must name drafters of runs with different names"),
        (["drafter=x", "policy=head"], "error: eval.policy"),
        (["drafter=x", "target=a/b/c"], "error: model.target=a/b/c: there is no such file"),
    ],
)
def test_a_wrong_word_gets_one_line(words, complaint, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(complaint)


def test_several_drafters_are_timed_in_one_run(tmp_path):
    folders = [tmp_path / name / "drafter" for name in ("one", "two")]
    for folder in folders:
        shutil.copytree("assets/toy/draft", folder)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "speed.json"
    prompts.write_text('{"text": "def f(x):"}\n{"text": "import os"}\n')
    words = {"drafter": ",".join(map(str, folders)), "target": "assets/toy/target", "K": "2,3"}
    words |= {"prompts": str(prompts), "count": "2", "tokens": "8", "batch": "1", "out": str(out)}
    assert main([f"{key}={value}" for key, value in words.items()]) == 0
    table = json.loads(out.read_text())["batch 1"]
    chains = [f"{name} chain of {K}" for name in ("one", "two") for K in (2, 3)]
    assert [*table] == ["generate", "plain", *chains]  # the drafters do not assist here
    assert table["one chain of 2"]["answers_as_generate"] == "2 of 2"
    rounds = [table[f"{name} chain of 3"]["round"] for name in ("one", "two")]
    assert rounds[0]["tokens_per_round"] == rounds[1]["tokens_per_round"]


@pytest.fixture
def drafter():
    return load_drafter("assets/toy/draft", Target.load("assets/toy/target"))


def test_a_policy_ends_the_chains_of_a_drafter_with_an_acceptance_head(drafter):
    given = {"policy": "head:0.8", "tree": ""}
    assert [*budgets_of(drafter, [4], given)] == ["chain of 4"]
    drafter.acceptance = fresh_head(drafter, K_min=3)
    [(name, budget)] = budgets_of(drafter, [4], given).items()
    assert (name, budget.policy, budget.max_tokens) == ("head:0.8, at most 4", "head:0.8", 4)
    assert isinstance(budget.stop, HeadPolicy)
    assert budget.stop.least == 3


def test_a_drafter_trained_with_its_target_is_not_timed_on_another(drafter, monkeypatch):
    target = Target.load("assets/toy/target")
    monkeypatch.setattr(drafter, "served_target", lambda: target)
    monkeypatch.setattr(real_speed, "load_drafter", lambda *words, **named: drafter)
    with pytest.raises(UserError, match="drafter must not be trained with its target: export it"):
        real_speed.loaded("runs/x/drafter", target)
