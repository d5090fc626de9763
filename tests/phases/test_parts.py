"""A run whose target has no layers: its losses and its report are those of a run that loads the
whole target; and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from data.traces import TraceStore
from eval.report.schema import read_report
from phases.check import spares_layers
from recipes import base
from scripts import evaluate
from tests.engines.states_server import LAYERS, serving
from tests.helpers.commands import command, own_words, read_jsonl, report_stores, training_stores
from tests.helpers.servers import played, scoring
from tests.helpers.tiny import save_tiny
from tests.target.test_parts import split
from trainer.config import ModelConfig

HEAD = ("recipe=eagle3", "method.layers=[0,1]", "trainer.eval_every=1", "model.parts=head")
WITH = [
    ("recipe=medusa",),
    ("recipe=hydra",),
    ("recipe=eagle",),
    ("recipe=eagle3", "method.layers=[0,1]", "trainer.pack_tokens=64"),
    ("recipe=dspark", "method.layers=[0,1]"),
    ("recipe=distillspec", "method.draft_hidden_size=16"),
    ("recipe=distillspec", "method.draft_hidden_size=16", "data.features=live",
     "method.data_mix={draft: 0.5, target: 0.5}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def states(tiny_target, tmp_path_factory):
    """A server of states of the whole target."""
    with serving(tiny_target("llama", layers=3), tmp_path_factory.mktemp("x") / "y") as server:
        yield server


def run(folder: Path, target: Path, name: str, *given: str) -> tuple[int, Path]:
    words = command(folder, target, f"run.dir={folder / name}", "trainer.log_every=1", *given)
    words = [w for w in words if not w.startswith("method.draft_") or w in given]
    return train.main(words), folder / name


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]


def replayed(folder: Path):
    return {
        (row.drafter, row.temperature, row.tree): row
        for row in read_report(folder / "report.json")["results"]
        if row.measured_by == "offline"
    }


def assert_the_same(parts: Path, whole: Path, rel: float) -> None:
    assert losses(parts) == pytest.approx(losses(whole), rel=rel)
    ours, theirs = replayed(parts), replayed(whole)
    assert {key for key in theirs if key[0] != "target"} == {*ours}
    for key, row in ours.items():
        for name in ("tokens_per_round", "alpha", "mbsu_params"):
            own, other = getattr(row, name), getattr(theirs[key], name)
            assert own == other or own == pytest.approx(other, rel=rel)


def test_losses_and_report_are_those_of_the_whole_target(tmp_path, tiny_folder, states, capsys):
    target = tiny_folder("llama", layers=3)
    given = (f"data.features_engine={states.url}", "eval.temperatures=[0,1]",
             "eval.tree=[calibrated:4,dynamic:4:2]")  # fmt: skip
    assert run(tmp_path, target, "whole", *HEAD, *given, "model.parts=all")[0] == 0
    capsys.readouterr()
    assert run(tmp_path, target, "parts", *HEAD, *given)[0] == 0
    said = capsys.readouterr().out
    assert "model.parts=head decodes nothing" in said
    assert "no row of calibrated:4, 4 nodes, depth 3 at T=1" in said
    assert_the_same(tmp_path / "parts", tmp_path / "whole", 1e-4)
    rows = read_report(tmp_path / "parts" / "report.json")["results"]
    assert {row.measured_by for row in rows if row.role != "plain"} == {"offline"}
    assert all(row.speedup is None and row.plain_tokens_per_s is None for row in rows)
    assert all("nothing is timed" in (row.cost_source or "") for row in rows if row.role != "plain")
    assert (tmp_path / "parts" / "export" / "vllm" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("given", WITH, ids=" ".join)
def test_other_recipes_train_the_same(tmp_path, tiny_folder, states, given):
    target = tiny_folder("llama", layers=3)
    cached = "data.features=cached", "data.features_dtype=fp32"
    given = [*(w for w in cached if w.partition("=")[0] not in str(given)), *given]
    words = [*given, f"data.features_engine={states.url}"]
    states.layers = LAYERS if "method.layers=[0,1]" in given else ("final_norm",)
    try:
        assert run(tmp_path, target, "whole", *words)[0] == 0
        assert run(tmp_path, target, "parts", *words, "model.parts=head")[0] == 0
    finally:
        states.layers = LAYERS
    assert_the_same(tmp_path / "parts", tmp_path / "whole", 1e-4)


def traces_in(cache: Path):
    folders = training_stores(cache) + report_stores(cache)
    return [trace for one in folders for trace in TraceStore.open(one, None, create=False).load()]


@pytest.fixture
def text(tmp_path, tiny_folder, tiny_target):
    """A server of the whole target's text, which was asked for the same prompts before."""
    assert run(tmp_path, tiny_folder("llama", layers=3), "first", *HEAD, "model.parts=all")[0] == 0
    known = {tuple(trace.prompt_ids): trace for trace in traces_in(tmp_path / "cache")}
    with played(known) as server:
        server.score = scoring(tiny_target("llama", layers=3).model)
        yield server


def test_a_checkpoint_whose_layers_are_deleted_trains(tmp_path, tiny_folder, states, text, capsys):
    folder = split(shutil.copytree(tiny_folder("llama", layers=3), tmp_path / "copy"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    served = f"data.features_engine={states.url}", "data.engine=openai"
    served += f"data.servers=[{text.url}]", "method.layer_from_target=false"
    assert run(tmp_path, folder, "parts", *HEAD, *served)[0] == 0, capsys.readouterr()
    whole = tiny_folder("llama", layers=3)
    assert run(tmp_path, whole, "whole", *HEAD, *served, "model.parts=all")[0] == 0
    assert "model.parts=head would do for this run" in capsys.readouterr().out
    assert_the_same(tmp_path / "parts", tmp_path / "whole", 1e-4)


def test_stored_states_are_enough_and_other_states_are_refused(
    tmp_path, tiny_folder, tiny_target, states, capsys
):
    """Once the states of all texts are stored no server is asked."""
    target, given = tiny_folder("llama", layers=3), (*HEAD, "data.features=cached")
    assert run(tmp_path, target, "text", *given, "model.parts=all", "run.stage=train")[0] == 0
    shutil.rmtree(tmp_path / "cache" / "features")
    capsys.readouterr()
    assert run(tmp_path, target, "none", *given)[0] == 2
    assert "data.engine=hf: is left to a target without layers" in capsys.readouterr().err
    assert run(tmp_path, target, "report", *given, "model.parts=all")[0] == 0
    shutil.rmtree(tmp_path / "cache" / "features")
    capsys.readouterr()
    assert run(tmp_path, target, "none", *given)[0] == 2
    assert "of the held-out states of this text" in capsys.readouterr().err
    other = tiny_target("llama", layers=3, seed=1)
    with serving(other, tmp_path / "other") as server:
        foreign = f"data.features_engine={server.url}"
        assert run(tmp_path, target, "none", *given, foreign)[0] == 2
        said = capsys.readouterr().err
        assert "are not those that the answers were written from (" in said
        assert "of the greedy tokens differ" in said or "nats beyond the entropy" in said
    assert not (tmp_path / "none" / "stages").exists()
    engine = f"data.features_engine={states.url}"
    assert run(tmp_path, target, "served", *given, engine)[0] == 0
    asked = len(states.asked)
    assert run(tmp_path, target, "stored", *given, engine, "run.seed=0")[0] == 0
    assert len(states.asked) == asked
    assert losses(tmp_path / "stored") == losses(tmp_path / "served")


def test_a_server_of_other_layers_is_refused(tmp_path, tiny_folder, states, capsys):
    target = tiny_folder("llama", layers=3)
    given = (*HEAD, f"data.features_engine={states.url}")
    assert run(tmp_path, target, "text", *given, "model.parts=all", "run.stage=train")[0] == 0
    assert run(tmp_path, target, "report", *given, "model.parts=all")[0] == 0
    states.faults += ["other layers"] * 9
    try:
        assert run(tmp_path, target, "parts", *given)[0] == 3
    finally:
        states.faults.clear()
    said = capsys.readouterr().err
    assert "states of the layers [1, 2, 3, 4], expected [1, 2, 3] as vLLM counts them" in said


WRONG = [
    (("recipe=medusa2",), "model.parts must be all for recipe=medusa2: it trains the target too"),
    (("recipe=osd",), "model.parts must be all for recipe=osd: it serves the requests"),
    (("recipe=gto", "trainer.lr_warmup_steps=0"), "model.parts must be all for recipe=gto"),
    (("recipe=specdecpp",), "model.parts must be all for recipe=specdecpp"),
    (("data.features=live", "data.features_engine=hf"),
     "data.features_engine=hf: is left to a target without layers; name vllm or the addresses"),
    (("model.device_map=auto",), "model.device_map must be left out with model.parts=head"),
    (("model.quantization={quant_method: x}",), "model.quantization must be left out with"),
    (("data.teacher_top_k=4",), "data.teacher_top_k must be 0 with model.parts=head"),
    (("model.target=x.gguf",), "model.parts must be all for model.target=x.gguf"),
    (("model.parts=heads",), "model.parts must be one of all, head"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_needs_layers_is_refused_before_a_model_is_loaded(
    words, says, tmp_path, tiny_folder, monkeypatch, capsys
):
    monkeypatch.setattr("phases.run.load_target", None)
    given = ["model.parts=head", "data.features=cached"]
    given = [w for w in given if w.partition("=")[0] not in [x.partition("=")[0] for x in words]]
    recipe = [] if any(w.startswith("recipe=") for w in words) else ["recipe=medusa"]
    assert run(tmp_path, tiny_folder("llama"), "run", *recipe, *given, *words)[0] == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        ("distillspec", ["method.data_mix={draft: 1}"], "data.features must be live with model.p"),
        ("fastdraft", ["method.search_parameters=5000"], "model.parts must be all with method.sea"),
    ],
)
def test_what_only_the_recipe_knows_is_refused_with_it(
    tmp_path, tiny_folder, recipe, given, says, capsys
):
    words = [f"recipe={recipe}", "data.features=cached", "model.parts=head", *given]
    words += own_words(recipe, tmp_path) or ["method.draft_hidden_size=16"]
    if recipe == "fastdraft":  # the size is searched for
        words.remove("method.draft_hidden_size=16")
    assert run(tmp_path, tiny_folder("llama"), "run", *words)[0] == 2
    assert says in capsys.readouterr().err


def test_a_measured_drafter_has_its_whole_target(tmp_path, tiny_folder, capsys):
    words = f"model.target={tiny_folder('llama')}", "eval.drafter=lookup:3", "model.parts=head"
    assert evaluate.main([*words]) == 2
    assert "model.parts must be all: a drafter is measured by decoding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "model", "data", "wanted"),
    [
        ("eagle3", {}, {}, True),
        ("osd", {}, {}, False),
        ("eagle3", {}, {"engine": "hf"}, False),
        ("eagle3", {}, {"features_engine": "hf"}, False),
        ("eagle3", {"parts": "head"}, {}, False),
        ("eagle3", {"device_map": "fsdp2"}, {}, False),
    ],
)
def test_a_run_that_could_do_without_layers_is_known(recipe, model, data, wanted):
    served = {"engine": "openai", "features_engine": "http://a:1", "teacher_top_k": 0}
    config = SimpleNamespace(
        model=ModelConfig(**model), data=SimpleNamespace(**served | data), method=None
    )
    assert spares_layers(config, base.load(recipe)[0].Recipe) == wanted  # type: ignore[arg-type]


def test_a_single_file_is_read_in_parts_too(tmp_path, states, capsys):
    """In the dtype that is asked for, and by a dry run, which says what it saves."""
    folder = save_tiny(tmp_path / "tiny", "llama", layers=3)
    given = ("recipe=medusa", "data.features=cached", "model.parts=head", "dry_run=true")
    assert run(tmp_path, folder, "dry", *given)[0] == 0
    assert "of them without its layers on each process" in capsys.readouterr().out
