"""Rows of a store, read from Arrow: the rows that were written, in little memory."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data import trace_rows
from data.trace_rows import Traces, chosen, column, lengths, num_tokens, tokens
from data.traces import TraceStore
from tests.data.test_traces import IDENTITY, flip, make

ROOT = Path(__file__).parents[2]
ROWS = [
    make(0, spec_trace=[{"start": 0}], domain="Füße, 数学"),
    make(1, prompt_ids=[], response_ids=[]),
    make(2, lookahead_ids=[5, 6], fixed_ids=[9] * 300),
    make(
        3,
        response_ids=[4, 5],
        teacher_ids=[[1, 2], []],
        teacher_logp=[[-0.5, -1.25], []],
        teacher_log_tail=[-3.0, -0.125],
    ),
    make(4, top_p=0.5, temperature=0.0),
]


def finished(folder: Path, rows=ROWS, rows_per_shard=2) -> TraceStore:
    store = TraceStore.open(folder, IDENTITY)
    with store.writer(rows_per_shard=rows_per_shard) as writer:
        for row in rows:
            writer.add(row)
    store.finish()
    return TraceStore.open(folder, IDENTITY)


@pytest.fixture(params=["complete", "being written", "of many batches"])
def stored(request, tmp_path, monkeypatch):
    if request.param == "of many batches":
        monkeypatch.setattr(trace_rows, "BATCH_BYTES", 1)
    store = finished(tmp_path)
    if request.param == "being written":
        (tmp_path / "manifest.json").write_text(
            (tmp_path / "manifest.json").read_text().replace("true", "false", 1)
        )
    return store.load()


# the sequence


def test_it_is_the_sequence_of_the_rows_that_were_written(stored):
    assert len(stored) == 5
    assert stored == ROWS
    assert stored != ROWS[1:]
    assert list(stored) == ROWS
    assert [stored[i] for i in (4, 0, -1, -5)] == [ROWS[i] for i in (4, 0, -1, -5)]
    assert list(stored[1:4]) == ROWS[1:4]
    assert list(stored[::-2]) == ROWS[::-2]
    assert list(stored[3:][1:]) == ROWS[4:]
    for index in (5, -6):
        with pytest.raises(IndexError):
            stored[index]


def test_a_subset_copies_no_row(stored):
    some = chosen(stored, np.array([3, 1, 3]))
    assert isinstance(some, Traces)
    assert list(some) == [ROWS[3], ROWS[1], ROWS[3]]
    assert some._batches is stored._batches


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [3, 0, 3], []])
def test_a_column_is_that_of_the_rows_whatever_holds_them(stored, rows):
    some, same = chosen(stored, np.array(rows, np.int64)), [ROWS[i] for i in rows]
    for name in ("key", "domain", "index", "temperature", "response_ids", "teacher_ids"):
        assert column(some, name) == column(same, name) == [getattr(row, name) for row in same]
    for name in ("prompt_ids", "fixed_ids", "teacher_ids"):
        expected = [len(getattr(row, name) or ()) for row in same]
        assert lengths(some, name).tolist() == lengths(same, name).tolist() == expected
    assert num_tokens(some).tolist() == [row.num_tokens for row in same]
    expected = sorted(token for row in same for token in row.fixed_ids + row.prompt_ids)
    for traces in (some, same):
        pieces = [*tokens(traces, "fixed_ids"), *tokens(traces, "prompt_ids")]
        assert sorted(np.concatenate(pieces).tolist()) == expected


# the file


def test_the_rows_of_a_complete_store_are_mapped_and_their_file_is_written_once(tmp_path):
    store, path = finished(tmp_path), tmp_path / "rows.arrow"
    written = path.stat().st_mtime_ns
    batch = store.load()._batches[0]
    assert batch.get_total_buffer_size() > 0
    assert trace_rows.pa.total_allocated_bytes() < batch.get_total_buffer_size()
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("harm", ["missing", "no record", "damaged", "of another pass"])
def test_the_file_is_made_again_where_it_is_not_that_of_the_shards(tmp_path, harm):
    store, path, record = finished(tmp_path), tmp_path / "rows.arrow", tmp_path / "rows.json"
    good = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "no record":
        record.unlink()
    elif harm == "damaged":
        flip(path, 0.5)
    else:  # its own record is sound, but the store has grown since
        before = path.read_bytes(), record.read_bytes()
        finished(tmp_path, [*ROWS, make(5)])
        good = path.read_bytes()
        path.write_bytes(before[0])
        record.write_bytes(before[1])
        assert list(store.load())[5:] == [make(5)]
    assert list(store.load())[:5] == ROWS
    assert path.read_bytes() == good


def test_where_the_file_cannot_be_written_the_rows_are_in_memory(tmp_path, monkeypatch, capsys):
    store = finished(tmp_path)
    (tmp_path / "rows.json").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trace_rows.os, "replace", full)
        assert list(store.load()) == ROWS
    said = capsys.readouterr().out
    assert f"cannot write {tmp_path / 'rows.arrow'} ([Errno 28] No space left" in said
    assert "each process holds these rows in its memory" in said
    assert not list(tmp_path.glob(".rows*"))


# memory

CHILD = """
import re, sys
from data.batches import Batches
from data.traces import TraceStore
from phases.dev import split_dev

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * int(re.search(r"^Anonymous:\\s+(\\d+)", file.read(), re.M)[1])

def epoch(folder):
    train, dev = split_dev(TraceStore.open(folder, None).load(), 0)
    batches = Batches(train, {"target": 1.0}, 16, seed=0)
    for index in range(len(train) // 16):
        batches.at(index)
    return batches

epoch(sys.argv[1])  # what is imported late, and what the allocators keep
before = anonymous()
kept = epoch(sys.argv[2])
print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_store_takes_less_than_ten_bytes_of_memory_a_token(tmp_path):
    generator = np.random.default_rng(0)
    for name, num_rows in (("small", 64), ("large", 2000)):
        rows = []
        for number in range(num_rows):
            ids = generator.integers(0, 150_000, 500).tolist()
            one = make(number, prompt_ids=ids[:200], response_ids=ids[200:])
            rows.append(dataclasses.replace(one, fixed_ids=ids[:100]))
        finished(tmp_path / name, rows, rows_per_shard=50)
    folders = [str(tmp_path / name) for name in ("small", "large")]
    command = [sys.executable, "-c", CHILD, *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 10 * 2000 * 500
