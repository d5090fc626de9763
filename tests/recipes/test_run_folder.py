"""What a run folder says of itself: damaged, gone, made under other versions, or begun again."""

from __future__ import annotations

import json
import shlex

import pytest

import train
from phases import run as run_phase
from recipes.common.draft_size import SizeSearch
from tests.helpers.commands import command, pipe, read_jsonl
from trainer.config import FORMAT


def times(folder):
    """Of all files but the lock, which everybody opens who asks for it."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p: p.stat().st_mtime_ns for p in files}


# metadata after a power loss


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("run.json", b"", "run.json is damaged (Expecting value"),
        ("run.json", b"{}", "run.json is damaged (it names no contents)"),
        (
            "run.json",
            b'{"contents": {}, "format": 2}',
            f"holds a run in format 2, this version writes format {FORMAT}; choose another run.dir",
        ),
        ("run.json", b'{"contents": {}}', "holds a run in format None"),
        ("run.json", None, "run.json is damaged ([Errno 2]"),
        ("config.yaml", b"", "config.yaml is damaged: it must hold a table"),
        ("config.yaml", b"a: [", "config.yaml is not YAML"),
        ("config.yaml", b"- 1", "config.yaml is damaged"),
    ],
)
def test_damaged_metadata_is_named_before_a_model_is_loaded(
    begun, capsys, monkeypatch, name, content, says
):
    run, words = begun
    (run / "report.json").unlink()
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    before = times(run)
    monkeypatch.setattr(run_phase, "load_target", lambda *_: pytest.fail("it was loaded"))
    capsys.readouterr()
    assert train.main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert times(run) == before


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "run.json", "stages/a/b/c/state.pt"])
def test_a_pipe_in_a_run_folder_is_not_waited_for(begun, capsys, name):
    run, words = begun
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    pipe(path)
    capsys.readouterr()
    assert train.main(words) == 2
    assert capsys.readouterr().err == (
        f"error: run.dir: the file {path} is a pipe: name a regular file\n"
    )


@pytest.mark.parametrize("content", [b"", b'{"schema": 1}', b"{", b"\xff"])
def test_a_report_counts_as_written_when_it_validates(begun, capsys, content):
    run, words = begun
    expected = json.loads((run / "report.json").read_text())["results"]
    (run / "report.json").write_bytes(content)
    trained = [(p, p.stat().st_mtime_ns) for p in run.glob("stages/*/finished.json")]
    assert train.main(words) == 0
    assert "the report is written again" in capsys.readouterr().out
    found = json.loads((run / "report.json").read_text())["results"]
    assert [row["tokens_per_round"] for row in found] == [r["tokens_per_round"] for r in expected]
    assert [(p, p.stat().st_mtime_ns) for p in run.glob("stages/*/finished.json")] == trained


@pytest.mark.parametrize("page", ["report.md", "report.html"])
def test_a_page_that_is_gone_is_made_again_from_the_report(begun, capsys, page):
    run, words = begun
    text = (run / page).read_text()
    (run / page).unlink()
    assert train.main(words) == 0
    assert (run / page).read_text() == text
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out


def test_a_damaged_finished_json_sends_training_to_its_last_checkpoint(begun, capsys):
    run, words = begun
    (run / "report.json").unlink()
    (finished,) = run.glob("stages/*/finished.json")
    content = json.loads(finished.read_text())
    finished.write_text("")
    assert train.main(words) == 0
    assert "resuming from the last checkpoint" in capsys.readouterr().out
    assert json.loads(finished.read_text()) == content


def test_a_finished_run_begins_again_where_it_must_not_resume(begun):
    run, words = begun
    before = {p: p.stat().st_mtime_ns for p in run.glob("stages/*/finished.json")}
    losses = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert train.main([*words, "trainer.resume=never"]) == 0
    assert {p: p.stat().st_mtime_ns for p in before} != before
    again = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert [row["loss"] for row in again] == [row["loss"] for row in losses]


def test_a_run_that_begins_again_has_no_report_until_it_ends(begun, monkeypatch):
    run, words = begun

    def stop(*_, **__):
        assert not (run / "report.json").exists()
        raise SystemExit(75)

    monkeypatch.setattr("phases.train.train_stages", stop)
    with pytest.raises(SystemExit):
        train.main([*words, "trainer.resume=never"])


def test_a_longer_training_is_a_new_run_by_the_command_that_is_printed(
    begun, tmp_path, capsys, monkeypatch
):
    run, words = begun
    longer = [word for word in words if not word.startswith("trainer.max_steps=")]
    longer.append("trainer.max_steps=3")
    before = times(run)
    assert train.main(longer) == 2
    err = capsys.readouterr().err
    assert "holds a run of another configuration (trainer.max_steps differ)" in err
    further = shlex.split(err.partition("in a new run: ")[2])
    assert further[:2] == ["python", "train.py"]
    monkeypatch.chdir(tmp_path)
    assert train.main(further[2:]) == 0
    (report,) = tmp_path.glob("runs/*/report.json")
    assert json.loads(report.read_text())["drafter"]["start"].endswith("run")
    assert times(run) == before


# versions


@pytest.mark.slow
def test_a_run_that_goes_on_under_other_versions_says_so(begun, capsys, monkeypatch):
    run, words = begun
    (run / "report.json").unlink()
    first = json.loads((run / "run.json").read_text())
    # by its name: transformers may put another module in the place of the one imported first
    monkeypatch.setattr("transformers.__version__", "99.0")
    assert train.main(words) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "other versions" in line]
    assert f"transformers {first['transformers']}, now 99.0" in said
    for facts in (
        json.loads((run / "run.json").read_text()),
        json.loads((run / "report.json").read_text())["run"],
    ):
        assert facts["transformers"] == first["transformers"]
        assert [one["transformers"] for one in facts["resumed"]] == ["99.0"]
    assert "99.0" in (run / "report.md").read_text()
    (run / "report.json").unlink()
    assert train.main(words) == 0  # nothing new since
    assert "other versions" not in capsys.readouterr().out
    assert len(json.loads((run / "run.json").read_text())["resumed"]) == 1


def test_the_versions_of_the_project_and_its_libraries_are_known(finished_run):
    facts = json.loads((finished_run[0] / "run" / "run.json").read_text())
    assert set(run_phase.VERSIONS) <= facts.keys()
    assert facts["torch"]


# shared places


def test_sizes_are_compared_by_one_process_at_a_time(tmp_path, tiny_folder, capsys, monkeypatch):
    """Two runs of one configuration share the folder of the short trainings."""
    words = [
        word
        for word in command(
            tmp_path, tiny_folder("llama"), "recipe=fastdraft", "method.stages=[align]",
            "method.search_parameters=[600]", "method.search_layers=[1]", "method.search_steps=2",
            "trainer.lr_warmup_steps=0",
        )
        if not word.startswith("method.draft_hidden_size")
    ]  # fmt: skip
    refused = []

    def trial(search, number, trial, K):
        (folder,) = (tmp_path / "cache" / "size_search").iterdir()
        before = times(folder)
        other = [word.replace(f"{tmp_path}/run", f"{tmp_path}/other") for word in words]
        refused.append(train.main(other))
        assert times(folder) == before
        raise SystemExit(75)

    monkeypatch.setattr(SizeSearch, "_row", trial)
    with pytest.raises(SystemExit):
        train.main(words)
    assert refused == [2]
    assert "sizes are being compared" in capsys.readouterr().err
