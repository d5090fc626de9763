"""File locks: a folder is written by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from trainer.errors import UserError

MISSING = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(path: Path, said: str) -> IO[str]:
    """Lock the file at `path`. The lock ends when the returned file is closed or the process dies;
    its holder may remove the file.

    Raises UserError(`said`) where another process holds the lock, and UserError where the file
    system has no locks: two processes could write the same files there unnoticed."""
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
                f"{path.parent} is on a file system without file locks ({error.strerror}): mount "
                "it with locks (Lustre: -o flock; NFS: with lockd running, or -o vers=4), or with "
                "-o localflock if only one machine uses it, or choose another folder"
            ) from error
        file.close()  # its holder has removed it: this lock is on a file without a name
