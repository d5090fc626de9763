"""The trace store: what is written comes back, whenever the writer dies."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import traces as traces_module
from data.budget import check_budget, estimate_bytes
from data.trace_identity import TraceIdentity
from data.trace_rows import trace_key
from data.traces import Trace, TraceStore
from tests.helpers.commands import start
from trainer.errors import RunFault, UserError

ROOT = Path(__file__).parents[2]
IDENTITY = TraceIdentity(
    prompts="toy",
    prompts_hash="p1",
    target={"weights": "w1", "tokenizer": {"hash": "t1"}, "eos": [1, 2]},
    temperatures=[0.0, 1.0],
    top_k=0,
    top_p=1.0,
    max_new_tokens=8,
    samples_per_prompt=1,
    seed=3,
    stop_strings=[],
    lookahead=2,
)


def make(number: int, **changes) -> Trace:
    """Row `number` of the job that all tests do."""
    row = Trace(
        prompt_ids=[number, 7, 150_000],
        response_ids=[number + 1] * (number % 4 + 1),
        source="target",
        domain="math",
        conversation_id=f"c{number}",
        turn=0,
        sample_index=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=3,
        finish_reason="eos",
        model_hash="m",
        tokenizer_hash="t",
        prompt_hash=f"h{number}",
        index=number,
    )
    return dataclasses.replace(row, **changes)


def write(folder: Path, numbers, rank: int = 0, rows_per_shard: int = 3) -> int:
    """Do what is not done of the rows; how many that were."""
    store = TraceStore.open(folder, IDENTITY)
    done = store.done_keys()
    todo = [row for row in map(make, numbers) if row.key not in done]
    with store.writer(rank, rows_per_shard) as writer:
        for row in todo:
            assert writer.add(row)
    return len(todo)


def stored(folder: Path) -> list[int]:
    return [row.index for row in TraceStore.open(folder, IDENTITY).load()]


# reading back


def test_every_field_comes_back(tmp_path):
    rows = [
        make(0, domain="Füße, 数学 🙂", temperature=0.1, top_p=0.95, top_k=5, seed=2**40),
        make(1, prompt_ids=[], response_ids=[], source="human", finish_reason="stop"),
        make(2, lookahead_ids=[5, 6], fixed_ids=[9] * 300, finish_reason="length"),
        make(3, spec_trace=[{"start": 0, "drafted_ids": [1, 2], "p_of_drafted": [0.1, 1e-9]}]),
        make(4, spec_trace=[]),
        make(
            5,
            response_ids=[4, 5],
            teacher_ids=[[1, 2], [3, 4]],
            teacher_logp=[[-0.5, -1.25], [-2.0, -4.5]],
            teacher_log_tail=[-3.0, -0.125],
        ),
        make(
            6,
            response_ids=[4, 5],
            teacher_ids=[[1], [3]],
            teacher_logp=[[-0.5], [-2.0]],
            teacher_log_tail=[-3.0, -0.125],
            tail_ids=[[8, 8], []],
            tail_logp=[[-9.0, -9.0], []],
        ),
    ]
    store = TraceStore.open(tmp_path, IDENTITY)
    with store.writer(0, rows_per_shard=2) as writer:
        for row in rows:
            writer.add(row)
    assert store.load() == rows
    assert store.done_keys() == {row.key for row in rows}
    assert TraceStore.open(tmp_path, identity=None, create=False).load() == rows


def test_a_shard_of_only_empty_values_reads_like_the_others(tmp_path):
    store = TraceStore.open(tmp_path, IDENTITY)
    with store.writer(0, rows_per_shard=1) as writer:
        writer.add(make(0, response_ids=[], prompt_ids=[]))
        writer.add(make(1, lookahead_ids=[1]))
    assert len(list(tmp_path.glob("shard-*"))) == 2
    table = store.dataset()
    assert table.num_rows == 2
    assert table["response_ids"][:] == [[], make(1).response_ids]
    assert table["lookahead_ids"][:] == [[], [1]]
    assert table["teacher_ids"][:] == [None, None]


def test_datasets_reads_the_shards_by_itself(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "store", range(7))
    files = [str(path) for path in sorted((tmp_path / "store").glob("shard-*.parquet"))]
    table = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert table["prompt_ids"][:] == [make(number).prompt_ids for number in range(7)]


def test_an_empty_store_is_a_store(tmp_path):
    store = TraceStore.open(tmp_path / "a" / "b", IDENTITY)
    assert store.load() == []
    assert store.dataset().num_rows == 0
    assert "response_ids" in store.dataset().column_names


def test_order_does_not_depend_on_who_wrote(tmp_path):
    for rank in (2, 0, 11, 1):
        write(tmp_path / "four", range(rank % 4, 21, 4), rank)
    write(tmp_path / "one", range(21))
    four, one = (TraceStore.open(tmp_path / name, IDENTITY).load() for name in ("four", "one"))
    assert four == one
    assert [row.index for row in one] == list(range(21))


def test_rows_no_reader_could_use_are_refused(tmp_path):
    with TraceStore.open(tmp_path, IDENTITY).writer() as writer:
        with pytest.raises(ValueError, match="source must be one of target, draft"):
            writer.add(make(0, source="student"))
        with pytest.raises(ValueError, match="finish_reason must be one of eos"):
            writer.add(make(0, finish_reason="abort"))
        with pytest.raises(ValueError, match=r"teacher block must have all parts, 1 positions"):
            writer.add(make(0, teacher_ids=[[1]]))
        block = {"teacher_logp": [[-1.0]] * 2, "teacher_log_tail": [-1.0] * 2}
        with pytest.raises(ValueError, match=r"teacher block must have all parts, 1 positions"):
            writer.add(make(0, teacher_ids=[[1]] * 2, **block))
    assert TraceStore.open(tmp_path, IDENTITY).load() == []


# keys


def test_key_is_prompt_sampling_and_sample_index_and_nothing_else():
    row = make(1)
    assert row.key == trace_key([1, 7, 150_000], 1, 0, 1, 3, 0)
    assert row.key == make(1, response_ids=[9, 9], index=5, turn=3, domain="code").key
    changes = [
        {"prompt_ids": [1, 7]},
        {"prompt_ids": [17, 150_000]},
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_p": 0.9},
        {"seed": 4},
        {"sample_index": 1},
    ]
    keys = {make(1, **change).key for change in changes}
    assert len(keys) == len(changes)
    assert row.key not in keys


def test_doubled_rows_are_refused_and_counted(tmp_path):
    write(tmp_path, range(3))
    with TraceStore.open(tmp_path, IDENTITY).writer(1) as writer:
        assert not writer.add(make(2))  # of another rank
        assert writer.add(make(3))
        assert not writer.add(make(3))  # still waiting
        assert writer.num_doubled == 2
    assert stored(tmp_path) == [0, 1, 2, 3]


# killed and continued


class Killed(BaseException):
    """Stands for the death of the process: nothing in the store catches it."""


@pytest.mark.slow
def test_killed_before_or_after_any_event_on_the_disk(tmp_path, monkeypatch, capsys):
    """Every call to the system that changes what a reader sees is the last one once."""
    expected = list(range(7))
    straight = tmp_path / "straight"
    write(straight, expected)
    moments = 0
    for after in (False, True):
        for moment in range(1000):
            folder = tmp_path / f"{after}-{moment}"
            calls = 0

            def dying(real, after=after, moment=moment):
                def call(*args):
                    nonlocal calls
                    calls += 1
                    if calls == moment + 1 and not after:
                        raise Killed
                    result = real(*args)
                    if calls == moment + 1:
                        raise Killed
                    return result

                return call

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", dying(os.fsync))
                patch.setattr(os, "replace", dying(os.replace))
                try:
                    write(folder, expected)
                except Killed:
                    moments += 1
                else:
                    break
            finished = len(list(folder.glob("shard-*.parquet")))
            before = set(stored(folder))
            assert len(before) == min(3 * finished, 7)  # no finished shard is lost
            assert write(folder, expected) == 7 - len(before)  # and none is done again
            assert stored(folder) == expected
            store = TraceStore.open(folder, IDENTITY)
            listed = json.loads((folder / "manifest-r0.json").read_text())["shards"]
            assert [entry["file"] for entry in listed] == [s.file for s in store.shards()]
            assert store.load() == TraceStore.open(straight, IDENTITY).load()
            store.finish()
            assert not list(folder.glob("*.tmp"))
    assert moments >= 2 * 2 * 8  # the manifest, the part at the start, three shards with theirs
    assert "gone" not in capsys.readouterr().out


@pytest.mark.slow
def test_kill_at_random_moments_loses_and_doubles_nothing(tmp_path):
    folder = tmp_path / "killed"
    generator = random.Random(0)
    have: set[int] = set()
    amid = 0
    for run in range(20):
        if len(have) > 900:  # a slow machine lets a child write many rows before it is killed
            break
        # another rank now and then: what one left half done, another must not do again
        log = tmp_path / f"log-{run}"
        child = start("-m", "tests.data.test_traces", str(folder), str(run % 3 // 2), log=log)
        lines = len(have) + generator.randrange(1, 10)
        while not (log.exists() and log.read_text().count("working") >= lines):
            assert child.poll() is None
        time.sleep(generator.uniform(0, 0.01))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        rows = stored(folder)
        assert len(set(rows)) == len(rows)
        assert have <= set(rows)
        amid += len(have) < len(rows) < 1000
        have = set(rows)
    assert amid >= 10  # or it would test nothing
    write(folder, range(1000), rows_per_shard=100)
    write(tmp_path / "straight", range(1000), rows_per_shard=100)
    killed, straight = (TraceStore.open(f, IDENTITY) for f in (folder, tmp_path / "straight"))
    assert killed.load() == straight.load()
    killed.finish()
    assert sum(shard.rows for shard in killed.shards()) == 1000
    assert not list(folder.glob("*.tmp"))


def test_resume_with_another_number_of_processes(tmp_path):
    for rank in range(4):  # killed early: rows 0..15 of 40
        write(tmp_path, range(rank, 16, 4), rank)
    lost = tmp_path / "manifest-r3.json"  # rank 3 died before it listed anything
    lost.unlink()
    assert sum(write(tmp_path, range(rank, 40, 3), rank) for rank in range(3)) == 24
    assert write(tmp_path, range(40), rank=3) == 0
    assert lost.exists()
    assert stored(tmp_path) == list(range(40))


def test_rows_that_wait_when_the_block_fails_are_not_written(tmp_path):
    store = TraceStore.open(tmp_path, IDENTITY)

    def fail() -> None:
        with store.writer(0, rows_per_shard=2) as writer:
            for number in range(3):
                writer.add(make(number))
            raise RuntimeError("generation failed")

    with pytest.raises(RuntimeError, match="generation failed"):
        fail()
    assert stored(tmp_path) == [0, 1]


def test_leftovers_of_dead_writers_are_removed(tmp_path):
    write(tmp_path, range(3))
    mine = tmp_path / ".shard-r0-00001.parquet.12345678.tmp"
    others = tmp_path / ".shard-r01-00001.parquet.12345678.tmp"
    for path in (mine, others):
        path.write_bytes(b"half")
    write(tmp_path, range(4))
    assert not mine.exists()
    assert others.exists()  # may belong to a rank that writes just now
    TraceStore.open(tmp_path, IDENTITY).finish()
    assert not others.exists()
    assert stored(tmp_path) == [0, 1, 2, 3]


def test_two_writers_of_one_rank_are_refused(tmp_path):
    store = TraceStore.open(tmp_path, IDENTITY)
    refused = pytest.raises(UserError, match=r"rank 0 of trace store .* another process")
    with store.writer(0), store.writer(1), refused, store.writer(0):
        pass
    with store.writer(0):
        pass


def test_a_store_in_use_names_the_keys_that_place_it(tmp_path):
    """The report's lie below data.cache_dir, whatever data.traces is."""
    store = TraceStore.open(tmp_path, IDENTITY)
    says = (
        "is being written by another process; wait for it, or use another data.traces where that "
        "names this folder, else another data.cache_dir"
    )
    for held in (store.exclusive, store.writer):
        with held(), pytest.raises(UserError) as refused, held():
            pass
        assert str(refused.value).endswith(f"trace store {tmp_path} {says}")


def test_rows_that_two_commands_wrote_side_by_side_are_read_once(tmp_path, capsys):
    store = TraceStore.open(tmp_path, IDENTITY)
    with store.writer(0) as one, store.writer(1) as other:
        for number in range(3):
            one.add(make(number))
        for number in range(2, 5):
            other.add(make(number))
    assert stored(tmp_path) == [0, 1, 2, 3, 4]
    assert store.dataset().num_rows == 5
    assert "1 rows left out" in capsys.readouterr().out


# finished


def test_finish_merges_the_parts(tmp_path):
    for rank in range(2):
        write(tmp_path, range(rank, 10, 2), rank)
    keys = {make(number).key for number in range(10)}
    store = TraceStore.open(tmp_path, IDENTITY)
    assert not store.is_complete(keys)
    store.finish()
    assert store.is_complete(keys)
    assert not store.is_complete({*keys, make(10).key})
    assert [path.name for path in sorted(tmp_path.glob("manifest*"))] == ["manifest.json"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["rows"] == 10
    assert manifest["bytes"] == sum(p.stat().st_size for p in tmp_path.glob("shard-*"))
    assert manifest["identity"] == json.loads(json.dumps(dataclasses.asdict(IDENTITY)))
    assert stored(tmp_path) == list(range(10))


def test_a_finished_store_goes_on(tmp_path):
    write(tmp_path, range(5))
    store = TraceStore.open(tmp_path, IDENTITY)
    store.finish()
    assert write(tmp_path, range(8)) == 3
    assert not store.is_complete([])  # shards that `finish` has not seen
    store.finish()
    assert store.is_complete([make(number).key for number in range(8)])


# identity


def test_a_store_from_before_the_eos_set_grew_is_refused_with_that_reason(tmp_path):
    before = dataclasses.replace(IDENTITY, target={**IDENTITY.target, "eos_ids": [0]})
    now = dataclasses.replace(IDENTITY, target={**IDENTITY.target, "eos_ids": [0, 5]})
    TraceStore.open(tmp_path, before)
    with pytest.raises(UserError) as caught:
        TraceStore.open(tmp_path, now)
    assert (caught.value.key, caught.value.value) == ("trace store", str(tmp_path))
    assert "ended at the token ids [0] alone; they end at [0, 5]" in caught.value.rule
    with pytest.raises(UserError, match="made with seed 3"):
        TraceStore.open(tmp_path, dataclasses.replace(now, seed=5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperatures": [0.7]}, r"temperatures \[0.0, 1.0\] \(wanted: \[0.7\]\)"),
        ({"max_new_tokens": 9}, r"max_new_tokens 8 \(wanted: 9\)"),
        ({"lookahead": 4, "seed": 5}, r"lookahead 2 \(wanted: 4\); seed 3 \(wanted: 5\)"),
        (
            {"target": {**IDENTITY.target, "tokenizer": {"hash": "t2"}}},
            r"target.tokenizer.hash 't1' \(wanted: 't2'\)",
        ),
        ({"target": {"weights": "w1", "eos": [1, 2]}}, r"target.tokenizer .* \(wanted: None\)"),
    ],
)
def test_another_identity_is_refused_by_key_and_values(tmp_path, change, words):
    write(tmp_path, range(3))
    other = dataclasses.replace(IDENTITY, **change)
    message = f"was made with {words}; use another data.traces or delete it"
    with pytest.raises(UserError, match=message):
        TraceStore.open(tmp_path, other)
    assert stored(tmp_path) == [0, 1, 2]


def test_other_prompts_name_the_keys_that_choose_them(tmp_path):
    write(tmp_path, range(3))
    with pytest.raises(UserError) as caught:
        TraceStore.open(tmp_path, dataclasses.replace(IDENTITY, prompts_hash="other"))
    assert "set data.num_prompts, data.prompts and the keys" in caught.value.remedy


def test_tuples_and_lists_are_the_same_identity(tmp_path):
    write(tmp_path, range(3))
    TraceStore.open(tmp_path, dataclasses.replace(IDENTITY, temperatures=(0.0, 1.0)))


def test_no_store_is_said_when_none_may_be_made(tmp_path):
    for identity, create in ((IDENTITY, False), (None, True)):
        with pytest.raises(UserError, match="no trace store in"):
            TraceStore.open(tmp_path / "none", identity, create)
    assert not (tmp_path / "none").exists()


def test_shards_of_another_store_are_refused(tmp_path):
    other = TraceStore.open(tmp_path / "other", dataclasses.replace(IDENTITY, seed=9))
    with other.writer() as writer:
        writer.add(make(0))
    (tmp_path / "other" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest-r0.json belongs to another trace store"):
        TraceStore.open(tmp_path / "other", IDENTITY)
    (tmp_path / "other" / "manifest-r0.json").unlink()
    with pytest.raises(UserError, match=r"shard-r0-00000.parquet belongs to another"):
        TraceStore.open(tmp_path / "other", IDENTITY)


# damage


def flip(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    "damage", [lambda path: flip(path, 0.3), lambda path: flip(path, 0.9), cut]
)
def test_damaged_shard_is_named_and_the_remedy_works(tmp_path, damage, finished, capsys):
    write(tmp_path, range(8))
    before = TraceStore.open(tmp_path, IDENTITY).load()
    if finished:
        TraceStore.open(tmp_path, IDENTITY).finish()
    shard = tmp_path / "shard-r0-00002.parquet"
    damage(shard)
    for use in (TraceStore.load, TraceStore.done_keys, TraceStore.dataset):
        with pytest.raises(
            UserError, match=r"shard-r0-00002.parquet is damaged .*delete this file"
        ):
            use(TraceStore.open(tmp_path, IDENTITY))
    shard.unlink()
    capsys.readouterr()
    assert stored(tmp_path) == list(range(6))
    assert "shard-r0-00002.parquet is gone; its 2 rows count as not done" in capsys.readouterr().out
    assert not TraceStore.open(tmp_path, IDENTITY).is_complete([])
    assert write(tmp_path, range(8)) == 2
    assert TraceStore.open(tmp_path, IDENTITY).load() == before
    part = json.loads((tmp_path / "manifest-r0.json").read_text())
    assert shard.name not in [entry["file"] for entry in part["shards"]]
    TraceStore.open(tmp_path, IDENTITY).finish()
    capsys.readouterr()
    assert TraceStore.open(tmp_path, IDENTITY).is_complete({make(n).key for n in range(8)})
    assert capsys.readouterr().out == ""


def test_a_whole_shard_in_the_place_of_another_is_named(tmp_path):
    """As a copy or a restored backup leaves it: its pages are sound, its rows are others."""
    write(tmp_path, range(6))
    first, second = sorted(tmp_path.glob("shard-*"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"shard-r0-00001.parquet is damaged .*size or checksum"):
        TraceStore.open(tmp_path, IDENTITY).load()


def test_no_shard_takes_the_name_of_one_that_is_there(tmp_path):
    """Where one before it is gone for so long that no manifest names it any more."""
    write(tmp_path, range(9))
    (tmp_path / "shard-r0-00001.parquet").unlink()
    assert write(tmp_path, range(9)) == 3
    assert write(tmp_path, range(12)) == 3
    assert stored(tmp_path) == list(range(12))
    names = [path.name for path in sorted(tmp_path.glob("shard-*"))]
    assert names == [f"shard-r0-{number:05d}.parquet" for number in (0, 2, 3, 4)]


def test_damage_shows_in_a_shard_that_was_not_listed_yet(tmp_path):
    write(tmp_path, range(3))
    (tmp_path / "manifest-r0.json").unlink()
    good = (tmp_path / "shard-r0-00000.parquet").read_bytes()
    ids = good.index(np.int32(150_000).tobytes())
    (tmp_path / "shard-r0-00000.parquet").write_bytes(good[:ids] + b"\0" + good[ids + 1 :])
    with pytest.raises(UserError, match=r"shard-r0-00000.parquet is damaged \(not readable"):
        TraceStore.open(tmp_path, IDENTITY)
    (tmp_path / "shard-r0-00000.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"shard-r0-00000.parquet is damaged \(not readable"):
        TraceStore.open(tmp_path, IDENTITY)


@pytest.mark.parametrize("name", ["manifest.json", "manifest-r0.json"])
def test_damaged_manifest_is_named_and_the_remedy_works(tmp_path, name):
    write(tmp_path, range(5))
    cut(tmp_path / name)
    message = re.escape(name) + " is damaged .*delete this file"
    with pytest.raises(UserError, match=message):
        TraceStore.open(tmp_path, IDENTITY)
    (tmp_path / name).unlink()
    assert write(tmp_path, range(5)) == 0
    assert stored(tmp_path) == list(range(5))


# disk full, budget


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("name", ["shard-r0-00001.parquet", "manifest-r0.json"])
def test_full_disk_is_named_and_finished_shards_stay(tmp_path, monkeypatch, call, name):
    write(tmp_path, range(3))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = TraceStore.open(tmp_path, IDENTITY)
    late = name.startswith("manifest")  # the shard itself still has room
    real, calls = getattr(os, call), iter([0, 0, 1, 1, 1] if call == "fsync" else [0, 1, 1])
    fault = pytest.raises(RunFault, match=rf"cannot write .*{name}: No space left on device")
    with fault, store.writer(0, rows_per_shard=3) as writer, monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *a: real(*a) if late and not next(calls) else full())
        for number in (3, 4, 5):
            writer.add(make(number))
    assert not list(tmp_path.glob("*.tmp"))
    assert stored(tmp_path) == list(range(6 if late else 3))
    assert write(tmp_path, range(9)) == (3 if late else 6)
    assert stored(tmp_path) == list(range(9))


def test_a_file_in_the_place_of_the_store_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file.manifest.json .*another folder"):
        TraceStore.open(tmp_path / "file", IDENTITY)


@pytest.mark.parametrize(
    ("rows", "prompt_tokens", "new_tokens", "top_k", "samples"),
    [(1000, 100, 100, 0, 0), (300, 15, 30, 0, 0), (300, 100, 60, 8, 0), (150, 50, 50, 16, 4)],
)
def test_estimate_is_close_to_the_bytes_on_disk(
    tmp_path, rows, prompt_tokens, new_tokens, top_k, samples
):
    generator = np.random.default_rng(0)

    def ids(*shape):
        return generator.integers(0, 150_000, shape).tolist()

    store = TraceStore.open(tmp_path, IDENTITY)
    with store.writer(0, 256) as writer:
        for number in range(rows):
            block = {"response_ids": ids(new_tokens), "prompt_ids": ids(prompt_tokens)}
            if top_k:
                block["teacher_ids"] = ids(new_tokens, top_k)
                block["teacher_logp"] = generator.random((new_tokens, top_k)).tolist()
                block["teacher_log_tail"] = generator.random(new_tokens).tolist()
            if samples:
                block["tail_ids"] = ids(new_tokens, samples)
                block["tail_logp"] = generator.random((new_tokens, samples)).tolist()
            hashes = {"prompt_hash": f"{number:064}", "conversation_id": f"{number:064}"}
            writer.add(make(number, **block, **hashes))
    store.finish()
    real = sum(path.stat().st_size for path in tmp_path.iterdir())
    estimate = estimate_bytes(rows, prompt_tokens, new_tokens, top_k, samples)
    assert abs(estimate - real) < 0.15 * real


def test_budget_is_printed_and_refused_when_too_large(tmp_path, capsys):
    folder = tmp_path / "not" / "there"
    check_budget(folder, 12_300_000, free=80 * 10**9)
    assert capsys.readouterr().out == f"traces: about 12.3 MB in {folder}; free 80 GB\n"
    with pytest.raises(UserError, match=r"need about 90 GB in .*only 80 GB are free: lower"):
        check_budget(folder, 90 * 10**9, free=80 * 10**9)
    check_budget(folder, 1)
    with pytest.raises(UserError, match="are free"):
        check_budget(folder, 10**18)


def test_loading_makes_no_call_for_a_row(tmp_path):
    """So that millions of rows load in seconds."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 150_000, (1000, 200)).tolist()
    store = TraceStore.open(tmp_path, IDENTITY)
    with store.writer() as writer:
        for number, row in enumerate(ids):
            writer.add(make(number, prompt_ids=[number], response_ids=row))
    calls = []
    sys.setprofile(lambda _, event, __: event.endswith("call") and calls.append(event))
    try:
        rows = store.load()
    finally:
        sys.setprofile(None)
    assert len(rows) == 1000
    assert len(calls) < len(rows)


@pytest.mark.parametrize("fault", [RunFault("a server is gone"), SystemExit(75)])
def test_what_was_finished_is_kept_when_the_work_is_stopped(tmp_path, fault):
    store = TraceStore.open(tmp_path, IDENTITY)

    def work():
        with store.writer(0) as writer:
            writer.add(make(0))
            writer.add(make(1))
            raise fault

    with pytest.raises(type(fault)):
        work()
    assert stored(tmp_path) == [0, 1]
    assert write(tmp_path, range(4)) == 2
    assert stored(tmp_path) == [0, 1, 2, 3]


def test_what_was_finished_long_ago_is_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(traces_module, "FLUSH_S", 0.0)
    store = TraceStore.open(tmp_path, IDENTITY)
    with store.writer(0) as writer:
        writer.add(make(0))
        assert stored(tmp_path) == [0]


def keep_writing(folder: str, rank: str) -> None:
    """In a process of its own, which is killed."""
    store = TraceStore.open(Path(folder), IDENTITY)
    done = store.done_keys()
    with store.writer(int(rank), rows_per_shard=2) as writer:
        for row in map(make, range(1000)):
            print("working", flush=True)
            if row.key not in done:
                writer.add(row)


if __name__ == "__main__":
    keep_writing(*sys.argv[1:])
