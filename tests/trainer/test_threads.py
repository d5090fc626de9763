"""The number of threads follows what other programs leave."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest

from trainer import threads as module
from trainer.threads import EVERY_S, Threads, cores, others_seconds


@pytest.fixture
def used(monkeypatch):
    """The numbers of threads that were put in use."""
    found = []
    monkeypatch.setattr(module.torch, "set_num_threads", found.append)
    return found


@pytest.mark.parametrize(
    ("most", "num_cores", "share", "count"),
    [
        (2, 2, 0.0, 2),
        (2, 2, -0.02, 2),  # clocks tick
        (2, 2, 0.4, 2),
        (2, 2, 0.67, 1),  # what one busy program gets beside two threads
        (2, 2, 1.3, 1),  # and two of them
        (16, 16, 3.1, 13),
        (4, 16, 3.1, 4),
        (4, 16, 13.9, 2),
    ],
)
def test_threads_are_as_many_as_others_leave_cores(used, most, num_cores, share, count):
    now = SimpleNamespace(s=100.0)
    threads = Threads(most, num_cores, lambda: 7.0 + share * now.s, lambda: now.s)
    threads.settle()
    assert used == []
    now.s += EVERY_S + 1
    threads.settle()
    assert used == [count]


def test_the_number_is_judged_every_few_seconds_and_returns(used):
    now = SimpleNamespace(s=0.0, others=0.0)
    threads = Threads(2, 2, lambda: now.others, lambda: now.s)
    for busy in (True, True, False):
        for _ in range(50):
            now.s += EVERY_S / 49
            now.others += busy * EVERY_S / 49
            threads.settle()
    assert used == [1, 1, 2]


def test_the_first_judgement_may_look_back_further(used):
    Threads(2, 2, lambda: 9.0, lambda: 10.0, since=(1.0, 0.5)).settle()
    assert used == [1]


def test_one_thread_is_never_judged(used):
    Threads(1, 2, lambda: 1 / 0).settle()
    assert used == []


def test_what_this_process_computes_is_not_what_others_do(monkeypatch):
    times = namedtuple("times", "user nice system idle iowait steal guest guest_nice")
    every = [times(5, 1, 2, 90, 4, 3, 2, 1), times(9, 9, 9, 9, 9, 9, 0, 0), times(*[1] * 8)]
    monkeypatch.setattr(module.psutil, "cpu_times", lambda percpu: every)
    monkeypatch.setattr(module, "cores", lambda: [0, 2])
    own = SimpleNamespace(user=2.0, system=0.5, children_user=0.75, children_system=0.25)
    monkeypatch.setattr(module.psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: own))
    assert others_seconds() == (5 + 1 + 2 + 3) + (1 + 1 + 1 + 1) - 3.5


def test_another_program_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        began, before = time.perf_counter(), others_seconds()
        time.sleep(1)
        used = (others_seconds() - before) / (time.perf_counter() - began)
        other.kill()
    assert 0.3 < used <= len(cores()) + 0.1  # other tests may use the cores too
