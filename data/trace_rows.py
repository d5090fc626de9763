"""Rows of a trace store: read from Arrow one at a time, or a column at once.

A list of `Trace` costs some 50 bytes a token. `Traces` is the same sequence over memory-mapped
Arrow, whose pages all processes of a machine share and the system may drop. The functions at the
end read one field of many rows, of `Traces` without decoding the rows, and of a plain list as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainer.errors import RunFault, UserError, require
from trainer.files import fingerprint, read_json, write_json


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


_REALS = pa.list_(pa.float32())
_ARROW = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
_ARROW |= {"list[int]": pa.list_(pa.int32()), "list[list[int]]": pa.list_(pa.list_(pa.int32()))}
_ARROW |= {"list[float]": _REALS, "list[list[float]]": pa.list_(_REALS)}
_ARROW |= {"list[dict[str, object]]": pa.string()}  # as JSON
_FIELDS = {item.name: str(item.type).removesuffix(" | None") for item in dataclasses.fields(Trace)}
COLUMNS = pa.schema([("key", pa.string())] + [(n, _ARROW[t]) for n, t in _FIELDS.items()])
_ORDER = ["index", "prompt_hash", "turn", "sample_index", "key"]

BATCH_BYTES = 1 << 23  # of an Arrow batch that is written, but for its last shard

_Reader = Callable[[int, int], list[Any]]


class Traces(Sequence[Trace]):
    """Rows of Arrow batches with the columns COLUMNS; each is decoded when it is asked for.

    A slice shares the batches. Two readings of a row give two objects, and a change of one is not
    kept.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], rows: np.ndarray):
        """`rows` [n] int64: places in the batches, counted from the first to the last."""
        self._batches, self._rows = batches, rows
        sizes = [batch.num_rows for batch in batches]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._readers: dict[int, list[_Reader]] = {}  # by batch

    @classmethod
    def ordered(cls, batches: Sequence[pa.RecordBatch]) -> Traces:
        """All rows, by (index, prompt_hash, turn, sample_index), whoever wrote them."""
        keys = [batch.select(_ORDER) for batch in batches]
        table = pa.Table.from_batches(keys, pa.schema([COLUMNS.field(name) for name in _ORDER]))
        options = pc.SortOptions([(name, "ascending") for name in _ORDER])
        order = pc.call_function("sort_indices", [table], options)
        return cls(batches, order.to_numpy().astype(np.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice) -> Traces: ...
    def __getitem__(self, index: int | slice) -> Trace | Traces:
        if isinstance(index, slice):
            return self.chosen(np.arange(len(self))[index])
        place = self._rows[index]
        number = int(np.searchsorted(self._ends, place, side="right"))
        batch = self._batches[number]
        if number not in self._readers:
            self._readers[number] = [_reader(batch.column(name)) for name in _FIELDS]
        i = int(place - self._ends[number]) + batch.num_rows
        trace = Trace(*(read(i, i + 1)[0] for read in self._readers[number]))
        if trace.spec_trace is not None:
            trace.spec_trace = json.loads(str(trace.spec_trace))
        return trace

    def chosen(self, indices: np.ndarray) -> Traces:
        """The rows with these indices, [n] int64, in their order."""
        found = Traces(self._batches, self._rows[indices])
        found._readers = self._readers
        return found

    def column(self, name: str) -> list[Any]:
        """A field of every row, decoded."""
        parts = [batch.column(name) for batch in self._batches]
        return (
            pa.chunked_array(parts, COLUMNS.field(name).type).take(pa.array(self._rows)).to_pylist()
        )

    def lengths(self, name: str) -> np.ndarray:
        """Length of a list in every row, 0 where it is null; [n] int64."""
        ends = [batch.column(name).offsets.to_numpy() for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *map(np.diff, ends)])[self._rows]

    def tokens(self, name: str) -> Iterator[np.ndarray]:
        """The token ids of all rows, in pieces and in no order, each [tokens] int32."""
        places, first = np.sort(self._rows), 0
        for batch, end in zip(self._batches, self._ends, strict=True):
            own = places[slice(*np.searchsorted(places, [first, end]))]
            times = np.bincount(own - first, minlength=batch.num_rows)
            offsets = batch.column(name).offsets.to_numpy()
            values = batch.column(name).values.to_numpy()[offsets[0] : offsets[-1]]
            yield np.repeat(values, np.repeat(times, np.diff(offsets)))
            first = end


def _reader(array: pa.Array) -> _Reader:
    """A function (first, end) -> the entries of `array` there, as Python has them.

    It reads numbers through numpy: one Arrow scalar after the other takes ten times as long.
    """
    if pa.types.is_string(array.type):
        return lambda first, end: array[first:end].to_pylist()
    if not pa.types.is_list(array.type):
        numbers = array.to_numpy()
        return lambda first, end: numbers[first:end].tolist()
    if array.null_count == len(array):
        return lambda first, end: [None] * (end - first)
    offsets, inner = array.offsets.to_numpy(), _reader(array.values)
    null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None

    def lists(first: int, end: int) -> list[Any]:
        ends = offsets[first : end + 1].tolist()
        flat = inner(ends[0], ends[-1])
        found = [flat[i - ends[0] : j - ends[0]] for i, j in pairwise(ends)]
        if null is None:
            return found
        return [None if null[first + i] else one for i, one in enumerate(found)]

    return lists


def mapped(
    path: Path, made_of: object, tables: Callable[[], Iterable[pa.Table]]
) -> list[pa.RecordBatch]:
    """The batches of an Arrow file, memory-mapped. Where it is missing, damaged or not made of
    `made_of` (JSON), it is written with `tables` first, whole or not at all.

    Where it cannot be written the rows are read into memory, and one line says so.
    """
    record = path.with_suffix(".json")
    if not _is_whole(path, record, made_of):
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, COLUMNS) as writer:
                for batch in _batches(tables()):
                    writer.write_batch(batch)
            digest = fingerprint(temporary)
            os.replace(temporary, path)
            write_json(record, {"made_of": made_of, "digest": digest})
            pa.default_memory_pool().release_unused()  # what the shards were decoded in
        except (OSError, RunFault) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            print(f"cannot write {path} ({error}): each process holds these rows in its memory")
            return in_memory(tables())
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def in_memory(tables: Iterable[pa.Table]) -> list[pa.RecordBatch]:
    """The rows of these tables, in few batches: each costs some 40 kB, however few rows it has."""
    return list(_batches(tables))


def _batches(tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.Table] = []
    for table in chain(tables, [None]):
        if table is not None:
            waiting.append(table)
        if waiting and (table is None or sum(one.nbytes for one in waiting) >= BATCH_BYTES):
            yield from pa.concat_tables(waiting).combine_chunks().to_batches()
            waiting = []


def _is_whole(path: Path, record: Path, made_of: object) -> bool:
    try:
        return read_json(record, "") == {"made_of": made_of, "digest": fingerprint(path)}
    except (OSError, UserError):
        return False


# --- one field of many rows ----------------------------------------------------------------------


def column(traces: Sequence[Trace], name: str) -> list[Any]:
    """A field of every trace."""
    if isinstance(traces, Traces):
        return traces.column(name)
    return [getattr(trace, name) for trace in traces]


def lengths(traces: Sequence[Trace], name: str) -> np.ndarray:
    """Number of entries of a list in every trace, 0 where there is none; [n] int64."""
    if isinstance(traces, Traces):
        return traces.lengths(name)
    return np.array([len(getattr(trace, name) or ()) for trace in traces], np.int64)


def num_tokens(traces: Sequence[Trace], response: str = "response_ids") -> np.ndarray:
    """Tokens of prompt and response, [n] int64."""
    return lengths(traces, "prompt_ids") + lengths(traces, response)


def tokens(traces: Sequence[Trace], name: str) -> Iterator[np.ndarray]:
    """The token ids of all traces, in pieces and in no order, each [tokens] integers."""
    if isinstance(traces, Traces):
        yield from traces.tokens(name)
    else:
        ids = chain.from_iterable(getattr(trace, name) for trace in traces)
        yield np.fromiter(ids, np.int32)


def chosen(traces: Sequence[Trace], indices: np.ndarray) -> Sequence[Trace]:
    """The traces with these indices, [n] int64, in their order."""
    if isinstance(traces, Traces):
        return traces.chosen(indices)
    return [traces[i] for i in indices.tolist()]
