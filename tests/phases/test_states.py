"""Stored states of the training text: found again by another recipe."""

from __future__ import annotations

import train
from tests.commands import command, read_jsonl


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
