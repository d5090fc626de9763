"""How many threads tensor operations of this process use, where other programs use the cores too.

The threads of an operation wait for each other at its end. On a quiet machine that takes a
microsecond. Where another program has the core of one of them, all wait for a time slice of some
milliseconds, at every operation, and decoding becomes many times slower than with one thread. So
the number of threads is judged again every few seconds, by timing small operations, and halved
while that is much faster (benchmarks/under_load.py).

Nothing is judged where one thread is used anyway (OMP_NUM_THREADS=1), or where a GPU computes.
Sums of other numbers of threads may round otherwise, as those of another processor do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

EVERY_S = 5.0  # between two judgements, which take about 1 % of that on a quiet machine
OPERATIONS = 200  # of a timing, at most: some 10 ms on a quiet machine
TIMING_S = 0.1  # of a timing, at most: several time slices of other programs
MUCH_FASTER = 2.0


def operation_seconds(threads: int) -> float:
    """Mean seconds of a small operation with so many threads, which are in use from then on."""
    torch.set_num_threads(threads)
    left, right = torch.ones(32, 256), torch.ones(256, 256)
    torch.mm(left, right)  # starts the threads
    began, count, spent = time.perf_counter(), 0, 0.0
    while count < OPERATIONS and spent < TIMING_S:
        torch.mm(left, right)
        count, spent = count + 1, time.perf_counter() - began
    return spent / count


class Threads:
    """Judges the number of threads, at most `most`. `seconds`: what an operation takes with a
    number of threads, which it puts in use."""

    def __init__(
        self,
        most: int,
        seconds: Callable[[int], float] = operation_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self.seconds, self.clock = most, seconds, clock
        self.due = clock()

    def settle(self) -> None:
        """Judge the number of threads, if that is due."""
        if self.most == 1 or self.clock() < self.due:
            return
        count, spent = self.most, self.seconds(self.most)
        while count > 1 and spent > MUCH_FASTER * (fewer := self.seconds(count // 2)):
            count, spent = count // 2, fewer
        torch.set_num_threads(count)
        self.due = self.clock() + EVERY_S


_own: list[Threads] = []  # made at the first call, when the caller's number is known


def settle_threads() -> None:
    """Between two steps of work on a CPU: use as many threads as are fast now."""
    if not _own:
        _own.append(Threads(1 if torch.cuda.is_available() else torch.get_num_threads()))
    _own[0].settle()
