"""The store of target generations: parquet shards and one manifest in a folder.

    manifest.json             what the store was made with, and once it is complete all shards, and
                              how many prompts were too long for a row, and how many later turns
                              were left out otherwise
    manifest-r0.json          the shards of rank 0 while it is written; one file per rank
    shard-r0-00000.parquet    finished rows; `datasets.load_dataset("parquet", data_files=...)`
    rows.arrow, rows.json     the same rows to be memory-mapped, and what they were made of:
                              derived, so they are made again where missing or damaged

A kill loses no finished shard and doubles no row, because one event decides: a shard counts from
the moment it gets its name, with its bytes on the disk. It is then listed with its checksum. One
that is not listed (killed in between) is checked page by page, counts as done from the first look
and is listed when its rank writes next. What remains follows from the keys of finished rows, never
from counts, so another number of processes may go on. Only rank r writes the files of rank r.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.trace_identity import (
    ImportedIdentity,
    TraceIdentity,
    differences,
    only_grown_eos,
)
from data.trace_rows import COLUMNS, Trace, Traces, in_memory, mapped
from trainer.errors import RunFault, UserError, require
from trainer.files import damaged, fingerprint, read_json, write_atomic, write_json
from trainer.lock import lock

if TYPE_CHECKING:
    import datasets

FLUSH_S = 120.0  # a kill loses no more than what was generated since

_REPEATING = ["source", "domain", "finish_reason", "model_hash", "tokenizer_hash"]
OURS = ("manifest.json", "manifest-r*.json", "shard-r*-*.parquet", "rows.arrow", "rows.json")
_STORE = b"draftsmith.store"  # in the metadata of a shard: hash of the identity of its store


class Shard(NamedTuple):
    """A finished shard, as the manifests list it; `sha256` and `bytes` are of the whole file."""

    file: str
    rows: int
    sha256: str
    bytes: int


class TraceStore:
    """Open with `TraceStore.open`, write with `writer`, read with `load` or `dataset`."""

    def __init__(self, folder: Path, identity: Mapping[str, object]):
        self.folder, self.identity = folder, identity
        self.hash = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._reported: set[str] = set()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        identity: TraceIdentity | ImportedIdentity | None,
        create: bool = True,
    ) -> TraceStore:
        """Create the store, or check that the one there has this identity (None: any).

        Raises UserError where it has another identity, is damaged, or is missing and `create` is
        False.
        """
        folder = Path(folder)
        path = folder / "manifest.json"
        check_store(folder)
        # through JSON, so that tuples and numbers as keys compare as they are stored
        wanted = json.loads(json.dumps(dataclasses.asdict(identity))) if identity else None
        if not path.exists():
            if wanted is None or not create:
                raise UserError(f"no trace store in {folder}: {path} is missing")
            write_json(path, {"identity": wanted, "complete": False, "shards": []})
        stored = read_json(path, REMEDY)["identity"]
        if wanted is not None and stored != wanted:
            remedy = "use another data.traces or delete it"
            if grown := only_grown_eos(stored, wanted):
                raise UserError(grown, key="trace store", value=str(folder), remedy=remedy)
            changed = differences(stored, wanted)
            if any(one.startswith("prompts_hash ") for one in changed):
                remedy = (
                    "other prompts were chosen then: set data.num_prompts, data.prompts and the "
                    f"keys that choose and render them as they were, {remedy}"
                )
            raise UserError(
                f"trace store {folder} was made with {'; '.join(changed)}", remedy=remedy
            )
        store = cls(folder, stored)
        store.shards()  # reports at once what is missing or foreign
        return store

    def shards(self) -> list[Shard]:
        """The finished shards of all ranks that are on the disk now.

        A listed shard that is gone is reported and left out, so its rows count as not done.
        """
        listed = self.listed()
        present = sorted(path.name for path in self.folder.glob("shard-r*-*.parquet"))
        for name in sorted(listed.keys() - set(present) - self._reported):
            rows = listed[name].rows
            print(f"trace store {self.folder}: {name} is gone; its {rows} rows count as not done")
            self._reported.add(name)
        return [listed.get(name) or self._read(name)[1] for name in present]

    def done_keys(self) -> set[str]:
        """Keys (`trace_key`) of all finished rows, of all ranks. Checks every shard."""
        return {key for table in self._tables() for key in table["key"].to_pylist()}

    def exclusive(self) -> IO[str]:
        """A lock that the first process of a command holds until the store is marked complete.

        It keeps a second command from writing into the same store. Raises UserError while another
        process holds it.
        """
        said = f"trace store {self.folder} is being written by another process; {ELSEWHERE}"
        return lock(self.folder / ".lock", said)

    @contextlib.contextmanager
    def writer(self, rank: int = 0, rows_per_shard: int = 256) -> Iterator[TraceWriter]:
        """A writer for the rows of one rank.

        It writes a shard when `rows_per_shard` rows wait, when the last one is older than FLUSH_S
        seconds, and when the block ends, unless by a fault of the program. Raises UserError while
        another process writes this rank.
        """
        said = (
            f"rank {rank} of trace store {self.folder} is being written by another process; "
            f"{ELSEWHERE}"
        )
        with lock(self.folder / f".writer-r{rank}.lock", said):
            writer = TraceWriter(self, rank, rows_per_shard)
            try:
                yield writer
            except (RunFault, SystemExit, KeyboardInterrupt):  # what is finished is kept
                with contextlib.suppress(RunFault):
                    writer.flush()
                raise
            writer.flush()

    def load(self) -> Traces:
        """All rows, checked, by (index, prompt_hash, turn, sample_index), whoever wrote them.

        Rows of a complete store are memory-mapped, those of another are in memory.
        """
        if not self.is_complete(()):
            return Traces.ordered(in_memory(self._tables()))
        return self._mapped()

    def _mapped(self) -> Traces:
        shards = self.shards()
        for shard in shards:
            found = fingerprint(self.folder / shard.file)
            self._compare(shard, found["bytes"], found["sha256"])
        made_of = [[shard.file, shard.sha256] for shard in shards]
        return Traces.ordered(mapped(self.folder / "rows.arrow", made_of, self._tables))

    def dataset(self) -> datasets.Dataset:
        """All rows, checked, as one data set in memory, in the order of the shards."""
        import datasets

        return datasets.Dataset(pa.concat_tables([COLUMNS.empty_table(), *self._tables()]))

    def is_complete(self, expected: Collection[str]) -> bool:
        """Whether `finish` has listed exactly these shards and each expected key has its row."""
        manifest = read_json(self.folder / "manifest.json", REMEDY)
        finished = {shard["file"] for shard in manifest["shards"]}
        same = manifest["complete"] and finished == {shard.file for shard in self.shards()}
        return same and (not expected or self.done_keys().issuperset(expected))

    @property
    def num_dropped(self) -> int:
        """How many prompts or later turns were too long for a row, where the store is complete."""
        return read_json(self.folder / "manifest.json", REMEDY).get("num_dropped", 0)

    @property
    def unchecked(self) -> bool:
        """Whether a server has written rows that nobody has compared with the target's."""
        return bool(read_json(self.folder / "manifest.json", REMEDY).get("unchecked", False))

    @unchecked.setter
    def unchecked(self, value: bool) -> None:
        manifest = read_json(self.folder / "manifest.json", REMEDY)
        manifest.pop("unchecked", None)
        manifest |= {"unchecked": True} if value else {}
        write_json(self.folder / "manifest.json", manifest)

    @property
    def left_out(self) -> dict[str, int]:
        """How many later turns of conversations have no row, by reason, where the store is complete
        and records it."""
        return read_json(self.folder / "manifest.json", REMEDY).get("left_out", {})

    def finish(
        self, check: Callable[[Traces], None] = lambda traces: None, num_writers: int = 1
    ) -> None:
        """Mark the store complete, with one manifest for all ranks, unless `check` raises.

        Called by one process, after all writers have closed. `num_writers`: ranks that have written
        now, whose counts of rows that are left out are added up; those of further ranks are of a
        killed run.
        """
        check(self._mapped())  # which writes what all processes will map
        shards = self.shards()
        totals = {"rows": sum(s.rows for s in shards), "bytes": sum(s.bytes for s in shards)}
        entries = [shard._asdict() for shard in shards]
        paths = [self.folder / f"manifest-r{rank}.json" for rank in range(num_writers)]
        parts = [read_json(path, REMEDY) for path in paths if path.exists()]
        totals["num_dropped"] = sum(part.get("num_dropped", 0) for part in parts)
        left_out = sum((Counter(part.get("left_out", {})) for part in parts), Counter())
        totals |= {"left_out": dict(left_out)} if left_out else {}
        totals |= {"unchecked": True} if self.unchecked else {}
        manifest = {"identity": self.identity, "complete": True, **totals, "shards": entries}
        write_json(self.folder / "manifest.json", manifest)
        for path in (*self.folder.glob("manifest-r*.json"), *self.folder.glob("*.tmp")):
            path.unlink()

    def remove(self) -> None:
        """Remove the store, and its folder where nothing else is in it."""
        for pattern in (*OURS, ".*.tmp", ".lock", ".writer-r*.lock"):
            for path in self.folder.glob(pattern):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def listed(self) -> dict[str, Shard]:
        """The shards that the manifest and its parts name, on the disk or not."""
        listed = {}
        for path in (self.folder / "manifest.json", *sorted(self.folder.glob("manifest-r*.json"))):
            part = read_json(path, REMEDY)
            if part.get("store", self.hash) != self.hash:
                raise UserError(f"{path} belongs to another trace store; move or delete it")
            listed.update({entry["file"]: Shard(**entry) for entry in part["shards"]})
        return listed

    def _compare(self, listed: Shard, num_bytes: int, sha256: str) -> None:
        if (num_bytes, sha256) != (listed.bytes, listed.sha256):
            what = "its size or checksum is not that of what was written"
            raise damaged(self.folder / listed.file, what, REMEDY)

    def _read(self, name: str, listed: Shard | None = None) -> tuple[pa.Table, Shard]:
        path = self.folder / name
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        if listed is not None:
            self._compare(listed, len(data), sha256)
        try:
            table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, f"not readable: {str(error).splitlines()[0]}", REMEDY) from error
        if (table.schema.metadata or {}).get(_STORE) != self.hash.encode():
            raise UserError(f"{path} belongs to another trace store; move or delete it")
        return table, Shard(name, table.num_rows, sha256, len(data))

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the table of each shard, checked, without rows that an earlier shard has."""
        seen: set[str] = set()
        for shard in self.shards():
            table = self._read(shard.file, shard)[0]
            keys = table["key"].to_pylist()
            fresh = [key not in seen for key in keys]
            seen.update(keys)
            if not all(fresh):  # two commands with different numbers of processes side by side
                print(
                    f"{shard.file}: {fresh.count(False)} rows left out, an earlier shard has them"
                )
                table = table.filter(pa.array(fresh))
            yield table


def check_store(folder: Path) -> None:
    """Raise UserError unless `folder` holds a trace store, nothing, or does not exist."""
    if not folder.is_dir():
        return
    manifest = folder / "manifest.json"
    if manifest.exists():
        foreign = [] if "identity" in read_json(manifest, REMEDY) else [manifest.name]
    else:  # files with a dot before their name may be locks of a store that another process begins
        names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
        foreign = [n for n in names if not any(fnmatch.fnmatch(n, one) for one in OURS)]
    if foreign:
        raise UserError(
            f"data.traces={folder} holds {foreign[0]!r} and is no trace store: name a new folder"
        )


class TraceWriter:
    """Collects rows of one rank and writes them as shards; made by `TraceStore.writer`."""

    def __init__(self, store: TraceStore, rank: int, rows_per_shard: int):
        require(rows_per_shard >= 1, "data.rows_per_shard", "be >= 1", rows_per_shard)
        self.store, self.rank, self.rows_per_shard = store, rank, rows_per_shard
        self.num_doubled = 0  # rows refused because the store has their key
        self.num_dropped = 0  # prompts or later turns that were too long for a row
        self.left_out: Counter[str] = Counter()  # later turns, by reason
        self._waiting: list[Trace] = []
        self._flushed = time.monotonic()
        for pattern in (f".shard-r{rank}-*.tmp", f".manifest-r{rank}.json.*.tmp"):
            for path in store.folder.glob(pattern):
                path.unlink()
        self._keys = store.done_keys()
        mine = f"shard-r{rank}-"
        self._shards = [shard for shard in store.shards() if shard.file.startswith(mine)]
        # a name that is listed but gone is not used again: its old checksum may still be about
        names = {shard.file for shard in self._shards} | store.listed().keys()
        used = [int(Path(name).stem.removeprefix(mine)) for name in names if name.startswith(mine)]
        self._next = max(used, default=-1) + 1
        self._write_part()

    def drop(self, too_long: int, later_turns: Mapping[str, int]) -> None:
        """Record how many prompts or later turns were too long for a row, and how many later turns
        have none for another reason, by reason."""
        self.num_dropped += too_long
        self.left_out.update(later_turns)
        self._write_part()

    def add(self, trace: Trace) -> bool:
        """Add a row; False, and counted in `num_doubled`, when the store has its key already."""
        trace.check()
        key = trace.key
        if key in self._keys:
            self.num_doubled += 1
            return False
        self._keys.add(key)
        self._waiting.append(trace)
        late = time.monotonic() - self._flushed > FLUSH_S
        if late or len(self._waiting) >= self.rows_per_shard:
            self.flush()
        return True

    def flush(self) -> None:
        """Write the rows that wait as one shard; RunFault where the disk cannot be written."""
        self._flushed = time.monotonic()
        rows, self._waiting = self._waiting, []  # whatever ends this, no row is written twice
        if not rows:
            return
        columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS.names}
        columns["spec_trace"] = [s if s is None else json.dumps(s) for s in columns["spec_trace"]]
        table = pa.table(columns, schema=COLUMNS.with_metadata({_STORE: self.store.hash}))
        sink = pa.BufferOutputStream()
        # plain and uncompressed: ids of a large vocabulary hardly shrink, and the budget holds
        layout = {"compression": "none", "use_dictionary": _REPEATING, "write_statistics": False}
        pq.write_table(table, sink, write_page_checksum=True, **layout)
        data = sink.getvalue().to_pybytes()
        name = f"shard-r{self.rank}-{self._next:05d}.parquet"
        write_atomic(self.store.folder / name, data)
        self._shards.append(
            Shard(name, table.num_rows, hashlib.sha256(data).hexdigest(), len(data))
        )
        self._next += 1
        self._write_part()

    def _write_part(self) -> None:
        shards = [shard._asdict() for shard in self._shards]
        part = {"store": self.store.hash, "num_dropped": self.num_dropped, "shards": shards}
        part |= {"left_out": self.left_out} if self.left_out else {}
        write_json(self.store.folder / f"manifest-r{self.rank}.json", part)


ELSEWHERE = (
    "wait for it, or use another data.traces where that names this folder, else another "
    "data.cache_dir"
)
REMEDY = "delete this file and start the same command again: what it held is made anew"
