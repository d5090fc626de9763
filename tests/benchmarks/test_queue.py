"""The queue of cells: what it refuses, runs, resumes, and shows."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import queue
from benchmarks.cells import Cells
from benchmarks.cells_table import engine_lines, speed_lines
from phases import pipeline
from recipes import base
from scripts import evaluate
from tests.helpers.commands import ROOT, SETTINGS

pytestmark = pytest.mark.tools

TINY = " ".join(f"{key}={value}" for key, value in SETTINGS.items())
ROW = """
[[row]]
name = "{name}"
seeds = {seeds}
minutes = {minutes}
commands = [{command}]
reports = ["{report}"]
"""


def note(text):
    """A command that writes a result, and adds a line to a file to show how often it ran."""
    content = f"import pathlib; p = pathlib.Path('{{folder}}'); p.mkdir(exist_ok=True); {text}"
    return f'python -c "{content}"'


WRITES = note("(p / 'out.json').write_text('{}'); (p / 'runs').open('a').write('x')")
SLEEPS = note("(p / 'runs').open('a').write('x'); import time; time.sleep(60)")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """table(row, ...) -> the words that name a committed table of these rows; committed=False
    leaves its content out of the commit."""
    monkeypatch.chdir(ROOT)
    place = tmp_path / "real" / "cells.toml"
    place.parent.mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)

    def make(*rows, committed=True, head=""):
        given = [{"seeds": [0], "minutes": 1, "report": "{folder}/out.json", **r} for r in rows]
        given = [{**row, "command": json.dumps(row["command"])} for row in given]
        text = f'folder = "{tmp_path}/runs"\n{head}\n' + "".join(ROW.format(**r) for r in given)
        place.write_text(text)
        if committed:
            subprocess.run([*git, "add", "-A"], check=True)
            subprocess.run([*git, "commit", "-qm", "cells"], check=True)
        return f"cells={place}"

    return make


def result(tmp_path, cell):
    return json.loads((tmp_path / "real" / "results" / f"{cell}.json").read_text())


def times(tmp_path, cell):
    return len((tmp_path / "runs" / cell / "runs").read_text())


@pytest.mark.slow
def test_two_cells_on_the_toy(tmp_path, table, capsys):
    medusa = f"python train.py recipe=medusa run.seed={{seed}} run.dir={{folder}} {{common}} {TINY}"
    words = table(
        {"name": "medusa", "seeds": [0, 1], "command": medusa, "report": "{folder}/report.json",
         "minutes": 10},
        {"name": "note", "command": WRITES},
        head=f"[words]\ncommon = 'data.cache_dir={tmp_path}/cache trainer.lr_warmup_steps=0'",
    )  # fmt: skip
    assert queue.main(["list", words]) == 0
    assert capsys.readouterr().out.startswith("0 of 3 cells\n  medusa-s0")
    assert queue.main(["table", words]) == 0
    assert "| medusa | not run |" in capsys.readouterr().out
    assert queue.main(["run", "medusa", words]) == 0
    assert capsys.readouterr().out.endswith("2 of 3 cells\n")
    for seed in (0, 1):
        found = result(tmp_path, f"medusa-s{seed}")
        assert found["failed"] is None
        assert found["wall_s"] > 0
        assert len(found["commit"]) == 40
        assert f"run.seed={seed}" in found["commands"][0]
        (output,) = found["outputs"]
        assert output["drafter"]["trained_parameters"] > 0
        rows = {(row["temperature"], row["measured_by"]) for row in output["rows"]}
        assert rows == {(t, by) for t in (0.0, 1.0) for by in ("offline", "decoding")}
        timed = [row for row in output["rows"] if row.get("speedup") and not row["temperature"]]
        for row in timed:
            keys = {"tokens_per_round_ci95", "cost_ratio", "verify_cost", "by_domain"}
            assert keys <= row.keys()
        assert {row["role"] for row in timed} >= {"trained"}
    assert queue.main(["table", words]) == 0
    shown = capsys.readouterr().out
    assert "2 of 3 cells are done." in shown
    assert "| row | T | draft | tokens per round | code | math | prose | alpha by depth |" in shown
    lines = [line.split(" | ") for line in shown.splitlines() if line.startswith("| medusa | ")]
    assert [line[1] for line in lines] == ["0", "0", "1", "1"]  # a chain and a tree each
    assert all(line[-1] == "2 of 2, indicative |" for line in lines)
    assert "| note | not run |" in shown


def test_settings_that_are_not_committed_are_not_run(tmp_path, table, capsys):
    words = table({"name": "a", "command": WRITES})
    assert queue.main(["run", words]) == 0
    words = table({"name": "a", "command": WRITES + " "}, committed=False)
    capsys.readouterr()
    assert queue.main(["run", words]) == 2
    assert "a-s0: its settings in" in capsys.readouterr().err
    assert times(tmp_path, "a-s0") == 1


def test_a_changed_cell_is_stale_and_runs_anew(tmp_path, table, capsys):
    words = table({"name": "a", "command": WRITES}, {"name": "b", "command": WRITES})
    assert queue.main(["run", words]) == 0
    table({"name": "a", "command": WRITES + " "}, {"name": "b", "command": WRITES, "minutes": 2})
    capsys.readouterr()
    assert queue.main(["list", words]) == 0
    assert "1 of 2 cells\n  a-s0" in (said := capsys.readouterr().out)
    assert "stale" in said.splitlines()[1]
    assert queue.main(["run", words]) == 0
    # what the former settings wrote is gone; the limit is no setting
    assert (times(tmp_path, "a-s0"), times(tmp_path, "b-s0")) == (1, 1)
    assert queue.main(["run", words]) == 0
    assert times(tmp_path, "a-s0") == 1


def test_a_cell_that_fails_is_named_and_runs_again_by_name(tmp_path, table, capsys):
    bad = "python -c 'import sys; print(\"bad luck\"); sys.exit(3)'"
    words = table({"name": "bad", "command": bad}, {"name": "good", "command": WRITES})
    assert queue.main(["run", words]) == 3
    assert result(tmp_path, "bad-s0")["failed"] == "exit code 3: bad luck"
    assert result(tmp_path, "good-s0")["failed"] is None
    capsys.readouterr()
    assert queue.main(["run", words]) == 0
    assert "bad" not in capsys.readouterr().out
    assert queue.main(["run", "bad", words]) == 3
    assert queue.main(["table", words]) == 0
    assert "| bad | failed |" in capsys.readouterr().out


def test_a_cell_over_its_limit_has_failed(tmp_path, table):
    words = table({"name": "slow", "command": SLEEPS, "minutes": 0.03})
    began = time.monotonic()
    assert queue.main(["run", words]) == 3
    assert time.monotonic() - began < 30
    assert result(tmp_path, "slow-s0")["failed"] == "over its limit of 0.03 minutes"


def test_a_budget_stops_a_cell_and_its_seconds_add_up(tmp_path, table, capsys):
    words = table({"name": "slow", "command": SLEEPS})
    for count in (1, 2):
        assert queue.main(["run", words, "budget=0.03"]) == 0
        assert "slow-s0: stopped; the same command goes on" in capsys.readouterr().out
        progress = json.loads((tmp_path / "runs" / "slow-s0.progress.json").read_text())
        assert 1.7 * count < progress["wall_s"] < 20
        assert times(tmp_path, "slow-s0") == count  # what it wrote stays
    assert not (tmp_path / "real" / "results").exists()


def test_a_command_that_a_signal_stops_ends_the_queue_with_its_code(tmp_path, table):
    stopped = "python -c 'import sys; sys.exit(75)'"
    words = table({"name": "told", "command": stopped}, {"name": "next", "command": WRITES})
    assert queue.main(["run", words]) == 75
    assert not (tmp_path / "real" / "results").exists()


@pytest.mark.slow
def test_sigterm_ends_the_command_too(tmp_path, table):
    words = table({"name": "slow", "command": SLEEPS})
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.queue", "run", words], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while not (tmp_path / "runs" / "slow-s0" / "runs").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75
    assert json.loads((tmp_path / "runs" / "slow-s0.progress.json").read_text())["wall_s"] > 0
    running = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path}/runs/slow-s0" not in running


def test_what_cells_share_runs_before_them_outside_their_time(tmp_path, table):
    mark = tmp_path / "shared"
    words = table(
        {"name": "a", "command": f"ls {mark}"}, {"name": "b", "command": WRITES},
        head=f'before = ["sleep 3", "touch {mark}"]',
    )  # fmt: skip
    assert queue.main(["run", words]) == 3
    assert "out.json is damaged (" in result(tmp_path, "a-s0")["failed"]  # it writes no result
    assert result(tmp_path, "b-s0")["failed"] is None
    assert result(tmp_path, "b-s0")["wall_s"] < 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("folder = 1\n[[row]]\n", "is not a table of cells (KeyError('name'))"),
        ("x", "is not a table of cells"),
        ('folder="x"\n' + '[[row]]\nname="a"\ncommands=[]\n' * 2, "has the cell a-s0 twice"),
        ('folder="x"\n[[row]]\nname="a"\ncommands=[]\nminute=3\n', "row a has the unknown key"),
    ],
)
def test_a_wrong_table_is_one_line(tmp_path, text, says, capsys):
    path = tmp_path / "cells.toml"
    path.write_text(text)
    assert queue.main(["list", f"cells={path}"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], "expected list, run or table, got 'lst'"),
        (["list", "budget=3"], "list knows no 'budget'"),
        (["run", "budget=x"], "budget must be a number of minutes, got 'x'"),
        (["run", "eagel3"], "has no cell 'eagel3'"),
        (["list", "cells=benchmarks"], "cells benchmarks is a folder: name a regular file"),
        (["list", "cells=cels.toml"], "cells=cels.toml does not exist: name a table of cells"),
    ],
)
def test_a_wrong_word_is_one_line(words, says, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert queue.main(words) == 2
    assert says in capsys.readouterr().err


def test_the_table_of_the_real_target_has_words_that_its_commands_take(monkeypatch):
    """Every recipe is in it, its settings compose, and a cell reads what an earlier one makes."""
    monkeypatch.chdir(ROOT)
    table = Cells.read(queue.TABLE)
    recipes, made = set(), set()
    for cell, command in [(c, command) for c in table.cells for command in c.commands]:
        words = shlex.split(command)
        named = [word.rpartition("=")[2] for word in words if word.endswith("/drafter")]
        read = {folder for word in named for folder in word.split(",")}
        assert read <= made
        if words[1] == "train.py":
            config = pipeline.resolve(words[2:])[0]
            assert config.run.seed == cell.seed
            assert config.run.dir == f"{table.folder}/{cell.cell}"
            report = f"{config.run.dir}/report.json"
            made |= {f"{config.run.dir}/{place}drafter" for place in ("", "export/vllm/")}
            recipes.add(config.recipe)
        else:
            assert words[:2] == ["python", "-m"]
            assert read
            if words[2] == "scripts.evaluate":
                report = f"{evaluate.resolve(words[3:]).script['out']}/report.json"
            else:
                assert words[2] in {"benchmarks.real_speed", "benchmarks.vllm_counters"}
                (report,) = [word.partition("=")[2] for word in words if word.startswith("out=")]
        if command == cell.commands[-1]:
            assert cell.reports == [report]
    assert recipes == {*base.names()}


def test_engines_and_clocks_have_tables_of_their_own():
    place = {"near_tie": True, "prompt": 3}
    vllm = {
        "kind": "eagle3", "K": 4, "answers_as_ours": 59, "differing": [place], "equal": True,
        "tokens_per_round": 1.6543, "over_plain": 1.25,
    }  # fmt: skip
    arm = {
        "tokens_per_s": 21.04, "over_generate": 1.9, "over_generate_range": [1.7, 2.1],
        "over_plain": 1.5, "over_plain_range": [1.4, 1.6], "answers_as_generate": "6 of 6",
    }  # fmt: skip
    alone = {"over_vllm": 1.0, "over_vllm_range": [1.0, 1.0]}
    spent = {"draft_ms": 11.6, "verify_ms": 60.2, "other_ms": 1.0,
             "tokens_per_round": 1.766, "tokens_per_round_needed": 2.004}  # fmt: skip
    outputs = {
        "vllm-s0": [{"prompts": 60, "drafters": {"runs/x/drafter": vllm}}],
        "speed-s0": [
            {"batch 1": {"plain": arm, "chain of 4": arm | {"round": spent}, "vllm": arm | alone}}
        ],
        "eagle-s0": [{"rows": []}],
    }
    *_, line = engine_lines(outputs)
    assert line == (
        "| vllm-s0 | eagle3 | runs/x/drafter | 4 | 59 of 60 | 1 of 1 | yes | 1.654 | 1.25 |"
    )
    *_, plain, chain, engine = speed_lines(outputs)
    start = "21.0 | 1.90 [1.70, 2.10] | 1.50 [1.40, 1.60] |"
    assert plain == f"| speed-s0 | 1 | plain | {start}  | 6 of 6 |  |  |  |  |  |"
    assert chain == f"| speed-s0 | 1 | chain of 4 | {start}  | 6 of 6 | 12 | 60 | 1 | 1.77 | 2.00 |"
    assert engine == f"| speed-s0 | 1 | vllm | {start} 1.00 [1.00, 1.00] | 6 of 6 |  |  |  |  |  |"
    assert engine_lines({"eagle-s0": [{"rows": []}]}) == []
    assert speed_lines({"eagle-s0": [{"rows": []}]}) == []
