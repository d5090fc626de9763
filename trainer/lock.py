"""What one process works on at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from trainer.config import UserError


def lock(path: Path, said: str) -> IO[str]:
    """Held until the file is closed, or the process dies, however it does. Raises UserError(`said`)
    where another process holds it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(said) from error
    return file
