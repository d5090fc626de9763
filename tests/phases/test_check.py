"""Rules across sections are asked as soon as they can be answered."""

from __future__ import annotations

import pytest
import torch

import train
from eval.config import EvalConfig
from phases.check import check_drafter
from tests.helpers.commands import command
from tests.helpers.eagle import build_eagle, eagle_settings
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
