"""Runs a command in a process group of its own, and stops the whole group with its parent:

    python guard.py <command> ...

The parent holds the standard input of this process; when it closes, however the parent ended, the
group is stopped. This file needs only Python's standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

PATIENCE_S = 20


def main(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        sys.stdin.buffer.read()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE_S)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent decides
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    while child.poll() is None and watcher.is_alive():
        watcher.join(0.2)
    with contextlib.suppress(ProcessLookupError):  # what its children left, too
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    # the watcher still reads: an interpreter that shuts down around that ends in a fatal error
    os._exit(main(sys.argv[1:]))
