"""vLLM in an environment of its own: its interpreter, and a server that runs as long as needed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from engines.web import PAGE_BYTES, Limits, ServerError, fetch, past_proxy
from target.model import Target
from trainer.errors import RunFault, UserError
from trainer.progress import working

PYTHON_VARIABLE = "DRAFTSMITH_VLLM_PYTHON"
DEFAULT_PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
GUARD = Path(__file__).with_name("guard.py")
# on a CPU: GiB for keys and values, and as many threads as OMP_NUM_THREADS says, not all cores
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
FORCED = {
    "PYTHONSAFEPATH": "1",  # the folder it starts in may hold modules with common names
    "VLLM_NO_USAGE_STATS": "1",
}
# what a launcher of several processes tells each of them: vLLM would wait for the others
LAUNCHER = re.compile(
    "(TORCHELASTIC|ACCELERATE|FSDP|DEEPSPEED)_|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|"
    "MASTER_(ADDR|PORT)$"
)
ERROR = re.compile(r"\b\w*(Error|Exception): \S")
MEMORY_SHARE = 0.9  # of what is free, for the server; vLLM's own default is that of all
START_S = 1800  # a large model is read for long
HEALTH_S = 5.0
SERVER = "vllm.entrypoints.openai.api_server"


def engine_python() -> Path:
    """The interpreter of the engine's environment, named by a variable or made by the script.
    UserError where there is none."""
    python = Path(os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON)
    if not (python.is_file() and os.access(python, os.X_OK)):
        remedy = f"run `bash scripts/engine_env.sh`, or name its Python in {PYTHON_VARIABLE}"
        raise UserError(f"no environment with vLLM: {python} is not a program: {remedy}")
    return python.absolute()  # not resolved: the link selects the environment


def model_options(target: Target) -> dict[str, object]:
    """The options with which vLLM loads the target, in the same dtype as here and, from the Hub, of
    the same commit."""
    local, commit = Path(target.name), getattr(target.model.config, "_commit_hash", None)
    return {
        "model": str(local.resolve()) if local.exists() else target.name,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        **({"revision": commit} if commit and not local.exists() else {}),
    }


def memory_options(num_devices: int = 1) -> dict[str, object]:
    """The share of a GPU that vLLM may take, where the target lies on the first ones, too."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.empty_cache()  # what a training or a report has used is held, but not in use
    pairs = [torch.cuda.mem_get_info(device) for device in range(num_devices)]
    share = MEMORY_SHARE * min(free / total for free, total in pairs)
    return {"gpu_memory_utilization": math.floor(100 * share) / 100}


def environment(modules: Path | None = None) -> dict[str, str]:
    """The environment of a process with vLLM, whose parts call each other on this machine.
    `modules`: a folder of Python modules that it may import."""
    own = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    if modules is not None:
        paths = [str(modules), *filter(None, [own.get("PYTHONPATH")])]
        own["PYTHONPATH"] = os.pathsep.join(paths)
    return DEFAULTS | own | past_proxy(os.environ) | FORCED


class Server(NamedTuple):
    """A running server. `alive` raises RunFault where it has ended."""

    url: str
    alive: Callable[[], None]


@contextlib.contextmanager
def vllm_server(
    target: Target, options: Mapping[str, object], modules: Path | None = None
) -> Iterator[Server]:
    """Run a server of the target on this machine. It ends with the block and
    with this process. `options`: further arguments of vLLM, such as {"tensor_parallel_size": 4};
    `modules`: a folder of Python modules that it may import.

    Raises RunFault with the end of its log where it does not start."""
    python = engine_python()
    num_devices = options.get("tensor_parallel_size", 1)
    assert isinstance(num_devices, int)
    settings: dict[str, object] = model_options(target) | memory_options(num_devices) | {
        "host": "127.0.0.1",  # for this machine alone: whoever reaches it may use it
        "port": free_port(),
        "generation_config": "vllm",  # no sampling defaults of the model's own
    }  # fmt: skip
    if not torch.cuda.is_available():
        settings["enforce_eager"] = True  # compiling takes longer than it saves there
    settings |= options
    host = str(settings["host"])
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings['port']}"
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, GUARD, python, "-m", SERVER, *command_line(settings)], cwd=scratch,
                env=environment(modules),
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert process.stdin is not None
        try:
            server = Server(url, lambda: _check(process, log))
            _await(server)
            yield server
        finally:
            process.stdin.close()
            process.wait()


def free_port() -> int:
    """A TCP port that no program uses at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def command_line(options: Mapping[str, object]) -> list[str]:
    """vLLM's arguments: {"max_model_len": 8, "enforce_eager": True} -> --max-model-len 8 ..."""
    words = list[str]()
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            shown = json.dumps(value) if isinstance(value, dict | list) else str(value)
            words += [f"--{dashed}", shown]
    return words


@working("starting vLLM")
def _await(server: Server) -> None:
    """Wait until the server is ready. RunFault where it ends or takes longer than START_S."""
    began = time.monotonic()
    while True:
        try:
            fetch(f"{server.url}/health", limits=Limits(HEALTH_S, PAGE_BYTES))
            return
        except ServerError:
            server.alive()
            if (waited := time.monotonic() - began) > START_S:
                raise RunFault(f"vLLM's server was not ready after {waited:.0f} s") from None
            time.sleep(0.5)


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    """RunFault with the first error and the last lines of the log, where the server has ended."""
    if process.poll() is None:
        return
    said = [s for s in log.read_text(errors="replace").splitlines() if s.strip()]
    first = next((line for line in said[:-8] if ERROR.search(line)), None)
    raise RunFault("\n".join(["vLLM's server ended:", *filter(None, [first]), *said[-8:]]))
