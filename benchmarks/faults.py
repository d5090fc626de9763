"""Faults at random moments: is a row lost or doubled, is a run that goes on another run?

    OMP_NUM_THREADS=1 python -m benchmarks.faults                # 50 runs of each kind
    OMP_NUM_THREADS=1 python -m benchmarks.faults --runs 3 --out /tmp/faults.json    # a look

Each run does a piece of work (traces, states, or a training) in a process of its own, in an empty
folder, and meets one fault: at a random moment, at a random size of a file, or at a random byte of
what is written. Then the same command runs again until it ends well; where it names a damaged file,
that file is deleted, as the message says. What is there in the end is compared with the work that
met no fault: rows by key and content, states by checksum, trained weights and logged losses bit for
bit. A fault that is not answered by a line with its cause counts as silent.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data import completions
from data.batches import Batches
from data.features import FeaturesPlan, write_features
from data.generate import GenerationPlan, generate_traces
from data.prompts import load_prompts
from data.target import Target
from data.traces import TraceStore
from recipes.distillspec import Config, Recipe
from recipes.phases.run import fail, stop_softly
from trainer.config import RunFault, TrainerConfig, UserError
from trainer.loop import fit, make_accelerator
from trainer.tracking import Tracker

RESULTS = Path("benchmarks/results/faults.json")
ROWS, NEW, STEPS = 48, 12, 24
ATTEMPTS = 6
Result = dict[str, Any]  # what a piece of work leaves, by name


class Work:
    """The three pieces of work, each into a folder, and what they leave there."""

    def __init__(self, scratch: Path):
        config = LlamaConfig(
            vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.save_pretrained(scratch / "target")
        AutoTokenizer.from_pretrained("assets/toy/target").save_pretrained(scratch / "target")
        self.target = Target.load(str(scratch / "target"), dtype="float32")
        prompts = tuple(load_prompts("toy", count=ROWS, seed=0))
        self.plan = GenerationPlan("toy", prompts, (1.0,), max_new_tokens=NEW)
        self.served: Callable[[], Any] | None = None  # servers, where the text comes from some
        self.broken_step = -1  # whose loss is no number
        self.rows = self._generate(scratch / "rows")

    def _generate(self, folder: Path) -> list[Any]:
        plan = replace(self.plan, served=self.served is not None)
        return generate_traces(
            self.target, plan, folder, batch_size=8, rows_per_shard=4, servers=self.served
        )

    def traces(self, folder: Path) -> Result:
        self._generate(folder)
        return {t.key: t.response_ids for t in TraceStore.open(folder, None, create=False).load()}

    def features(self, folder: Path) -> Result:
        plan = FeaturesPlan((0, "final_norm"), "fp32", tokens_per_shard=400)
        store = write_features(self.target, self.rows, plan, folder, batch_size=4)
        found = {}
        for trace in self.rows:
            batch = Batches([trace], {"target": 1.0}, 1, seed=0).at(0)
            outputs: Any = store.outputs(batch)
            states = b"".join(outputs.hidden[layer].numpy().tobytes() for layer in plan.layers)
            found[trace.key] = hashlib.sha256(states).hexdigest()
        return found

    def training(self, folder: Path) -> Result:
        config = TrainerConfig(
            max_steps=STEPS, batch_size=4, log_every=1, save_every=3, eval_every=STEPS
        )
        recipe = Recipe(Config(divergence="ce_hard", draft_hidden_size=16), self.target)
        torch.manual_seed(0)
        drafter: Any = recipe.build([])
        (stage, *_) = recipe.stages()
        recipe.begin(stage, NEW)
        whole = recipe.loss

        def loss(batch: Any, outputs: Any, step: int) -> Any:
            output = whole(batch, outputs, step)
            if step == self.broken_step:
                total, count, weight = output.terms[0]
                output = replace(output, terms=[(total * float("nan"), count, weight)])
            return output

        recipe.loss = loss  # type: ignore[method-assign]
        tracker = Tracker(config, folder, "faults", {})
        fit(
            recipe=recipe, drafter=drafter, batches=Batches(self.rows, {"target": 1.0}, 4, seed=0),
            evaluate=None, outputs=lambda batch, step: None, config=config, folder=folder / "fit",
            seed=0, accelerator=make_accelerator(config, cpu=True), tracker=tracker,
        )  # fmt: skip
        tracker.finish()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        found: Result = {f"step {i}": [r["step"], r["loss"]] for i, r in enumerate(rows)}
        for name, tensor in drafter.state_dict().items():
            found[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        return found


@dataclass
class End:
    code: int  # as a shell has it: 137 for kill -9
    said: str
    result: Result | None


def apart(act: Callable[[Path], Result], folder: Path, scratch: Path, *, stop: Any = None,
          limit: int | None = None) -> End:  # fmt: skip
    """`act` in a process of its own; `stop`: (seconds, signal); `limit`: no file may be larger."""
    said, left = scratch / "said", scratch / "left"
    left.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        with said.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                stop_softly()
                if limit is not None:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then it is an OSError
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                result = act(folder)
                if limit is None:
                    left.write_text(json.dumps(result))
                code = 0
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            except (UserError, RunFault) as error:
                code = fail(error)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                os._exit(code)
    if stop is not None:
        time.sleep(stop[0])
        os.kill(child, stop[1])
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    result = json.loads(left.read_text()) if left.exists() else None
    return End(128 - code if code < 0 else code, said.read_text(errors="replace"), result)


# --- faults: each makes one attempt, or damages what one has left ---------------------------------


def files_of(folder: Path, rng: random.Random) -> Path:
    """Something that the work has written, not empty."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]
    return rng.choice([p for p in found if p.suffix in (".parquet", ".safetensors", ".pt")])


class Bench:
    def __init__(self, scratch: Path):
        self.scratch, self.work = scratch, Work(scratch)
        self.expected, self.seconds, self.largest = {}, {}, {}
        for name in ("traces", "features", "training"):
            folder = scratch / "expected" / name
            began = time.monotonic()
            end = apart(getattr(self.work, name), folder, scratch)
            assert end.result, end.said
            self.seconds[name] = time.monotonic() - began
            self.expected[name] = end.result
            self.largest[name] = max(p.stat().st_size for p in folder.rglob("*") if p.is_file())

    def act(self, name: str) -> Callable[[Path], Result]:
        return getattr(self.work, name)

    def killed(self, name: str, folder: Path, rng: random.Random, number: int = 9) -> End:
        stop = (rng.uniform(0, self.seconds[name]), number)
        return apart(self.act(name), folder, self.scratch, stop=stop)

    def told_to_stop(self, name: str, folder: Path, rng: random.Random) -> End:
        return self.killed(name, folder, rng, signal.SIGTERM)

    def full_disk(self, name: str, folder: Path, rng: random.Random) -> End:
        limit = rng.randrange(200, self.largest[name])
        return apart(self.act(name), folder, self.scratch, limit=limit)

    def _partly(self, name: str, folder: Path, rng: random.Random) -> Path:
        """A file of a run that was killed, or of a finished one."""
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            self.killed(name, folder, rng)
            with contextlib.suppress(IndexError):  # nothing is written yet
                return files_of(folder, rng)

    def flipped_byte(self, name: str, folder: Path, rng: random.Random) -> End:
        path = self._partly(name, folder, rng)
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        return apart(self.act(name), folder, self.scratch)

    def cut_short(self, name: str, folder: Path, rng: random.Random) -> End:
        path = self._partly(name, folder, rng)
        os.truncate(path, rng.randrange(path.stat().st_size))
        return apart(self.act(name), folder, self.scratch)

    def removed(self, name: str, folder: Path, rng: random.Random) -> End:
        self._partly(name, folder, rng).unlink()
        return apart(self.act(name), folder, self.scratch)

    def not_a_number(self, name: str, folder: Path, rng: random.Random) -> End:
        self.work.broken_step = rng.randrange(STEPS)
        try:
            return apart(self.act(name), folder, self.scratch)
        finally:
            self.work.broken_step = -1

    def server_gone(self, name: str, folder: Path, rng: random.Random) -> End:
        """After a random number of answers, some of them broken off before."""
        with server({tuple(t.prompt_ids): t.response_ids for t in self.work.rows}) as state:
            self.work.served = lambda: contextlib.nullcontext([state.url])
            state.left = rng.randrange(ROWS)
            state.broken = rng.sample(range(ROWS), 5)
            first = apart(self.act(name), folder, self.scratch)
            state.left = 10 * ROWS
            second = apart(self.act(name), folder, self.scratch)
            self.work.served = None
        assert second.result is not None or first.code == 0, second.said
        return End(first.code, first.said, second.result)


KINDS: dict[str, tuple[str, str]] = {
    f"{work}: {words}": (work, method)
    for work, kinds in {
        "traces": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed", "the server goes away": "server_gone",
        },
        "features": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed",
        },
        "training": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed", "a loss that is no number": "not_a_number",
        },
    }.items()
    for words, method in kinds.items()
}  # fmt: skip


class _State:
    url = ""
    left, asked = 0, 0
    broken: list[int]


@contextlib.contextmanager
def server(answers: dict[tuple[int, ...], list[int]]) -> Any:
    """Answers as told, `left` times; those numbered in `broken` break off."""
    state, lock = _State(), threading.Lock()
    state.broken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, content: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.asked += 1
                state.left -= 1
                gone = state.left < 0 or state.asked in state.broken
            if not gone:
                self.reply({"choices": [{"token_ids": answers[tuple(asked["prompt"])]}]})

        def log_message(self, *_: Any) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def one_run(bench: Bench, kind: str, seed: int) -> dict[str, Any]:
    """One fault and what came of it."""
    (name, method), rng = KINDS[kind], random.Random(f"{kind} {seed}")
    folder = bench.scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    end = getattr(bench, method)(name, folder, rng)
    first, attempts, deleted = end, 1, 0
    while end.result is None and attempts < ATTEMPTS:
        named = re.search(r"^error: (?:data\.features: )?(\S+) is damaged", end.said, re.M)
        if end.code == 2 and named:
            Path(named[1]).unlink()
            deleted += 1
        end = apart(bench.act(name), folder, bench.scratch)
        attempts += 1
    expected, found = bench.expected[name], end.result or {}
    # killed, stopped, or never met: nothing to say; else a line with the cause
    quiet = first.code in (0, 75, 137, 143) or re.search(r"^error: .{20}", first.said, re.M)
    return {
        "code": first.code, "deleted": deleted, "silent": not quiet,
        "lost": len(expected.keys() - found.keys()),
        "doubled": len(found.keys() - expected.keys()),
        "wrong": sum(found[key] != expected[key] for key in expected.keys() & found.keys()),
        "ended": end.result is not None,
    }  # fmt: skip


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {key: sum(run[key] for run in runs) for key in
              ("deleted", "lost", "doubled", "wrong", "silent")}  # fmt: skip
    codes = Counter(str(run["code"]) for run in runs)
    return {
        "runs": len(runs), "codes": dict(sorted(codes.items())), **counts,
        "not ended": sum(not run["ended"] for run in runs),
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [
        "| fault | runs | how the first attempt ended | files deleted as told | lost | doubled "
        "| wrong | silent | not ended |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, row in result["kinds"].items():
        codes = ", ".join(f"{count} x {code}" for code, count in row["codes"].items())
        cells = [row[k] for k in ("deleted", "lost", "doubled", "wrong", "silent", "not ended")]
        lines.append(f"| {kind} | {row['runs']} | {codes} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=50, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a fork takes no threads along
    completions.PATIENCE_S, completions.DELAYS_S = 0.3, (0.02,)
    result: dict[str, Any] = {"kinds": {}}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        for kind in given.kinds:
            began = time.monotonic()
            runs = [one_run(bench, kind, seed) for seed in range(given.runs)]
            result["kinds"][kind] = summed(runs)
            print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)
    result["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
    print(table(result))
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
