"""The real commands on tiny settings, for the tests of train.py and of the scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from data.traces import Trace, TraceStore
from tests.helpers.warm import Warm, piped

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "data.num_prompts": 8,
    "data.max_new_tokens": 8,
    "data.batch_size": 4,
    "trainer.max_steps": 2,
    "trainer.batch_size": 4,
    "eval.num_prompts": 4,
    "eval.max_new_tokens": 11,  # one token of the prefill, two full rounds of K + 1
    "eval.timing_prompts": 1,
    "eval.bootstrap_draws": 20,
}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(folder: Path, target: Any, *given: str) -> list[str]:
    """`key=value` words of a tiny run of `target` below `folder`; words of `given` come first."""
    prompts, held_out = folder / "train.jsonl", folder / "eval.jsonl"
    if not prompts.exists():
        sums = [(i, 7 * i % 13) for i in range(8)]
        rows = [{"prompt": f"Add {a} and {b}: ", "response": f"{a + b}."} for a, b in sums]
        write_jsonl(prompts, rows)
        write_jsonl(held_out, [{"prompt": f"What is {i} times 3? "} for i in range(4)])
    words = {
        "recipe": "distillspec",
        "run.dir": folder / "run",
        "data.cache_dir": folder / "cache",
        "data.prompts": prompts,
        "eval.prompts": held_out,
        "model.target": target,
        "model.drafter": "null",
        "method.draft_hidden_size": 16,
        **SETTINGS,
        "eval.temperatures": 0,  # a second one doubles the report, a control the training
    }
    words |= dict(word.split("=", 1) for word in given)
    if words["recipe"] == "distillspec":
        words.setdefault("method.control", "false")
    return [f"{key}={value}" for key, value in words.items()]


def own_words(recipe: str, folder: Path) -> list[str]:
    """What a tiny run of this recipe needs besides `command`; that of distillspec is there."""
    if recipe != "fastdraft":
        return []
    raw = write_jsonl(
        folder / "raw.jsonl", [{"text": f"{i} and {7 * i % 13}." * 9} for i in range(40)]
    )
    code = write_jsonl(folder / "code.jsonl", [{"text": f"f({i}) = {i}\n" * 12} for i in range(40)])
    return [
        f"method.corpus={{{raw}: 1}}", f"method.continue_corpus={{{code}: 2, {raw}: 1}}",
        "method.context=32", "method.pretrain_steps=10", "method.continue_steps=10",
        "method.draft_hidden_size=16", "data.temperature=1", "trainer.lr_warmup_steps=0",
    ]  # fmt: skip


def only(words: list[str], *reads: str) -> list[str]:
    """The words of these keys and sections, for a command that reads no others."""
    keys = [word.partition("=")[0] for word in words]
    return [w for w, k in zip(words, keys, strict=True) if {k, k.partition(".")[0]} & {*reads}]


def pipe(path: Path) -> Path:
    """A named pipe, at whose other end somebody waits with nothing to say."""
    os.mkfifo(path)
    threading.Thread(target=lambda: path.open("wb").close(), daemon=True).start()
    return path


# `accelerate launch --cpu --num_processes 2` starts one process only (accelerate 1.15)
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
FOUR = (*TWO[:-1], "4")


def start(
    *words: str, log: Path | None = None, folder: Path = ROOT, fresh: bool = False
) -> Warm | subprocess.Popen:
    """A process of its own in `folder`: `start("train.py", *command(...))`. `fresh`: Python's own
    beginning, and the launchers', seconds longer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if words[: len(TWO)] == TWO:
        # two processes on CPU, even beside one GPU
        environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    if not fresh:
        return Warm(words, environment, folder, *([log] if log else piped()))
    output = subprocess.PIPE if log is None else log.open("a")
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, text=True,
        stdout=output, stderr=subprocess.STDOUT if log else subprocess.PIPE,
    )  # fmt: skip


def finish(process: Warm | subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes by force after half a minute
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"has not ended:\n{out}\n{err}"[-4000:]) from None
    return process.returncode, out or "", err or ""


def stored_traces(folder: Path) -> list[Trace]:
    """Of the one trace store in `folder`, training before evaluation by number of rows."""
    return TraceStore.open(folder, None, create=False).load()


def training_stores(cache: Path, looked_ahead: bool = False) -> list[Path]:
    """The stores below a cache that hold training traces; or the report's, with look-ahead."""
    found = []
    for manifest in sorted(cache.glob("traces/*/manifest.json")):
        if (json.loads(manifest.read_text())["identity"]["lookahead"] > 0) == looked_ahead:
            found.append(manifest.parent)
    return found


def report_stores(cache: Path) -> list[Path]:
    """The stores below a cache that hold the text of reports."""
    return training_stores(cache, looked_ahead=True)
