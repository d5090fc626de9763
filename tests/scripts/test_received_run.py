"""A run folder that somebody else made: it runs no code, is sent nothing, and an export beside it
takes nothing away."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml

import train
from scripts import evaluate, export
from tests.helpers.commands import command
from tests.test_security import foreign  # noqa: F401 - a fixture


@pytest.fixture
def received(tmp_path, foreign, monkeypatch, capsys):  # noqa: F811
    """(run folder, file that its target's code leaves): trained where that code was trusted."""
    folder, mark = foreign
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    words = command(
        tmp_path, folder, "recipe=medusa", "method.num_heads=2", "eval.K=2", "eval.tree=null",
        "eval.temperatures=0", "model.trust_remote_code=true", "trainer.max_steps=1",
    )  # fmt: skip
    kept = [w for w in words if not w.startswith(("method.draft", "model.drafter"))]
    assert train.main(kept) == 0
    assert mark.exists()
    mark.unlink()
    capsys.readouterr()
    return tmp_path / "run", mark


def test_code_of_a_received_target_runs_only_where_this_command_says_so(received, tmp_path, capsys):
    run, mark = received
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["model"]["trust_remote_code"] is True
    for main, words in (
        (evaluate.main, [f"eval.drafter={run}/drafter", "eval.timing_prompts=0"]),
        (export.main, [f"script.drafter={run}/drafter", "script.engine=vllm"]),
    ):
        out = tmp_path / main.__module__
        assert main([*words, f"script.out={out}"]) == 2
        said = capsys.readouterr()
        assert "set model.trust_remote_code=true if you trust the code" in said.err
        assert f"model.target={stored['model']['target']}, from {run / 'config.yaml'}" in said.out
        assert not mark.exists()
        assert not out.exists()
    assert main([*words, f"script.out={out}", "model.trust_remote_code=true"]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny_folder("llama"), folder / "target")
    words = ["eval.temperatures=0", "method.control=false", "eval.timing_prompts=0"]
    assert train.main(command(folder, folder / "target", *words)) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path_factory):
    """A copy of a run folder, beside a copy of its target."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("run", "target"):
        shutil.copytree(trained / name, folder / name)
    stored = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    stored["model"]["target"] = str(folder / "target")
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(stored))
    return folder / "run"


def test_the_folder_of_a_run_stands_for_its_drafter_in_every_script(run, tmp_path):
    inside = evaluate.resolve([f"eval.drafter={run}/drafter"])
    whole = evaluate.resolve([f"eval.drafter={run}"])
    whole.eval.drafter = inside.eval.drafter
    assert whole == inside
    words = ["script.engine=vllm", f"script.out={tmp_path / 'out'}"]
    assert export.main([f"script.drafter={run}", *words]) == 0


def test_an_export_asks_the_hub_for_no_missing_folder(run, tmp_path, capsys):
    words = ["script.engine=vllm", f"script.out={tmp_path / 'out'}", "model.target=/gone"]
    assert export.main([f"script.drafter={run}", *words]) == 2
    assert "model.target=/gone: there is no such file or folder" in capsys.readouterr().err


def test_a_server_that_a_received_run_names_is_not_asked(run, tmp_path, capsys):
    stored = yaml.safe_load((run / "config.yaml").read_text())
    stored["eval"]["engine"] = "http://127.0.0.1:9"
    (run / "config.yaml").write_text(yaml.safe_dump(stored))
    words = [f"eval.drafter={run}/drafter", f"script.out={tmp_path / 'out'}"]
    assert evaluate.main(words) == 0
    assert "eval.engine=http://127.0.0.1:9" in capsys.readouterr().out
    assert evaluate.main([*words, "eval.engine=http://127.0.0.1:9"]) == 2
    assert "cannot read http://127.0.0.1:9/metrics" in capsys.readouterr().err


def test_an_engine_of_a_received_run_starts_and_is_asked_where_this_command_names_it(
    run, tmp_path, capsys
):
    """Its options too, one of which would run code."""
    stored = yaml.safe_load((run / "config.yaml").read_text())
    asked = [f"eval.drafter={run}/drafter", f"script.out={tmp_path / 'out'}"]
    servers = ["http://127.0.0.1:9"]
    for engine in (
        {"engine": "openai", "servers": servers},
        {"engine": "vllm", "engine_options": {"trust_remote_code": True}},
    ):
        text = yaml.safe_dump(stored | {"data": stored["data"] | engine})
        (run / "config.yaml").write_text(text)
        for words in ([], ["data.engine=openai"])[: 1 + (engine["engine"] == "openai")]:
            config = evaluate.resolve([*asked, *words])
            said = capsys.readouterr().out
            assert f"data.engine={engine['engine']} of {run / 'config.yaml'} is not used" in said
            assert (config.data.engine, config.data.servers) == ("hf", [])
            assert config.data.engine_options == {}
    config = evaluate.resolve([*asked, "data.engine=vllm"])
    assert (config.data.engine, config.data.engine_options) == ("vllm", {})
    config = evaluate.resolve([*asked, "data.engine=openai", f"data.servers={servers}",
                               "data.engine_options={}"])  # fmt: skip
    assert (config.data.engine, config.data.servers) == ("openai", servers)


@pytest.mark.parametrize("content", [{}, {"recipe": 3}, {"recipe": "../evil"}, {"recipe": "base"}])
def test_a_configuration_without_a_known_recipe_is_named(run, tmp_path, capsys, content):
    (run / "config.yaml").write_text(yaml.safe_dump(content or {"model": {}}))
    assert evaluate.main([f"eval.drafter={run}/drafter", f"script.out={tmp_path / 'out'}"]) == 2
    err = capsys.readouterr().err
    assert "recipe" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": [1]}, "config.yaml: model must be a table of settings, got [1]"),
        ({"eval": 3}, "config.yaml: eval must be a table of settings, got 3"),
        ({"eval": {"K": [2]}}, "eval.K must be a whole number >= 1, got [2]"),
        (
            {"revision": [1]},
            "config.yaml: model.target_revision must be the name of a revision",
        ),
    ],
)
def test_an_export_names_what_a_received_configuration_cannot_hold(
    run, tmp_path, capsys, changed, says
):
    stored = yaml.safe_load((run / "config.yaml").read_text())
    if "revision" in changed:
        changed = {"model": stored["model"] | {"target_revision": changed["revision"]}}
    (run / "config.yaml").write_text(yaml.safe_dump(stored | changed))
    words = ["script.engine=vllm", f"script.out={tmp_path / 'out'}"]
    assert export.main([f"script.drafter={run}", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_report_is_not_written_over_that_of_a_run(run, capsys):
    before = (run / "report.json").read_bytes()
    assert evaluate.main([f"eval.drafter={run}/drafter", f"script.out={run}"]) == 2
    assert "holds a run, whose report would be lost" in capsys.readouterr().err
    assert (run / "report.json").read_bytes() == before


def test_an_export_never_replaces_what_was_not_exported(run, tmp_path, capsys):
    """A target, the drafter, a folder around them, somebody's fine-tune with its history."""
    tuned = tmp_path / "tuned"
    shutil.copytree(run.parent / "target", tuned)
    (tuned / "optimizer.pt").write_bytes(b"precious")
    subprocess.run(["git", "init", "-q", tuned], check=True)
    link = tmp_path / "link"
    link.symlink_to(run / "drafter")
    places = {
        run.parent / "target": "would replace model.target",
        run / "drafter": "would replace script.drafter",
        link: "would replace script.drafter",
        run: "would replace script.drafter",
        run.parent: "would replace model.target",
        tuned: "tuned holds files that were not exported here (.git)",
        run / "report.json": "cannot be a folder",
        run / "report.json" / "out": "cannot be a folder",
    }
    words = [f"script.drafter={run}/drafter", "script.engine=vllm"]

    def everything():
        return {
            p: p.lstat().st_mtime_ns for folder in (run.parent, tmp_path) for p in folder.rglob("*")
        }

    before = everything()
    for out, says in places.items():
        assert export.main([*words, f"script.out={out}"]) == 2, out
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1
        assert everything() == before
    for _ in range(2):
        assert export.main([*words, f"script.out={tmp_path / 'out'}"]) == 0


def test_the_runs_own_export_of_an_earlier_version_is_moved_aside(run, capsys):
    exported = run / "export" / "transformers"
    (exported / ".draftsmith.json").unlink()
    (run / "report.json").unlink()
    stored = yaml.safe_load((run / "config.yaml").read_text())
    stored["run"]["dir"] = str(run)
    given = [
        f"{section}.{key}={json.dumps(value)}"
        for section in ("run", "model", "data", "trainer", "eval", "method")
        for key, value in stored[section].items()
    ]
    assert train.main(["recipe=distillspec", *given]) == 0
    assert (run / "export" / "transformers-before-1" / "config.json").exists()
    assert (exported / ".draftsmith.json").exists()
    assert "moved to" in capsys.readouterr().out
