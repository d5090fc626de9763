"""Which runs use the stores that they share: one file for each store, `.users/<kind>/<name>` below
data.cache_dir, with a line for each run."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from phases.run import Run

FOLDER = ".users"


class Use(NamedTuple):
    """A run that used a store: its folder, and the target's name."""

    run: str
    target: str


def note_use(run: Run, store: Path) -> None:
    """Note that the run uses a store. What lies elsewhere than in data.cache_dir is nobody's but
    the user's; a note that cannot be written stops no run."""
    cache = Path(run.config.data.cache_dir)
    if not run.accelerator.is_main_process or cache.absolute() not in store.absolute().parents:
        return
    now = Use(str(run.folder.absolute()), run.target.name)
    path = file_of(cache, store)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if now in uses_of(cache, store):
            os.utime(path)
            return
        with path.open("a") as file:
            file.write(json.dumps(now._asdict()) + "\n")


def uses_of(cache: Path, store: Path) -> list[Use]:
    """List the runs that used a store, the first one first."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in file_of(cache, store).read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # cut by a kill
                row = json.loads(line)
                found.append(Use(str(row["run"]), str(row["target"])))
    return found


def file_of(cache: Path, store: Path) -> Path:
    """The file of a store's runs."""
    return cache / FOLDER / store.absolute().relative_to(cache.absolute())
