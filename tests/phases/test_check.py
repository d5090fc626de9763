"""Rules across sections are asked as soon as they can be answered."""

from __future__ import annotations

import pytest
import torch

import train
from data.traces import Trace
from eval.config import EvalConfig
from eval.row import row_with
from phases import measure
from phases.check import check_drafter
from phases.measure import check_own_text
from scripts import evaluate
from tests.helpers.commands import command, only
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.tiny import VOCAB_SIZE
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("medusa", ["eval.K=6"]),
        ("medusa", ["method.num_heads=2", "eval.K=2", "eval.tree=dynamic:8:3:3"]),
        ("medusa2", ["eval.K=6"]),
        ("hydra", ["eval.K=6"]),
        ("hydrapp", ["method.num_heads=2"]),
    ],
)
def test_drafts_deeper_than_the_heads_are_refused_before_a_model_is_loaded(
    recipe, words, tmp_path, capsys
):
    given = command(tmp_path, tmp_path / "no target", f"recipe={recipe}", *words, "dry_run=true")
    assert train.main([w for w in given if not w.startswith("method.draft_")]) == 2
    assert "heads, so it drafts at most" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tree_wider_than_the_draft_vocabulary_is_refused_with_the_drafter(tiny_target):
    target = tiny_target("llama")
    settings = eagle_settings(3, [0, 1], target.hidden_size)
    drafter = build_eagle(target, settings, kept=torch.tensor([5, 9, 11]))
    check_drafter(drafter, target, EvalConfig(tree=["dynamic:9:2:3"]))
    with pytest.raises(UserError) as caught:
        check_drafter(drafter, target, EvalConfig(tree=["dynamic:9:2:4"]))
    assert (caught.value.key, caught.value.value) == ("eval.tree", 4)
    assert "at most 3 children under a node" in caught.value.rule


@pytest.mark.parametrize(
    ("alpha", "says"),
    [(1.0, ""), (0.98, ""), (0.95, "warning: the target agrees with 95.0%"), (None, "")],
)
def test_text_that_the_target_hardly_agrees_with_is_warned_of(alpha, says, tiny_target, capsys):
    check_own_text(row_with(alpha=alpha, text_by="vllm"), tiny_target("llama"), [])
    out = capsys.readouterr().out
    assert out.startswith(says)
    assert bool(out) == bool(says)


def test_one_token_that_transformers_did_not_write_is_warned_of(tiny_target, capsys):
    """A near-tie is none: of two equal logits either may come first."""
    target = tiny_target("llama")
    prompt, ids = list(range(20, 28)), list[int]()
    for _ in range(60):
        logits = target.outputs(torch.tensor([prompt + ids])).logits[0, -1, :VOCAB_SIZE]
        (best, second), tokens = (part.tolist() for part in logits.topk(2))
        ids.append(tokens[0])
        if 1e-3 < best - second < 0.1:  # a difference that a server may make, transformers not
            break
    trace = Trace(prompt, ids, "target", "x", "c", 0, 0, 0.0, 0, 1.0, 0, "length", "m", "t")
    row = row_with(alpha=0.99, text_by="hf")
    check_own_text(row, target, [trace])
    assert "warning" not in capsys.readouterr().out
    trace.response_ids[-1] = tokens[1]
    check_own_text(row, target, [trace])
    assert "warning: 1 tokens of the target's own stored" in capsys.readouterr().out


def test_text_that_another_model_wrote_is_refused(tmp_path, tiny_folder, monkeypatch, capsys):
    """Such as a store that somebody brought, in which every answer is one token."""
    words = command(tmp_path, tiny_folder("llama"), "eval.drafter=lookup:3", "eval.K=2")
    words = only(words, "model.target", "eval", "data.cache_dir")
    honest = measure.evaluation_traces

    def brought(*given, **options):
        traces, plan = honest(*given, **options)
        for trace in traces:
            trace.response_ids = [7] * len(trace.response_ids)
        return traces, plan

    monkeypatch.setattr(measure, "evaluation_traces", brought)
    assert evaluate.main([*words, f"script.out={tmp_path / 'out'}"]) == 2
    assert "of its own stored answers at temperature 0: another" in capsys.readouterr().err
    assert not (tmp_path / "out" / "report.json").exists()
