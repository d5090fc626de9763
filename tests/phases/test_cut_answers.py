"""The account of cut answers, and of what servers do by default, in log and report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from data.answers import AnswerFormat
from data.config import DataConfig
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from eval.config import EvalConfig
from eval.report.rows import prompts_of
from eval.row import row_with
from eval.serving_defaults import unmeasured_defaults, unmeasured_words
from phases.cut_answers import measured_on, show_cut
from tests.data.test_traces import make
from tests.helpers.tiny import EOS

ONE = Prompt("a", None, None, "test", "row 1", "c1")
THREE = Prompt(
    None, tuple({"role": "user", "content": text} for text in "abc"), None, "test", "row 2", "c2"
)


def rows(*reasons, index=0, turn=0):
    return [
        make(i, index=index, turn=turn, response_ids=[9, EOS], finish_reason=reason)
        for i, reason in enumerate(reasons)
    ]


@pytest.fixture
def run(tiny_target):
    config = SimpleNamespace(data=DataConfig(), eval=EvalConfig())
    main = SimpleNamespace(is_main_process=True)
    return SimpleNamespace(config=config, accelerator=main, target=tiny_target("llama"))


@pytest.mark.parametrize(
    ("traces", "prompts", "own", "said"),
    [
        (rows("eos", "eos"), [ONE], True, "x: 0 of 2 answers (0%) are cut\n"),
        (rows("length", *["eos"] * 4), [ONE], True, "x: 1 of 5 answers (20%) are cut\n"),
        (rows("length", "length"), [ONE], False, "x: 2 of 2 answers (100%) are cut\n"),
        (rows("length", "eos"), [ONE], True,
         "x: 1 of 2 answers (50%) are cut\nwarning: x: more than 20% of the answers to your "
         "prompts have no end: raise eval.max_new_tokens=8\n"),
        ([*rows("length", index=1), *rows(*["eos"] * 9)], [ONE, THREE], False,
         "x: 1 of 10 answers (10%) are cut\nwarning: x: 2 later turns of their conversations are "
         "left out: raise eval.max_new_tokens=8\n"),
        (rows("length", index=1, turn=2), [ONE, THREE], False,
         "x: 1 of 1 answers (100%) are cut\n"),
    ],
)  # fmt: skip
def test_the_share_is_printed_always_and_a_warning_where_it_misleads(
    run, capsys, traces, prompts, own, said
):
    show_cut(run, "x", "eval.max_new_tokens=8", traces, prompts, own)
    assert capsys.readouterr().out == said


def test_an_open_thought_is_a_warning(run, capsys, monkeypatch):
    answers = AnswerFormat(run.target.tokenizer, (EOS,))
    answers.thoughts, answers._mark_ids = [("(", ")")], [(9, 10)]
    monkeypatch.setattr("phases.cut_answers.answer_format", lambda *_: answers)
    show_cut(run, "x", "data.max_new_tokens=8", rows(*["eos"] * 3), [ONE], False)
    assert "warning: x: 3 answers end inside a thought: raise data." in capsys.readouterr().out


def test_a_report_says_how_many_answers_are_cut(run):
    answers = AnswerFormat(run.target.tokenizer, (EOS,))
    plan = GenerationPlan("own.jsonl", (ONE, THREE, ONE), temperatures=(0.0,))
    found = measured_on(plan, [*rows("length", index=1), *rows("eos", "eos", "eos")], answers)
    assert found == {
        "name": "own.jsonl", "hash": plan.prompts_hash, "answers": 4, "cut": 1, "left_out": 1,
        "later_turns_left_out": 2,
    }  # fmt: skip
    words = "4 prompts, 1 left out as too long or equal to another, 25% of the answers cut, 2 "
    row = row_with(num_prompts=4, prompts=found)
    assert prompts_of(row) == f"{words}later turns left out behind those"
    row.prompts = {"answers": 4, "cut": 0}
    assert prompts_of(row).endswith("0% of the answers cut")
    row.prompts = {}
    assert prompts_of(row) == "4 prompts"  # that were imported, say


@pytest.mark.parametrize(
    ("stored", "measured", "left_out"),
    [
        ({}, {}, {}),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}, {}, {}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": False}, {},
         {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95},
         {"temperatures": [0.0, 0.6], "top_k": 20}, {"top_p": 0.95}),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, {"temperatures": [1.0]},
         {"min_p": 0.1, "repetition_penalty": 1.05}),
    ],
)  # fmt: skip
def test_defaults_of_servers_that_are_not_measured_are_named(stored, measured, left_out):
    config = EvalConfig(**measured)
    found = unmeasured_defaults(GenerationConfig(**stored), config)
    assert found == left_out
    line = unmeasured_words(found)
    assert bool(line) == bool(left_out)
    assert all(f"{key}={value:g}" in line for key, value in left_out.items())
    assert unmeasured_defaults(None, config) == {}
