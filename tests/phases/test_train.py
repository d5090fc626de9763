"""What is refused, and what is named, before text is generated."""

from __future__ import annotations

import shutil

import pytest

from phases.train import prepare, settings_of_the_toy
from recipes import base, medusa, medusa2
from tests.recipes.test_train_phase import run_of
from train import resolve
from trainer.config import UserError


def test_a_recipe_without_a_published_setting_trains_with_a_large_target(tmp_path, monkeypatch):
    for path in base.FOLDER.glob("eagle3.*"):
        if path.name != "eagle3.published.yaml":
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(base, "FOLDER", tmp_path)
    assert settings_of_the_toy(resolve(["recipe=eagle3"])[0], 8 * 10**9) == []


def test_heads_without_layers_to_compute_again_are_refused_at_the_start(tmp_path, tiny_target):
    target, checkpointed = tiny_target("llama"), "trainer.gradient_checkpointing=true"
    fresh = medusa.Recipe(medusa.Config(num_heads=2), target)
    says = r"trainer\.gradient_checkpointing must be false for a MedusaDrafter, got true"
    with pytest.raises(UserError, match=says):
        prepare(run_of(tmp_path, target, checkpointed), fresh, [])
    drafter = prepare(run_of(tmp_path, target), fresh, [])
    drafter.save_pretrained(tmp_path / "heads")
    given = f"model.drafter={tmp_path / 'heads'}"
    with pytest.raises(UserError, match=says):
        prepare(run_of(tmp_path, target, checkpointed, given), fresh, [])
    # its second stage trains in the target, which has layers
    both = medusa2.Recipe(medusa2.Config(num_heads=2), target)
    for words in ((), (given,)):
        run = run_of(tmp_path, target, "recipe=medusa2", checkpointed, *words)
        assert prepare(run, both, []).kind == "medusa"
