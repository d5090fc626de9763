"""Sources of raw text: an embedded domain, a file, a folder of files or a Hub data set.

A source is written `toy:<domain>` (the training modules of an embedded domain), the path of a file
or a folder (.txt .jsonl .json .parquet .csv, each also .gz; a .txt file is one document), or the id
of a Hub data set. Options follow a `#`: `org/name#config=c&split=train&column=text&revision=main`.
Files and data sets are streamed by `datasets`; no source is held in memory as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from data import toy
from trainer.checks import is_file, is_path
from trainer.config import suggest
from trainer.errors import RunFault, UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

COLUMNS = ("text", "content", "code")
KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
OPTIONS = ("config", "split", "column", "revision")


@dataclass(frozen=True)
class Source:
    """A source of raw text; `config`, `split` and `revision` belong to Hub data sets."""

    name: str
    config: str | None = None
    split: str | None = None
    column: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read `name#option=value&...`; UserError where a source or an option is unknown."""
        name, _, tail = text.partition("#")
        options = dict(parse_qsl(tail))
        for key in options:
            if key not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise UserError(
                    f"corpus {text!r}: unknown option {key!r}{suggest(key, list(OPTIONS))}; known: "
                    f"{known}, as in org/name#split=train&column=text"
                )
        source = cls(name, **options)
        kind, _, domain = name.partition(":")
        if kind == "toy" and domain not in toy.DOMAINS:
            known = ", ".join(f"toy:{one}" for one in toy.DOMAINS)
            raise UserError(f"unknown corpus {text!r}; of the toy there are {known}")
        path = Path(name).expanduser()
        is_local = os.path.exists(path)
        allowed = () if kind == "toy" else ("column",) if is_local else OPTIONS
        for key in options:
            if key not in allowed:
                raise UserError(f"corpus {text!r}: {key} does not apply to {name}; remove it")
        on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not is_path(name)
        if allowed == OPTIONS and not on_hub:
            raise UserError(
                f"corpus {name} does not exist: it is neither a file, a folder nor a Hub data set"
            )
        if allowed == OPTIONS and _suffix(path) in KINDS:
            raise UserError(f"corpus file {name} does not exist")
        return source

    @property
    def is_toy(self) -> bool:
        """Whether this is an embedded domain."""
        return self.name.startswith("toy:")

    def files(self) -> list[Path]:
        """The files of a local source; [] for the toy and for a Hub data set."""
        path = Path(self.name).expanduser()
        if not os.path.isdir(path) and is_file("corpus file", path):
            return [path]
        found = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in KINDS)
        if path.is_dir() and not found:
            raise UserError(f"corpus folder {self.name} holds no file of {' '.join(KINDS)}")
        return found

    def identity(self) -> dict[str, object]:
        """What decides the text: the content of files, or the library that the toy is made of."""
        if self.is_toy:
            made = hashlib.sha256(Path(toy.__file__).read_bytes()).hexdigest()
            return {"name": self.name, "python": platform.python_version(), "toy": made}
        files = self.files()
        if not files:
            return asdict(self)
        return {"column": self.column, "files": {str(p): _sha256(p) for p in files}}

    def texts(self, skip: int) -> Iterator[str]:
        """Yield the documents from number `skip` on; an empty one is ""."""
        if self.is_toy:
            found = toy.documents(self.name.removeprefix("toy:"), "train")
            yield from (document.text for document in itertools.islice(found, skip, None))
            return
        dataset, column = self._open()
        rows = dataset.skip(skip) if skip else dataset
        for number, row in _rows(rows, self, skip):
            text = row.get(column)
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(
                    f"corpus {self.name} row {number}: column {column!r} must hold text, got {kind}"
                )
            yield text or ""

    def _open(self) -> tuple[IterableDataset, str]:
        """The streamed data set and the name of its text column."""
        import datasets

        files = self.files()
        kinds = {KINDS.get(_suffix(path)) for path in files}
        if None in kinds or len(kinds) > 1:
            known = " ".join(KINDS)
            raise UserError(
                f"corpus {self.name} must be one file or a folder of files of one kind ({known})"
            )
        try:
            if files:
                kind = kinds.pop()
                read = functools.partial(
                    datasets.load_dataset, str(kind), data_files=[str(path) for path in files],
                    split="train", streaming=True,
                )  # fmt: skip
                dataset = read(sample_by="document") if kind == "text" else read()
            else:
                dataset = datasets.load_dataset(
                    self.name, self.config, split=self.split or "train", streaming=True,
                    revision=self.revision,
                )  # fmt: skip
            first = next(iter(dataset), None)
        except Exception as error:  # whatever the layers below raise, the remedy is the same
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"corpus {self.name!r} cannot be opened as a file, a folder or a Hub data set with "
                f"config={self.config} split={self.split or 'train'} "
                f"({type(error).__name__}: {reason})"
            ) from error
        columns = list(first or {})
        column = self.column or next((name for name in COLUMNS if name in columns), None)
        if first is not None and column not in columns:
            raise UserError(
                f"corpus {self.name} has no column {self.column or ' or '.join(COLUMNS)!r}; "
                f"columns: {', '.join(columns)}; name one as {self.name}#column=..."
            )
        return dataset, str(column)


def _suffix(path: Path) -> str:
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def _rows(
    dataset: Iterable[Mapping[str, object]], source: Source, skip: int
) -> Iterator[tuple[int, Mapping[str, object]]]:
    rows = iter(dataset)
    for number in itertools.count(skip + 1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise RunFault(
                f"corpus {source.name} cannot be read after row {number - 1} ({reason}); what is "
                "tokenised stays: remove the cause and start the same command again"
            ) from error
        yield number, row
