"""Tables of prompts: the columns and rows of a local file or of a Hub data set.

A file is .jsonl, .json, .parquet, .csv or .txt, each also with .gz. A row that cannot be read stops
the run with its number. Most of this code is for what users get wrong, each mistake with a sentence
of its own.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trainer.checks import is_file
from trainer.errors import UserError

Row: TypeAlias = tuple[str, Mapping[str, object]]  # its place ("x.jsonl line 3") and its columns

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".txt")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # of a CSV file
SEPARATOR_ROWS = 100  # first rows of a CSV file that its separator is found by

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table:
    """Column names of a source, and a reader of its rows with the columns that are named.

    A text file is read whole, so its reader may return more columns than were named.
    """

    columns: list[str]
    rows: Callable[[list[str]], Iterable[Row]]


def read_table(source: str, config: str | None, split: str) -> Table:
    """The table of a file, or of a Hub data set with this configuration and split.

    Raises UserError where there is none or where it cannot be read.
    """
    path = Path(os.path.expanduser(source))
    kind = file_kind(path)
    if kind not in FILE_KINDS and os.path.isdir(path):
        return _hub_table(source, config, split)
    there = is_file("prompts file", path)
    if kind not in FILE_KINDS and there:
        known = " ".join(FILE_KINDS)
        raise UserError(f"prompts file {source} must end in one of {known}, or in one and .gz")
    if not there and (kind in FILE_KINDS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)):
        raise UserError(f"prompts file {source} does not exist")
    if not there:
        return _hub_table(source, config, split)
    return (_parquet_table if kind == ".parquet" else _text_table)(source, path, kind)


def file_kind(path: Path) -> str:
    """The suffix of a file, that before .gz where it is compressed."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def _read_bytes(source: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"prompts file {source} cannot be read ({one_line(error)})") from error
    if not content.strip():
        raise UserError(f"prompts file {source} is empty")
    return content


def _text_table(source: str, path: Path, kind: str) -> Table:
    try:
        # some editors put a byte-order mark before the first line
        text = _read_bytes(source, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"({one_line(error)}); convert it first"
        raise UserError(f"prompts file {source} is not UTF-8 {reason}") from error
    if kind == ".csv":
        return _csv_table(source, text)
    if kind == ".json":
        rows = _json_rows(source, text)
    else:
        rows = []
        # not splitlines(): it would also split at the line separators of Unicode, inside a prompt
        for number, line in enumerate(io.StringIO(text, newline=None), 1):
            if line.strip():
                where, line = f"{source} line {number}", line.removesuffix("\n")
                rows.append(
                    (where, _json_line(where, line) if kind == ".jsonl" else {"text": line})
                )
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    return Table(columns, lambda _: rows)


def _json_line(where: str, line: str) -> dict[str, object]:
    return _object(where, _json(where, line, lambda error: f"{error.msg}: column {error.colno}"))


def _json_rows(source: str, text: str) -> list[Row]:
    remedy = "if each line holds one object, name the file .jsonl"
    loaded = _json(source, text, lambda error: f"{error.msg}: line {error.lineno}", f"; {remedy}")
    if not isinstance(loaded, list):
        raise UserError(f"{source} must hold one JSON list of objects, got {kind_of(loaded)}")
    numbered = [(f"{source} row {number}", row) for number, row in enumerate(loaded, 1)]
    return [(where, _object(where, row)) for where, row in numbered]


def _json(
    where: str, text: str, place: Callable[[json.JSONDecodeError], str], remedy: str = ""
) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({place(error)}){remedy}") from error
    except (RecursionError, ValueError) as error:
        long = "holds a whole number of thousands of digits"
        what = "is nested too deep" if isinstance(error, RecursionError) else long
        raise UserError(f"{where} {what}; repair or drop it") from error


def _object(where: str, row: object) -> dict[str, object]:
    if not isinstance(row, dict):
        raise UserError(f"{where} must be an object with named columns, got {kind_of(row)}")
    return row


def _csv_table(source: str, text: str) -> Table:
    csv.field_size_limit(2**31 - 1)  # the default refuses prompts beyond 131072 characters
    separator, text = csv_separator(source, text)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[Row] = []
    try:
        for number, row in enumerate(reader, 1):
            if None in row:
                remedy = f"quote fields that hold {SEPARATORS[separator]}"
                raise UserError(f"{source} row {number} has more fields than the header; {remedy}")
            rows.append((f"{source} row {number}", row))
    except csv.Error as error:
        raise UserError(f"{source} row {len(rows) + 1} is not CSV ({error})") from error
    return Table(list(reader.fieldnames or []), lambda _: rows)


def csv_separator(source: str, text: str) -> tuple[str, str]:
    """The separator of a CSV file, and its text from the header on.

    A first line `sep=;`, as Excel writes it, names the separator. Otherwise it is the one of
    SEPARATORS that splits the header and the first rows into equally many columns; a file of one
    column, or of uneven rows, has the one that its header holds, else commas. Raises UserError
    where two fit equally well.
    """
    first, _, rest = text.partition("\n")
    named = re.fullmatch(r"\"?sep=([,;\t|])\"?\s*", first)
    if named:
        return named[1], rest
    splitting = {mark: rows for mark in SEPARATORS if len((rows := _rows_of(text, mark))[0]) > 1}
    even = [mark for mark, rows in splitting.items() if len(set(map(len, rows))) == 1]
    if len(even) > 1:
        names = " and ".join(SEPARATORS[mark] for mark in even)
        rule = f"header and rows can be split at {names} alike"
        remedy = "quote the columns that hold one of them"
        raise UserError(rule, key=f"prompts file {source}", remedy=remedy)
    separator = next(iter([*even, *splitting, ","]))
    if separator != ",":
        _log.info("%s: its columns are separated by %s", source, SEPARATORS[separator])
    return separator, text


def _rows_of(text: str, separator: str) -> list[list[str]]:
    """Header and first rows of a CSV file at this separator, without blank lines. One empty row
    where they cannot be read so."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        return list(itertools.islice(filter(None, reader), SEPARATOR_ROWS)) or [[]]
    except csv.Error:
        return [[]]


def _parquet_table(source: str, path: Path, kind: str) -> Table:
    import pyarrow
    import pyarrow.parquet

    # a damaged file shows itself anywhere, and not only by Arrow's own errors
    faults = (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)

    def damaged(error: Exception) -> UserError:
        return UserError(f"{source} is not a Parquet file, or damaged ({one_line(error)})")

    content = _read_bytes(source, path)
    try:
        file = pyarrow.parquet.ParquetFile(
            pyarrow.BufferReader(content), page_checksum_verification=True
        )
        names = list(file.schema_arrow.names)
    except faults as error:
        raise damaged(error) from error

    def rows(columns: list[str]) -> Iterator[Row]:
        number = 0
        try:
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source} row {number}", row
        except faults as error:
            raise damaged(error) from error

    return Table(names, rows)


def _hub_table(source: str, config: str | None, split: str) -> Table:
    import datasets

    try:
        dataset = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # whatever the network layers below raise, the remedy is the same
        raise UserError(
            f"prompts {source!r} are neither toy, nor a file ({' '.join(FILE_KINDS)}), nor a Hub"
            f" data set that loads with config={config} split={split} ({type(error).__name__}:"
            f" {one_line(error)}); check id, config and split, or download it and name the file"
        ) from error

    def rows(columns: list[str]) -> Iterator[Row]:
        for number, row in enumerate(dataset.select_columns(columns), 1):
            yield f"{source} {split} row {number}", dict(row)

    return Table(dataset.column_names, rows)


def split_files(source: str) -> dict[str, list[Path]]:
    """The resolved files of each split of a folder that is one data set, which its card or their
    names say: those that `read_table` reads there. None where `datasets` finds no data."""
    import datasets

    try:
        found = datasets.load_dataset_builder(source).config.data_files or {}
    except FileNotFoundError:
        found = {}
    return {str(split): [Path(file).resolve() for file in found[split]] for split in found}


def kind_of(value: object) -> str:
    """Type and beginning of a value, for a message."""
    return f"{type(value).__name__} {shorten(repr(value))}" if value is not None else "nothing"


def listed(names: Iterable[str]) -> str:
    """Names on one line of a message, or "none"."""
    return shorten(", ".join(names), 300) or "none"


def shorten(text: str, width: int = 60) -> str:
    """`text` on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def one_line(error: Exception) -> str:
    """The message of an error on one line of at most 200 characters."""
    return shorten(str(error), 200)
