"""A vLLM server started for a run, played by a small module: what it is told, and that it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from engines import vllm_server as module
from engines.vllm_server import command_line, vllm_server
from engines.web import fetch
from tests.helpers.commands import (
    ROOT,
    TWO,
    command,
    finish,
    report_stores,
    start,
    stored_traces,
    training_stores,
)
from tests.helpers.servers import answers_of
from trainer.errors import RunFault, UserError

FAKE = """
import http.server, json, os, sys, threading, time

with open(os.environ["FAKE_LOG"], "a") as log:
    said = {"pid": os.getpid(), "guard": os.getppid(), "words": sys.argv[1:]}
    said["environment"] = dict(os.environ)
    log.write(json.dumps(said) + chr(10))
if os.environ.get("FAKE_VLLM") == "die":
    print(os.environ.get("FAKE_LINES", "loading" + chr(10) + "ValueError: no such model"))
    sys.exit(1)
with open(os.environ.get("FAKE_ANSWERS", os.devnull)) as file:
    answers = json.loads(file.read() or "{}")

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        self.reply({"data": [{"id": "tiny"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply({"choices": [{"token_ids": answers[str(asked["prompt"])]}]})
    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
host = sys.argv[sys.argv.index("--host") + 1] if "--host" in sys.argv else "0.0.0.0"
http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """This interpreter in place of the engine's, with a module vllm. Returns a reader of its
    starts."""
    package = tmp_path / "modules" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv(module.PYTHON_VARIABLE, sys.executable)
    return lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def ended(pid: int) -> bool:
    """Sooner or later."""
    for _ in range(600):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def watch(server) -> None:
    """For a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        server.alive()
        time.sleep(0.05)


@pytest.fixture
def proxy(monkeypatch):
    """One that the environment names and that answers nobody."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_the_server_is_told_what_to_serve_and_ends_with_the_block(target, starts, proxy):
    with vllm_server(target, {"max_model_len": 99, "enforce_eager": False}) as (url, _):
        fetch(f"{url}/v1/models")
        (one,) = starts()
        assert Path(f"/proc/{one['pid']}").exists()
    assert ended(one["pid"])
    words = one["words"]
    said = dict(itertools.pairwise(words))
    assert said["--model"] == str(Path(target.name).resolve())
    assert said["--dtype"] == "float32"
    assert said["--host"] == "127.0.0.1"  # vLLM's own default is every interface
    assert one["environment"]["no_proxy"] == "127.0.0.1,localhost,::1"
    assert said["--generation-config"] == "vllm"  # else its penalties change the law
    assert said["--max-model-len"] == "99"
    assert "--no-enforce-eager" in words
    assert "--enforce-eager" not in words


def test_a_server_that_ends_is_known_to_have_ended(target, starts):
    with vllm_server(target, {}) as server:
        server.alive()
        (one,) = starts()
        os.kill(one["pid"], signal.SIGKILL)
        assert ended(one["pid"])
        assert ended(one["guard"])  # its guard, perhaps but for a thread of it
        with pytest.raises(RunFault, match="vLLM's server ended"):
            watch(server)


def test_of_a_long_log_the_first_error_is_shown(target, starts, tmp_path, monkeypatch):
    lines = ["loading", "(pid=7) ValueError: no such layer", *map(str, range(20)), "the end"]
    monkeypatch.setenv("FAKE_VLLM", "die")
    monkeypatch.setenv("FAKE_LINES", "\n".join(lines))
    with pytest.raises(RunFault) as raised:
        vllm_server(target, {}).__enter__()
    assert str(raised.value).splitlines()[1:] == [lines[1], *lines[-8:]]


def test_the_server_listens_elsewhere_where_that_is_asked_for(target, starts):
    with vllm_server(target, {"host": "127.0.0.2"}) as (url, _):
        assert url.startswith("http://127.0.0.2:")
        fetch(f"{url}/v1/models")
    assert dict(itertools.pairwise(starts()[0]["words"]))["--host"] == "127.0.0.2"


def test_the_server_is_no_process_of_the_launch_that_starts_it(target, starts, monkeypatch):
    told = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NAME", "kept")
    monkeypatch.setenv("RANKING", "kept")
    with vllm_server(target, {}):
        (one,) = starts()
    assert not told.keys() & one["environment"].keys()
    assert one["environment"]["RANKING"] == "kept"


def test_the_server_takes_of_a_gpu_what_is_free(target, starts, monkeypatch):
    """The target, and on the second one something else, lie there already. Memory that torch holds
    for later is given back before."""
    free = {0: 10, 1: 30}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.update({0: 50}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80))
    for options, share in (({}, "0.56"), ({"tensor_parallel_size": 2}, "0.33")):
        with vllm_server(target, options):
            said = dict(itertools.pairwise(starts()[-1]["words"]))
        assert said["--gpu-memory-utilization"] == share
    with vllm_server(target, {"gpu_memory_utilization": 0.2}):
        assert "0.2" in starts()[-1]["words"]


def test_options_are_words_of_the_command_line():
    options = {"a_b": 1, "yes": True, "no_way": False, "more": {"x": [1]}}
    expected = ["--a-b", "1", "--yes", "--no-no-way", "--more", '{"x": [1]}']
    assert command_line(options) == expected


def test_a_server_that_does_not_start_is_a_fault_with_its_last_words(target, starts, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "die")
    with pytest.raises(RunFault, match="server ended:\nloading\nValueError: no such model"):
        vllm_server(target, {}).__enter__()
    monkeypatch.setenv(module.PYTHON_VARIABLE, "/no/such")
    with pytest.raises(UserError, match="no environment with vLLM"):
        vllm_server(target, {}).__enter__()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_process_that_is_killed_leaves_no_server_behind(starts, tmp_path):
    code = (
        "import sys; from engines import vllm_server as vllm\n"
        "process = vllm.subprocess.Popen([sys.executable, vllm.GUARD, sys.executable, '-m', "
        "vllm.SERVER, '--host', '127.0.0.1', '--port', str(vllm.free_port())], "
        "stdin=vllm.subprocess.PIPE)\n"
        "print('started', flush=True); process.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    while not (tmp_path / "log").exists() or not starts():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ended(starts()[0]["pid"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_has_its_text_from_a_server_of_its_own(
    tiny_folder, starts, tmp_path, monkeypatch, count
):
    given = ("data.temperature=0", "eval.temperatures=0", "trainer.batch_size=2")

    def words(name, *more):
        return command(tmp_path, tiny_folder("llama"), *given, f"run.dir={tmp_path / name}", *more)

    assert train.main(words("own")) == 0
    (store,), (held_out,) = (find(tmp_path / "cache") for find in (training_stores, report_stores))
    own = stored_traces(store)
    answers = answers_of([*own, *stored_traces(held_out)])
    answers = {str([*ids]): answer for ids, answer in answers.items()}
    (tmp_path / "answers").write_text(json.dumps(answers))
    monkeypatch.setenv("FAKE_ANSWERS", str(tmp_path / "answers"))
    served = words("served", "data.engine=vllm", "data.engine_options={max_num_seqs: 7}")
    if count == 1:
        assert train.main(served) == 0
    else:
        code, _, err = finish(start(*TWO, "train.py", *served))
        assert code == 0, err
    (one,) = starts()  # once, for both processes and for the text of training and report
    assert "--max-num-seqs" in one["words"]
    assert ended(one["pid"])
    (other,) = [s for s in training_stores(tmp_path / "cache") if s != store]
    assert sorted(map(repr, stored_traces(other))) == sorted(map(repr, own))
    assert len(report_stores(tmp_path / "cache")) == 2
