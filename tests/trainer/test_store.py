"""Checkpoints are written beside the training: what was saved is what reaches the disk."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.trainer.test_loop import (
    Batches,
    Counting,
    TinyLM,
    accuracy,
    rows_of,
    same_weights,
    train,
)
from trainer import checkpoint, store
from trainer.config import TrainerConfig
from trainer.errors import RunFault
from trainer.optimizer import make_optimizer
from trainer.replicated import Replicated
from trainer.store import Counters, Store

LARGE = 50_000  # bytes; a checkpoint of these tests is smaller


class Gate:
    """Lets a writer through once `go` is set."""

    def __init__(self, monkeypatch) -> None:
        self.go, self.begun, self.names = threading.Event(), threading.Event(), []
        plain = store.write

        def write(directory, *given):
            self.begun.set()
            assert self.go.wait(20)
            self.names.append(directory.name)
            plain(directory, *given)

        monkeypatch.setattr(store, "write", write)


@pytest.fixture
def gate(monkeypatch):
    found = Gate(monkeypatch)
    yield found
    found.go.set()


@pytest.fixture
def slow(monkeypatch):
    """A disk that takes a second for a checkpoint."""
    plain = store.write

    def write(*given):
        time.sleep(1)
        plain(*given)

    monkeypatch.setattr(store, "write", write)


class Training:
    """A network after a step, its optimiser, and a store in `folder`."""

    def __init__(self, folder) -> None:
        torch.manual_seed(0)
        config = TrainerConfig()
        self.folder = folder
        self.store = Store(folder, Replicated(Accelerator(cpu=True), config), seed=0)
        self.model, self.objective = TinyLM(), Counting()
        self.optimizer = make_optimizer(self.model, config)
        self.counters, self.window = Counters(), {"loss": [0.0, 0.0]}
        self.step()

    def step(self) -> None:
        """Changes everything that a checkpoint holds, in place."""
        self.model(torch.arange(9)[None]).square().sum().backward()
        self.optimizer.step()
        self.objective.calls += 1
        self.counters.step += 1
        self.counters.series.append({"step": self.counters.step})
        self.window["loss"][0] += 1.0

    def save(self) -> None:
        self.store.save(self.counters, self.model, self.optimizer, self.objective, self.window)

    def stored(self):
        found, counters = self.store.find(resume=True)
        model = TinyLM()
        checkpoint.load_weights(found, model)
        optimizer, objective = make_optimizer(model, TrainerConfig()), Counting()
        window = self.store.load(found, model, optimizer, objective)
        return model, optimizer.state_dict(), int(objective.calls), counters, window


def everything(training):
    optimizer = training.optimizer.state_dict()["state"]
    return [
        *(p.clone() for p in training.model.parameters()),
        *(value.clone() for state in optimizer.values() for value in state.values()),
    ]


def test_what_is_written_is_the_state_of_the_step_saved(tmp_path, gate):
    """Although every tensor, number and list changes in place before a byte is written."""
    training = Training(tmp_path)
    before = everything(training)
    training.save()
    assert gate.begun.wait(20)
    training.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, everything(training), strict=True))
    gate.go.set()
    training.store.settle()
    model, optimizer, calls, counters, window = training.stored()
    found = [
        *model.parameters(),
        *(value for state in optimizer["state"].values() for value in state.values()),
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, found, strict=True))
    assert (calls, counters.step, len(counters.series)) == (1, 1, 1)
    assert window == {"loss": [1.0, 0.0]}


def test_generators_are_those_of_the_step_saved(tmp_path, gate):
    training = Training(tmp_path)
    training.save()
    expected = torch.rand(3)
    gate.go.set()
    training.store.settle()
    training.stored()
    assert torch.equal(torch.rand(3), expected)


def test_one_step_at_most_is_in_flight(tmp_path, gate):
    """The best weights and the checkpoint of a step are two files of it."""
    training = Training(tmp_path)
    training.store.save_best(1, training.model, {"select": 0.5})
    training.save()
    training.step()
    threading.Timer(0.3, gate.go.set).start()
    assert gate.names == []
    training.save()
    assert gate.names[:2] == ["step-000001", "step-000001"]
    training.store.settle()
    assert gate.names[2:] == ["step-000002"]


def test_a_checkpoint_is_not_written_after_best_weights_that_failed(tmp_path, monkeypatch):
    """It names them, and would take the place of one whose best weights are whole."""
    training = Training(tmp_path)
    training.save()
    training.store.settle()
    training.step()
    plain, tried, asked = store.write, [], threading.Event()

    def write(directory, *given):
        tried.append(directory.name)
        if directory.parent.name == "best":
            assert asked.wait(60), "the checkpoint is asked for while the weights are written"
            raise RunFault("cannot write checkpoint: the disk is full")
        plain(directory, *given)

    monkeypatch.setattr(store, "write", write)
    training.store.save_best(2, training.model, {"select": 0.5})
    training.counters.best_step = 2
    training.save()
    asked.set()
    with pytest.raises(RunFault, match="the disk is full"):
        training.store.settle()
    assert checkpoint.latest(tmp_path).name == "step-000001"
    assert len(tried) == 1  # the best weights
    training.store.settle()  # the fault is reported once


def test_a_full_disk_ends_the_training_soon_with_the_usual_line(tmp_path):
    class Wide(TinyLM):
        def __init__(self):
            super().__init__()
            self.more = nn.Parameter(torch.zeros(LARGE))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    started = []

    class Limited(Batches):
        """Once the checkpoint of step 20 is whole, files are as on a full disk."""

        def at(self, index):
            started.append(index)
            if index == 21:
                ends = time.monotonic() + 300  # a busy disk has taken more than 20 seconds
                while checkpoint.latest(tmp_path) is None and time.monotonic() < ends:
                    time.sleep(0.01)
                resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, hard))
            if index > 40:
                time.sleep(0.25)  # there is time for the writer to find out
            return super().at(index)

    said = r"cannot write checkpoint .*step-000040.*free disk space"
    try:
        with pytest.raises(RunFault, match=said):
            train(
                tmp_path, drafter=Wide(), batches=Limited(2), evaluate=None, max_steps=400,
                save_every=20,
            )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert started[-1] < 59  # not at the next checkpoint
    assert checkpoint.latest(tmp_path).name == "step-000020"


def test_a_training_that_is_asked_to_stop_ends_once_its_checkpoint_is_there(tmp_path, slow):
    class Signalling(Batches):
        def at(self, index):
            if index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().at(index)

    with pytest.raises(SystemExit):
        train(tmp_path, batches=Signalling(2), evaluate=None)
    assert checkpoint.latest(tmp_path).name == "step-000002"


def test_a_training_ends_once_its_last_checkpoint_is_there(tmp_path, slow):
    train(tmp_path, evaluate=None, max_steps=2)
    assert checkpoint.latest(tmp_path).name == "step-000002"


def test_a_training_that_fails_ends_once_the_checkpoint_before_that_is_there(tmp_path, slow):
    class Failing(Batches):
        def at(self, index):
            if index == 4:
                raise RunFault("a server is gone")
            return super().at(index)

    with pytest.raises(RunFault, match="a server is gone"):
        train(tmp_path, batches=Failing(2), evaluate=None)
    assert checkpoint.latest(tmp_path).name == "step-000004"


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, slow):
    began, done = time.perf_counter(), []

    class Timed(Batches):
        def at(self, index):
            done.append(time.perf_counter() - began)
            return super().at(index)

    train(tmp_path / "a", batches=Timed(2), evaluate=None, max_steps=8, save_every=4)
    assert done[7] - done[3] < 0.9  # the checkpoint after index 3 takes a second


@pytest.mark.slow
def test_a_slow_disk_changes_no_number(tmp_path, slow):
    settings = {"max_steps": 6, "save_every": 2, "eval_every": 3, "log_every": 3}
    _, drafter, _ = train(tmp_path / "a", evaluate=accuracy, **settings)
    _, expected, _ = train(tmp_path / "b", evaluate=accuracy, **(settings | {"save_every": 6}))
    assert same_weights(drafter, expected)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
