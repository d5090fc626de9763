"""The command of a run: as a shell was given it, as the report shows it, and the one that trains
the run's drafter further."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trainer.redaction import shell_command, shown_command

# words that a new run which starts from the drafter of another one does without: where that run
# was, what it started from, and the search for the size of a fresh drafter
OF_ITS_START = ("run.dir=", "model.drafter", "method.search_", "trainer.resume=")


def command_of(script: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The words of this command as a shell was given them. `script`: what stands behind `python`;
    the words of a launcher are those of the process that started this one."""
    own, words = [script[-1], *arguments], list[str]()
    with contextlib.suppress(psutil.Error):
        started = psutil.Process().parent()
        words = started.cmdline() if started else []
    names = [Path(word).name for word in words]
    if {"accelerate", "accelerate.commands.launch", "torchrun"} & {*names[:3]}:
        at = len(words) - len(own)
        if at > 1 and names[at] == own[0] and words[at + 1 :] == own[1:]:
            begin = ["python", *words[1:at]] if names[1] == "-m" else [names[1], *words[2:at]]
            return [*begin, *own]
    return ["python", *script, *arguments]


def without_places(facts: Mapping[str, object]) -> dict[str, object]:
    """The facts of a run or a command as its report has them: without the places of this
    machine."""
    found = {**facts, "command": _without_places(str(facts["command"]))}
    resumed = facts.get("resumed")
    if isinstance(resumed, list):
        found["resumed"] = [
            row | {"command": _without_places(str(row["command"]))} for row in resumed
        ]
    return found


def _without_places(command: str) -> str:
    try:
        return shown_command(shlex.split(command))
    except ValueError:  # of a run.json that was written by hand, without quotes
        return shown_command(command.split())


def trained_further(command: Sequence[str], folder: Path) -> str:
    """The command, for a shell, that trains the drafter of the run in `folder` further as
    `command` says, in a new run."""
    kept = [word for word in command if not word.startswith(OF_ITS_START)]
    return shell_command([*kept, f"model.drafter={folder}"])
