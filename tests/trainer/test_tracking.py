"""Rows reach their places, and a file that was cut short is read all the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb.errors
from accelerate import Accelerator
from safetensors.torch import load_file
from wandb.sdk.lib.wbauth import unauthenticate_session

import train
from tests.helpers.commands import command
from trainer import tracking
from trainer.config import TrainerConfig
from trainer.errors import RunFault, UserError
from trainer.losses import LossOutput, Term
from trainer.tracking import StepRecord, Tokens, Tracker, Window, check_login, track_report


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tracker_in(folder, **options):
    return Tracker(TrainerConfig(), folder, "name", {}, **options)


def test_rows_are_on_disk_when_log_returns(tmp_path):
    tracker = tracker_in(tmp_path / "new")
    tracker.log({"step": 1, "loss": 0.1 + 0.2})
    tracker.log({"step": 2, "eval": {"select": 1}})
    assert rows(tmp_path / "new") == [
        {"step": 1, "loss": 0.1 + 0.2},
        {"step": 2, "eval": {"select": 1}},
    ]


def test_truncate_keeps_rows_up_to_the_step_and_drops_a_torn_line(tmp_path):
    tracker = tracker_in(tmp_path)
    for step in range(5):
        tracker.log({"step": step})
    with tracker.path.open("a") as file:
        file.write('{"step": 5, "lo')
    tracker.truncate(3)
    tracker.log({"step": 4, "again": True})
    assert rows(tmp_path) == [*({"step": step} for step in range(4)), {"step": 4, "again": True}]
    tracker.truncate(-1)
    assert rows(tmp_path) == []


def test_truncate_leaves_other_stages_alone(tmp_path):
    first, second = tracker_in(tmp_path, stage="base"), tracker_in(tmp_path, stage="align")
    for tracker in (first, second):
        for step in (1, 2):
            tracker.log({"step": step})
    second.truncate(-1)
    assert rows(tmp_path) == [{"stage": "base", "step": step} for step in (1, 2)]


def test_only_the_main_process_writes(tmp_path):
    tracker = tracker_in(tmp_path / "other", is_main=False)
    tracker.log({"step": 1})
    tracker.truncate(0)
    tracker.finish()
    assert not (tmp_path / "other").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFault, match=r"metrics\.jsonl"):
        tracker_in(tmp_path).log({"step": 1})


def add(window, step, loss, count=2.0, seen=3.0):
    batch = Tokens(torch.tensor([[step]]), torch.ones(1, 1))
    record = StepRecord(step, [batch], [torch.tensor(loss)])
    terms = {"labels": Term(torch.tensor(loss), count)}
    record.add(LossOutput(terms, {"seen": (torch.tensor(seen), count)}), {"labels": 2.0})
    window.add(record, torch.tensor(1.0))


def test_a_window_gives_means_over_its_steps_and_begins_anew(tmp_path):
    window = Window(Accelerator(cpu=True), tmp_path, object)
    add(window, 0, 1.0)
    add(window, 1, 2.0)
    row = window.row(2, 40, 0.1)
    assert (row["loss"], row["seen"], row["num_tokens"], row["lr"]) == (1.5, 1.5, 40, 0.1)
    add(window, 2, 5.0)
    assert window.row(3, 60, 0.1)["loss"] == 5.0
    assert window.row(4, 60, 0.1)["loss"] is None


def test_a_window_looked_at_late_names_the_first_step_that_broke(tmp_path):
    """On a GPU the numbers are read when a row is due, several steps after they went wrong."""
    folder = tmp_path / "not yet there"
    window = Window(Accelerator(cpu=True), folder, object)
    for step, loss in enumerate([1.0, 2.0, float("inf"), float("nan")]):
        add(window, step, loss)
    with pytest.raises(RunFault, match=r"loss inf, gradient norm 1\.0 at step 3"):
        window.settle()
    assert load_file(folder / "nan_batch.safetensors")["input_ids"].item() == 2


def test_a_step_that_broke_names_the_metrics_that_broke_with_it(tmp_path):
    """They say which of its terms did."""
    window = Window(Accelerator(cpu=True), tmp_path, object)
    add(window, 0, 1.0)
    add(window, 1, float("nan"), seen=float("nan"))
    with pytest.raises(RunFault, match=r"loss nan, gradient norm 1\.0, seen nan at step 2: .*tvd"):
        window.settle()


def test_tokens_per_second_are_those_since_the_last_row_without_pauses(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(tracking, "time", SimpleNamespace(perf_counter=lambda: now))
    window = Window(Accelerator(cpu=True), tmp_path, object)
    window.start(100)
    now = 2.0
    with window.paused():  # an evaluation
        now = 7.0
    now = 10.0
    assert window.row(1, 150, 0.1)["tokens_per_s"] == 50 / 5
    now = 12.0
    assert window.row(2, 180, 0.1)["tokens_per_s"] == 30 / 2


@pytest.mark.parametrize("count", [3.0, 2.001])
def test_denominators_other_than_announced_are_a_fault(tmp_path, count):
    window = Window(Accelerator(cpu=True), tmp_path, object)
    add(window, 0, 1.0, count=torch.tensor(count, dtype=torch.float64))
    with pytest.raises(RunFault, match=rf"denominator {count} of labels at step 1, .* 2\.0"):
        window.settle()


@pytest.mark.slow
def test_offline_wandb_leaves_a_run_folder_and_keeps_its_id(tmp_path):
    config = TrainerConfig(wandb="offline")
    for step in (1, 2):  # the second time as a resumed run
        tracker = Tracker(config, tmp_path, "a run", {"trainer": {"lr": 0.1}})
        tracker.log({"step": step, "loss": 1.0, "eval": {"alpha": 0.5}})
        tracker.finish()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert folders
    run_id = (tmp_path / "wandb_id").read_text()
    # W&B appends a number where both begin within one second
    assert all(run_id in folder.name for folder in folders)
    assert any(path.stat().st_size > 0 for path in (tmp_path / "wandb").rglob("*.wandb"))


@pytest.mark.parametrize(
    ("key", "says"),
    [("", "no API key is configured"), ("short", "has 5"), ("k" * 40, None)],
)
def test_a_login_that_is_missing_is_known_at_once(tmp_path, key, says, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()  # W&B prints as its first settings in a process say
    if says is None:
        check_login(TrainerConfig(wandb="online"))
        unauthenticate_session()
    else:
        with pytest.raises(UserError, match=rf"trainer\.wandb=online needs a login \(.*{says}"):
            check_login(TrainerConfig(wandb="online"))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "1")  # which logs nothing
    check_login(TrainerConfig(wandb="online"))


@pytest.mark.parametrize("wandb", ["offline", "online"])
def test_a_missing_package_is_known_at_once(wandb, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=f"trainer.wandb={wandb} needs the wandb package"):
        check_login(TrainerConfig(wandb=wandb))
    check_login(TrainerConfig())


@pytest.mark.parametrize("fault", [wandb.errors.CommError("no way\nout"), OSError("no way")])
def test_a_report_that_cannot_be_sent_is_a_line(tmp_path, fault, monkeypatch, capsys):
    def fail(artifact):
        raise fault

    wandb_run = SimpleNamespace(
        id="abc", summary={}, dir=str(tmp_path / "wandb/run-abc/files"), log_artifact=fail
    )
    monkeypatch.setattr("trainer.tracking._start_wandb", lambda *given: wandb_run)
    track_report(TrainerConfig(wandb="online"), tmp_path, "a run", {}, {}, [])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("the report was not sent to W&B (no way): it is in ")
    assert f"{tmp_path / 'report.json'}, and `wandb sync {tmp_path / 'wandb/run-abc'}`" in line


@pytest.mark.slow
def test_a_finished_report_is_an_artifact_and_its_numbers_the_summary(
    tmp_path, tiny_folder, monkeypatch
):
    logged = []
    wandb_run = SimpleNamespace(
        id="abc", summary={}, define_metric=lambda *given, **options: None,
        log=lambda row: None, log_artifact=logged.append, finish=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr("trainer.tracking._start_wandb", lambda *given: wandb_run)
    given = ["trainer.wandb=offline", "eval.temperatures=0"]
    assert train.main(command(tmp_path, tiny_folder("llama"), *given)) == 0
    (artifact,) = logged
    assert (artifact.name, artifact.type) == ("report-abc", "report")
    assert set(artifact.manifest.entries) == {"report.md", "report.html", "report.json"}
    assert 0 <= wandb_run.summary["after/T=0/alpha"] <= 1
    assert "times 3" in (tmp_path / "run" / "report.html").read_text()
    for entry in artifact.manifest.entries.values():  # prompts are the user's own
        assert "times 3" not in Path(entry.local_path).read_text()
