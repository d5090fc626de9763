"""The number of threads follows what other programs leave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer import threads as module
from trainer.threads import EVERY_S, Threads, operation_seconds


@pytest.fixture
def used(monkeypatch):
    """The numbers of threads that were put in use."""
    found = []
    monkeypatch.setattr(module.torch, "set_num_threads", found.append)
    return found


@pytest.mark.parametrize(
    ("most", "seconds", "count"),
    [
        (2, {2: 1.0, 1: 1.9}, 2),  # a quiet machine, large operations
        (2, {2: 1.9, 1: 1.0}, 2),  # small ones: threads cost a little, other work gains by them
        (2, {2: 30.0, 1: 1.0}, 1),  # a busy core
        (16, {16: 40.0, 8: 1.0, 4: 1.9, 2: 3.8, 1: 7.0}, 8),  # one busy core of sixteen
        (6, {6: 90.0, 3: 30.0, 1: 1.0}, 1),
    ],
)
def test_threads_are_halved_while_that_is_much_faster(used, most, seconds, count):
    now = SimpleNamespace(s=0.0)
    threads = Threads(most, seconds.__getitem__, lambda: now.s)
    threads.settle()
    assert used == [count]


def test_the_number_is_judged_again_every_few_seconds_and_returns(used):
    now, timed = SimpleNamespace(s=0.0, busy=True), []

    def seconds(count):
        timed.append(count)
        return {2: 30.0 if now.busy else 0.6, 1: 1.0}[count]

    threads = Threads(2, seconds, lambda: now.s)
    for _ in range(10):
        threads.settle()
        now.s += 0.1
    assert (used, timed) == ([1], [2, 1])
    now.s, now.busy = EVERY_S + 1, False
    threads.settle()
    assert (used, timed) == ([1, 2], [2, 1, 2, 1])


def test_one_thread_is_never_judged(used):
    Threads(1, lambda count: 1 / 0).settle()
    assert used == []


def test_operations_are_timed_with_the_threads_that_are_named():
    before = torch.get_num_threads()
    try:
        assert operation_seconds(1) > 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
