"""The exit code of a run whose export failed."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

import train
from drafters.kinds import KINDS, Writer
from scripts import export
from tests.helpers.commands import command


@pytest.mark.slow
def test_an_export_that_is_made_later_ends_the_run_with_0(
    tmp_path, tiny_folder, monkeypatch, capsys
):
    """By the command that the failed run prints, in a folder with a blank."""

    def fail(drafter, folder, asked):
        raise RuntimeError("the layout has no room")

    words = command(
        tmp_path / "a b", tiny_folder("llama", layers=4), "recipe=medusa", "eval.temperatures=0",
        "eval.timing_prompts=0", "eval.K=2",
    )  # fmt: skip
    words = [word for word in words if "draft_hidden_size" not in word]
    with monkeypatch.context() as patched:
        broken = dataclasses.replace(
            KINDS["medusa"], writers={"vllm": Writer(fail, lambda drafter: None)}
        )
        patched.setitem(KINDS, "medusa", broken)
        for _ in range(2):
            assert train.main(words) == 3
    said = capsys.readouterr().err.strip().splitlines()[-1]
    python, dash, module, *given = shlex.split(said.partition("fix that and run ")[2])
    assert (python, dash, module) == ("python", "-m", "scripts.export")
    assert export.main(given) == 0
    assert train.main(words) == 0
    assert "not exported" not in capsys.readouterr().err
