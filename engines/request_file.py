"""The file that the request proxy writes and `recipe=osd` reads: one JSON line for each exchange.

A line is appended completely or not at all. A line is deleted by overwriting it with blanks, so
that all others keep their offsets: a reader that follows the file by an offset continues, and skips
blank lines. The file therefore never becomes shorter; it can be removed when no reader follows it.
Only its owner may read it.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from trainer.checks import is_file
from trainer.errors import UserError

PRIVATE = 0o600


def prepare(path: Path) -> None:
    """Create the file and missing folders above it, readable by their owner alone. UserError where
    that is not possible."""
    is_file("script.log", path)  # False: there is no file yet
    try:
        for folder in reversed([one for one in path.parents if not one.exists()]):
            folder.mkdir(mode=0o700, exist_ok=True)
        handle = _open(path)
        try:
            os.fchmod(handle, PRIVATE)  # an earlier version may have made it
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(f"script.log={path} cannot be written ({error.strerror})") from error


def append(path: Path, row: Mapping[str, object]) -> None:
    """Append a line. OSError where it cannot be written; the file is then as before."""
    line = json.dumps(row).encode() + b"\n"
    handle = _open(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # another proxy may write here too
        end = os.fstat(handle).st_size
        if (
            end and os.pread(handle, 1, end - 1) != b"\n"
        ):  # the machine stopped while a line was written
            line = b"\n" + line
        try:
            while line:
                line = line[os.write(handle, line) :]
        except OSError:
            os.ftruncate(handle, end)
            raise
    finally:
        os.close(handle)


def delete_before(path: Path, moment: float) -> int:
    """Delete the lines logged before `moment`, in seconds since 1970; returns their number.

    `response.created` is the time of a line, and lines are in the order of time. A line without it
    counts as the next line that has it, and after the last of these as the file's last change."""
    with path.open("r+b") as file:
        end = 0
        for offset, line in _lines(file):
            logged = _logged_at(line)
            if logged is not None and logged >= moment:
                break
            if logged is not None:
                end = offset + len(line)
        else:
            if os.fstat(file.fileno()).st_mtime < moment:
                end = file.tell()
        return _blank(file, itertools.takewhile(lambda one: one[0] < end, _lines(file)))


def delete_with(path: Path, text: str) -> int:
    """Delete every exchange with `text` in its request or its answer; returns their number."""
    with path.open("r+b") as file:
        return _blank(file, ((at, line) for at, line in _lines(file) if _holds(line, text)))


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each complete line that is not blank, as (offset, line)."""
    offset = file.seek(0)
    for line in file:
        if line.strip() and line.endswith(b"\n"):
            yield offset, line
        offset += len(line)


def _blank(file: BinaryIO, lines: Iterable[tuple[int, bytes]]) -> int:
    """Overwrite lines with blanks; returns their number."""
    count = 0
    for offset, line in lines:
        os.pwrite(file.fileno(), b" " * (len(line) - 1), offset)
        count += 1
    os.fsync(file.fileno())
    return count


def _logged_at(line: bytes) -> float | None:
    """The time of a line in seconds since 1970; None where it has none."""
    try:
        created = json.loads(line)["response"]["created"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return created if isinstance(created, int | float) else None


def _holds(line: bytes, text: str) -> bool:
    """Whether a line holds `text`; it may be no JSON, if its deletion was interrupted."""
    try:
        found: list[object] = [json.loads(line)]
    except (ValueError, RecursionError):
        found = [line.decode(errors="replace")]
    while found:
        one = found.pop()
        if isinstance(one, str) and text in one:
            return True
        if isinstance(one, dict):
            found += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            found += one
    return False
