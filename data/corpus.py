"""Raw text as one long row of token ids on the disk, written once. `data/raw_text.py` reads it.

    source.json     what the tokens were made of
    tokens.bin      uint32, every document ends in EOS
    ends.bin        uint64, where each document ends in it
    blocks.jsonl    one line per finished block: documents, tokens, running SHA-256

A block counts from the moment its line is written. A killed run goes on after the last block, a
later stage that needs more text makes the same file longer, and what a shorter budget reads of it
stays the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
from huggingface_hub import HfApi
from tqdm import tqdm

from data.raw_text import Source
from target.model import Target
from trainer.errors import RunFault, UserError, one_line
from trainer.files import read_json, write_atomic, write_json
from trainer.lock import lock
from trainer.processes import Spread

BLOCK_DOCUMENTS = 512
VERIFIED = "verified.json"  # the state of the files whose hashes were last compared


class Block(TypedDict):
    """A line of blocks.jsonl: what the files hold once this block is written."""

    documents: int  # read from the source, empty ones included
    kept: int  # documents that are in the files: those that are not empty
    tokens: int
    sha256: str  # running: the sum of the block before it, its tokens and its ends
    last: bool  # the source has ended


_TYPES = {"documents": int, "kept": int, "tokens": int, "sha256": str, "last": bool}


def _pinned(source: Source, folder: Path) -> Source:
    """The source, a Hub data set at the commit that the first block was read from.

    Raises UserError where the Hub does not show it.
    """
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


class TokenFile:
    """Token ids of a source, memory-mapped: the blocks that first reach `num_tokens`, or all.

    `tokens` [num_tokens] uint32; `ends` [documents] uint64, the index after each document.
    """

    def __init__(self, folder: Path, source: str, num_tokens: int):
        self.folder, self.source = folder, source
        blocks = read_blocks(folder)
        check_sizes(folder, blocks[-1])
        used = next((b for b in blocks if b["tokens"] >= num_tokens), blocks[-1])
        self.num_tokens, self.num_documents = used["tokens"], used["documents"]
        self.fingerprint: str = used["sha256"]
        self.tokens = _mapped(folder / "tokens.bin", np.uint32, self.num_tokens)
        self.ends = _mapped(folder / "ends.bin", np.uint64, used["kept"])

    def row(self, index: int, context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The index-th stretch of `context` tokens: ids, positions and document numbers.

        Each is [context] int64. Positions count within a document, from the start of the row where
        the document began before it; document numbers count from 0.
        """
        start = index * context
        place = np.arange(start, start + context)
        document = np.searchsorted(self.ends, place.astype(np.uint64), side="right")
        begins = np.where(document > 0, self.ends[np.maximum(document, 1) - 1], 0).astype(np.int64)
        position = place - np.maximum(begins, start)
        ids = self.tokens[start : start + context].astype(np.int64)
        return ids, position, document - document[0]


def _mapped(path: Path, dtype: type[np.generic], length: int) -> np.ndarray:
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
    """At least `num_tokens` tokens of the source with the target's tokenizer, or all it has.

    All processes tokenise what is missing, and the main one writes it. Raises UserError
    where the source cannot be read, the files are damaged or another process writes them, and
    RunFault where the disk cannot be written.
    """
    identity = {
        **source.identity(),
        "tokenizer": target.fingerprint["tokenizer"],
        "eos": _eos(target),
        "block_documents": BLOCK_DOCUMENTS,
    }
    text = json.dumps(identity, sort_keys=True)
    folder = Path(cache_dir) / "corpus" / hashlib.sha256(text.encode()).hexdigest()[:12]
    spread = Spread(partial(_encoded, target))
    if not is_main:
        spread.help()
    else:
        if not (folder / "source.json").exists():
            write_atomic(folder / "source.json", text + "\n")
        said = f"corpus {folder} is being written by another process; wait for it or use another"
        with spread, lock(folder / ".lock", f"{said} data.cache_dir"):
            verify(folder)
            _extend(folder, source, target, num_tokens, spread)
    barrier()
    return TokenFile(folder, source.name, num_tokens)


def _eos(target: Target) -> int | None:
    """The id that ends a document: the tokenizer's EOS, else the first id that ends an answer."""
    own = target.tokenizer.eos_token_id
    return own if own is not None else next(iter(target.eos_ids), None)


def check_sizes(folder: Path, block: Block) -> None:
    """Raise UserError where a file is shorter than `block` says: it was cut, or half copied."""
    for name, wanted in (("tokens.bin", 4 * block["tokens"]), ("ends.bin", 8 * block["kept"])):
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found < wanted:
            raise _damaged(folder, f"{name} has {found} bytes, {wanted} were written")


def verify(folder: Path) -> None:
    """Compare the files with the hashes of their blocks, once for each size and time of change.

    Called by the process that holds the lock. Raises UserError where they differ.
    """
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


def _state(folder: Path) -> dict[str, list[int]]:
    """[size in bytes, time of change in ns] of each file of a corpus."""
    found = {}
    for name in ("tokens.bin", "ends.bin", "blocks.jsonl"):
        if (folder / name).exists():
            stat = (folder / name).stat()
            found[name] = [stat.st_size, stat.st_mtime_ns]
    return found


def _verified(folder: Path) -> dict[str, list[int]] | None:
    """The state of the files when they were last verified, None where it is not known."""
    try:
        return read_json(folder / VERIFIED, "")
    except UserError:
        return None


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(
        f"corpus {folder} is damaged ({what}): delete this folder and start the same command "
        "again, its text is tokenised anew"
    )


def read_blocks(folder: Path) -> list[Block]:
    """The blocks of a corpus, after an empty one; a line torn by a kill is left out.

    Raises UserError where a whole line is no block.
    """
    blocks: list[Block] = [{"documents": 0, "kept": 0, "tokens": 0, "sha256": "", "last": False}]
    path = folder / "blocks.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            block: Block = json.loads(line)
        except ValueError:
            break
        if not isinstance(block, dict) or {k: type(v) for k, v in block.items()} != _TYPES:
            raise _damaged(folder, f"line {len(blocks)} of {path.name} is no block")
        blocks.append(block)
    return blocks


class Encoded(NamedTuple):
    """The tokens [N] uint32 of a block of documents, EOS included, and the lengths [kept] uint64 of
    those that are not empty."""

    documents: int
    tokens: np.ndarray
    lengths: np.ndarray


def _encoded(target: Target, documents: list[str]) -> Encoded:
    eos = _eos(target)
    filled = [text for text in documents if text.strip()]
    ids = target.tokenizer(filled, verbose=False)["input_ids"] if filled else []
    rows = [row if eos is None or row[-1:] == [eos] else [*row, eos] for row in ids]
    tokens = np.array([token for row in rows for token in row], np.uint32)
    return Encoded(len(documents), tokens, np.array([len(row) for row in rows], np.uint64))


def _cut(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield the documents of each block; a short one is the last."""
    documents = [""] * BLOCK_DOCUMENTS
    while len(documents) == BLOCK_DOCUMENTS:
        documents = list(itertools.islice(texts, BLOCK_DOCUMENTS))
        yield documents


def _extend(
    folder: Path,
    source: Source,
    target: Target,
    num_tokens: int,
    spread: Spread[list[str], Encoded],
) -> None:
    """Write blocks of documents until there are `num_tokens` tokens."""
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
            file.truncate(size)  # removes what a kill left after the last whole block
    texts = _pinned(source, folder).texts(blocks[-1]["documents"])
    encoded = spread.each(_cut(texts))
    named = one_line(f"tokenise {source.name}")
    bar = tqdm(total=num_tokens, initial=blocks[-1]["tokens"], desc=named,
               unit="token", unit_scale=True, dynamic_ncols=True, disable=None)  # fmt: skip
    block = blocks[-1]
    with bar:
        while block["tokens"] < num_tokens and not block["last"]:
            before = block["tokens"]
            block = _append(folder, source, target, block, next(encoded))
            bar.update(block["tokens"] - before)
            tenth = 10 * block["tokens"] // num_tokens
            if bar.disable and tenth > 10 * before // num_tokens:
                print(f"{named}: {block['tokens']} of {num_tokens} tokens")


def _append(folder: Path, source: Source, target: Target, block: Block, encoded: Encoded) -> Block:
    """Write a block after `block`; a short one is the last."""
    documents, tokens, lengths = encoded
    limit = target.vocab_size
    if len(tokens) and tokens.max() >= limit:
        raise UserError(
            f"CompatibilityError: the tokenizer gives id {tokens.max()} in {source.name}, the "
            f"target scores ids below {limit}"
        )
    ends = block["tokens"] + np.cumsum(lengths, dtype=np.uint64)
    digest = _chained(block["sha256"], tokens, ends)
    block = {
        "documents": block["documents"] + documents,
        "kept": block["kept"] + len(lengths),
        "tokens": block["tokens"] + len(tokens),
        "sha256": digest,
        "last": documents < BLOCK_DOCUMENTS,
    }
    try:
        for name, content in (("tokens.bin", tokens), ("ends.bin", ends.astype(np.uint64))):
            _write(folder / name, content.tobytes())
        _write(folder / "blocks.jsonl", (json.dumps(block) + "\n").encode())
    except OSError as error:
        raise RunFault(
            f"cannot write {folder}: {error.strerror or error}; finished blocks stay: make room"
            " and start the same command again"
        ) from error
    return block


def _write(path: Path, content: bytes) -> None:
    """Append to a file; the bytes are on the disk when this returns."""
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
