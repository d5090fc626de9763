"""Files of a folder that together take no more than a limit, whichever processes write them, of one
run or of several.

How many bytes lie there is written in the file `.lock`, which a process locks while it makes room
for a file and creates it at its whole size, and while it gives it its name when it is whole. Its
time of change is that of its last use. A reader that finds none fetches the content again, so any
file may be deleted at any time: one that has it mapped keeps the content, whose room on the disk is
free once nobody has it mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.errors import RunFault

# read at once where the system can: one page after the other takes as long as to copy it
MAPPED = {
    "flags": mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
    "prot": mmap.PROT_READ,
}
FREE_SHARE = 1 / 8  # of the limit, free again when a process has looked at all files to make room


class FileCache:
    """At most `limit_bytes` in `folder`, of all processes that use it with that limit."""

    def __init__(self, folder: Path, limit_bytes: float):
        self.folder, self._limit = folder, limit_bytes
        self._level = limit_bytes * (1 - FREE_SHARE)
        self._looked = False  # at all files; what `.lock` says may be older than they are
        self._checked: set[str] = set()  # names whose file was whole when this process read it

    def read(self, name: str) -> np.ndarray | None:
        """What was written as `name`, [bytes] uint8; None where it is gone or damaged."""
        path = self.folder / name
        try:
            os.utime(path)
            with path.open("rb") as file:  # mapped for as long as the array lives
                content = np.frombuffer(mmap.mmap(file.fileno(), 0, **MAPPED), np.uint8)
        except (FileNotFoundError, ValueError):  # ValueError: it is empty
            return None
        digest, content = content[:32], content[32:]
        if name not in self._checked:
            if hashlib.sha256(content.data).digest() != digest.tobytes():
                path.unlink(missing_ok=True)
                return None
            self._checked.add(name)
        return content

    def write(self, name: str, content: np.ndarray, digest: bytes) -> None:
        """Write bytes, [bytes] uint8 with their SHA-256, and make room for them: what was not used
        for longest goes. Nothing is written where they exceed the limit. RunFault where the disk
        cannot be written.
        """
        size = 32 + len(content)
        if size > self._level:
            return
        path = self.folder / name
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as lock:
                total = size + (int(os.pread(lock, 20, 0) or 0) if self._looked else 0)
                if total > self._limit or not self._looked:
                    total = self._make_room(size)
                os.pwrite(lock, f"{total:20d}".encode(), 0)  # first: the process may be killed
                file = temporary.open("wb")
                file.truncate(size)
            with file:
                file.write(digest)
                file.write(content.data)
            # locked: who looks at all files would count it under neither name
            with contextlib.suppress(FileNotFoundError), self._locked():  # others needed the room
                os.replace(temporary, path)
        except OSError as error:
            raise RunFault(
                f"cannot write {self.folder}: {error.strerror or error}; lower "
                "data.features_cache_gb or name another data.features_cache_dir"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Yield the open file `.lock`, which no other process locks meanwhile."""
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _make_room(self, size: int) -> int:
        """The bytes of all files and `size` more; where they exceed the limit, those that were not
        used for longest are deleted until an eighth of it is free."""
        files: list[tuple[int, int, str]] = []
        for store in os.scandir(self.folder):
            for entry in os.scandir(store.path) if store.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    files.append((found.st_mtime_ns, found.st_size, entry.path))
        total = size + sum(size for _, size, _ in files)
        level = self._level if total > self._limit else self._limit
        for _, freed, path in sorted(files):
            if total <= level:
                break
            Path(path).unlink(missing_ok=True)
            total -= freed
        self._looked = True
        return total
