"""Measuring a drafter by itself: one of a finished run, one of any other folder."""

from __future__ import annotations

import json

import pytest

import train
from scripts import evaluate
from tests.commands import command, only, read_jsonl

BASELINES = {"plain", "untrained", "prompt_lookup", "target"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("finished")
    assert train.main(command(folder, tiny_folder("llama"))) == 0
    return folder


def measured(folder, *words):
    assert evaluate.main([*words, f"script.out={folder / 'out'}"]) == 0
    return json.loads((folder / "out" / "report.json").read_text())


def row(report, drafter, temperature, measured_by="offline"):
    (found,) = [
        r for r in report["results"]
        if (r["drafter"], r["temperature"], r["measured_by"]) == (drafter, temperature, measured_by)
    ]  # fmt: skip
    return found


COUNTED = (
    "alpha",
    "tokens_per_round",
    "num_rounds",
    "engine_accepted_per_position",
    "prompts",
    "K",
)


def test_a_drafter_of_a_run_brings_its_configuration(tmp_path, finished, capsys):
    name = str(finished / "run" / "drafter")
    report = measured(tmp_path, f"eval.drafter={name}")
    out = capsys.readouterr().out
    assert out.strip().endswith(f"report: {tmp_path / 'out' / 'report.html'}")
    assert (tmp_path / "out" / "report.md").read_text() in out
    assert {r["drafter"] for r in report["results"]} == {name, *BASELINES}
    trained = json.loads((finished / "run" / "report.json").read_text())
    assert report["target"] == trained["target"]
    for temperature in (0.0, 1.0):
        for measured_by in ("offline", "decoding"):
            ours = row(report, name, temperature, measured_by)
            theirs = row(trained, "after", temperature, measured_by)
            for key in COUNTED:
                assert ours[key] == pytest.approx(theirs[key]), key
    rounds = read_jsonl(tmp_path / "out" / "rounds.jsonl")
    assert len(rounds) == len(read_jsonl(finished / "run" / "rounds.jsonl"))


def test_words_of_the_command_line_go_before_the_runs_configuration(tmp_path, finished):
    name = str(finished / "run" / "drafter")
    report = measured(tmp_path, f"eval.drafter={name}", "eval.K=2", "eval.temperatures=0")
    assert {r["temperature"] for r in report["results"]} == {0.0}
    assert {r["K"] for r in report["results"] if r["drafter"] != "plain"} == {2}
    assert row(report, "target", 0.0)["tokens_per_round"] > 2
    assert len(row(report, name, 0.0)["alpha_pos"]) <= 2


def test_the_exported_drafter_measures_the_same(tmp_path, finished, tiny_folder):
    name = str(finished / "run" / "export" / "transformers")
    words = only(command(finished, tiny_folder("llama")), *evaluate.READS)
    report = measured(tmp_path, f"eval.drafter={name}", *words, "eval.temperatures=0")
    trained = json.loads((finished / "run" / "report.json").read_text())
    for key in COUNTED:
        ours, theirs = row(report, name, 0.0)[key], row(trained, "after", 0.0)[key]
        assert ours == pytest.approx(theirs), key


def test_any_folder_of_transformers_is_measured(tmp_path, tiny_folder):
    name = str(tiny_folder("gpt2", layers=1, width=16))
    words = only(command(tmp_path, tiny_folder("llama")), *evaluate.READS)
    report = measured(tmp_path, f"eval.drafter={name}", *words)
    assert row(report, name, 1.0)["alpha"] > 0
    decoded = row(report, name, 0.0, "decoding")
    assert decoded["identical_to_plain"] == 1
    assert report["drafter"]["start"] == name


def test_without_a_place_the_report_is_named_by_the_configuration(tmp_path, finished, monkeypatch):
    name = str(finished / "run" / "drafter")
    words = [f"eval.drafter={name}", "eval.temperatures=0"]
    monkeypatch.chdir(tmp_path)
    assert evaluate.main(words) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == f"evaluate-{evaluate.resolve(words).hash()}"
    assert (folder / "report.json").exists()


def test_a_dry_run_measures_nothing(tmp_path, finished, capsys):
    name = str(finished / "run" / "drafter")
    words = [f"eval.drafter={name}", f"script.out={tmp_path / 'out'}", "dry_run=true"]
    assert evaluate.main(words) == 0
    assert "4 for evaluation" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
