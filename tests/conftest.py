"""Fixtures for all tests: tiny models saved once a session. Everything runs offline: what would
leave this machine fails, here and in the processes that tests start."""

from __future__ import annotations

import gc
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent / "offline"), os.environ.get("PYTHONPATH")) if path
)

import pytest

import tests.offline.sitecustomize  # noqa: F401
from tests.helpers.reports import no_report
from tests.helpers.tiny import save_tiny

# a file goes to one process: those that take minutes begin first, so that none is left at the end
LONGEST = (
    "trainer/test_placements.py", "engines/test_states_killed.py", "test_docs.py",
    "engines/test_vllm.py", "engines/test_vllm_server.py", "test_sizes.py", "test_resume.py",
    "eval/verifiers/test_tree.py", "engines/test_states.py", "test_train.py",
    "test_architecture.py", "scripts/test_setup.py", "eval/test_assisted.py",
    "benchmarks/test_queue.py", "data/test_toy.py", "trainer/test_compiled.py",
    "engines/test_llamacpp.py", "data/test_traces.py", "trainer/test_fused.py",
    "trainer/test_tabular_oracle.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Tests of tools wait for CI, as slow ones do, however fast they are."""
    for item in items:
        if item.get_closest_marker("tools"):
            item.add_marker("slow")
    place = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collection_finish(session):
    """Every training collects garbage, which would walk through all the tests there are."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """tiny_folder(name, **options of save_tiny) -> folder, written at most once a session."""
    made = {}

    def get(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp(name) / name, name, **options)
        return made[key]

    return get


@dataclass
class Sync:
    """A file or folder whose content was made to reach the disk: where, by which inode (a new name
    keeps it) and at what size."""

    path: Path
    inode: int
    size: int


@pytest.fixture
def syncs(monkeypatch):
    """Every call of os.fsync, in order."""
    found, fsync = [], os.fsync

    def note(descriptor):
        file = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append(Sync(path, file.st_ino, file.st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return found


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, tiny_folder):
    """(folder, words) of a whole run of tests.helpers.commands, shared: do not change it."""
    import train
    from tests.helpers.commands import command

    folder = tmp_path_factory.mktemp("finished")
    words = command(folder, tiny_folder("llama"))
    assert train.main(words) == 0
    return folder, words


@pytest.fixture
def begun(finished_run, tmp_path):
    """The same run, copied: (run folder, words)."""
    folder, words = finished_run
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path / "run", [word.replace(f"={folder}/run", f"={tmp_path}/run") for word in words]


@pytest.fixture
def unreported():
    """For tests that look at the training alone."""
    with no_report():
        yield


@pytest.fixture(scope="session")
def tiny_target(tiny_folder):
    """tiny_target(name, **options of save_tiny) -> a loaded target.model.Target, shared: do not
    change it."""
    from target.model import Target

    made = {}

    def get(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = Target.load(str(tiny_folder(name, **options)))
        return made[key]

    return get
