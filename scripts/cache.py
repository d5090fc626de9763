"""List the stores that runs share below data.cache_dir, and delete one.

    python -m scripts.cache                                    # those in runs/cache
    python -m scripts.cache data.cache_dir=/disk/cache
    python -m scripts.cache script.delete=features/c5805cb8c126

A line has the store's kind and name, its size, the days since a run used it last, the target, and
the runs that used it and are still there. What is deleted is made again by the next run that needs
it: text by the target, states from the text, stages by training. A store that is being written is
not deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

from data.config import DataConfig
from eval.report.render import Table, Text, to_markdown
from phases import exits
from phases.uses import file_of, uses_of
from trainer.config import asks_for_help, parse_overrides, suggest
from trainer.errors import UserError
from trainer.lock import lock
from trainer.terminal import guard_terminal

KEYS = ["data.cache_dir", "script.delete"]
DAY_S = 86_400


class Store(NamedTuple):
    """A store. `name`: its kind and its own name; `used`: seconds since the epoch; `runs`: the
    folders, still there, of runs that used it."""

    name: str
    folder: Path
    num_bytes: int
    used: float
    targets: list[str]
    runs: list[str]


def main(arguments: list[str]) -> int:
    guard_terminal()
    if arguments and asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        words = parse_overrides(arguments, KEYS, KEYS)
        cache = Path(words.get("data.cache_dir") or DataConfig.cache_dir)
        if name := words.get("script.delete"):
            print(f"deleted: {name}, {_size(delete(cache, name))}")
        else:
            print(listing(cache))
    except Exception as error:
        return exits.fail(error, arguments)
    return 0


def stores(cache: Path) -> list[Store]:
    """List the stores, the largest first. UserError where there is no such folder."""
    if not cache.is_dir():
        raise UserError("is no folder", key="data.cache_dir", value=str(cache))
    folders = [
        store
        for kind in cache.iterdir() if kind.is_dir() and not kind.name.startswith(".")
        for store in kind.iterdir() if store.is_dir() and not store.name.startswith(".")
    ]  # fmt: skip
    return sorted((_store(cache, folder) for folder in folders), key=lambda one: -one.num_bytes)


def _store(cache: Path, folder: Path) -> Store:
    uses, noted = uses_of(cache, folder), file_of(cache, folder)
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    times = [path.stat().st_mtime for path in [folder, *files]]
    if noted.is_file():
        times.append(noted.stat().st_mtime)
    return Store(
        str(folder.relative_to(cache)), folder, sum(path.stat().st_size for path in files),
        max(times), list(dict.fromkeys(use.target for use in uses)),
        [run for use in uses if os.path.isdir(run := use.run)],
    )  # fmt: skip


def listing(cache: Path) -> str:
    """The table of all stores."""
    found = stores(cache)
    rows = [
        [
            one.name, _size(one.num_bytes), f"{(time.time() - one.used) / DAY_S:.1f}",
            ", ".join(one.targets) or "–", ", ".join(map(_short, one.runs)) or "–",
        ]
        for one in found
    ]  # fmt: skip
    total = f"{len(found)} stores, {_size(sum(one.num_bytes for one in found))} in {cache}"
    if not rows:
        return total
    header = ["store", "size", "days", "target", "runs"]
    return to_markdown([Table(header, rows), Text(total)])


def delete(cache: Path, name: str) -> int:
    """Delete the store of that name, and return its bytes. UserError where there is none, or where
    somebody writes it."""
    known = {one.name: one for one in stores(cache)}
    if name not in known:
        close = suggest(name, list(known)) or "; python -m scripts.cache lists them"
        raise UserError(f"script.delete={name}: there is no such store in {cache}{close}")
    store, said = known[name], f"script.delete={name}: another process is writing this store"
    with contextlib.ExitStack() as held:
        for path in sorted(store.folder.glob(".*lock")):
            held.enter_context(lock(path, f"{said}; wait for it"))
        shutil.rmtree(store.folder)
    file_of(cache, store.folder).unlink(missing_ok=True)
    return store.num_bytes


def _size(num_bytes: int) -> str:
    """Bytes in the unit that gives one to three digits before the point."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _short(run: str) -> str:
    """A run's folder as seen from here, where it lies below."""
    return os.path.relpath(run) if Path.cwd() in Path(run).parents else run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
