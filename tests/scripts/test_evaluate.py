"""Measuring a drafter by itself: one of a finished run, one of any other folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import train
from drafters.eagle3 import Eagle3Settings
from drafters.export.card import Export
from drafters.kinds import kind_of
from eval.config import EvalConfig
from eval.report.rows import draft_shape
from eval.report.schema import read_report
from eval.report.terminal import summary
from eval.row import row_with
from scripts import evaluate
from tests.helpers.commands import command, only, read_jsonl
from tests.helpers.eagle import build_eagle

BASELINES = {"plain", "untrained", "prompt_lookup", "target"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("finished")
    words = command(folder, tiny_folder("llama"), "eval.temperatures=[0, 1]")
    assert train.main(words) == 0
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


def test_a_drafter_that_sees_less_than_the_prompts_is_refused(tmp_path, tiny_folder, capsys):
    short = tiny_folder("llama", layers=1, width=16, max_position_embeddings=16)
    words = command(tmp_path, tiny_folder("llama"), f"eval.drafter={short}")
    words = [word for word in words if word.startswith(("model.target", "eval.", "data.cache"))]
    assert evaluate.main([*words, f"script.out={tmp_path / 'out'}"]) == 2
    assert "error: ContextError: the drafter sees 16 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["eval.K=3", "eval.drafter=", "eval.drafter=null"])
def test_a_drafter_must_be_named(word, capsys):
    assert evaluate.main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: eval.drafter must name a drafter: a folder, a Hub id or ")
    assert error.endswith(", got nothing\n")


def test_a_folder_at_the_root_is_a_drafter_like_any_other():
    assert evaluate.resolve(["eval.drafter=/drafter"]).eval.drafter == "/drafter"


@pytest.mark.slow
def test_a_drafter_of_a_run_brings_its_configuration(tmp_path, finished, capsys):
    name = str(finished / "run" / "drafter")
    report = measured(tmp_path, f"eval.drafter={name}")
    out = capsys.readouterr().out
    assert out.strip().endswith(f"report: {tmp_path / 'out' / 'report.html'}")
    assert summary(read_report(tmp_path / "out" / "report.json")) in out
    assert {r["drafter"] for r in report["results"]} == {"drafter", *BASELINES}
    trained = json.loads((finished / "run" / "report.json").read_text())
    assert report["target"] == trained["target"]
    for temperature in (0.0, 1.0):
        for measured_by in ("offline", "decoding"):
            ours = row(report, "drafter", temperature, measured_by)
            theirs = row(trained, "after", temperature, measured_by)
            for key in COUNTED:
                assert ours[key] == pytest.approx(theirs[key]), key
    rounds = read_jsonl(tmp_path / "out" / "rounds.jsonl")
    assert len(rounds) == len(read_jsonl(finished / "run" / "rounds.jsonl"))


def test_a_link_to_a_drafter_of_a_run_brings_it_too(tmp_path, finished, monkeypatch):
    drafter = finished / "run" / "drafter"
    (tmp_path / "best").symlink_to(drafter)
    named = evaluate.resolve([f"eval.drafter={drafter}"])
    linked = evaluate.resolve([f"eval.drafter={tmp_path / 'best'}"])
    monkeypatch.chdir(drafter)
    for one in (linked, evaluate.resolve(["eval.drafter=."])):
        assert one.recipe == named.recipe != "evaluate"
        assert one.data == named.data


def test_an_export_of_a_run_brings_it_too_and_a_folder_called_export_nothing(tmp_path, finished):
    run = finished / "run"
    named = evaluate.resolve([f"eval.drafter={run / 'drafter'}"])
    exported = evaluate.resolve([f"eval.drafter={run / 'export' / 'transformers'}"])
    assert (exported.recipe, exported.data, exported.model) == (
        named.recipe, named.data, named.model
    )  # fmt: skip
    (tmp_path / "export" / "mine").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("somebody: else\n")
    mine = evaluate.resolve([f"eval.drafter={tmp_path / 'export' / 'mine'}"])
    assert mine.recipe == "evaluate"


def test_exported_heads_are_measured_on_the_target_that_was_trained_with_them(tmp_path, finished):
    """Medusa-2's: a target lies beside them."""
    run, heads = tmp_path / "run", tmp_path / "run" / "export" / "vllm" / "drafter"
    shutil.copytree(finished / "run", run, ignore=shutil.ignore_patterns("stages"))
    heads.mkdir(parents=True)
    found = evaluate.resolve([f"eval.drafter={heads}"])
    assert found.recipe == "distillspec"
    assert found.model.target == str(heads.parent / "target")
    assert evaluate.resolve([f"eval.drafter={heads}", "model.target=other"]).model.target == "other"


def test_words_of_the_command_line_go_before_the_runs_configuration(tmp_path, finished):
    name = str(finished / "run" / "drafter")
    report = measured(tmp_path, f"eval.drafter={name}", "eval.K=2", "eval.temperatures=0")
    assert {r["temperature"] for r in report["results"]} == {0.0}
    assert {r["K"] for r in report["results"] if r["drafter"] != "plain"} == {2}
    assert row(report, "target", 0.0)["tokens_per_round"] > 2
    assert len(row(report, "drafter", 0.0)["alpha_pos"]) <= 2


def test_the_exported_drafter_measures_the_same(tmp_path, finished, tiny_folder):
    name = str(finished / "run" / "export" / "transformers")
    words = only(command(finished, tiny_folder("llama")), *evaluate.READS)
    report = measured(tmp_path, f"eval.drafter={name}", *words)
    trained = json.loads((finished / "run" / "report.json").read_text())
    for key in COUNTED:
        ours, theirs = row(report, "transformers", 0.0)[key], row(trained, "after", 0.0)[key]
        assert ours == pytest.approx(theirs), key


def test_a_drafter_in_a_folder_called_target_keeps_a_row_of_its_own(tmp_path, tiny_folder):
    name = tmp_path / "target"
    shutil.copytree(tiny_folder("gpt2", layers=1, width=16), name)
    words = only(command(tmp_path, tiny_folder("llama")), *evaluate.READS)
    report = measured(tmp_path, f"eval.drafter={name}", *words)
    assert row(report, "./target", 0.0)["alpha"] < row(report, "target", 0.0)["alpha"] == 1


def test_a_published_acceptance_head_ends_the_drafts(tmp_path, finished):
    name, published = str(finished / "run" / "drafter"), tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text('{"hidden_size": 16, "num_layers": 0}')
    short = {"model.0.weight": torch.zeros(2, 16), "model.0.bias": torch.tensor([5.0, -5.0])}
    save_file(short, published / "model.safetensors")
    words = [f"eval.drafter={name}", f"eval.acceptance_head={published}", "eval.temperatures=0"]
    measured(tmp_path, *words, "eval.policy=head:0.5")
    rounds = read_jsonl(tmp_path / "out" / "rounds.jsonl")
    drafted = [one["submitted"] for one in rounds]
    assert set(drafted) <= {1, 2}  # 1 before the end of the answer
    assert drafted.count(2) > 5


def test_a_training_free_drafter_is_measured_by_name(tmp_path, tiny_folder, capsys):
    words = only(command(tmp_path, tiny_folder("llama")), *evaluate.READS)
    report = measured(tmp_path, "eval.drafter=lookup:2", *words)
    roles = {r["drafter"]: r["role"] for r in report["results"]}
    assert roles == {
        "plain": "plain", "lookup:2": "measured", "prompt_lookup": "baseline", "target": "target",
    }  # fmt: skip
    assert report["drafter"] == {"start": "lookup:2", "kind": "lookup", "parameters": 0}
    assert row(report, "lookup:2", 0.0, "decoding")["identical_to_plain"] == 1
    assert "the trained drafter" not in capsys.readouterr().out
    longer = row(report, "prompt_lookup", 0.0)["engine_drafts"]
    assert row(report, "lookup:2", 0.0)["engine_drafts"] >= longer > 0


def test_baselines_are_those_that_are_named(tmp_path, tiny_folder):
    words = only(command(tmp_path, tiny_folder("llama")), *evaluate.READS)
    words += ["eval.drafter=lookup:3"]
    report = measured(tmp_path, *words, "eval.baselines=[lookup:1, lookup:3, 'lookup,max_ngram=4']")
    roles = {r["drafter"]: r["role"] for r in report["results"]}
    assert roles == {
        "plain": "plain", "lookup:3": "measured", "lookup:1": "baseline",
        "lookup,max_ngram=4": "baseline", "target": "target",
    }  # fmt: skip
    report = measured(tmp_path, *words, "eval.baselines=[]")
    assert {r["drafter"] for r in report["results"]} == {"plain", "lookup:3", "target"}


FROZEN = "tests/fixtures/frozen"


@pytest.fixture
def earlier(tmp_path):
    """The run folder of an EAGLE head, and words that measure it."""
    for name in ("cache", "eagle"):
        shutil.copytree(f"{FROZEN}/{name}", tmp_path / name)
    drafter = tmp_path / "eagle" / "drafter"
    return drafter.parent, [f"eval.drafter={drafter}", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.mark.slow
def test_a_static_tree_has_drawn_children_and_their_exact_verifier_at_temperatures_above_0(
    tmp_path, earlier
):
    _, words = earlier
    report = measured(tmp_path, *words, "eval.tree=eagle", "eval.K=5")
    trees = [r for r in report["results"] if r.get("tree")]
    found = {(r["temperature"], r["verifier"], r["tree_children"], r["lossless"]) for r in trees}
    assert found == {(0.0, "token", "top", True), (1.0, "multi_round", "sampled", True)}
    assert compared_trees(report) == {
        (0.0, trees[0]["tree"]), (1.0, trees[0]["tree"] + ", sampled children")
    }  # fmt: skip


def compared_trees(report):
    """Temperature and name of each tree that is compared with its drafter's chain."""
    pairs = [(c, c["a"].partition(", ")) for c in report["comparisons"]]
    return {(c["temperature"], tree) for c, (name, _, tree) in pairs if name == c["b"]}


@pytest.mark.slow
def test_each_of_several_trees_has_its_rows(tmp_path, earlier):
    """One that differs in its drawn children alone, only where some are drawn."""
    _, words = earlier
    trees = "eval.tree=[dynamic:6:3:3, eagle, 'eagle,siblings=top']"
    report = measured(tmp_path, *words, trees, "eval.K=5")
    dynamic, eagle = "dynamic, 6 nodes, depth 3, top 3", "eagle, 25 nodes, depth 5"
    expected = {
        (0.0, dynamic), (1.0, dynamic), (0.0, eagle), (1.0, eagle),
        (1.0, eagle + ", sampled children"),
    }  # fmt: skip
    rows = [r for r in report["results"] if r.get("tree") and r["measured_by"] == "decoding"]
    assert len(rows) == len(expected)
    assert {(r["temperature"], draft_shape(row_with(**r))) for r in rows} == expected
    assert compared_trees(report) == expected
    rounds = read_jsonl(tmp_path / "out" / "rounds.jsonl")
    assert {(r["temperature"], r["tree"]) for r in rounds if "tree" in r} == expected
    alone = measured(tmp_path / "alone", *words, "eval.tree=dynamic:6:3:3", "eval.K=5")
    (once,) = [r for r in alone["results"] if r.get("tree") and r["measured_by"] == "decoding"
               and r["temperature"] == 1]  # fmt: skip
    (beside,) = [r for r in rows if r["tree"] == dynamic and r["temperature"] == 1]
    for name in ("tokens_per_round", "num_rounds", "engine_accepted_per_position"):
        assert once[name] == beside[name], name


@pytest.mark.parametrize("folder", ["drafter", "export/vllm"])
def test_drafts_deeper_than_a_head_was_trained_for_are_warned_of(
    folder, tmp_path, tiny_target, capsys
):
    """Also where its export is measured, which does not say."""
    target = tiny_target("llama", layers=4)
    head = build_eagle(target, Eagle3Settings([0, 1, 2], target.hidden_size))
    head.trained_depth = 3
    head.save_pretrained(tmp_path / "drafter")
    kind_of(head).writers["vllm"](head, tmp_path / "export" / "vllm", Export("", "x", 3))
    deep = {"K": 2, "tree": ["dynamic:25:5:8"]}
    for words, warned in (
        ({"K": 3}, ""), ({"K": 5}, "eval.K=5 drafts 5 tokens"), (deep, "eval.tree=dynamic:25:5:8"),
    ):  # fmt: skip
        evaluate.drafter_of(EvalConfig(drafter=str(tmp_path / folder), **words), target)
        said = capsys.readouterr().out
        assert ("warning: " in said) == bool(warned)
        assert warned in said
    assert "draft at most 3 deep" in said


def test_any_folder_of_transformers_is_measured(tmp_path, tiny_folder):
    name = str(tiny_folder("gpt2", layers=1, width=16))
    given = command(tmp_path, tiny_folder("llama"), "eval.temperatures=[0, 1]")
    report = measured(tmp_path, f"eval.drafter={name}", *only(given, *evaluate.READS))
    assert row(report, "gpt2", 1.0)["alpha"] > 0
    decoded = row(report, "gpt2", 0.0, "decoding")
    assert decoded["identical_to_plain"] == 1
    assert report["drafter"]["start"] == "gpt2"


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
