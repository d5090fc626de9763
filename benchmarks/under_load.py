"""Generation, training and report while other programs keep the cores busy.

    python -m benchmarks.under_load out=benchmarks/results/under_load.json      # 40 minutes
    python -m benchmarks.under_load seconds=10 rounds=1                         # a look

Each cell is a real command on the embedded toy, ended after `seconds` of counted work: tokens of
answers, steps of training, tokens of the report. `fixed` uses a thread for every core throughout,
`judged` as many as `trainer.threads` finds fast. The two alternate, `rounds` times, beside 0, 1 and
2 programs that do nothing but count.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer import progress, threads
from trainer.files import write_json

ROOT = Path(__file__).resolve().parents[1]
# it ends with the benchmark, however that ends
BUSY = [sys.executable, "-c", "import os; mine = os.getppid()\nwhile os.getppid() == mine: pass"]
# a module with `main`, the name of the progress that counts, "" for the steps of a training, and
# words; {} is a folder, {new} one that is new each time
WORK = {
    "generate": ("scripts.generate", "training traces",
                 ["data.num_prompts=5000", "data.cache_dir={new}"]),
    "train": ("train", "",
              ["recipe=eagle3", "data.num_prompts=64", "trainer.max_steps=100000",
               "trainer.eval_every=100000", "run.dir={new}", "data.cache_dir={}"]),
    "report": ("scripts.evaluate", "report",
               ["eval.drafter=assets/toy/draft", "eval.num_prompts=384", "eval.timing_prompts=0",
                "script.out={}/report", "data.cache_dir={}"]),
}  # fmt: skip


def child(arm: str, seconds: float, kind: str, words: list[str]) -> None:
    """Run a command for so many seconds from the first count of its work on, print the rate, and
    end. What it does before that, such as the text of a training, is not counted."""
    import importlib

    module, label, _ = WORK[kind]
    counted, began = 0.0, 0.0

    def counting(advance):
        def run(self, count=1):
            nonlocal counted, began
            if (self.label or "").partition(":")[0] != label:
                advance(self, count)
                return
            now = time.perf_counter()
            began = began or now
            if now - began >= seconds:
                print(json.dumps(counted / (now - began)), flush=True)
                os._exit(0)
            counted += count
            advance(self, count)

        return run

    if arm == "fixed":
        threads.EVERY_S = math.inf
    progress.Progress.advance = counting(progress.Progress.advance)
    importlib.import_module(module).main(words)
    raise SystemExit(f"{module} ended before {seconds:g} s")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    others = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def rate(arm: str, seconds: float, kind: str, folder: Path) -> float:
    """Tokens, or training steps, per second."""
    words = WORK[kind][2]
    new = folder / str(time.monotonic_ns())
    words = [word.replace("{new}", str(new)).replace("{}", str(folder)) for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.under_load", "child", arm, str(seconds), kind, *words],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(words: list[str]) -> None:
    given = {"seconds": "30", "rounds": "3", "out": ""} | dict(word.split("=") for word in words)
    seconds, found = float(given["seconds"]), dict[str, dict[str, list[float]]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in WORK:  # what they read is there afterwards
            rate("judged", 1, kind, folder)
        for _ in range(int(given["rounds"])):
            for count in (0, 1, 2):
                with busy(count):
                    for kind in WORK:
                        row = found.setdefault(f"{kind}, {count} busy", {})
                        for arm in ("fixed", "judged"):
                            row.setdefault(arm, []).append(rate(arm, seconds, kind, folder))
                            print(kind, count, arm, f"{row[arm][-1]:.1f}", flush=True)
    print("| work, other programs | fixed | judged | ratio |\n| --- | ---: | ---: | ---: |")
    for name, row in found.items():
        fixed, judged = (statistics.median(row[arm]) for arm in ("fixed", "judged"))
        print(f"| {name} | {fixed:.1f} | {judged:.1f} | {judged / fixed:.2f} |")
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if given["out"]:
        write_json(Path(given["out"]), {"machine": machine, "seconds": seconds, "per_s": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5:])
    else:
        main(sys.argv[1:])
