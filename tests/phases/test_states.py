"""Stored states of the training text: by which recipes they are read, and found again."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import train
from data.features_layout import FeaturesPlan
from target.model import Target
from tests.helpers.commands import command, read_jsonl
from trainer.logits import ReducedLogits


def test_a_recipe_reads_the_states_that_another_one_stored(tmp_path, tiny_folder, capsys):
    def losses(name: str, cache: str, *given: str) -> list[float]:
        words = command(
            tmp_path, tiny_folder("llama"), f"run.dir={tmp_path / name}", "run.stage=train",
            f"data.cache_dir={tmp_path / cache}", *given,
        )  # fmt: skip
        assert train.main([word for word in words if not word.startswith("method.draft")]) == 0
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        return [row["loss"] for row in rows if "loss" in row]

    losses("wide", "cache", "recipe=eagle3", "method.layers=[0,1]")
    said = capsys.readouterr().out
    assert "to write" in said
    shared = losses("shared", "cache", "recipe=medusa")
    said = capsys.readouterr().out
    assert "features: layers ['final_norm'] of those in " in said
    assert len([*(tmp_path / "cache" / "features").iterdir()]) == 1
    assert shared
    assert shared == losses("own", "other", "recipe=medusa")


@pytest.mark.slow
def test_a_reduced_vocabulary_trains_the_same_from_stored_summaries(
    tmp_path, tiny_folder, capsys, monkeypatch
):
    """As with the target live, and from a store of an earlier version, which has none."""

    def losses(name: str, *given: str) -> list[float]:
        words = command(
            tmp_path, tiny_folder("llama"), "recipe=eagle3", "method.layers=[0,1]",
            "run.stage=train", f"run.dir={tmp_path / name}", "data.features_dtype=fp32",
            "trainer.log_every=1", *given,
        )  # fmt: skip
        words = [word for word in words if not word.startswith("method.draft_")]
        assert train.main([*words, "method.draft_vocab_size=30"]) == 0
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        return [row["loss"] for row in rows if "loss" in row]

    def without(*given: Any, summary: bool, **options: Any) -> FeaturesPlan:
        return FeaturesPlan(*given, **options)

    live = losses("live", "data.features=live")
    with monkeypatch.context() as patch:
        patch.setattr("phases.states.FeaturesPlan", without)
        assert losses("earlier") == pytest.approx(live, rel=1e-5)
    (store,) = (tmp_path / "cache" / "features").iterdir()
    capsys.readouterr()
    assert losses("found") == pytest.approx(live, rel=1e-5)
    assert "features: without summaries of the logits" in capsys.readouterr().out
    shutil.rmtree(store)
    with monkeypatch.context() as patch:
        patch.setattr(ReducedLogits, "of", None)  # no logits of the whole vocabulary
        assert losses("stored") == pytest.approx(live, rel=1e-5)
    assert "without summaries" not in capsys.readouterr().out


def test_from_stored_states_the_target_reads_held_out_texts_once_and_nothing_else(
    tmp_path, tiny_folder, monkeypatch
):
    """As far as their states are held, so that a target which does not fit beside the drafter may
    lie in the host's memory."""
    read: list[torch.Tensor] = []

    def outputs(self, input_ids, *given, _outputs=Target.outputs, **options):
        read.append(input_ids)
        return _outputs(self, input_ids, *given, **options)

    for name in ("first", "second"):
        words = command(
            tmp_path, tiny_folder("llama"), "recipe=medusa", "run.stage=train",
            f"run.dir={tmp_path / name}", "trainer.max_steps=6", "trainer.eval_every=2",
        )  # fmt: skip
        monkeypatch.setattr(Target, "outputs", outputs)
        read.clear()
        assert train.main([word for word in words if not word.startswith("method.draft")]) == 0
    (texts,) = read
    assert len(texts) == 1  # of eight


def test_states_of_held_out_texts_are_stored_too(tmp_path, tiny_folder, capsys):
    """Over the same traces a run with another seed, which holds out others, finds its states."""
    words = command(tmp_path, tiny_folder("llama"), "recipe=medusa", "run.stage=train")
    assert train.main([word for word in words if not word.startswith("method.draft")]) == 0
    assert "features: 8 rows, " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ["recipe=distillspec", "method.control=true"],
        ["recipe=distillspec", "method.data_mix={target: 0.5, draft: 0.5}"],
        [
            "recipe=fastdraft",
            "method.divergence=fkl",
            "trainer.lr_warmup_steps=1",
            "method.pretrain_steps=2",
            "method.continue_steps=2",
        ],
        ["recipe=specdecpp"],
    ],
    ids=["beside a stage without a teacher", "draft text too", "raw text too", "states and logits"],
)
def test_a_teacher_of_logits_is_read_from_stored_states(tmp_path, tiny_folder, capsys, given):
    def losses(features: str) -> list[float]:
        words = command(
            tmp_path, tiny_folder("llama"), f"run.dir={tmp_path / features}",
            f"data.features={features}", "data.features_dtype=fp32", "trainer.max_steps=4",
            "trainer.log_every=1", *given,
        )  # fmt: skip
        assert train.main(words) == 0
        rows = read_jsonl(tmp_path / features / "metrics.jsonl")
        return [row["loss"] for row in rows if "loss" in row]

    expected = losses("live")
    assert "features:" not in capsys.readouterr().out
    found = losses("cached")
    assert "features:" in capsys.readouterr().out
    assert found == pytest.approx(expected, rel=1e-5)
