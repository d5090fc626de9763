"""The tables of a source of prompts: a file, a data set or several of them, and their columns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.columns import Columns, choose_columns
from data.tables import FILE_KINDS, Row, Table, file_kind, listed, read_table, split_files
from trainer.errors import UserError

# names of folders that hold parts of one data set
PARTS = {"data", "train", "training", "test", "testing", "eval", "evaluation", "valid",
         "validation", "dev"}  # fmt: skip

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptTable:
    """A table of `source` and which of its columns are read; `domain`: of rows that name none."""

    source: str
    domain: str
    table: Table
    columns: Columns

    def rows(self) -> Iterable[Row]:
        """The rows with the columns that are read."""
        read = set(self.columns.read)
        return self.table.rows([name for name in self.table.columns if name in read])


def open_tables(
    source: str,
    config: str | None,
    split: str,
    column: Sequence[str],
    response_column: str | None,
    key: str = "data.prompts",
) -> list[PromptTable]:
    """The tables of a source: one, or those of a folder that holds several data sets.

    Each file or folder in that is a data set, and its name the domain of it, or each file of such a
    folder is one where they differ in their columns; of the files only those of `split` are read.
    Text files, which would give a prompt a line, are left out there, and so is what holds no
    prompts; each is named. Raises UserError where there is no table of prompts, or a folder of
    tables has no such split.
    """

    def opened(place: Path | str, domain: str) -> PromptTable:
        table = read_table(str(place), config, split)
        columns = choose_columns(str(place), table, column, response_column, key)
        return PromptTable(str(place), domain, table, columns)

    folder = Path(os.path.expanduser(source))
    several = config is None and _holds_several(folder)
    found = list(_data_sets(folder, split, opened)) if several else []
    return found or [opened(source, folder.name.split(".")[0])]


def _holds_several(folder: Path) -> bool:
    """Whether two folders or more in this one hold tables, which are no parts of one data set: it
    has no card that says how to read it, and they are not named as parts are."""
    if not os.path.isdir(folder):  # also of a name that no file can have
        return False
    card = folder / "README.md"
    if card.exists() and card.read_text(errors="replace").startswith("---"):
        return False
    names = [entry.name.lower() for entry in folder.iterdir() if entry.is_dir() and _files(entry)]
    return len(names) > 1 and PARTS.isdisjoint(names)


def _files(place: Path) -> list[Path]:
    """The tables at a place, without text files."""
    files = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
    return [file for file in files if file_kind(file) in FILE_KINDS and file_kind(file) != ".txt"]


def _data_sets(
    folder: Path, split: str, opened: Callable[[Path, str], PromptTable]
) -> Iterator[PromptTable]:
    for entry in sorted(folder.iterdir()):
        files, domain = _files(entry), entry.name.split(".")[0]
        if entry.is_dir() and files:
            try:
                yield opened(entry, domain)
                continue
            except UserError as error:  # its files may be readable one by one
                files = _files_of_split(entry, split, files, error)
        for file in files:
            try:
                yield opened(file, domain)
            except UserError as error:
                _log.info("left out: %s", error)


def _files_of_split(entry: Path, split: str, files: list[Path], error: UserError) -> list[Path]:
    """Those of the `files` of a data set that are of this split. Raises UserError where it has no
    such split, `error` where nobody knows which they are."""
    try:
        parts = split_files(str(entry))
    except Exception:  # what is wrong with the folder, `error` says
        raise error from None
    if parts and split not in parts:
        raise UserError(
            f"{entry} has no split {split!r}; it has: {listed(parts)}: set prompts_split to one "
            f"that every data set in {entry.parent} has, or move {entry.name} elsewhere"
        ) from error
    for file in files:
        if not any(file.resolve() in part for part in parts.values()):
            _log.info("left out: %s is of no split of %s", file, entry)
    return [file for file in files if file.resolve() in parts.get(split, [])]
