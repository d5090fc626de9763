"""A request to stop: SIGTERM or Ctrl-C ends a training after its step, with a checkpoint."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import ClassVar


class Interrupt(AbstractContextManager):
    """Turns SIGTERM and Ctrl-C into a request to stop after the step; a second stops at once."""

    requested = False
    latest: ClassVar[Interrupt | None] = None

    def __enter__(self) -> Interrupt:
        Interrupt.latest = self
        self._former: dict[
            int, Callable[[int, FrameType | None], object] | int | signal.Handlers | None
        ] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__()

    def __exit__(self, *exception: object) -> None:
        while self._former:
            signal.signal(*self._former.popitem())


def stop_requested() -> bool:
    """Whether this process's training was asked to stop, for code that waits inside a step."""
    return Interrupt.latest is not None and Interrupt.latest.requested


def launched_alone() -> bool:
    """Whether `accelerate launch` started this one process, on Linux. That launcher does not pass
    on the SIGTERM that ends it. Those of several processes do, and give each of them a rank."""
    ranks = {"RANK", "LOCAL_RANK"} & os.environ.keys()
    return sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ and not ranks


def signal_at_death_of_parent(number: int) -> None:
    """Let Linux send this process a signal when the process that started it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
