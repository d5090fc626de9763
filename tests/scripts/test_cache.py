"""The stores that runs share are listed with what they hold, and deleted by name."""

from __future__ import annotations

import fcntl
import shutil

import pytest

import train
from phases.uses import Use, uses_of
from scripts import cache
from tests.helpers.commands import command


@pytest.fixture
def used(tmp_path, tiny_folder):
    """A cache that two runs have used, one of which is gone."""
    for name in ("first", "second"):
        words = command(
            tmp_path, tiny_folder("llama"), "recipe=medusa", f"run.dir={tmp_path / name}",
            "data.features=cached", "trainer.max_steps=1", "run.stage=train",
        )  # fmt: skip
        assert train.main([word for word in words if not word.startswith("method.draft_")]) == 0
    shutil.rmtree(tmp_path / "second")
    return tmp_path / "cache"


@pytest.mark.slow
def test_stores_are_listed_with_size_target_and_runs_and_one_is_deleted(
    used, tmp_path, tiny_folder, capsys
):
    target = str(tiny_folder("llama"))
    found = cache.stores(used)
    assert {one.name.split("/")[0] for one in found} == {"traces", "features"}
    for one in found:
        files = [path for path in one.folder.rglob("*") if path.is_file()]
        assert one.num_bytes == sum(path.stat().st_size for path in files) > 0
        assert (one.targets, one.runs) == ([target], [str(tmp_path / "first")])
        runs = [Use(str(tmp_path / name), target) for name in ("first", "second")]
        assert uses_of(used, one.folder) == runs  # each once
    assert [one.num_bytes for one in found] == sorted((o.num_bytes for o in found), reverse=True)
    capsys.readouterr()
    assert cache.main([f"data.cache_dir={used}"]) == 0
    shown = capsys.readouterr().out
    assert all(one.name in shown for one in found)
    assert f"{len(found)} stores, " in shown

    name = next(one.name for one in found if one.name.startswith("features"))
    assert cache.main([f"data.cache_dir={used}", f"script.delete={name}"]) == 0
    assert f"deleted: {name}, " in capsys.readouterr().out
    assert not (used / name).exists()
    assert not (used / ".users" / name).exists()
    assert [one.name for one in cache.stores(used)] == [o.name for o in found if o.name != name]


@pytest.fixture
def stored(tmp_path):
    store = tmp_path / "features" / "abc"
    store.mkdir(parents=True)
    (store / "shard").write_bytes(b"x" * 12_345)
    return store


@pytest.mark.parametrize("name", ["features/abd", "features", "../features/abc", "features/abc/"])
def test_only_a_store_by_its_name_is_deleted(name, stored, tmp_path, capsys):
    assert cache.main([f"data.cache_dir={tmp_path}", f"script.delete={name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"script.delete={name}: there is no such store" in line
    if name == "features/abd":
        assert line.endswith("did you mean 'features/abc'?")
    assert stored.exists()


def test_a_store_that_is_being_written_stays(stored, tmp_path, capsys):
    with (stored / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache.main([f"data.cache_dir={tmp_path}", "script.delete=features/abc"]) == 2
        assert "another process is writing this store; wait" in capsys.readouterr().err
    assert (stored / "shard").exists()
    assert cache.main([f"data.cache_dir={tmp_path}", "script.delete=features/abc"]) == 0
    assert capsys.readouterr().out == "deleted: features/abc, 12.3 kB\n"
    assert not stored.exists()


def test_a_cache_that_is_not_there_is_named_and_an_empty_one_is_empty(tmp_path, capsys):
    assert cache.main([f"data.cache_dir={tmp_path / 'none'}"]) == 2
    assert capsys.readouterr().err == f"error: data.cache_dir={tmp_path / 'none'}: is no folder\n"
    assert cache.main([f"data.cache_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"0 stores, 0 B in {tmp_path}\n"


def test_a_note_that_was_cut_by_a_kill_is_passed_over(stored, tmp_path):
    path = tmp_path / ".users" / "features" / "abc"
    path.parent.mkdir(parents=True)
    path.write_text('{"run": "/a", "target": "t"}\n[1]\n{"run": "/b"}\n{"run": "/c", "tar')
    assert uses_of(tmp_path, stored) == [Use("/a", "t")]
