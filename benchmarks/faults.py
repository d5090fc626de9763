"""Faults at random moments: is a row lost or doubled, does a resumed run give other numbers?

    OMP_NUM_THREADS=1 python -m benchmarks.faults                # 50 runs of each kind
    OMP_NUM_THREADS=1 python -m benchmarks.faults --runs 3 --out /tmp/faults.json    # a look

Kinds that the file of results has with as many runs are not run again.

Each run does a piece of work (traces, states, a corpus, a training, or a whole run of train.py) in
a process of its own, in an empty folder, and meets one fault: at a random moment, at a random size
of a file, or at a random byte of what is written; or two and three processes do the same work at
once. Then the same command runs again until it ends well; where it names a damaged file or folder,
that is deleted, as the message says. What is there in the end is compared with the work that had no
fault: rows by key and content, states by checksum, trained weights and logged losses bit for bit. A
fault that is not answered by a line with its cause counts as silent.
"""

from __future__ import annotations

import argparse
import contextlib
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
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults_work import ROWS, STEPS, Result, Work, server
from engines import completions
from phases.exits import fail, stop_softly
from trainer.errors import RunFault, UserError
from trainer.files import write_json

RESULTS = Path("benchmarks/results/faults.json")
ATTEMPTS = 6


@dataclass
class End:
    code: int  # as a shell has it: 137 for kill -9
    said: str
    result: Result | None


def start(act: Callable[[Path], Result], folder: Path, scratch: Path, name: str = "",
          limit: int | None = None) -> int:  # fmt: skip
    """`act` in a process of its own; `limit`: no file may be larger."""
    (scratch / f"left{name}").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    code = 1
    with (scratch / f"said{name}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            stop_softly()
            if limit is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then it is an OSError
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            result = act(folder)
            if limit is None:
                write_json(scratch / f"left{name}", result)  # whole, or not there
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


def wait(child: int, scratch: Path, name: str = "") -> End:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left, said = scratch / f"left{name}", scratch / f"said{name}"
    result = json.loads(left.read_text()) if left.exists() else None
    return End(128 - code if code < 0 else code, said.read_text(errors="replace"), result)


def apart(
    act: Callable[[Path], Result], folder: Path, scratch: Path, *,
    stop: tuple[float, int] | None = None, limit: int | None = None,
) -> End:  # fmt: skip
    """`act` in a process of its own until it ends; `stop`: (seconds, signal)."""
    child = start(act, folder, scratch, limit=limit)
    if stop is not None:
        time.sleep(stop[0])
        os.kill(child, stop[1])
    return wait(child, scratch)


# --- faults: each makes one attempt, or damages what one has left ---------------------------------


def files_of(folder: Path, rng: random.Random) -> Path:
    """Something that the work has written, not empty."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]
    kinds = (".parquet", ".safetensors", ".pt", ".bin")
    return rng.choice([p for p in found if p.suffix in kinds or p.name == "blocks.jsonl"])


class Experiment:
    def __init__(self, scratch: Path, works: set[str]):
        self.scratch, self.work = scratch, Work(scratch)
        self.expected, self.seconds, self.largest = {}, {}, {}
        for name in sorted(works):
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

    def odd_server(self, name: str, folder: Path, rng: random.Random) -> End:
        """Two replicas; one gives odd answers, from the first or from a later one on."""
        answers = {tuple(t.prompt_ids): t.response_ids for t in self.work.rows}
        with server(answers) as good, server(answers) as bad:
            self.work.served = lambda: contextlib.nullcontext([bad.url, good.url])
            good.left = bad.left = 10 * ROWS
            bad.odd, bad.odd_after = rng.choice(ODD), rng.choice([0, 0, 9, 20])
            end = apart(self.act(name), folder, self.scratch)
            self.work.served = lambda: contextlib.nullcontext([good.url])
            again = apart(self.act(name), folder, self.scratch)  # whatever became of the first
            self.work.served = None
        named = bad.url.rpartition(":")[2] in end.said or bad.asked <= bad.odd_after
        return End(end.code if named else -1, end.said, again.result)

    def _starters(self, count: int, name: str, folder: Path, rng: random.Random) -> End:
        """At random offsets; who comes too early is refused, and one of them ends well."""
        began, children = time.monotonic(), []
        offsets = sorted(rng.uniform(0, self.seconds[name]) for _ in range(count - 1))
        for number, offset in enumerate([0.0, *offsets]):
            time.sleep(max(0.0, began + offset - time.monotonic()))
            self.work.starter = number
            children.append(start(self.act(name), folder, self.scratch, str(number)))
        self.work.starter = 0
        ends = [wait(child, self.scratch, str(number)) for number, child in enumerate(children)]
        wrong = [e for e in ends if e.code not in (0, 2) or (e.code == 2 and not REFUSED(e.said))]
        wrong += [e for e in ends if e.result is not None and e.result != self.expected[name]]
        worst = (wrong or sorted(ends, key=lambda end: -end.code))[0]
        last = apart(self.act(name), folder, self.scratch)
        return End(-1 if wrong else worst.code, worst.said, last.result)

    def two_starters(self, name: str, folder: Path, rng: random.Random) -> End:
        return self._starters(2, name, folder, rng)

    def three_starters(self, name: str, folder: Path, rng: random.Random) -> End:
        return self._starters(3, name, folder, rng)

    def emptied(self, name: str, folder: Path, rng: random.Random) -> End:
        """A file of a run's metadata after a power loss: without its bytes."""
        apart(self.act(name), folder, self.scratch)
        found = [p for p in sorted((folder / "run0").rglob("*")) if p.name in METADATA]
        rng.choice(found).write_bytes(b"")
        if rng.random() < 0.5:  # before it had ended, too
            (folder / "run0" / "report.json").unlink()
        return apart(self.act(name), folder, self.scratch)

    def kept_damaged(self, name: str, folder: Path, rng: random.Random) -> End:
        """A stage that an earlier run has left for others: a byte flipped, cut short, or gone."""
        shutil.copytree(self.scratch / "expected" / name / "cache", folder / "cache")
        files = sorted(p for p in (folder / "cache" / "stages").rglob("*") if p.is_file())
        path = rng.choice([p for p in files if p.stat().st_size])
        damage = rng.randrange(3)
        if damage == 0:
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        elif damage == 1:
            os.truncate(path, rng.randrange(path.stat().st_size))
        else:
            path.unlink()
        return apart(self.act(name), folder, self.scratch)


METADATA = ("run.json", "config.yaml", "report.json", "report.md", "finished.json", "drafter.json")
ODD: list[Callable[[list[int]], object]] = [
    lambda tokens: [*tokens[:-1], 10**9],
    lambda tokens: [-1, *tokens[1:]],
    lambda tokens: [float(token) for token in tokens],
    lambda tokens: [True, *tokens[1:]],
    lambda tokens: tokens * 50,
    lambda tokens: [],
    lambda tokens: "text",
    lambda tokens: {"ids": tokens},
    lambda tokens: [(token + 7) % 2000 + 1 for token in tokens],  # another model's text
]


def REFUSED(said: str) -> bool:
    return bool(re.search(r"^error: .*(another process|another command|compared in)", said, re.M))


KINDS: dict[str, tuple[str, str]] = {
    f"{work}: {words}": (work, method)
    for work, kinds in {
        "traces": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed", "the server goes away": "server_gone",
            "an odd server": "odd_server", "two starters": "two_starters",
            "three starters": "three_starters",
        },
        "features": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed", "two starters": "two_starters",
        },
        "training": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed", "a loss that is no number": "not_a_number",
        },
        "corpus": {
            "kill -9": "killed", "SIGTERM": "told_to_stop", "a full disk": "full_disk",
            "a byte flipped": "flipped_byte", "a file cut short": "cut_short",
            "a file removed": "removed", "two starters": "two_starters",
            "three starters": "three_starters",
        },
        "run": {"kill -9": "killed", "metadata emptied": "emptied", "two starters": "two_starters"},
        "stages": {"the kept stage damaged": "kept_damaged", "two starters": "two_starters"},
        "sizes": {"two starters": "two_starters"},
    }.items()
    for words, method in kinds.items()
}  # fmt: skip


def one_run(bench: Experiment, kind: str, seed: int) -> dict[str, Any]:
    """One fault and what came of it."""
    (name, method), rng = KINDS[kind], random.Random(f"{kind} {seed}")
    folder = bench.scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    end = getattr(bench, method)(name, folder, rng)
    first, attempts, deleted = end, 1, 0
    while end.result is None and attempts < ATTEMPTS:
        named = re.search(r"^error: (?:data\.features: |corpus )?(\S+) is damaged", end.said, re.M)
        named = named or re.search(r"^error: (\S+config.yaml) is not YAML", end.said, re.M)
        if end.code == 2 and named:
            path = Path(named[1])
            if path.name in ("run.json", "config.yaml"):  # told to choose another run.dir
                path = path.parent
            shutil.rmtree(path) if path.is_dir() else path.unlink()
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
    for kind, row in ((kind, result["kinds"][kind]) for kind in KINDS if kind in result["kinds"]):
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
    if given.out.exists():
        result = json.loads(given.out.read_text())
    result["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
    left = [k for k in given.kinds if result["kinds"].get(k, {"runs": 0})["runs"] < given.runs]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Experiment(Path(scratch), {KINDS[kind][0] for kind in left})
        for kind in left:
            began = time.monotonic()
            runs = [one_run(bench, kind, seed) for seed in range(given.runs)]
            result["kinds"][kind] = summed(runs)
            write_json(given.out, result)
            print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
