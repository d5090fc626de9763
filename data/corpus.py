"""Raw text: from its source to one long row of token ids on the disk, written once.

A source is `toy:<domain>` (the training modules of the embedded domains), a file or a folder of
files (.txt .jsonl .json .parquet .csv, each also .gz; a .txt file is one document), or a Hub data
set id; options follow a `#`: `org/name#config=c&split=train&column=text&revision=main`. Files and
data sets are streamed by `datasets`; nothing is held at once.

    source.json     what the tokens were made of
    tokens.bin      uint32, every document ends in EOS
    ends.bin        uint64, where each document ends in it
    blocks.jsonl    one line per finished block: documents, tokens, running SHA-256

A block counts from the moment its line is written. A killed run goes on behind the last one, a
later stage that needs more text makes the same file longer, and what a shorter budget reads of it
stays the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from huggingface_hub import HfApi
from tqdm import tqdm

from data import toy
from target.model import Target
from trainer.checks import is_file
from trainer.config import RunFault, UserError, suggest
from trainer.files import read_json, write_atomic, write_json
from trainer.lock import lock

COLUMNS = ("text", "content", "code")
KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
OPTIONS = ("config", "split", "column", "revision")
BLOCK_DOCUMENTS = 512
BLOCK = {"documents": int, "kept": int, "tokens": int, "sha256": str, "last": bool}
VERIFIED = "verified.json"  # the state of the files whose hashes were last compared


@dataclass(frozen=True)
class Source:
    """Where raw text comes from; `config`, `split` and `revision` belong to Hub data sets."""

    name: str
    config: str | None = None
    split: str | None = None
    column: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
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
        there = os.path.exists(path)
        allowed = () if kind == "toy" else ("column",) if there else OPTIONS
        for key in options:
            if key not in allowed:
                raise UserError(f"corpus {text!r}: {key} does not apply to {name}; leave it out")
        if allowed == OPTIONS and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise UserError(f"corpus {name} does not exist: neither file, folder nor Hub data set")
        if allowed == OPTIONS and _suffix(path) in KINDS:
            raise UserError(f"corpus file {name} does not exist")
        return source

    @property
    def is_toy(self) -> bool:
        return self.name.startswith("toy:")

    def files(self) -> list[Path]:
        """The files of a local source, [] where it is none."""
        path = Path(self.name).expanduser()
        if not os.path.isdir(path) and is_file("corpus file", path):
            return [path]
        found = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in KINDS)
        if path.is_dir() and not found:
            raise UserError(f"corpus folder {self.name} holds no file of {' '.join(KINDS)}")
        return found

    def identity(self) -> dict[str, Any]:
        """What fixes its text: of files their content, of the toy the library it is made of."""
        if self.is_toy:
            made = hashlib.sha256(Path(toy.__file__).read_bytes()).hexdigest()
            return {"name": self.name, "python": platform.python_version(), "toy": made}
        files = self.files()
        if not files:
            return asdict(self)
        return {"column": self.column, "files": {str(p): _sha256(p) for p in files}}

    def texts(self, skip: int) -> Iterator[str]:
        """Its documents from number `skip` on, "" where one is empty."""
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

    def _open(self) -> tuple[Any, str]:
        """The streamed data set and the column of its text."""
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
                options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
                names = [str(path) for path in files]
                dataset: Any = datasets.load_dataset(
                    str(kind), data_files=names, split="train", streaming=True, **options
                )
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


def _pinned(source: Source, folder: Path) -> Source:
    """A Hub data set stays at the commit that the first block was read from."""
    if source.is_toy or source.files() or source.revision:
        return source
    path = folder / "revision"
    if not path.exists():
        try:
            commit = str(HfApi().dataset_info(source.name).sha)
        except Exception as error:  # not there, no network, no right to it
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"corpus {source.name!r} is neither toy:<domain>, nor a file or folder, nor a data "
                f"set that the Hub shows ({type(error).__name__}: {reason})"
            ) from error
        write_atomic(path, commit)
    return replace(source, revision=path.read_text())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def _rows(dataset: Any, source: Source, skip: int) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = iter(dataset)
    for number in itertools.count(skip + 1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise RunFault(
                f"corpus {source.name} cannot be read behind row {number - 1} ({reason}); what is "
                "tokenised is kept: remove the cause and start the same command again"
            ) from error
        yield number, row


class TokenFile:
    """Token ids of a source, memory-mapped: the blocks that first reach `num_tokens`, or all."""

    def __init__(self, folder: Path, source: str, num_tokens: int):
        self.source = source
        blocks = read_blocks(folder)
        check_sizes(folder, blocks[-1])
        used = next((b for b in blocks if b["tokens"] >= num_tokens), blocks[-1])
        self.num_tokens, self.num_documents = used["tokens"], used["documents"]
        self.fingerprint: str = used["sha256"]
        self.tokens = _mapped(folder / "tokens.bin", np.uint32, self.num_tokens)
        self.ends = _mapped(folder / "ends.bin", np.uint64, used["kept"])

    def row(self, index: int, context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the index-th stretch of `context` tokens: ids, positions within their documents (from
        the row's start where a document began before it) and document numbers from 0; int64."""
        start = index * context
        place = np.arange(start, start + context)
        document = np.searchsorted(self.ends, place.astype(np.uint64), side="right")
        begins = np.where(document > 0, self.ends[np.maximum(document, 1) - 1], 0).astype(np.int64)
        position = place - np.maximum(begins, start)
        ids = self.tokens[start : start + context].astype(np.int64)
        return ids, position, document - document[0]


def _mapped(path: Path, dtype: Any, length: int) -> np.ndarray:
    if not length:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(length,))


def tokenised(
    source: Source,
    target: Target,
    num_tokens: int,
    cache_dir: str | Path,
    *,
    is_main: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> TokenFile:
    """At least `num_tokens` tokens of the source with the target's tokenizer, or all it has. The
    main process writes what is missing; the others wait for it at the barrier."""
    identity = {
        **source.identity(),
        "tokenizer": target.fingerprint["tokenizer"],
        "eos": _eos(target),
        "block_documents": BLOCK_DOCUMENTS,
    }
    text = json.dumps(identity, sort_keys=True)
    folder = Path(cache_dir) / "corpus" / hashlib.sha256(text.encode()).hexdigest()[:12]
    if is_main:
        if not (folder / "source.json").exists():
            write_atomic(folder / "source.json", text + "\n")
        said = f"corpus {folder} is being written by another process; wait for it or use another"
        with lock(folder / ".lock", f"{said} data.cache_dir"):
            verify(folder)
            _extend(folder, source, target, num_tokens)
    barrier()
    return TokenFile(folder, source.name, num_tokens)


def _eos(target: Target) -> int | None:
    """What ends a document: the tokenizer's EOS, else the first that ends an answer."""
    own = target.tokenizer.eos_token_id
    return own if own is not None else next(iter(target.eos_ids), None)


def check_sizes(folder: Path, block: dict[str, Any]) -> None:
    """Raise UserError where a file is shorter than its blocks say: it was cut, or half copied."""
    for name, wanted in (("tokens.bin", 4 * block["tokens"]), ("ends.bin", 8 * block["kept"])):
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found < wanted:
            raise _damaged(folder, f"{name} has {found} bytes, {wanted} were written")


def verify(folder: Path) -> None:
    """Compare all that was written with the hashes of its blocks, once for each state of the files
    (size and time of change). By the process that holds the lock. Raises UserError."""
    blocks = read_blocks(folder)
    check_sizes(folder, blocks[-1])
    state = _state(folder)
    if len(blocks) == 1 or _verified(folder) == state:
        return
    if 4 * blocks[-1]["tokens"] > 1e9:
        print(f"corpus {folder}: comparing it with its checksums, once", flush=True)
    tokens = _mapped(folder / "tokens.bin", np.uint32, blocks[-1]["tokens"])
    ends = _mapped(folder / "ends.bin", np.uint64, blocks[-1]["kept"])
    for number, (before, block) in enumerate(itertools.pairwise(blocks), start=1):
        own = tokens[before["tokens"] : block["tokens"]], ends[before["kept"] : block["kept"]]
        documents = block["documents"] - before["documents"]
        whole = 0 <= documents <= BLOCK_DOCUMENTS and not before["last"]
        whole = whole and block["last"] == (documents < BLOCK_DOCUMENTS)
        if not whole or _chained(before["sha256"], *own) != block["sha256"]:
            raise _damaged(folder, f"block {number} does not have the checksum written with it")
    write_json(folder / VERIFIED, state)


def _chained(before: str, tokens: np.ndarray, ends: np.ndarray) -> str:
    """The running SHA-256 after a block: the one before it, its tokens and its ends."""
    return hashlib.sha256(before.encode() + tokens.tobytes() + ends.tobytes()).hexdigest()


def _state(folder: Path) -> dict[str, Any]:
    """Of the files of a corpus: size and time of change."""
    found = {}
    for name in ("tokens.bin", "ends.bin", "blocks.jsonl"):
        if (folder / name).exists():
            stat = (folder / name).stat()
            found[name] = [stat.st_size, stat.st_mtime_ns]
    return found


def _verified(folder: Path) -> dict[str, Any] | None:
    """The state that was last seen to be whole, None where nobody knows."""
    try:
        return read_json(folder / VERIFIED, "")
    except UserError:
        return None


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(
        f"corpus {folder} is damaged ({what}): delete this folder and start the same command "
        "again, its text is tokenised anew"
    )


def read_blocks(folder: Path) -> list[dict[str, Any]]:
    """Lines of blocks.jsonl; one torn by a kill is left out. The first stands for no text."""
    blocks: list[dict[str, Any]] = [
        {"documents": 0, "kept": 0, "tokens": 0, "sha256": "", "last": False}
    ]
    path = folder / "blocks.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            block = json.loads(line)
        except ValueError:
            break
        if not isinstance(block, dict) or {k: type(v) for k, v in block.items()} != BLOCK:
            raise _damaged(folder, f"line {len(blocks)} of {path.name} is no block")
        blocks.append(block)
    return blocks


def _extend(folder: Path, source: Source, target: Target, num_tokens: int) -> None:
    blocks = read_blocks(folder)
    if blocks[-1]["tokens"] >= num_tokens or blocks[-1]["last"]:
        return
    _print_budget(folder, source, num_tokens - blocks[-1]["tokens"])
    write_atomic(folder / "blocks.jsonl", "".join(json.dumps(b) + "\n" for b in blocks[1:]))
    for name, size in (
        ("tokens.bin", 4 * blocks[-1]["tokens"]),
        ("ends.bin", 8 * blocks[-1]["kept"]),
    ):
        with (folder / name).open("ab") as file:
            file.truncate(size)  # what a kill left behind the last whole block
    texts = _pinned(source, folder).texts(blocks[-1]["documents"])
    bar = tqdm(total=num_tokens, initial=blocks[-1]["tokens"], desc=f"tokenise {source.name}",
               unit="token", unit_scale=True, dynamic_ncols=True, disable=None)  # fmt: skip
    block = blocks[-1]
    with bar:
        while block["tokens"] < num_tokens and not block["last"]:
            found = list(itertools.islice(texts, BLOCK_DOCUMENTS))
            before = block["tokens"]
            block = _append(folder, source, target, block, found)
            bar.update(block["tokens"] - before)
            tenth = 10 * block["tokens"] // num_tokens
            if bar.disable and tenth > 10 * before // num_tokens:
                print(f"tokenise {source.name}: {block['tokens']} of {num_tokens} tokens")


def _append(
    folder: Path, source: Source, target: Target, block: dict[str, Any], found: list[str]
) -> dict[str, Any]:
    """Write the block of these documents; a short one is the last."""
    eos, limit = _eos(target), target.vocab_size
    filled = [text for text in found if text.strip()]
    ids: Any = target.tokenizer(filled, verbose=False)["input_ids"] if filled else []
    rows = [row if eos is None or row[-1:] == [eos] else [*row, eos] for row in ids]
    tokens = np.array([token for row in rows for token in row], np.uint32)
    if len(tokens) and tokens.max() >= limit:
        raise UserError(
            f"CompatibilityError: the tokenizer gives id {tokens.max()} in {source.name}, the "
            f"target scores ids below {limit}"
        )
    ends = block["tokens"] + np.cumsum([len(row) for row in rows], dtype=np.uint64)
    digest = _chained(block["sha256"], tokens, ends)
    block = {
        "documents": block["documents"] + len(found), "kept": block["kept"] + len(rows),
        "tokens": block["tokens"] + len(tokens), "sha256": digest,
        "last": len(found) < BLOCK_DOCUMENTS,
    }  # fmt: skip
    try:
        for name, content in (("tokens.bin", tokens), ("ends.bin", ends.astype(np.uint64))):
            _write(folder / name, content.tobytes())
        _write(folder / "blocks.jsonl", (json.dumps(block) + "\n").encode())
    except OSError as error:
        raise RunFault(
            f"cannot write {folder}: {error.strerror or error}; finished blocks are kept: make room"
            " and start the same command again"
        ) from error
    return block


def _write(path: Path, content: bytes) -> None:
    """Append, on the disk when this returns."""
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _print_budget(folder: Path, source: Source, num_tokens: int) -> None:
    needed, free = 4 * num_tokens, shutil.disk_usage(folder).free
    print(
        f"corpus {source.name}: up to {num_tokens} more tokens, about {needed / 1e6:.3g} MB in "
        f"{folder}; free {free / 1e6:.3g} MB"
    )
    if needed > free:
        raise UserError(
            f"corpus {source.name} needs about {needed / 1e6:.3g} MB in {folder}, only "
            f"{free / 1e6:.3g} are free: lower trainer.max_steps or use a larger disk "
            "(data.cache_dir)"
        )
