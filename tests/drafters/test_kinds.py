"""The table of kinds: what each row promises, and a kind of its own from training to report."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest

import train
from drafters.kinds import KINDS, Kind, Writer, kind_of, served_by, stored_kind
from drafters.load import load_drafter
from drafters.medusa import MedusaDrafter
from phases import report as report_phase
from recipes import base, medusa
from target.model import Target
from tests.helpers.commands import command
from trainer.errors import RunFault, UserError
from trainer.files import rewrite


class LoneDrafter(MedusaDrafter):
    kind = "lone"


class LoneRecipe(medusa.Recipe):
    kind = "lone"

    def build(self, traces):
        heads = super().build(traces)
        lone = LoneDrafter(heads.settings, self.target)
        lone.load_state_dict(heads.state_dict())
        return lone


@pytest.fixture
def lone_recipe(monkeypatch):
    """recipe=lone, which trains a kind that has no row in the table."""
    load = base.load
    module = types.SimpleNamespace(Config=medusa.Config, Recipe=LoneRecipe)
    monkeypatch.setattr(
        base, "load", lambda name, *preset: (module, []) if name == "lone" else load(name, *preset)
    )


def words(folder, target, recipe):
    given = command(folder, target, f"recipe={recipe}", "method.num_heads=2", "eval.K=2")
    return [word for word in given if not word.startswith("method.draft_hidden_size")]


def test_every_row_names_its_class_and_what_engines_call_it():
    for name, kind in KINDS.items():
        assert (name, kind.name) == (kind.drafter.kind, name)
        assert kind.words.startswith(("A ", "An "))
        assert (kind.method is not None) == bool(kind.writers)
    read = [name for name, kind in KINDS.items() if kind.adopt]
    assert read == ["medusa", "hydra", "eagle", "eagle3", "dflash", "dspark"]


def test_messages_name_what_is_served_and_by_whom():
    served = dict(part.split(": ") for part in served_by().split("; "))
    assert served["medusa"] == "vllm"
    assert served["eagle3"] == "vllm, speculators, sglang, llamacpp"
    assert served["dflash"] == "vllm, transformers, speculators, sglang, llamacpp"
    assert served["dspark"] == "vllm, speculators, sglang, llamacpp"
    assert not {"hydra", "bank"} & served.keys()


def test_eagle_heads_are_stored_under_one_kind():
    for version, name in ((1, "eagle"), (3, "eagle3")):
        about = {"kind": "eagle", "settings": {"version": version}}
        assert stored_kind(about).name == name


def test_a_kind_without_an_engine_is_trained_saved_loaded_and_reported(
    lone_recipe, monkeypatch, tiny_folder, tmp_path, capsys
):
    monkeypatch.setitem(
        KINDS, "lone", Kind(LoneDrafter, "A lone head", LoneDrafter.from_pretrained)
    )
    target = tiny_folder("llama", layers=4)
    assert train.main(words(tmp_path, target, "lone")) == 0
    assert "no engine serves a drafter of kind 'lone'" in capsys.readouterr().out
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    assert report["drafter"]["kind"] == "lone"
    assert report["drafter"]["export"] == {}
    assert any(row["drafter"] == "after" for row in report["results"])
    assert not (run / "export").exists()
    loaded = load_drafter(str(run / "drafter"), Target.load(str(target)))
    assert type(loaded) is LoneDrafter


@pytest.mark.parametrize("given", [[], ["run.stage=train"]])  # a stage alone exports nothing
def test_a_kind_without_a_row_is_refused_before_it_is_trained(
    lone_recipe, tiny_folder, tmp_path, capsys, given
):
    assert train.main([*words(tmp_path, tiny_folder("llama", layers=4), "lone"), *given]) == 2
    assert "kind 'lone' have no row in drafters/kinds.py" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_failed_export_leaves_drafter_and_report_and_ends_with_3(
    monkeypatch, tiny_folder, tmp_path, capsys
):
    def fail(drafter, folder, asked):
        raise RuntimeError("the layout has no room")

    broken = dataclasses.replace(
        KINDS["medusa"], writers={"vllm": Writer(fail, lambda drafter: None)}
    )
    monkeypatch.setitem(KINDS, "medusa", broken)
    given = words(tmp_path, tiny_folder("llama", layers=4), "medusa")
    for _ in range(2):  # the finished run says so again
        assert train.main(given) == 3
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: the drafter was trained and saved, but not exported")
        assert "the layout has no room" in said
    run = tmp_path / "run"
    assert (run / "drafter" / "model.safetensors").exists()
    assert (run / "report.html").exists()
    exported = json.loads((run / "report.json").read_text())["drafter"]["export"]
    assert exported == {"engine": "vllm", "error": "RuntimeError: the layout has no room"}


def test_what_the_runs_own_export_would_refuse_is_refused_before_it_is_trained(
    monkeypatch, tiny_folder, tmp_path, capsys
):
    def refuse(drafter):
        raise UserError("has no place in this layout", key="method.num_heads", value=2)

    writer = Writer(KINDS["medusa"].writers["vllm"].write, refuse)
    broken = dataclasses.replace(KINDS["medusa"], writers={"vllm": writer})
    monkeypatch.setitem(KINDS, "medusa", broken)
    given = words(tmp_path, tiny_folder("llama", layers=4), "medusa")
    assert train.main(given) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "export=vllm: this run's own export would fail: method.num_heads=2: has no" in said
    assert not (tmp_path / "run").exists()
    assert train.main([*given, "run.stage=train"]) == 0  # which exports nothing


@pytest.mark.slow
def test_the_drafter_is_exported_before_it_is_measured(monkeypatch, tiny_folder, tmp_path, capsys):
    given = words(tmp_path, tiny_folder("llama", layers=4), "medusa")
    measure = report_phase.measure

    def fail(*arguments):
        raise RunFault("the measurement was cut short")

    monkeypatch.setattr(report_phase, "measure", fail)
    assert train.main(given) == 3
    run, card = tmp_path / "run", tmp_path / "run" / "export" / "vllm" / "README.md"
    assert (run / "drafter" / "drafter.json").exists()
    assert "Not measured." in card.read_text()
    monkeypatch.setattr(report_phase, "measure", measure)
    assert train.main(given) == 0
    assert "tokens per round" in card.read_text()
    assert not list(run.glob("export/*-before-*"))  # the folder counts as unchanged
    rewrite(card.parent, {"README.md": "by hand"})


def test_a_drafter_that_no_row_describes_is_a_users_line():
    with pytest.raises(UserError, match="have no row in"):
        kind_of(types.SimpleNamespace(kind="other"))
