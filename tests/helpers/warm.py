"""Processes that begin where every command has imported its libraries.

A command of a second imports torch and transformers for five. Here one process imports them and
forks itself for each: `Warm(words, ..)` stands for `subprocess.Popen([sys.executable, *words])`,
also where a launcher (`torch.distributed.run`, `accelerate launch`) starts its processes. What is
tested of a beginning itself starts afresh.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

FORK = multiprocessing.get_context("fork")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([f"{__package__}.warm_imports"])
LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")


class Warm:
    """What the tests and the launchers use of a `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], env: dict[str, str], folder: Path, *outputs: Path,
        session: bool = False, context: Any = SERVER,
    ) -> None:  # fmt: skip
        """`outputs`: files for stdout and stderr, or one for both; without them, this process's."""
        self._outputs = outputs
        given = (words, env, folder, outputs, session)
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._outputs)
        for path in self._outputs:
            path.unlink()
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def piped() -> list[Path]:
    """Files for what `communicate` returns."""
    files = [tempfile.mkstemp() for _ in range(2)]
    for descriptor, _ in files:
        os.close(descriptor)
    return [Path(name) for _, name in files]


def _run(
    words: Sequence[str], env: dict[str, str], folder: Path, outputs: Sequence[Path],
    session: bool,
) -> None:  # fmt: skip
    """In the new process: become `python words`."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, path in zip((1, 2), (*outputs, *outputs), strict=False):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if threads := env.get("OMP_NUM_THREADS"):  # was read where torch was imported
        torch.set_num_threads(int(threads))
    multiprocessing.set_start_method(None, force=True)
    try:
        _as_main(*words)
    finally:
        atexit._run_exitfuncs()


def _as_main(*words: str) -> None:
    """Run a script, or a module after `-m`, with its words, as Python's own program."""
    module = words[0] == "-m"
    name, *given = words[module:]
    sys.argv = [name, *given]
    if name in LAUNCHERS:
        subprocess.Popen = partial(_popen, subprocess.Popen)  # type: ignore[misc]
        launcher = importlib.import_module(
            "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        )
        launcher.Popen = subprocess.Popen
        importlib.import_module(name).main()
    elif module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")


def _popen(cold: Any, args: Sequence[str], env: Any = None, **options: Any) -> Any:
    """What a launcher starts: Python programs are forked from it, but not what those start in their
    turn, with pipes and folders of its own."""
    session = options.get("start_new_session", False)
    plain = all(options[name] is None for name in options if name != "start_new_session")
    if args[0] != sys.executable or not plain:
        return cold(args, env=env, **options)
    words = [word for word in args[1:] if word != "-u"]
    return Warm(words, dict(env or os.environ), Path.cwd(), session=session, context=FORK)
