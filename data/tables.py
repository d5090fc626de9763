"""Tables of prompts: the columns and rows of a local file or of a Hub data set.

A file is .jsonl, .json, .parquet, .csv or .txt, each also with .gz or .zst. A row that cannot be
read is handed on as a `BadRow`. Most of this code is for what users get wrong, each mistake with a
sentence of its own.
"""

from __future__ import annotations

import codecs
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
from typing import TYPE_CHECKING, TypeAlias

from data.bad_rows import BadRow
from trainer.checks import is_file, is_path
from trainer.errors import UserError

if TYPE_CHECKING:
    import pyarrow

# its place ("x.jsonl line 3"), and its columns or why it cannot be read
Row: TypeAlias = tuple[str, Mapping[str, object] | BadRow]

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".txt")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # of a CSV file
SEPARATOR_ROWS = 100  # first rows of a CSV file that its separator is found by
_FILLED = re.compile(r"\S")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table:
    """Column names of a source, those that hold text, and a reader of its rows with the columns
    that are named.

    A text file is read whole, so its reader may return more columns than were named.
    """

    columns: list[str]
    texts: list[str]
    rows: Callable[[list[str]], Iterable[Row]]


def read_table(source: str, config: str | None, split: str) -> Table:
    """The table of a file, or of a Hub data set with this configuration and split.

    Raises UserError where there is none or where it cannot be read.
    """
    path = Path(os.path.expanduser(source))
    kind = file_kind(path)
    if kind not in FILE_KINDS and os.path.isdir(path):
        return _hub_table(str(path), config, split)
    there = is_file("prompts file", path)
    if kind not in FILE_KINDS and there:
        known = " ".join(FILE_KINDS)
        rule = f"must end in one of {known}, or in one and .gz or .zst"
        raise UserError(f"prompts file {source} {rule}")
    on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not is_path(source)
    if not there and (kind in FILE_KINDS or not on_hub):
        raise UserError(f"prompts file {source} does not exist")
    if not there:
        return _hub_table(source, config, split)
    return (_parquet_table if kind == ".parquet" else _text_table)(source, path, kind)


def file_kind(path: Path) -> str:
    """The suffix of a file, that before .gz or .zst where it is compressed."""
    return (Path(path.stem) if path.suffix in (".gz", ".zst") else path).suffix.lower()


def _read_bytes(source: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".zst":
            import pyarrow

            content = pyarrow.input_stream(path).read()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"prompts file {source} cannot be read ({one_line(error)})") from error
    _refuse_empty(source, content)
    return content


def _refuse_empty(source: str, content: bytes | str) -> None:
    if not content.strip():
        raise UserError(f"prompts file {source} is empty")


def _text_table(source: str, path: Path, kind: str) -> Table:
    content = _read_bytes(source, path)
    # some editors put a byte-order mark before the first line, which says what UTF-16 is
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(
            f"line {line} is not UTF-8 ({one_line(error)})",
            key=f"prompts file {source}",
            remedy="convert it first, such as with iconv -f cp1252 -t utf-8",
        ) from error
    _refuse_empty(source, text)
    if kind == ".csv":
        return _csv_table(source, text)
    if kind == ".txt":
        rows: list[Row] = [(where, {"text": line}) for where, line in _lines(source, text)]
    else:
        rows = (_json_rows if kind == ".json" else _json_lines)(source, text)
    named = [row for _, row in rows if not isinstance(row, BadRow)]
    columns, texts = dict[str, None](), dict[str, None]()
    for row in named:
        columns.update(dict.fromkeys(row))
        texts.update((key, None) for key, value in row.items() if isinstance(value, str))
    return Table([*columns], [*texts], lambda _: rows)


def _lines(source: str, text: str) -> Iterator[tuple[str, str]]:
    """Place and text of each line that is not blank."""
    # not splitlines(): it would also split at the line separators of Unicode, inside a prompt
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            yield f"{source} line {number}", line.removesuffix("\n")


def _json_lines(source: str, text: str) -> list[Row]:
    """The rows of a .jsonl file: one a line, else objects over several lines, or one list."""
    rows: list[Row] = [(where, _line(line)) for where, line in _lines(source, text)]
    if not isinstance(rows[0][1], BadRow):
        return rows
    try:
        values = list(_values(text))
    except (ValueError, RecursionError):
        return rows
    match values:
        case [[*items]]:
            return _numbered(source, items)
    return _numbered(source, values)


def _json_rows(source: str, text: str) -> list[Row]:
    """The rows of a .json file: one list of objects, alone or as the only list of an object; else
    as those of a .jsonl file, which many are."""
    try:
        values = list(_values(text))
    except (ValueError, RecursionError) as error:
        lines: list[Row] = [(where, _line(line)) for where, line in _lines(source, text)]
        if not isinstance(lines[0][1], BadRow):
            return lines
        raise UserError(str(_fault(error)), key=f"prompts file {source}") from error
    if len(values) > 1:
        return _numbered(source, values)
    if isinstance(values[0], list):
        return _numbered(source, values[0])
    found = _lists_in(values[0])
    if len(found) != 1:
        holds = f"holds several ({listed(found)})" if found else f"got {kind_of(values[0])}"
        rule, remedy = f"must hold one list of objects, {holds}", "write it to a file of its own"
        raise UserError(rule, key=f"prompts file {source}", remedy=remedy)
    [(name, rows)] = found.items()
    _log.info("%s: its rows are the list %r", source, name)
    return _numbered(source, rows)


def _lists_in(value: object) -> dict[str, list[object]]:
    """The lists of rows that an object holds, by key: of objects that are no messages."""
    return {
        name: inner for name, inner in (value.items() if isinstance(value, dict) else ())
        if isinstance(inner, list) and inner and isinstance(inner[0], dict)
        and not inner[0].keys() & {"role", "from"}
    }  # fmt: skip


def _values(text: str) -> Iterator[object]:
    """The JSON values of a text that follow each other. Raises ValueError, RecursionError."""
    decoder, at = json.JSONDecoder(), 0
    while begins := _FILLED.search(text, at):
        value, at = decoder.raw_decode(text, begins.start())
        yield value


def _line(text: str) -> dict[str, object] | BadRow:
    try:
        return _object(json.loads(text))
    except (ValueError, RecursionError) as error:
        return _fault(error)


def _fault(error: Exception) -> BadRow:
    """Why a text is no JSON that can be read."""
    if isinstance(error, json.JSONDecodeError):
        return BadRow("not JSON", f"{error.msg}: line {error.lineno}, column {error.colno}")
    if isinstance(error, RecursionError):
        return BadRow("JSON that is nested too deep")
    return BadRow("a whole number of thousands of digits")


def _numbered(source: str, values: Iterable[object]) -> list[Row]:
    return [(f"{source} row {number}", _object(row)) for number, row in enumerate(values, 1)]


def _object(row: object) -> dict[str, object] | BadRow:
    return row if isinstance(row, dict) else BadRow("no object with named columns", kind_of(row))


def _csv_table(source: str, text: str) -> Table:
    csv.field_size_limit(2**31 - 1)  # the default refuses prompts beyond 131072 characters
    separator, text = csv_separator(source, text)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[Row] = []
    try:
        for number, row in enumerate(reader, 1):
            remedy = f"quote fields that hold {SEPARATORS[separator]}"
            many = BadRow("more fields than the header", remedy)
            rows.append((f"{source} row {number}", many if None in row else row))
    except csv.Error as error:
        raise UserError(f"{source} row {len(rows) + 1} is not CSV ({error})") from error
    columns = list(reader.fieldnames or [])
    return Table(columns, [name for name in columns if not _is_numeric(name, rows)], lambda _: rows)


def _is_numeric(name: str, rows: Iterable[Row]) -> bool:
    """Whether a column of a CSV file, where everything is text, holds numbers alone."""
    try:
        for _, row in rows:
            if not isinstance(row, BadRow) and row[name]:
                float(str(row[name]))
    except ValueError:
        return False
    return True


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
        texts = [column.name for column in file.schema_arrow if _is_text(column.type)]
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

    return Table(names, texts, rows)


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow.types

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def _hub_table(source: str, config: str | None, split: str) -> Table:
    import datasets

    try:
        dataset = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # whatever the network layers below raise, the remedy is the same
        if (known := _splits(source)) and split not in known:
            rule = f"has no split {split!r}; it has: {listed(known)}"
            raise UserError(
                rule, key=f"prompts {source}", remedy="set prompts_split to one of them"
            ) from error
        raise UserError(
            f"prompts {source!r} are neither toy, nor a file ({' '.join(FILE_KINDS)}), nor a Hub"
            f" data set that loads with config={config} split={split} ({type(error).__name__}:"
            f" {one_line(error)}); check id, config and split, or download it and name the file"
        ) from error

    def rows(columns: list[str]) -> Iterator[Row]:
        for number, row in enumerate(dataset.select_columns(columns), 1):
            yield f"{source} {split} row {number}", dict(row)

    texts = [column.name for column in dataset.features.arrow_schema if _is_text(column.type)]
    return Table(dataset.column_names, texts, rows)


def split_files(source: str) -> dict[str, list[Path]]:
    """The resolved files of each split of a folder that is one data set, which its card or their
    names say: those that `read_table` reads there. None where `datasets` finds no data."""
    import datasets

    try:
        found = datasets.load_dataset_builder(source).config.data_files or {}
    except FileNotFoundError:
        found = {}
    return {str(split): [Path(file).resolve() for file in found[split]] for split in found}


def _splits(source: str) -> dict[str, list[Path]]:
    """`split_files`; none where even that cannot be read."""
    try:
        return split_files(source)
    except Exception:  # of the same network layers; the caller has the first error
        return {}


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
