"""pytest in a process that begins where the libraries are imported, which takes seven seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "transformers.models.llama.modeling_llama", "accelerate", "tests.mutants.forked"]
)


def tested(words: list[str], folder: str, env: dict[str, str], said: Path) -> None:
    """In a new process, which has the libraries and nothing of the project: become pytest in the
    copy."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [folder, *(place for place in sys.path if place not in ("", str(ROOT)))]
    multiprocessing.set_start_method(None, force=True)
    torch = importlib.import_module("torch")
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # was read where torch was imported
    sys.argv = ["pytest", *words]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
