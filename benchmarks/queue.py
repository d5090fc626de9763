"""The cells of a benchmark: in any order, each within its limit of time, one result file each.

    python -m benchmarks.queue list
    python -m benchmarks.queue run [cell or row ...] [budget=<minutes>]
    python -m benchmarks.queue table [row ...]

`benchmarks/real/cells.toml` is the table, another one is named by cells=<file>. A row of it is one
setting, a cell is a row with one of its seeds. A cell runs only if its settings are committed as
they stand, so that no setting is chosen after its result; the result, `results/<cell>.json` beside
the table, holds them with their hash, the commit, machine, date and seconds, and what the reports
of its commands say. It is to be committed, too.

`run` without names runs what is not run or stale (its settings have changed since); a failed cell
runs again by name. A cell that is stopped, by the budget or by SIGTERM, goes on where it was: its
seconds add up. Several of these commands may run side by side: a cell is run by one of them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from benchmarks.cells import DONE, FAILED, NOT_RUN, STALE, Cells, Json, Settings
from benchmarks.cells_table import markdown
from phases.exits import end
from phases.run import provenance
from trainer.config import asks_for_help, suggest
from trainer.errors import UserError
from trainer.files import read_json, write_json
from trainer.lock import lock

TABLE = Path("benchmarks/real/cells.toml")
GRACE_S = 60  # from SIGTERM to SIGKILL: a training saves a checkpoint
INTERRUPTED = 75
KEPT = (
    "drafter", "role", "prompts", "temperature", "top_k", "top_p", "verifier", "policy", "K",
    "tree", "nodes", "measured_by", "num_prompts", "num_rounds", "tokens_per_round",
    "tokens_per_round_ci95", "alpha", "alpha_ci95", "alpha_by_depth", "alpha_pos", "greedy_match",
    "identical_to_plain", "speedup", "speedup_ci95", "plain_tokens_per_s",
    "speculative_tokens_per_s", "cost_ratio", "verify_cost", "modelled_speedup", "mbsu",
    "by_domain", "by_position", "draft_vocabulary",
)  # fmt: skip


def show(table: Cells) -> None:
    print(table.count())
    for cell in table.cells:
        state, found = table.state(cell)
        about = f"  {found['wall_s'] / 60:.1f} min, {found['date']}" if found else ""
        about += f"  {found['failed']}" if state == FAILED else ""
        print(f"  {cell.cell:<32} {state:<8}{about}")


def run(table: Cells, names: Sequence[str], budget_s: float) -> int:
    """Run cells, for at most `budget_s` in all. Returns the exit code: 3 if a cell has failed, 75
    if a signal has stopped the command of one."""
    ends = time.monotonic() + budget_s
    committed = table.committed()
    wanted = table.chosen(names)
    if changed := [cell.cell for cell in wanted if committed.get(cell.cell) != cell.hash]:
        raise UserError(
            f"{changed[0]}: its settings in {table.path} are not committed: commit them first, so "
            "that no setting is chosen after its result"
        )
    states = (NOT_RUN, STALE, FAILED) if names else (NOT_RUN, STALE)
    failed = 0
    table.folder.mkdir(parents=True, exist_ok=True)
    for cell in wanted:
        if time.monotonic() >= ends:
            break
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock(table.folder / f".{cell.cell}.lock", "in use"))
            except UserError:
                print(f"{cell.cell}: another process runs it")
                continue
            if table.state(cell)[0] not in states:
                continue
            found = run_cell(table, cell, ends)
        if found is None:
            print(f"{cell.cell}: stopped; the same command goes on")
            if time.monotonic() < ends:
                return INTERRUPTED
            break
        failed += bool(found["failed"])
        print(f"{cell.cell}: {found['failed'] or DONE}, {found['wall_s'] / 60:.1f} min, now commit "
              f"{table.result(cell)}", flush=True)  # fmt: skip
    print(table.count())
    return 3 if failed else 0


def run_cell(table: Cells, cell: Settings, ends: float) -> Json | None:
    """Run a cell and write its result; None where the budget, or a signal, stopped it before."""
    progress, folder = table.folder / f"{cell.cell}.progress.json", table.folder / cell.cell
    state = {"settings_hash": cell.hash, "wall_s": 0.0}
    if progress.exists() and read_json(progress, "delete it")["settings_hash"] == cell.hash:
        state = read_json(progress, "delete it")
    else:  # what lies there is of other settings
        shutil.rmtree(folder, ignore_errors=True)
        write_json(progress, state)
    spent, failed = state["wall_s"], None
    print(f"{cell.cell}: {cell.minutes - spent / 60:.1f} minutes are left to it", flush=True)
    with (table.folder / f"{cell.cell}.log").open("a") as log:
        for words in cell.before:  # what cells share is not of their time
            if (code := execute(words, ends - time.monotonic(), log)) != 0:
                if code in (None, INTERRUPTED):
                    return None
                raise UserError(f"{words} ended with exit code {code}: {last_line(log)}")
        began = time.monotonic()
        limit = min(ends, began + 60 * cell.minutes - spent)
        try:
            for words in cell.commands:
                code = execute(words, limit - time.monotonic(), log)
                if code is None and limit < ends:
                    failed = f"over its limit of {cell.minutes:g} minutes"
                elif code in (None, INTERRUPTED):
                    return None
                elif code:
                    failed = f"exit code {code}: {last_line(log)}"
                if failed:
                    break
        finally:
            state["wall_s"] = round(spent + time.monotonic() - began, 3)
            write_json(progress, state)
    outputs: list[Json] = []
    try:
        outputs = [] if failed else [output(Path(path)) for path in cell.reports]
    except UserError as error:
        failed = str(error)
    result = {
        "cell": cell.cell, **asdict(cell), "settings_hash": cell.hash, "failed": failed,
        **provenance(["benchmarks.queue", "run", cell.cell]), "changed_files": changed_files(),
        "threads": os.environ.get("OMP_NUM_THREADS"), "wall_s": round(state["wall_s"], 1),
        "outputs": outputs,
    }  # fmt: skip
    write_json(table.result(cell), result)
    if not failed:
        progress.unlink()
    return result


def execute(words: str, seconds: float, log: TextIO) -> int | None:
    """Run a command, and end it and what it started after so many seconds: None then."""
    command = shlex.split(words)
    command = [sys.executable if word == "python" else word for word in command]
    log.write(f"$ {words}\n")
    log.flush()
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this process is told to stop
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_line(log: TextIO) -> str:
    lines = Path(log.name).read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def changed_files() -> list[str]:
    """The tracked files that differ from the commit."""
    git = ["git", "diff", "HEAD", "--name-only"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.splitlines()


def output(path: Path) -> Json:
    """What a command has measured: of a report the rows of its drafters, of other files all."""
    content = read_json(path, "it is what the cell's command writes: name it in `reports`")
    if "results" not in content:
        return content
    rows = [row for row in content["results"] if row["role"] not in ("plain", "target")]
    return {
        "run": {key: content["run"].get(key) for key in ("recipe", "command", "contents")},
        "drafter": content["drafter"],
        "rows": [{key: row[key] for key in KEPT if row.get(key) is not None} for row in rows],
        "comparisons": content["comparisons"],
    }


def main(arguments: list[str]) -> int:
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        what, *rest = arguments
        given = dict(word.partition("=")[::2] for word in rest if "=" in word)
        names = [word for word in rest if "=" not in word]
        known = {"list": {"cells"}, "run": {"cells", "budget"}, "table": {"cells"}}
        if what not in known:
            raise UserError(f"expected list, run or table, got {what!r}")
        for key in given.keys() - known[what]:
            raise UserError(f"{what} knows no {key!r}{suggest(key, sorted(known[what]))}")
        table = Cells.read(Path(given.get("cells", TABLE)))
        if what == "run":
            signal.signal(signal.SIGTERM, _stop)
            return run(table, names, 60 * _minutes(given.get("budget", "inf")))
        print(markdown(table, names)) if what == "table" else show(table)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _minutes(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"budget must be a number of minutes, got {text!r}") from error


def _stop(*_: object) -> None:
    raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    end(main)
