"""Mistakes put into the code one at a time, to see that a test notices each.

python -m tests.mutants [--only name ...] [--list] [--out results.json] [--timeout s] [--jobs n]
                        [--green]

`table.toml` holds the mistakes. Each is made in a copy of the tracked files, where the tests named
beside it run up to the first failure: the mutant is killed. One that SURVIVED is a missing test.
Tests that pass no more, or never passed, without the mistake are an error, as is a mistake that
ends pytest before its tests. With --out, what stands in the file and is unchanged is not run again.
--jobs: runs side by side; --green: all tests have passed on these files, so they are not run
without a mistake.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.mutants.forked import SERVER, tested

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800
TESTS = "not gpu and not engine and not zero"  # pytest's -m: those that are slow, too


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    search: str  # occurs once in the file
    replacement: str
    tests: list[str] = field(default_factory=list)  # as pytest takes them

    def mutated(self, root: Path) -> str:
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.search) != 1:
            raise ValueError(f"{self.name}: {text.count(self.search)} places in {self.file}")
        return text.replace(self.search, self.replacement)


def read_table(root: Path) -> list[Mutant]:
    with (root / "tests" / "mutants" / "table.toml").open("rb") as file:
        return [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]


def copy_of(root: Path, folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def outcome(root: Path, mutant: Mutant, mutated: bool, timeout_s: float) -> tuple[str, str]:
    """("killed" | "SURVIVED" | "error", by what)"""
    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", TESTS, *mutant.tests]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        copy_of(root, Path(folder))
        if mutated:
            (Path(folder) / mutant.file).write_text(mutant.mutated(root), encoding="utf-8")
        said = Path(folder) / ".said"
        process = SERVER.Process(target=tested, args=(words, folder, given | own, said))
        process.start()
        process.join(timeout_s)
        status = process.exitcode
        with contextlib.suppress(ProcessLookupError):  # what a test has left running
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        out = said.read_text(errors="replace") if said.exists() else ""
    if status is None:
        return "killed", f"timed out after {timeout_s:g} s"
    if status == 0:
        return "SURVIVED", ""
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.M)
    if status == 1 and first:
        return "killed", first[1]
    if status < 0:
        return "killed", f"exit status {status}"
    return "error", f"pytest ended with {status}: {' '.join(out.split()[-20:])}"


def state_of(root: Path, mutant: Mutant) -> str:
    """Of all that a result depends on that is likely to change."""
    digest = hashlib.sha256(json.dumps(asdict(mutant), sort_keys=True).encode())
    for name in sorted({mutant.file, *(test.partition("::")[0] for test in mutant.tests)}):
        digest.update((root / name).read_bytes() if (root / name).is_file() else name.encode())
    return digest.hexdigest()


def results(
    root: Path, mutants: list[Mutant], timeout_s: float, green: bool
) -> list[dict[str, object]]:
    """The row of each of these mutants, which have the same tests."""
    rows, baseline, failed = list[dict[str, object]](), "SURVIVED", ""
    if not green:
        baseline, failed = outcome(root, mutants[0], False, timeout_s)
    for mutant in mutants:
        start = time.perf_counter()
        result, by = "error", f"without the mistake: {failed}"
        if baseline == "SURVIVED":  # the tests pass without the mistake
            result, by = outcome(root, mutant, True, timeout_s)
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"file": mutant.file, "result": result, "by": by, "seconds": seconds})
    return rows


def run(
    root: Path, mutants: list[Mutant], out: Path | None, timeout_s: float, jobs: int, green: bool
) -> bool:
    """Prints the table; whether every mutant was killed."""
    known = json.loads(out.read_text()) if out and out.exists() else {}
    states = {mutant.name: state_of(root, mutant) for mutant in mutants}
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    print("| mutant | file | result | by | seconds |\n| --- | --- | --- | --- | ---: |", flush=True)
    for mutant in mutants:
        if known.get(mutant.name, {}).get("state") == states[mutant.name]:
            show(mutant, known[mutant.name])
        else:
            groups.setdefault(tuple(mutant.tests), []).append(mutant)
    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(results, root, g, timeout_s, green): g for g in groups.values()}
        for task in as_completed(tasks):
            for mutant, row in zip(tasks[task], task.result(), strict=True):
                show(mutant, row)
                known[mutant.name] = row | {"state": states[mutant.name]}
            if out:
                out.write_text(json.dumps(known, indent=1))
    return all(known[mutant.name]["result"] == "killed" for mutant in mutants)


def show(mutant: Mutant, row: dict[str, object]) -> None:
    cells = (mutant.name, row["file"], row["result"], row["by"], f"{row['seconds']:.0f}")
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", nargs="+", metavar="name")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--green", action="store_true")
    given = parser.parse_args(arguments)
    mutants = read_table(root)
    if given.only:
        unknown = set(given.only) - {mutant.name for mutant in mutants}
        if unknown:
            parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.name in given.only]
    if given.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.file}, {' '.join(mutant.tests)}")
        return 0
    return 0 if run(root, mutants, given.out, given.timeout, given.jobs, given.green) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
