"""What a command prints is shown: text of anyone's, such as a prompt, the name of a file or the
answer of a server, neither steers the terminal nor hides a part of a line.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable

from trainer.errors import printable

_BETWEEN_BARS = re.compile(r"\n*(?:\x1b\[A)+")  # of progress bars one below the other


def guard_terminal() -> None:
    """From here on stdout and stderr show control characters and marks that reorder a line as
    escapes. Every command begins with it, and so does what libraries print for it."""
    for stream in (sys.stdout, sys.stderr):
        if not hasattr(stream.write, "__wrapped__"):
            stream.write = _shown(stream.write)


def _shown(write: Callable[[str], int]) -> Callable[[str], int]:
    @functools.wraps(write)
    def shown(text: str, /) -> int:
        if _BETWEEN_BARS.fullmatch(text):
            return write(text)
        bar = text[:1] == "\r"  # a progress bar, which begins its line anew
        return write("\r" * bar + printable(text[bar:]))

    return shown
