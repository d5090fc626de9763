"""How many threads tensor operations of this process use, where other programs use the cores too.

The threads of an operation wait for each other at its end. On a quiet machine that takes a
microsecond. Where another program has the core of one of them, all wait for a time slice of some
milliseconds, at every operation, and decoding becomes many times slower than with one thread. So
every few seconds this process takes as many threads as other programs leave cores
(benchmarks/under_load.py measures what that gives).

Nothing is judged where one thread is used anyway (OMP_NUM_THREADS=1), or where a GPU computes.
Sums of other numbers of threads may round otherwise, as those of another processor do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

EVERY_S = 5.0  # that a judgement looks back


def cores() -> list[int]:
    """The cores that this process may use."""
    if psutil.LINUX or psutil.WINDOWS:
        return psutil.Process().cpu_affinity()
    return list(range(psutil.cpu_count() or 1))


def others_seconds() -> float:
    """Seconds that the cores which this process may use have computed for other programs, or for
    other virtual machines, since they were started; not for what this process started, once it has
    ended."""
    every, own = psutil.cpu_times(percpu=True), psutil.Process().cpu_times()
    children = own.children_user + own.children_system  # of those that have ended
    busy = 0.0
    for core in cores():
        times = every[core]._asdict()
        # Linux counts guests in `user` as well
        for name in ("idle", "iowait", "guest", "guest_nice"):
            times.pop(name, None)
        busy += sum(times.values())
    return busy - own.user - own.system - children


class Threads:
    """Judges the number of threads: at most `most`, of `num_cores` that others use as well.
    `others`: seconds that they have computed so far; `since`: clock and others at the time from
    which the first judgement looks back, None: now."""

    def __init__(
        self,
        most: int,
        num_cores: int,
        others: Callable[[], float] = others_seconds,
        clock: Callable[[], float] = time.monotonic,
        since: tuple[float, float] | None = None,
    ) -> None:
        self.most, self.num_cores, self.others, self.clock = most, num_cores, others, clock
        if most > 1:
            self.since = since or (clock(), others())

    def settle(self) -> None:
        """Judge the number of threads, if that is due."""
        if self.most == 1 or self.clock() - self.since[0] < EVERY_S:
            return
        now = self.clock(), self.others()
        used = (now[1] - self.since[1]) / (now[0] - self.since[0])
        self.since = now
        torch.set_num_threads(min(self.most, max(1, int(self.num_cores - used + 0.5))))


_own: list[Threads] = []  # made at the first call, when the caller's number is known
_begun = time.monotonic(), others_seconds()  # loading takes long enough for a first judgement


def settle_threads() -> None:
    """Between two steps of work on a CPU: use as many threads as others leave cores."""
    if not _own:
        most = 1 if torch.cuda.is_available() else torch.get_num_threads()
        _own.append(Threads(most, len(cores()), since=_begun))
    _own[0].settle()
