"""What one process works on at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from trainer.config import UserError

MISSING = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(path: Path, said: str) -> IO[str]:
    """Held until the file is closed, or the process dies, however it does; who holds it may remove
    the file. Raises UserError(`said`) where another process holds it, and where the file system has
    no locks: two processes would write the same files there without noticing."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            raise UserError(said) from error
        except FileNotFoundError:
            pass
        except OSError as error:
            file.close()
            if error.errno not in MISSING:
                raise
            raise UserError(
                f"{path.parent} lies on a file system without file locks ({error.strerror}): mount "
                "it with them (Lustre: -o flock; NFS: with lockd running, or -o vers=4), or with "
                "-o localflock where one machine alone uses it, or name another folder"
            ) from error
        file.close()  # removed by its holder meanwhile: this lock is of a file that has no name
