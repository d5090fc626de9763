"""A features store on object storage, through `fsspec`; the rows that are read are kept on a disk.

Batches are shuffled, so a batch reads few rows of many shards: of a shard its header is fetched
once, and of each row its own bytes, all rows of a batch side by side. A row is compared with the
checksum in its shard before it is used. A shard counts once its length is what its header says, and
the store once its manifest, which is written last, calls it complete.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import fsspec
import numpy as np

from data.features_layout import HEADER, MANIFEST, Bytes, Identity, Row, Shard, ShardEntry
from data.file_cache import FileCache
from data.traces import REMEDY
from trainer.errors import RunFault, UserError
from trainer.files import damaged

T = TypeVar("T")
KEY = "data.features_url"
HEADER_BYTES = 1 << 16  # fetched to read a header, which has a few thousand
DELAYS_S = (1.0, 4.0, 16.0)  # before a request that failed is sent again


class _Head(NamedTuple):
    """What a shard says of itself. `places`: the first byte of each tensor in the file."""

    entry: ShardEntry
    file_bytes: int
    places: dict[str, int]


class RemoteFolder:
    """The files of one store, below the URL `root`. `work`: a folder on the disk for half-written
    shards and the lock; the store has its name."""

    def __init__(self, root: str, work: Path, cache: FileCache):
        self.root, self.work, self.cache = root.rstrip("/"), work, cache
        self.url = f"{self.root}/{work.name}"
        self._fs, self._path = self._call("open", lambda: fsspec.url_to_fs(self.url))
        self._entries: dict[str, ShardEntry] = {}
        self._shards: dict[str, tuple[_Head, bytes]] = {}  # with the tensor "sha256"

    def __str__(self) -> str:
        return self.url

    def beside(self) -> list[RemoteFolder]:
        """The stores below the same URL."""
        found = self._call("list", lambda: self._listed(str(PurePosixPath(self._path).parent)))
        names = sorted(name for name, one in found.items() if one["type"] == "directory")
        return [RemoteFolder(self.root, self.work.with_name(name), self.cache) for name in names]

    def manifest(self) -> dict[str, Any] | None:
        """Its content, None where there is none. UserError where it is damaged."""
        path = f"{self._path}/{MANIFEST}"
        try:
            content = json.loads(self._call("read", lambda: self._fs.cat_file(path)))
            if not isinstance(content, dict):
                raise ValueError("it must hold a table")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise damaged(f"{self.url}/{MANIFEST}", str(error), REMEDY) from error
        return content

    def write_manifest(self, content: Mapping[str, object]) -> None:
        data = json.dumps(content, indent=1).encode()
        # a path that begins with a bucket needs no folders, and a bucket of that name is not made
        if self._path.startswith("/"):
            self._call("write", lambda: self._fs.makedirs(self._path, exist_ok=True))
        self._call("write", lambda: self._fs.pipe_file(f"{self._path}/{MANIFEST}", data))

    def free(self) -> None:
        """None: how many bytes can be written is not known."""

    def entries(self, shards: Sequence[Shard], identity: Identity) -> list[ShardEntry | None]:
        """The entry of each shard; None where it is missing or not whole. Those of a complete store
        are the manifest's, and no shard is looked at."""
        manifest = self.manifest()
        if manifest is not None and manifest["complete"]:
            self._entries = {entry["file"]: entry for entry in manifest["shards"]}
        else:
            files = self._call("list", lambda: self._listed(self._path))
            there = [shard for shard in shards if shard.file in files]
            heads = self._call("read", lambda: self._heads(there, identity))
            self._entries = {
                file: head.entry
                for file, head in heads.items()
                if head is not None and head.file_bytes == files[file]["size"]
            }
        return [self._entries.get(shard.file) for shard in shards]

    def publish(self, temporary: Path, shard: Shard) -> None:
        """Upload a shard that lies in `work`, and delete it there."""
        path = f"{self._path}/{shard.file}"
        self._call("write", lambda: self._fs.put_file(str(temporary), path))
        temporary.unlink()

    def rows(self, rows: Sequence[Row], identity: Identity) -> list[Bytes]:
        """The tensors of these rows, from the disk or else fetched. UserError where a shard is
        missing, RunFault where it cannot be read."""
        names = [f"{self.work.name}/{row.shard.keys[row.number].hex()}" for row in rows]
        wanted = dict(zip(names, rows, strict=True))
        read = {name: self.cache.read(name) for name in wanted}
        found = {name: content for name, content in read.items() if content is not None}
        missing = {name: row for name, row in wanted.items() if name not in found}
        if missing:
            try:
                fetched = self._call("read", lambda: self._fetch([*missing.values()], identity))
            except FileNotFoundError as error:
                what = f"a shard of {self.url} is gone ({error}): delete its {MANIFEST}"
                raise UserError(f"{KEY}: {what} and start the same command again") from error
            for name, (content, digest) in zip(missing, fetched, strict=True):
                self.cache.write(name, content, digest)
                found[name] = content
        return [
            {
                part: found[name][place].reshape(-1, width)
                for part, place, width in _parts(row, identity)
            }
            for name, row in zip(names, rows, strict=True)
        ]

    # --- requests, each inside `_call` ------------------------------------------------------------

    def _listed(self, path: str) -> dict[str, dict[str, Any]]:
        """By name, "type" and "size" of what lies in a folder."""
        self._fs.invalidate_cache()  # other processes write as well
        try:
            return {PurePosixPath(one["name"]).name: one for one in self._fs.ls(path, detail=True)}
        except FileNotFoundError:
            return {}

    def _heads(self, shards: Sequence[Shard], identity: Identity) -> dict[str, _Head | None]:
        ranges = [(shard.file, 0, HEADER_BYTES) for shard in shards]
        found = zip(shards, self._ranges(ranges), strict=True)
        return {shard.file: _parsed(data, shard, identity) for shard, data in found}

    def _fetch(self, rows: Sequence[Row], identity: Identity) -> list[tuple[np.ndarray, bytes]]:
        """The bytes of these rows, and their checksums. ValueError where they differ."""
        new = {r.shard.file: r.shard for r in rows if r.shard.file not in self._shards}
        heads: dict[str, _Head] = {}
        for file, head in self._heads([*new.values()], identity).items():
            if head is None or head.entry != self._entries[file]:
                raise ValueError(f"the header of {file} is not the one that was written")
            heads[file] = head
        places = {file: head.places for file, (head, _) in self._shards.items()}
        places |= {file: head.places for file, head in heads.items()}
        ranges = []
        for file, shard in new.items():
            first = places[file]["sha256"]
            ranges.append((file, first, first + 32 * len(shard.keys)))
        for row in rows:
            for part, _, width in _parts(row, identity):
                first = places[row.shard.file][part]
                ends = first + row.tokens.start * width, first + row.tokens.stop * width
                ranges.append((row.shard.file, *ends))
        data = iter(self._ranges(ranges))
        for file, head in heads.items():
            sums = next(data)
            if hashlib.sha256(sums).hexdigest() != head.entry["sha256"]:
                raise ValueError(f"the checksums of {file} are not those that were written")
            self._shards[file] = head, sums
        found = []
        for row in rows:
            content = b"".join(next(data) for _ in _parts(row, identity))
            sums = self._shards[row.shard.file][1]
            digest = sums[32 * row.number : 32 * row.number + 32]
            if hashlib.sha256(content).digest() != digest:
                what = f"the states of row {row.number} of {row.shard.file}"
                raise ValueError(f"{what} are not those that were written")
            found.append((np.frombuffer(content, np.uint8), digest))
        return found

    def _ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """The bytes [first, end) of files, fewer at the end of one; side by side where the file
        system can."""
        paths = [f"{self._path}/{file}" for file, _, _ in ranges]
        firsts, ends = [first for _, first, _ in ranges], [end for _, _, end in ranges]
        return self._fs.cat_ranges(paths, firsts, ends, on_error="raise")

    def _call(self, what: str, request: Callable[[], T]) -> T:
        """Send a request, again where it fails. RunFault where it goes on failing or is not
        allowed, FileNotFoundError where there is nothing to read."""
        for delay in (*DELAYS_S, None):
            try:
                return request()
            except Exception as error:  # each storage has errors of its own
                if isinstance(error, FileNotFoundError) and what != "write":
                    raise
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if delay is None or isinstance(error, PermissionError):
                    raise RunFault(
                        f"{KEY}: cannot {what} {self.url} ({reason}): check the network and the "
                        "credentials, then start the same command again"
                    ) from error
                print(f"{self.url}: {reason}; tried again in {delay:g} s", flush=True)
                time.sleep(delay)
        raise AssertionError


def check_storage(url: str) -> None:
    """Raise RunFault where what lies below `url` cannot be listed."""
    RemoteFolder(url, Path("any"), FileCache(Path(), 1)).beside()


def _parts(row: Row, identity: Identity) -> list[tuple[str, slice, int]]:
    """Name, place among the bytes of a row and bytes per token of each of its tensors."""
    parts, first = [], 0
    for name, (dtype, shape) in sorted(row.shard.layout(identity).items()):
        if name != "sha256":
            width = shape[1] * dtype.itemsize
            size = width * (row.tokens.stop - row.tokens.start)
            parts.append((name, slice(first, first + size), width))
            first += size
    return parts


def _parsed(data: bytes, shard: Shard, identity: Identity) -> _Head | None:
    """The head of a shard that begins with `data`; None where it is not that shard, or is cut."""
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:begin])
        own = json.loads(header.pop("__metadata__")[HEADER])
        ends = {name: tuple(one["data_offsets"]) for name, one in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    layout = shard.layout(identity).items()
    sizes = {name: shape[0] * shape[1] * dtype.itemsize for name, (dtype, shape) in layout}
    if own["identity"] != identity or {name: b - a for name, (a, b) in ends.items()} != sizes:
        return None
    file_bytes = begin + max(end for _, end in ends.values())
    return _Head(own["shard"], file_bytes, {name: begin + a for name, (a, _) in ends.items()})
