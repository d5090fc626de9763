"""The file that the request proxy writes and `recipe=osd` follows: one JSON line an exchange.

A line is appended whole or not at all. A line is deleted by overwriting it with blanks where it
stands, so that all others stay where they are: whoever follows the file by an offset goes on, and
skips blank lines. The file therefore never gets shorter; once nobody follows it, it can be removed.
Only its owner may read it.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checks import is_file
from trainer.config import UserError

PRIVATE = 0o600


def prepare(path: Path) -> None:
    """Make the file, and folders that are missing above it, for its owner alone."""
    is_file("script.log", path)  # or nothing yet
    try:
        for folder in reversed([one for one in path.parents if not one.exists()]):
            folder.mkdir(mode=0o700, exist_ok=True)
        handle = _open(path)
        try:
            os.fchmod(handle, PRIVATE)  # it may be older than this rule
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(f"script.log={path} cannot be written ({error.strerror})") from error


def append(path: Path, row: dict[str, Any]) -> None:
    """OSError where it cannot be written: then nothing of it stays."""
    line = json.dumps(row).encode() + b"\n"
    handle = _open(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # another proxy may write here too
        end = os.fstat(handle).st_size
        if end and os.pread(handle, 1, end - 1) != b"\n":  # a machine went down in the middle
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
    """Delete what was logged before `moment`, in seconds since 1970; returns the number of lines.

    `response.created` says when a line was logged. The lines stand in that order: one that does not
    say it is as old as the next that does, after the last of these as old as the file's last
    change."""
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
    """Delete every exchange that holds `text` in its request or its answer; returns how many."""
    with path.open("r+b") as file:
        return _blank(file, ((at, line) for at, line in _lines(file) if _holds(line, text)))


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Where each whole line that is not blank begins, and the line."""
    offset = file.seek(0)
    for line in file:
        if line.strip() and line.endswith(b"\n"):
            yield offset, line
        offset += len(line)


def _blank(file: BinaryIO, lines: Iterable[tuple[int, bytes]]) -> int:
    count = 0
    for offset, line in lines:
        os.pwrite(file.fileno(), b" " * (len(line) - 1), offset)
        count += 1
    os.fsync(file.fileno())
    return count


def _logged_at(line: bytes) -> float | None:
    try:
        created = json.loads(line)["response"]["created"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return created if isinstance(created, int | float) else None


def _holds(line: bytes, text: str) -> bool:
    """Also in a line that is no JSON, such as one whose deletion broke off."""
    try:
        found: list[Any] = [json.loads(line)]
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
