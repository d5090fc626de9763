"""The command of a run: as it was given, as it is published, and the one that trains further."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from phases.commands import command_of, trained_further, without_places

WORDS = ["recipe=medusa", "eval.temperatures=[0, 1]"]


@pytest.mark.parametrize(
    ("started", "script", "expected"),
    [(["/bin/python", "/bin/accelerate", "launch", "--cpu", "./train.py", *WORDS], ["train.py"],
      ["accelerate", "launch", "--cpu", "train.py", *WORDS]),
     (["/bin/python", "-m", "accelerate.commands.launch", "-m", "scripts.evaluate", *WORDS],
      ["-m", "scripts.evaluate"],
      ["python", "-m", "accelerate.commands.launch", "-m", "scripts.evaluate", *WORDS]),
     (["/bin/python", "/bin/torchrun", "--nproc-per-node=2", "train.py", *WORDS], ["train.py"],
      ["torchrun", "--nproc-per-node=2", "train.py", *WORDS]),
     (["bash", "-c", "python train.py"], ["train.py"], ["python", "train.py", *WORDS]),
     (["/bin/python", "/bin/accelerate", "launch", "other.py"], ["train.py"],
      ["python", "train.py", *WORDS]),
     (["accelerate"], ["train.py"], ["python", "train.py", *WORDS]), ([], ["train.py"],
      ["python", "train.py", *WORDS])],
)  # fmt: skip
def test_the_command_of_a_run_is_the_one_that_a_shell_was_given(
    started, script, expected, monkeypatch
):
    parent = SimpleNamespace(cmdline=lambda: started)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parent=lambda: parent))
    assert command_of(script, WORDS) == expected


def test_published_facts_hold_no_place_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    command = f"python train.py 'run.dir={tmp_path}/my runs'"
    facts = {
        "command": command,
        "resumed": [{"command": f"train.py data.system_prompt=it's {tmp_path}/x"}],
    }
    found = without_places(facts)
    assert found["command"] == "python train.py 'run.dir=my runs'"
    assert str(tmp_path) not in str(found)


def test_the_command_that_trains_further_starts_from_the_runs_drafter():
    words = ["run.dir=runs/my x", "model.drafter=null", "recipe=eagle3", "trainer.max_steps=9",
             "model.drafter_revision=main", "method.search_steps=3", "trainer.resume=never",
             "eval.tree=[a, b]"]  # fmt: skip
    further = trained_further(["accelerate", "launch", "train.py", *words], Path("runs/my x"))
    assert shlex.split(further) == [
        "accelerate", "launch", "train.py", "recipe=eagle3", "trainer.max_steps=9",
        "eval.tree=[a, b]", "model.drafter=runs/my x",
    ]  # fmt: skip
