"""Stored states on object storage: the local ones, whatever fails, in a bounded folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import data.features_remote as remote
import train
from data.config import DataConfig
from data.features import FeaturesStore, write_features
from data.features_layout import FeaturesPlan
from data.features_remote import RemoteFolder, check_storage
from data.file_cache import FileCache
from target.model import Target
from tests.data.test_features import FILES, LAYERS, PLAN, TRACES, answer, batch_of, shards
from tests.helpers.commands import ROOT, command, read_jsonl
from trainer.errors import RunFault, UserError


class Bucket(MemoryFileSystem):
    """Object storage that counts its requests and fails when it is told to."""

    protocol = "bucket"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[list[str]] = []  # paths that were read or written
    errors: ClassVar[list[Exception]] = []  # of the next requests

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bucket://"))

    def _request(self, path):
        self.requests.append(path)
        if self.errors:
            raise self.errors.pop(0)

    def cat_file(self, path, *given, **options):
        self._request(path)
        return super().cat_file(path, *given, **options)

    def pipe_file(self, path, *given, **options):
        self._request(path)
        return super().pipe_file(path, *given, **options)

    def put_file(self, lpath, rpath, *given, **options):
        self._request(rpath)
        return super().put_file(lpath, rpath, *given, **options)


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    monkeypatch.setattr(remote, "DELAYS_S", (0.0, 0.0))
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    for found in (Bucket.store, Bucket.requests, Bucket.errors):
        found.clear()
    return Bucket


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """The same store on the disk."""
    folder = tmp_path_factory.mktemp("whole")
    return write_features(target, TRACES, PLAN, folder, batch_size=2)


def place(folder: Path, limit=1e9, url="bucket://some/states") -> RemoteFolder:
    return RemoteFolder(url, folder / "features" / "digest", FileCache(folder / "cache", limit))


def fill(target, folder, plan=PLAN, **options) -> FeaturesStore:
    return write_features(target, TRACES, plan, folder, batch_size=2, **options)


def batches():
    order = np.random.default_rng(0).permutation(len(TRACES) * 3) % len(TRACES)
    return [batch_of(*(TRACES[i] for i in order[j : j + 3])) for j in range(0, len(order), 3)]


def assert_same(store: FeaturesStore, local: FeaturesStore, watch=lambda: None) -> None:
    for batch in batches():
        found, wanted = answer(store, batch), answer(local, batch)
        assert all(torch.equal(found.hidden[n], states) for n, states in wanted.hidden.items())
        assert (found.summary is None) == (wanted.summary is None)
        if found.summary is not None and wanted.summary is not None:
            pairs = zip(vars(found.summary).values(), vars(wanted.summary).values(), strict=True)
            for one, other in pairs:  # NaN where nothing is trained
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        watch()


def cached_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sum(path.stat().st_size for path in files)


# what is read


@pytest.mark.parametrize(
    ("dtype", "summary"), [("fp32", False), ("fp32", True), ("bf16", False), ("fp8", True)]
)
def test_states_are_those_of_a_local_store_and_are_fetched_once(
    target, tmp_path, bucket, dtype, summary
):
    plan = FeaturesPlan(LAYERS, dtype, 60, summary=summary)
    local = fill(target, tmp_path / "local", plan)
    fill(target, place(tmp_path), plan)
    bucket.requests.clear()
    store = fill(target, place(tmp_path), plan)
    assert bucket.requests == ["/some/states/digest/manifest.json"] * 3  # and no shard
    assert_same(store, local)
    bucket.requests.clear()
    assert_same(store, local)
    assert not bucket.requests
    again = fill(target, place(tmp_path), plan)
    bucket.errors += [OSError()] * 9  # another process of this machine, without a network
    assert_same(again, local)
    assert bucket.requests == ["/some/states/digest/manifest.json"] * 3


def test_the_files_are_those_of_a_local_store(target, whole, tmp_path):
    fill(target, place(tmp_path, url=f"file://{tmp_path}/there"))
    assert shards(tmp_path / "there" / "digest") == shards(whole.folder.path)
    assert sorted(p.name for p in (tmp_path / "features" / "digest").iterdir()) == [".lock"]


def test_only_the_rows_of_a_batch_are_fetched(target, tmp_path):
    store = fill(target, place(tmp_path))
    answer(store, batch_of(TRACES[2]))
    assert cached_bytes(tmp_path / "cache") == 32 + 4 * 3 * 32 * 4  # of 4 tokens, three layers


def test_states_that_were_announced_are_there(target, whole, tmp_path, bucket):
    store = fill(target, place(tmp_path))
    batch = batch_of(TRACES[1], TRACES[1], TRACES[4])
    store.ahead(batch)
    store._pool.submit(lambda: None).result()  # what was asked before has come
    bucket.requests.clear()
    for states in (answer(store, batch).hidden, answer(store, batch).hidden):
        assert torch.equal(states[0], answer(whole, batch).hidden[0])
    assert not bucket.requests


def test_the_folder_stays_below_its_limit_though_the_store_is_larger(target, whole, tmp_path):
    limit = cached_bytes(whole.folder.path) // 3

    def watch():
        assert cached_bytes(tmp_path / "cache") <= limit

    assert_same(fill(target, place(tmp_path, limit)), whole, watch)
    assert cached_bytes(tmp_path / "cache") > limit / 2


def test_a_text_larger_than_the_limit_is_read_without_the_folder(target, whole, tmp_path):
    assert_same(fill(target, place(tmp_path, limit=64)), whole)
    assert not cached_bytes(tmp_path / "cache")


def test_a_row_that_was_damaged_on_the_disk_is_fetched_again(target, whole, tmp_path):
    assert_same(fill(target, place(tmp_path)), whole)
    for path in (tmp_path / "cache" / "digest").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert_same(fill(target, place(tmp_path)), whole)


# what fails


def test_a_request_that_fails_is_sent_again(target, whole, tmp_path, bucket, capsys):
    store = fill(target, place(tmp_path))
    capsys.readouterr()
    bucket.errors += [TimeoutError("slow"), ConnectionError("reset")]
    assert_same(store, whole)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "bucket://some/states/digest: TimeoutError: slow; tried again in 0 s"
    assert len(said) == 2


@pytest.mark.parametrize(
    ("error", "count"), [(OSError("no route\nto host"), 3), (PermissionError("denied"), 1)]
)
def test_one_that_goes_on_failing_is_one_line(target, tmp_path, bucket, error, count):
    store = fill(target, place(tmp_path))
    bucket.errors += [error] * 9
    with pytest.raises(RunFault) as found:
        store.outputs(batch_of(*TRACES))
    assert len(bucket.errors) == 9 - count
    said = str(found.value)
    assert said.startswith("data.features_url: cannot read bucket://some/states/digest (")
    assert " ".join(str(error).split()) in said
    assert said.endswith("check the network and the credentials, then start the same command again")
    assert "\n" not in said


def test_storage_that_cannot_be_listed_is_named(bucket, monkeypatch):
    check_storage("bucket://empty")

    def ls(*_, **__):
        raise PermissionError("denied")

    monkeypatch.setattr(bucket, "ls", ls)
    with pytest.raises(RunFault, match=r"cannot list bucket://empty.*denied"):
        check_storage("bucket://empty")


@pytest.mark.parametrize(("path", "made"), [("bucket/digest", 0), ("/folder/digest", 1)])
def test_folders_are_made_but_no_bucket(tmp_path, monkeypatch, path, made):
    """By s3fs, to make the folders of a path makes its bucket, whose name may be a mistake."""
    done = []
    folder = place(tmp_path)
    monkeypatch.setattr(folder, "_path", path)
    monkeypatch.setattr(folder._fs, "makedirs", lambda *_, **__: done.append("folders"))
    monkeypatch.setattr(folder._fs, "pipe_file", lambda name, _: done.append(name))
    folder.write_manifest({})
    assert done == ["folders"] * made + [f"{path}/manifest.json"]


@pytest.mark.parametrize("where", ["states", "sums", "header"])
def test_bytes_that_are_not_those_that_were_written_are_not_used(target, tmp_path, bucket, where):
    store = fill(target, place(tmp_path))
    path = f"/some/states/digest/{FILES[0]}"
    content = bytearray(bucket.store[path].getvalue())
    content[{"states": len(content) // 2, "sums": -1, "header": 20}[where]] ^= 1
    bucket.store[path].seek(0)
    bucket.store[path].write(bytes(content))
    with pytest.raises(RunFault, match=rf"ValueError: the .* of .*{FILES[0]} (is|are) not"):
        store.outputs(batch_of(*TRACES))


def test_a_shard_that_is_gone_is_made_again(target, whole, tmp_path, bucket):
    store = fill(target, place(tmp_path))
    del bucket.store[f"/some/states/digest/{FILES[2]}"]
    with pytest.raises(UserError, match=rf"a shard of bucket://.*{FILES[2]}.*delete its manifest"):
        store.outputs(batch_of(*TRACES))
    del bucket.store["/some/states/digest/manifest.json"]
    bucket.requests.clear()
    assert_same(fill(target, place(tmp_path)), whole)
    assert len([name for name in bucket.requests if name.endswith(FILES[2])]) > 1


# killed and started again


class Killed(BaseException):
    pass


@pytest.mark.parametrize("survivors", range(7))
def test_a_run_that_dies_between_uploads_goes_on(target, whole, tmp_path, bucket, survivors):
    """Before a shard, or after the last one and before the manifest; a half-uploaded one is no
    shard, on storage that shows it."""
    if survivors < 6:
        put = bucket.put_file
        done = iter(range(99))

        def dying(self, lpath, rpath, **options):
            if next(done) == survivors:
                self.pipe_file(rpath, Path(lpath).read_bytes()[:-1])
                raise Killed
            return put(self, lpath, rpath, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bucket, "put_file", dying)
            with pytest.raises(Killed):
                fill(target, place(tmp_path))
    else:
        write = RemoteFolder.write_manifest

        def incomplete(self, content):
            if content["complete"]:
                raise Killed
            write(self, content)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RemoteFolder, "write_manifest", incomplete)
            with pytest.raises(Killed):
                fill(target, place(tmp_path))
    with pytest.raises(UserError, match="bucket://some/states/digest is not complete"):
        FeaturesStore.open(
            place(tmp_path), target_fingerprint=target.fingerprint, layers=LAYERS, traces=TRACES
        )
    shutil.rmtree(tmp_path)  # another machine goes on
    with pytest.MonkeyPatch.context() as patch:
        if survivors == 6:
            patch.setattr(Target, "outputs", None)  # nothing is computed
        uploads = []
        patch.setattr(bucket, "_request", lambda self, path: uploads.append(path))
        put = bucket.put_file
        patch.setattr(
            bucket, "put_file", lambda self, a, b, **o: (uploads.append("put"), put(self, a, b))
        )
        store = fill(target, place(tmp_path))
    assert uploads.count("put") == 6 - survivors
    assert_same(store, whole)
    for file in FILES:
        local = (whole.folder.path / file).read_bytes()
        assert bucket.store[f"/some/states/digest/{file}"].getvalue() == local


def test_two_ranks_write_the_same_store(whole, tmp_path, target):
    barrier = threading.Barrier(2)
    targets = [Target.load(target.name) for _ in range(2)]

    def work(rank):
        fill(targets[rank], place(tmp_path), rank=rank, world=2, barrier=barrier.wait)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(fill(target, place(tmp_path)), whole)


# the folder of what was read


def bytes_of(number: int, size: int = 100) -> tuple[np.ndarray, bytes]:
    content = np.full(size - 32, number, np.uint8)
    return content, remote.hashlib.sha256(content.data).digest()


def test_what_was_not_used_for_longest_goes(tmp_path):
    for number in range(8):
        FileCache(tmp_path, 800).write(f"a/{number}", *bytes_of(number))
        os.utime(tmp_path / "a" / str(number), (number, number))
    cache = FileCache(tmp_path, 800)  # which is full
    assert cache.read("a/0") is not None
    cache.write("a/8", *bytes_of(8))  # then an eighth is left free
    assert [number for number in range(9) if cache.read(f"a/{number}") is None] == [1, 2]
    assert cache.read("a/5").tolist() == [5] * 68


@pytest.mark.parametrize("said", ["", "0", f"{100:20d}"])
def test_a_process_looks_once_at_what_others_left(tmp_path, said):
    """A machine that failed may have lost what `.lock` said last."""
    for number in range(8):
        FileCache(tmp_path, 800).write(f"a/{number}", *bytes_of(number))
    (tmp_path / ".lock").write_text(said)
    FileCache(tmp_path, 800).write("a/8", *bytes_of(8))
    assert len([*tmp_path.glob("a/*")]) == 7


def test_a_folder_that_was_deleted_is_made_again(tmp_path):
    cache = FileCache(tmp_path / "x", 800)
    for number in range(30):
        if number == 5:
            shutil.rmtree(tmp_path / "x")
        cache.write(f"a/{number}", *bytes_of(number))
        assert cached_bytes(tmp_path / "x") <= 800
    assert cache.read("a/29").tolist() == [29] * 68


def watched(folder: Path, ended: Callable[[], bool]) -> int:
    """Most bytes that lie there until `ended`."""
    most = 0
    while not ended():
        total = 0
        for path in folder.glob("a/*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        most = max(most, total)
    return most


RUN = """
import hashlib, sys
from pathlib import Path
import numpy as np
from data.file_cache import FileCache

folder, limit, run = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
cache = FileCache(folder, limit)
shown = cache.read("a/shown")
print("mapped", flush=True)
input()
for number in range(300):
    content = np.full(1000, number % 256, np.uint8)
    cache.write(f"a/{run}-{number}", content, hashlib.sha256(content.data).digest())
    for other in "01":
        found = cache.read(f"a/{other}-{number}")
        assert found is None or found.tolist() == content.tolist()
assert not (folder / "a" / "shown").exists()
assert shown.tolist() == [7] * len(shown)
"""


def test_runs_keep_the_limit_of_a_folder_and_what_they_read_of_it(tmp_path):
    """Two commands on one machine: more is written than the folder takes, while both have a file of
    it mapped that is deleted."""
    limit = 20_000
    FileCache(tmp_path, limit).write("a/shown", *bytes_of(7, 9000))
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path), str(limit), str(run)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) for run in range(2)
    ]  # fmt: skip
    assert [run.stdout.readline() for run in runs] == ["mapped\n"] * 2
    for run in runs:
        run.stdin.write("go\n")
        run.stdin.flush()
    most = watched(tmp_path, lambda: all(run.poll() is not None for run in runs))
    assert [run.communicate()[1] for run in runs] == ["", ""]
    assert limit / 2 < most <= limit


@pytest.mark.parametrize("size", [100, 20])
def test_several_writers_keep_the_limit_together(tmp_path, size):
    limit, num_writers = 4000, 4

    def work(writer):
        cache = FileCache(tmp_path, limit)
        for number in range(60):
            cache.write(f"a/{writer}-{number}", *bytes_of(number, 32 + size))
            content = cache.read(f"a/{writer}-{number}")
            assert content is None or content.tolist() == [number] * size

    with ThreadPoolExecutor(num_writers) as pool:
        work_of = [pool.submit(work, writer) for writer in range(num_writers)]
        most = watched(tmp_path, lambda: all(one.done() for one in work_of))
    for one in work_of:
        one.result()
    assert limit / 2 < most <= limit


# the command


def losses(tmp_path, tiny_folder, name: str, *given: str) -> list[float]:
    words = command(
        tmp_path, tiny_folder("llama"), f"run.dir={tmp_path / name}", "run.stage=train",
        f"data.cache_dir={tmp_path / f'cache-{name}'}", "trainer.gradient_accumulation_steps=2",
        "trainer.max_steps=3", *given,
    )  # fmt: skip
    assert train.main([word for word in words if not word.startswith("method.draft")]) == 0
    return [row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in row]


def test_a_run_trains_alike_on_states_from_storage(tmp_path, tiny_folder, bucket, capsys):
    url = "data.features_url=bucket://some/states"
    own = losses(tmp_path, tiny_folder, "own", "recipe=medusa")
    wide = losses(tmp_path, tiny_folder, "wide", "recipe=eagle3", "method.layers=[0,1]", url)
    assert wide
    capsys.readouterr()
    small = "data.features_cache_gb=0.00002", f"data.features_cache_dir={tmp_path / 'disk'}"
    assert losses(tmp_path, tiny_folder, "far", "recipe=medusa", url, *small) == own
    said = capsys.readouterr().out
    assert "features: layers ['final_norm'] of those in bucket://some/states/" in said
    assert 0 < cached_bytes(tmp_path / "disk") <= 20_000
    assert not (tmp_path / "cache-far" / "features_cache").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"features_url": "bogus://a/b"}, "data.features_url=bogus://a/b: no protocol 'bogus'"),
        ({"features_url": "runs/x"}, "data.features_url must be a URL such as s3://bucket/states"),
        ({"features_url": "sftp://me:secret@host/x"}, "data.features_url must hold no password"),
        ({"features_url": "memory://x", "features": "live"}, "data.features_url is for states"),
        ({"features_cache_dir": "x"}, "data.features_cache_dir is for states that lie on object"),
        ({"features_cache_gb": 0.0}, "data.features_cache_gb must be > 0, got 0.0"),
    ],
)
def test_a_wrong_key_is_refused(given, says):
    with pytest.raises(UserError, match=f"^{says}") as found:
        DataConfig(**({"features": "cached"} | given))
    assert "secret" not in str(found.value)


def test_a_package_that_is_missing_is_one_line_before_the_target_is_loaded(tmp_path, capsys):
    if importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    words = command(tmp_path, tmp_path / "none", "recipe=medusa", "data.features_url=s3://a/b")
    assert train.main([word for word in words if not word.startswith("method.draft")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.features_url=s3://a/b needs a package that is not installed: Install s3fs" in line
