"""A table of cells: their settings, and the state of each."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from trainer.checks import is_file
from trainer.config import suggest
from trainer.errors import UserError
from trainer.files import read_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Json: TypeAlias = dict[str, Any]
MINUTES = 40
DONE, FAILED, STALE, NOT_RUN = "done", "failed", "stale", "not run"


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a cell, as the table has it."""

    row: str
    seed: int
    before: list[str]
    commands: list[str]
    reports: list[str]
    minutes: float = MINUTES

    @property
    def cell(self) -> str:
        return f"{self.row}-s{self.seed}"

    @property
    def hash(self) -> str:
        """Of all but the limit, which changes no number."""
        settings = {key: value for key, value in asdict(self).items() if key != "minutes"}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cells:
    """A table of cells, and where its results and its working files lie."""

    path: Path
    folder: Path
    cells: list[Settings] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Cells:
        if not is_file("cells", path):
            raise UserError(f"cells={path} does not exist: name a table of cells")
        return cls.parse(path, path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, path: Path, text: str) -> Cells:
        """The table in `text`. `{word}` in a command is the entry of [words], `{folder}` the
        cell's own folder, `{seed}` its seed. `before` is what runs ahead of every cell, outside
        of its `minutes`, which a row may have of its own."""
        try:
            table = tomllib.loads(text)
            folder, words = table["folder"], table.get("words", {})
            cells = []
            for row in table["row"]:
                if odd := row.keys() - {"name", "seeds", "minutes", "commands", "reports"}:
                    raise UserError(f"{path}: row {row['name']} has the unknown key {min(odd)!r}")
                for seed in row.get("seeds", [0]):
                    own = {**words, "seed": str(seed), "folder": f"{folder}/{row['name']}-s{seed}"}
                    lists = {
                        "before": table.get("before", []), "commands": row["commands"],
                        "reports": row.get("reports", ["{folder}/report.json"]),
                    }  # fmt: skip
                    filled = {
                        key: [_fill(one, own) for one in found] for key, found in lists.items()
                    }
                    minutes = row.get("minutes", table.get("minutes", MINUTES))
                    cells.append(Settings(row["name"], seed, minutes=minutes, **filled))
        except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a table of cells ({error!r})") from error
        twice = [name for name, count in Counter(c.cell for c in cells).items() if count > 1]
        if twice:
            raise UserError(f"{path} has the cell {twice[0]} twice")
        return cls(path, Path(folder), cells)

    def chosen(self, names: Sequence[str]) -> list[Settings]:
        """The cells of these names of cells or rows; all where there is none."""
        known = [*dict.fromkeys(c.row for c in self.cells), *(c.cell for c in self.cells)]
        for name in names:
            if name not in known:
                raise UserError(f"{self.path} has no cell {name!r}{suggest(name, known)}")
        return [c for c in self.cells if not names or {c.row, c.cell} & {*names}]

    def result(self, cell: Settings) -> Path:
        return self.path.parent / "results" / f"{cell.cell}.json"

    def state(self, cell: Settings) -> tuple[str, Json]:
        """The state of a cell, and its result."""
        path = self.result(cell)
        if not path.exists():
            return NOT_RUN, {}
        found = read_json(path, "delete it, and run the cell again")
        if found["settings_hash"] != cell.hash:
            return STALE, found
        return FAILED if found["failed"] else DONE, found

    def count(self) -> str:
        done = sum(self.state(cell)[0] == DONE for cell in self.cells)
        return f"{done} of {len(self.cells)} cells"

    def committed(self) -> dict[str, str]:
        """The hash of each cell's settings as the last commit has them."""
        git = ["git", "-C", str(self.path.parent), "show", f"HEAD:./{self.path.name}"]
        found = subprocess.run(git, capture_output=True, text=True, check=False)
        if found.returncode:
            return {}
        return {c.cell: c.hash for c in Cells.parse(self.path, found.stdout).cells}


def _fill(text: str, words: Mapping[str, str]) -> str:
    """`text` with the words in braces replaced; braces around anything else stay."""
    for _ in range(5):  # a word may hold others
        for name, value in words.items():
            text = text.replace(f"{{{name}}}", value)
    return text
