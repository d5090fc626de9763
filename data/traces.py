"""The store of target generations: parquet shards and one manifest in a folder.

    manifest.json             what the store was made with, and all shards once it is complete
    manifest-r0.json          the shards of rank 0 while it is written; one file per rank
    shard-r0-00000.parquet    finished rows; `datasets.load_dataset("parquet", data_files=...)`

A kill loses no finished shard and doubles no row, because one event decides: a shard counts from
the moment it gets its name, with its bytes on the disk. It is then listed with its checksum. One
that is not listed (killed in between) is checked page by page, counts as done from the first look
and is listed when its rank writes next. What remains follows from the keys of finished rows, never
from counts, so another number of processes may go on. Only rank r writes the files of rank r.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.config import RunFault, UserError, require
from trainer.files import damaged, read_json, write_atomic, write_json
from trainer.lock import lock

if TYPE_CHECKING:
    import datasets


def trace_key(
    ids: list[int], temperature: float, top_k: int, top_p: float, seed: int, sample_index: int
) -> str:
    """The key of a row, known before it is generated: prompt ids, sampling and sample index."""
    sampling = [float(temperature), int(top_k), float(top_p), int(seed), int(sample_index)]
    return hashlib.sha256(json.dumps([sampling, list(map(int, ids))]).encode()).hexdigest()[:32]


@dataclass
class Trace:
    """One assistant turn: the rendered context as `prompt_ids`, what came after as `response_ids`.

    `lookahead_ids`: tokens generated past the end, for the exact replay of engine counters.
    `fixed_ids`: the response the data set holds for the same prompt. `index`: place in the order
    of the data set. Teacher block, one entry per response token: `teacher_ids` and `teacher_logp`
    (natural log, normalised over the full vocabulary), `teacher_log_tail` = log(1 - their mass),
    `tail_ids` and `tail_logp` drawn from the tail; stored as float32.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    source: str  # target, draft, human or mix
    domain: str
    conversation_id: str
    turn: int
    sample_index: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    finish_reason: str  # eos, length or stop
    model_hash: str
    tokenizer_hash: str
    lookahead_ids: list[int] = field(default_factory=list)
    fixed_ids: list[int] = field(default_factory=list)
    prompt_hash: str = ""
    index: int = 0
    teacher_ids: list[list[int]] | None = None
    teacher_logp: list[list[float]] | None = None
    teacher_log_tail: list[float] | None = None
    tail_ids: list[list[int]] | None = None
    tail_logp: list[list[float]] | None = None
    spec_trace: list[dict[str, object]] | None = None  # records of rounds

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def key(self) -> str:
        """`trace_key` of this row: two rows with one key are the same draw."""
        sampling = (self.temperature, self.top_k, self.top_p, self.seed)
        return trace_key(self.prompt_ids, *sampling, self.sample_index)

    def check(self) -> None:
        """Raise UserError for a row that no reader could use."""
        sources, reasons = "target, draft, human, mix", "eos, length, stop"
        for name, allowed in (("source", sources), ("finish_reason", reasons)):
            value = getattr(self, name)
            require(value in allowed.split(", "), name, f"be one of {allowed}", value)
        num, tail = len(self.response_ids), (self.tail_ids, self.tail_logp)
        for block in ((self.teacher_ids, self.teacher_logp, self.teacher_log_tail), tail):
            sizes = [None if part is None else len(part) for part in block]
            whole = set(sizes) in ({None}, {num})
            require(whole, "teacher block", f"have all parts, {num} positions each", sizes)


FLUSH_S = 120.0  # a kill loses no more than what was generated since

_REALS = pa.list_(pa.float32())
_ARROW = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
_ARROW |= {"list[int]": pa.list_(pa.int32()), "list[list[int]]": pa.list_(pa.list_(pa.int32()))}
_ARROW |= {"list[float]": _REALS, "list[list[float]]": pa.list_(_REALS)}
_ARROW |= {"list[dict[str, object]]": pa.string()}  # as JSON
_FIELDS = {item.name: str(item.type).removesuffix(" | None") for item in dataclasses.fields(Trace)}
_COLUMNS = pa.schema([("key", pa.string())] + [(n, _ARROW[t]) for n, t in _FIELDS.items()])
_REPEATING = ["source", "domain", "finish_reason", "model_hash", "tokenizer_hash"]
_STORE = b"draftsmith.store"  # in the metadata of a shard: hash of the identity of its store


@dataclass(frozen=True)
class TraceIdentity:
    """What a store was made with. Stores with different identities are never mixed."""

    prompts: str  # description of the source, for readers
    prompts_hash: str
    target: Mapping[str, object]  # its fingerprint
    temperatures: list[float]
    top_k: int
    top_p: float
    max_new_tokens: int
    samples_per_prompt: int
    seed: int
    stop_strings: list[str]
    lookahead: int
    teacher_top_k: int = 0
    teacher_samples: int = 0
    served: bool = False  # generated by a serving engine
    schema: int = 1


@dataclass(frozen=True)
class ImportedIdentity:
    """What a store was made of whose rows another program generated."""

    log: str  # name of the file, for readers
    log_sha256: str
    domains: list[str]  # that were taken from it; empty: all
    target: Mapping[str, object]  # its fingerprint
    schema: int = 1


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
        # through JSON, so that tuples and numbers as keys compare as they are stored
        wanted = json.loads(json.dumps(dataclasses.asdict(identity))) if identity else None
        if not path.exists():
            if wanted is None or not create:
                raise UserError(f"no trace store in {folder}: {path} is missing")
            write_json(path, {"identity": wanted, "complete": False, "shards": []})
        stored = read_json(path, REMEDY)["identity"]
        if wanted is not None and stored != wanted:
            raise UserError(
                f"trace store {folder} was made with {'; '.join(differences(stored, wanted))};"
                " use another data.traces or delete it"
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
        said = (
            f"trace store {self.folder} is being written by another process; wait for it or use "
            "another data.traces"
        )
        return lock(self.folder / ".lock", said)

    @contextlib.contextmanager
    def writer(self, rank: int = 0, rows_per_shard: int = 256) -> Iterator[TraceWriter]:
        """A writer for the rows of one rank.

        It writes a shard when `rows_per_shard` rows wait, when the last one is older than FLUSH_S
        seconds, and when the block ends, unless by a fault of the program. Raises UserError while
        another process writes this rank.
        """
        said = (
            f"rank {rank} of trace store {self.folder} is being written by another process; wait "
            "for it or use another data.traces"
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

    def load(self) -> list[Trace]:
        """All rows, checked, by (index, prompt_hash, turn, sample_index), whoever wrote them."""
        traces: list[Trace] = []
        for table in self._tables():
            columns = {name: table[name].to_pylist() for name in _FIELDS}
            columns["spec_trace"] = [text and json.loads(text) for text in columns["spec_trace"]]
            traces += [Trace(*row) for row in zip(*columns.values(), strict=True)]
        return sorted(traces, key=lambda t: (t.index, t.prompt_hash, t.turn, t.sample_index, t.key))

    def dataset(self) -> datasets.Dataset:
        """All rows, checked, as one data set in memory, in the order of the shards."""
        import datasets

        return datasets.Dataset(pa.concat_tables([_COLUMNS.empty_table(), *self._tables()]))

    def is_complete(self, expected: Collection[str]) -> bool:
        """Whether `finish` has listed exactly these shards and each expected key has its row."""
        manifest = read_json(self.folder / "manifest.json", REMEDY)
        finished = {shard["file"] for shard in manifest["shards"]}
        same = manifest["complete"] and finished == {shard.file for shard in self.shards()}
        return same and self.done_keys().issuperset(expected)

    def finish(self) -> None:
        """Mark the store complete, with one manifest for all ranks.

        Called by one process, after all writers have closed.
        """
        shards = self.shards()
        totals = {"rows": sum(s.rows for s in shards), "bytes": sum(s.bytes for s in shards)}
        entries = [shard._asdict() for shard in shards]
        manifest = {"identity": self.identity, "complete": True, **totals, "shards": entries}
        write_json(self.folder / "manifest.json", manifest)
        for path in (*self.folder.glob("manifest-r*.json"), *self.folder.glob("*.tmp")):
            path.unlink()

    def listed(self) -> dict[str, Shard]:
        """The shards that the manifest and its parts name, on the disk or not."""
        listed = {}
        for path in (self.folder / "manifest.json", *sorted(self.folder.glob("manifest-r*.json"))):
            part = read_json(path, REMEDY)
            if part.get("store", self.hash) != self.hash:
                raise UserError(f"{path} belongs to another trace store; move or delete it")
            listed.update({entry["file"]: Shard(**entry) for entry in part["shards"]})
        return listed

    def _read(self, name: str, listed: Shard | None = None) -> tuple[pa.Table, Shard]:
        path = self.folder / name
        data = path.read_bytes()
        found = (len(data), hashlib.sha256(data).hexdigest())
        if listed is not None and found != (listed.bytes, listed.sha256):
            raise damaged(path, "its size or checksum is not that of what was written", REMEDY)
        try:
            table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, f"not readable: {str(error).splitlines()[0]}", REMEDY) from error
        if (table.schema.metadata or {}).get(_STORE) != self.hash.encode():
            raise UserError(f"{path} belongs to another trace store; move or delete it")
        return table, Shard(name, table.num_rows, found[1], found[0])

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


class TraceWriter:
    """Collects rows of one rank and writes them as shards; made by `TraceStore.writer`."""

    def __init__(self, store: TraceStore, rank: int, rows_per_shard: int):
        require(rows_per_shard >= 1, "data.rows_per_shard", "be >= 1", rows_per_shard)
        self.store, self.rank, self.rows_per_shard = store, rank, rows_per_shard
        self.num_doubled = 0  # rows refused because the store has their key
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
        columns = {name: [getattr(row, name) for row in rows] for name in _COLUMNS.names}
        columns["spec_trace"] = [s if s is None else json.dumps(s) for s in columns["spec_trace"]]
        table = pa.table(columns, schema=_COLUMNS.with_metadata({_STORE: self.store.hash}))
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
        part = {"store": self.store.hash, "shards": [shard._asdict() for shard in self._shards]}
        write_json(self.store.folder / f"manifest-r{self.rank}.json", part)


def differences(stored: object, wanted: object, key: str = "") -> list[str]:
    """One text per entry of two JSON values that differs, with its key and both values."""
    if not (isinstance(stored, dict) and isinstance(wanted, dict)):
        return [] if stored == wanted else [f"{key} {stored!r} (wanted: {wanted!r})"]
    lines = []
    for name in sorted(stored.keys() | wanted.keys()):
        lines += differences(stored.get(name), wanted.get(name), f"{key}.{name}".lstrip("."))
    return lines


REMEDY = "delete this file and start the same command again: what it held is made anew"
