"""Processes on several machines must see the same folders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phases import run
from phases.pipeline import resolve
from tests.helpers.commands import command
from trainer.errors import UserError


def machine(first):
    return SimpleNamespace(num_processes=2, is_main_process=first)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(run, "SHARED_FOLDER_WAIT_S", 0.0)
    return resolve(command(tmp_path, "target"))[0]


@pytest.mark.parametrize("cache", ["cache", "run/cache", "."])
def test_the_first_machine_leaves_nothing_behind(cache, config, tmp_path):
    config.data.cache_dir = str(tmp_path / cache)
    before = sorted(tmp_path.rglob("*"))
    run.check_shared_folders(config, machine(True))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("missing", ["run.dir", "data.cache_dir"])
def test_a_folder_that_a_machine_does_not_see_is_named(config, tmp_path, missing, monkeypatch):
    monkeypatch.setattr(run, "broadcast_object_list", lambda _: ["mark", None])
    for key, name in (("run.dir", "run"), ("data.cache_dir", "cache")):
        (tmp_path / name).mkdir()
        if key != missing:
            (tmp_path / name / "mark").touch()
    with pytest.raises(UserError, match=rf"^{missing} must lie on a disk that all machines see"):
        run.check_shared_folders(config, machine(False))


def test_what_another_machine_does_not_see_stops_this_one(config, monkeypatch):
    monkeypatch.setattr(run, "gather_object", lambda own: [*own, "data.cache_dir"])
    with pytest.raises(UserError, match=r"^data\.cache_dir must lie"):
        run.check_shared_folders(config, machine(True))


def test_a_slow_disk_is_waited_for(config, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SHARED_FOLDER_WAIT_S", 5.0)
    monkeypatch.setattr(run, "broadcast_object_list", lambda _: ["mark", None])

    def appear(seconds):
        for name in ("run", "cache"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "mark").touch()

    monkeypatch.setattr(run.time, "sleep", appear)
    run.check_shared_folders(config, machine(False))


def test_a_folder_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"^data\.cache_dir=.* cannot be written \(File exists"):
        run.check_shared_folders(config, machine(True))


def test_one_machine_is_not_asked(config, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run.check_shared_folders(config, machine(True))
    assert not (tmp_path / "cache").exists()
