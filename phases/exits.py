"""How a command ends: on its return, on an error, and when it is asked to stop."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import NoReturn

import torch

from trainer.errors import RunFault, UserError, one_line
from trainer.interrupt import launched_alone, signal_at_death_of_parent, stop_requested
from trainer.redaction import hide

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


def end(command: Callable[[list[str]], int]) -> NoReturn:
    """Run a command as the whole of this process, with its words, and exit with its return value.

    A process of a group leaves it first: one that just exits takes the others with it. Then it ends
    without finalising Python. A thread of gloo takes Python's lock to free a tensor after a
    collective: DDP's reducer, where it is the last to hold the group, waits for that thread with
    the lock, for ever; and finalisation unwinds the thread, which aborts the process
    (pytorch/pytorch issue 190489).
    """
    sys.excepthook = _show_fault
    try:
        code = command(sys.argv[1:])
        sys.stdout.flush()
    except BaseException as fault:
        if isinstance(fault, BrokenPipeError) and _reader_has_left():
            code = 128 + signal.SIGPIPE
        elif not _in_group():
            raise
        elif isinstance(fault, SystemExit) and isinstance(fault.code, int):
            code = fault.code
        else:
            sys.excepthook(type(fault), fault, fault.__traceback__)
            code = 1
    if not _in_group():
        sys.exit(code)
    group = torch.distributed.group.WORLD  # held from here on
    torch.distributed.destroy_process_group(group)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show_fault(
    kind: type[BaseException], fault: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of a bug without secrets: a library may have put one into its message."""
    text = "".join(traceback.format_exception(kind, fault, trace))
    print(hide(text, sys.argv[1:], pairs=False), end="", file=sys.stderr)


def _reader_has_left() -> bool:
    """Whether what reads stdout has closed it, as `head` does; what is left goes nowhere then."""
    output, asked = sys.stdout.fileno(), select.poll()
    asked.register(output, 0)
    if not asked.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _OneLine(logging.Formatter):
    """Prints a message, which may hold names of anyone's, on one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(record.message)


def show_log() -> None:
    """Print what this project logs, such as the prompts that are dropped, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "accelerate", "datasets", "bitsandbytes", "gguf"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def stop_softly() -> None:
    """Let SIGTERM end generation and reporting with exit code 75: finished parts are on the disk,
    and the same command resumes the run. (Training saves a checkpoint first.) The death of
    `accelerate launch` counts as one, where it started this process alone."""

    def leave_now(number: int, frame: FrameType | None) -> None:
        global _stopping
        _stopping = True
        print("stopped: rerun the same command to resume it", file=sys.stderr)
        raise SystemExit(75)

    def launcher_died(number: int, frame: FrameType | None) -> None:
        if not (_stopping or stop_requested()):  # a second request would stop without saving
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave_now)
    if launched_alone():
        signal.signal(signal.SIGUSR2, launcher_died)
        signal_at_death_of_parent(signal.SIGUSR2)


_stopping = False  # by SIGTERM; a library may turn the exception that ends us into one of its own


def fail(error: Exception, words: Sequence[str] = ()) -> int:
    """Print an error in one line, without the secrets in `words`, those of the command line.
    Returns the exit code: 2 for a user's mistake, 3 for a fault while running, such as a disk that
    is full or may not be written. Any other error is a bug of ours, and raised."""
    if _stopping:
        return 75
    if not isinstance(error, UserError | RunFault):
        # safetensors and torch wrap the error of a full disk
        full = os.strerror(errno.ENOSPC) in str(error)
        if not full and not (isinstance(error, OSError) and error.errno in DISK_FAULTS):
            raise error
        error = RunFault(f"{error}; fix that and rerun the same command")
    print(f"error: {hide(str(error), words)}", file=sys.stderr)
    return 2 if isinstance(error, UserError) else 3
