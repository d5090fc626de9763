"""Stored runs, drafters, exports and traces load and give the numbers that were stored with them.

The drafters are small and their numbers of one machine: what matters is that they stay. The command
of each run is in its run.json; distillspec, eagle, eagle3 and medusa have weights of the first
edition (commit 59b2d9e), which today's training does not make again.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train
from data.traces import TraceStore
from scripts import compare, evaluate, export
from tests.helpers.commands import read_jsonl

PLACE = "tests/fixtures/frozen"
SOURCE = Path(__file__).resolve().parents[1] / PLACE
RUNS = ("distillspec", "eagle", "eagle3", "gto", "hydra", "medusa", "specdecpp")
LANGUAGE_MODELS = ("distillspec", "specdecpp")
# measured on the clock
TIMES = {"draft_s", "verify_s", "cost_ratio", "verify_cost", "draft_time_share", "modelled_speedup",
         "speedup", "plain_tokens_per_s", "speculative_tokens_per_s", "cost_source"}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy, under the relative path that the stored configurations name."""
    shutil.copytree(SOURCE, tmp_path / PLACE)
    monkeypatch.chdir(tmp_path)
    return Path(PLACE)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def rows_of(report, drafter):
    return {
        (row["measured_by"], row["temperature"], row["policy"], row.get("tree")): row
        for row in report["results"]
        if row["drafter"] == drafter
    }


def assert_same(now, before, where):
    if isinstance(before, float):
        # float32: from one processor to another 1.3e-6 of a probability was seen to move
        assert now == pytest.approx(before, rel=1e-5, abs=1e-9), where
    elif isinstance(before, dict):
        for key, value in before.items():
            assert_same(now[key], value, (*where, key))
    elif isinstance(before, list):
        assert len(now) == len(before), where
        for one, other in zip(now, before, strict=True):
            assert_same(one, other, where)
    else:
        assert now == before, where


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_drafter_is_measured_as_it_was(name, place):
    """Every column of the report, every round, and no text generated again."""
    run, drafter = place / name, f"{place / name}/drafter"
    stores = set((place / "cache" / "traces").iterdir())
    words = (
        f"eval.drafter={drafter}", f"model.target={place}/target", f"data.cache_dir={place}/cache",
        f"eval.prompts={place}/eval.jsonl", "eval.num_prompts=4", "eval.max_new_tokens=11",
        "eval.timing_prompts=0", "eval.bootstrap_draws=20", "script.out=found",
    )  # fmt: skip
    assert evaluate.main(list(words)) == 0
    assert set((place / "cache" / "traces").iterdir()) == stores
    now, before = rows_of(report_of(Path("found")), drafter), rows_of(report_of(run), "after")
    if name == "specdecpp":  # whose training compares further policies
        before = {key: row for key, row in before.items() if key in now}
    assert now.keys() == before.keys()
    assert now
    for key, row in before.items():
        for column, value in row.items():
            if column not in {*TIMES, "drafter", "role"}:
                assert_same(now[key][column], value, (key, column))

    found, stored = (read_jsonl(folder / "rounds.jsonl") for folder in (Path("found"), run))
    stored = [row for row in stored if "policy" not in row]
    assert len(found) == len(stored) > 0
    for number, (row, old) in enumerate(zip(found, stored, strict=True)):
        for name, value in old.items():
            if not name.startswith("t_"):
                assert_same(row[name], value, (number, name))


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_is_found_by_its_command(name, place, capsys):
    folder = place / name
    before = (folder / "config.yaml").read_bytes()
    _, _, *words = shlex.split(json.loads((folder / "run.json").read_text())["command"])
    assert train.main([*words, "run.seed=5"]) == 2
    assert "another configuration (run.seed differ)" in capsys.readouterr().err
    assert train.main(words) == 0
    assert f"{name} for {place / 'target'}" in capsys.readouterr().out
    assert (folder / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("name", sorted({*RUNS} - {"hydra"}))  # which no engine serves
def test_a_drafter_is_exported_as_it_was(name, place):
    engine = "transformers" if name in LANGUAGE_MODELS else "vllm"
    words = (f"script.drafter={place / name}/drafter", f"script.engine={engine}",
             f"model.target={place}/target", "script.out=out")  # fmt: skip
    assert export.main(list(words)) == 0
    stored, now = place / name / "export" / engine, Path("out")
    for file in stored.glob("*.json"):
        assert json.loads((now / file.name).read_text()) == json.loads(file.read_text()), file.name
    before, found = (load_file(folder / "model.safetensors") for folder in (stored, now))
    assert before.keys() == found.keys()
    for key, tensor in before.items():
        assert tensor.equal(found[key]), key


def test_reports_are_compared(place, capsys):
    compare.main([str(place / name / "report.json") for name in RUNS])
    printed = capsys.readouterr().out
    for name in RUNS:
        assert name in printed


def test_traces_are_read(place):
    for folder in (place / "cache" / "traces").iterdir():
        traces = TraceStore.open(folder, None, create=False).load()
        assert traces
        assert all(trace.response_ids for trace in traces)
