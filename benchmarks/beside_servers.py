"""A drafter from text to an engine's counters as `scripts.serve` prints it, command by command:

    OMP_NUM_THREADS=1 python -m benchmarks.beside_servers OUT recipe=eagle3 \\
        model.target=runs/smollm2 data.prompts=prompts.jsonl ...

Two vLLM servers, of the text and of the states; training beside them without the target's layers;
the export; a third server with the drafter, and one without it, which `scripts.evaluate` measures
alone and under load. Servers get free ports, on a CPU --enforce-eager, and the module behind
`vllm serve`; nothing else is changed in what is printed. Prints the memory that the training took,
and the engine's counters beside those of replay and decoding. OUT: a folder for the report and the
logs of the servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engines.vllm_server import DEFAULTS, PYTHON_VARIABLE, SERVER, engine_python, free_port
from engines.web import Limits, ServerError, fetch

ROOT = Path(__file__).resolve().parents[1]
START_S = 900
EAGER = "" if torch.cuda.is_available() else " --enforce-eager"


def printed(words: list[str], folder: Path) -> list[str]:
    """The commands, in their order: text, folder, states, training, export, serving."""
    out = ran(["-m", "scripts.serve", *words, f"script.folder={folder}"])
    return [line for line in out.splitlines() if line and not line.startswith("#")]


def ran(words: list[str]) -> str:
    """What a Python command of this project prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def environment() -> dict[str, str]:
    bins = [Path(sys.executable).parent, engine_python().parent]
    path = os.pathsep.join([*map(str, bins), os.environ["PATH"]])
    return {**DEFAULTS, **os.environ, PYTHON_VARIABLE: str(engine_python()), "PATH": path}


@contextlib.contextmanager
def served(command: str, log: Path) -> Iterator[str]:
    """Run the command of a server, on a free port, until the block ends. Yields its address."""
    port = free_port()
    command = re.sub(r" --port \d+", "", command) + f" --port {port}{EAGER}"
    # the CPU build has no working `vllm` command
    command = command.replace("vllm serve ", f'"${PYTHON_VARIABLE}" -m {SERVER} --model ')
    url = f"http://localhost:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, env=environment(), start_new_session=True,
        )  # fmt: skip
    try:
        began = time.monotonic()
        while True:
            with contextlib.suppress(ServerError):
                fetch(f"{url}/health", limits=Limits(5.0, 1 << 16))
                break
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit(f"{command}: not ready, see {log}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trained(command: str, urls: Mapping[int, str]) -> float:
    """Run the printed training with these servers. Returns the most memory of a process, in GB."""
    for port, url in urls.items():
        command = command.replace(f"http://localhost:{port}", url)
    timed = ["bash", "-c", f"exec {command}"]
    process = subprocess.Popen(timed, cwd=ROOT, env=environment())
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_maxrss * 1024 / 1e9


def run(words: list[str], out: Path) -> dict[str, object]:
    """Everything from text to counters. Returns the measured rows."""
    out.mkdir(parents=True, exist_ok=True)
    commands = printed(words, out / "states")
    text, folder, states, training, export, serving = commands
    subprocess.run(["bash", "-c", folder], check=True)
    print("\n".join(commands), flush=True)
    with served(text, out / "text.log") as first, served(states, out / "states.log") as second:
        memory = trained(training, {8000: first, 8001: second})
    ran(shlex.split(export)[1:])
    (drafter,) = (w.partition("=")[2] for w in shlex.split(export) if "script.drafter=" in w)
    plain = re.sub(r" --speculative-config '[^']*'", "", serving)
    with served(serving, out / "drafter.log") as drafting, served(plain, out / "plain.log") as bare:
        ran([
            "-m", "scripts.evaluate", f"eval.drafter={drafter}", f"eval.engine={drafting}",
            f"eval.plain_engine={bare}", "eval.concurrency=[1,4]", f"script.out={out / 'report'}",
            "eval.tree=null", "eval.timing_prompts=2",
        ])  # fmt: skip
    rows = json.loads((out / "report" / "report.json").read_text())
    own = [row for row in rows["results"] if row["role"] == "measured"]
    found: dict[str, object] = {"memory_gb": round(memory, 2), "load": rows["load"]}
    for by in ("offline", "decoding", "vllm"):
        found[by] = [
            {name: row[name] for name in ("temperature", "engine_drafts", "engine_accepted",
                                          "engine_accepted_per_position", "tokens_per_round")}
            for row in own if row["measured_by"] == by
        ]  # fmt: skip
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[2:], Path(sys.argv[1]).resolve()), indent=1))
