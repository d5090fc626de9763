"""FastDraft: its stages, what each is trained on and from where, and the pitfalls of the method."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import train
from data.batches import Batches
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.packing import PackedBatches, RawText, check_separation
from data.prompts import Prompt
from drafters.causal_lm import CausalLMDrafter
from eval.costs import read_per_step
from phases import pipeline
from recipes import distillspec
from recipes.base import Context
from recipes.common import draft_size
from recipes.common.draft_size import SizeSearch, TrialResult, _inner_parameters
from recipes.fastdraft import Config, Recipe
from target.model import Target
from tests.helpers.aligned import align
from tests.helpers.commands import (
    TWO,
    command,
    finish,
    own_words,
    read_jsonl,
    start,
    stored_traces,
    training_stores,
    write_jsonl,
)
from tests.helpers.losses import divergence, listed, ordered
from tests.helpers.objectives import Trained, trained
from tests.helpers.tiny import ARCHITECTURES, EOS, VOCAB_SIZE
from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.losses import ce_hard
from trainer.optimizer import learning_rate

STEPS = 6


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    prompts = [Prompt(f"Question {i}: ", None, "yes.", "test", "", f"c{i}") for i in range(16)]
    plan = GenerationPlan(
        "test", tuple(prompts), (1.0,), max_new_tokens=12, teacher_top_k=8, teacher_samples=16
    )
    folder = tmp_path_factory.mktemp("traces")
    return list(generate_traces(target, plan, folder, batch_size=16, rows_per_shard=16))


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    rows = [{"text": f"Line {i} says {3 * i % 11}" * (1 + i % 2)} for i in range(40)]
    return str(write_jsonl(folder / "raw.jsonl", rows))


def make(target, stage, seed=0, **options) -> Trained:
    options = {"draft_hidden_size": 16} | options
    recipe = Recipe(Config(**options), target)
    torch.manual_seed(seed)
    number = [one.name for one in recipe.stages()].index(stage)
    return trained(recipe, recipe.build([]).eval(), stage=number, new=8)


def context_of(batch) -> Context:
    return Context(batch, None, lambda *_: [], lambda: None)


def loss_of(recipe, batch, step=0):
    if refreshed := recipe.refresh(step, context_of(batch)):
        batch = refreshed
    request = recipe.target_request(batch, step)
    outputs = None
    if request is not None:
        outputs = recipe.target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits
        )
    terms = listed(recipe.loss(batch, outputs, step).terms)
    assert [float(count) for _, count, _ in terms] == ordered(recipe.denominators(batch, step))
    return sum(weight * total / count for total, count, weight in terms)


def packed(target, raw, folder, context=32):
    text = RawText({raw: 1.0}, context)
    return PackedBatches(text.load(target, 10**6, folder), text, 4, 0).at(0)


def stored(traces, teacher=False):
    return Batches(traces, {"target": 1.0}, 8, seed=0, teacher=teacher).at(0)


# --- pre-training -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_documents_train_like_documents_of_their_own(name, tiny_target, raw, tmp_path):
    """Mask, positions and sliding windows included, in every architecture."""
    target = tiny_target(name)
    recipe = make(target, "pretrain")
    batch = packed(target, raw, tmp_path)
    total = count = 0.0
    for ids, documents in zip(batch.input_ids, batch.document_ids, strict=True):
        for document in documents.unique():
            alone = ids[documents == document].unsqueeze(0)
            logits = recipe.drafter.model(input_ids=alone).logits[0, :-1, :VOCAB_SIZE]
            total += F.cross_entropy(logits.double(), alone[0, 1:], reduction="sum").item()
            count += alone.shape[1] - 1
    assert count == batch.num_supervised
    assert loss_of(recipe, batch).item() == pytest.approx(total / count, rel=1e-5)


def test_raw_text_needs_no_word_of_the_target(target, raw, tmp_path):
    batch = packed(target, raw, tmp_path)
    for stage in ("pretrain", "continue"):
        for options in ({}, {"divergence": "fkl", "ce_share": 0.5}):
            recipe = make(target, stage, **options)
            assert recipe.target_request(batch, 0) is None
            assert len(recipe.denominators(batch, 0)) == 1


@pytest.mark.parametrize("shares", [{}, {"a": 0}, {"a": float("inf")}, {"a": 1, "b": 1e-7},
                                    {"a": 1e9, "b": 1}, {"a": True}])  # fmt: skip
def test_shares_that_mean_nothing_are_refused(shares):
    with pytest.raises(UserError, match=r"method\.corpus must name sources with shares > 0"):
        Config(corpus=shares)


def test_a_network_that_does_not_keep_documents_apart_is_refused(target):
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    check_separation(drafter.model, "remedy")
    plain = drafter.model.base_model.forward

    def forward(input_ids, position_ids=None, **options):
        return plain(input_ids, **options)

    drafter.model.base_model.forward = forward
    with pytest.raises(UserError, match=r"see each other: leave .* out of method\.stages"):
        Recipe(Config(draft_hidden_size=16), target, drafter)
    with pytest.raises(UserError, match="see each other: remedy"):
        check_separation(drafter.model, "remedy")


# --- alignment --------------------------------------------------------------------------------


def test_the_default_alignment_is_cross_entropy_on_the_targets_text(target, traces):
    recipe, batch = make(target, "align"), stored(traces)
    assert recipe.target_request(batch, 0) is None
    logits = recipe.drafter.draft_logits(batch.input_ids)
    found = align(batch.input_ids, batch.loss_mask, logits, None)
    expected = ce_hard(found.draft.double(), found.labels).mean().item()
    assert loss_of(recipe, batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["fkl", "tvd"])
@pytest.mark.parametrize("teacher", ["live", "compressed"])
def test_a_share_of_cross_entropy_is_the_papers_mixture(name, teacher, target, traces):
    common = {"divergence": name, "teacher": teacher}
    if name == "tvd" and teacher == "compressed":
        common["approx"] = "bucket"
    batch = stored(traces, teacher == "compressed")
    soft = loss_of(make(target, "align", **common), batch).item()
    hard = loss_of(make(target, "align"), stored(traces)).item()
    mixed = make(target, "align", ce_share=0.25, **common)
    assert loss_of(mixed, batch).item() == pytest.approx(0.75 * soft + 0.25 * hard, rel=1e-5)
    terms = mixed.loss(
        batch, None if teacher == "compressed" else target.outputs(batch.input_ids), 0
    ).terms
    assert {n: t.weight for n, t in terms.items()} == {"divergence": 0.75, "labels": 0.25}


def test_token_level_alignment_is_the_divergence(target, traces):
    batch = stored(traces)
    recipe = make(target, "align", divergence="fkl")
    logits = recipe.drafter.draft_logits(batch.input_ids)
    teacher = target.outputs(batch.input_ids).logits
    found = align(batch.input_ids, batch.loss_mask, logits, teacher, VOCAB_SIZE)
    expected = divergence("fkl", found.draft, found.teacher, found.labels).mean().item()
    assert loss_of(recipe, batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({}, {"divergence": "fkl"}),
        ({}, {"reduction": "sequence"}),
        ({}, {"draft_layers": 2}),
        ({}, {"draft_hidden_size": 24}),
        ({}, {"tie_embeddings": True}),
        ({"divergence": "jsd"}, {"divergence": "jsd:0.2"}),
        ({"divergence": "lk_hybrid"}, {"divergence": "lk_hybrid:1"}),
        ({"divergence": "kl_mix"}, {"divergence": "kl_mix:0.3"}),
        ({"divergence": "fkl"}, {"ce_share": 0.5}),
    ],
    ids=str,
)
def test_every_option_of_the_alignment_changes_its_loss(common, change, target, traces):
    traces = [
        dataclasses.replace(trace, response_ids=trace.response_ids[: 3 + trace.index % 9])
        for trace in traces
    ]
    plain, changed = (
        loss_of(make(target, "align", **options), stored(traces))
        for options in (common, common | change)
    )
    assert abs((plain - changed).item()) > 1e-5


# --- size -------------------------------------------------------------------------------------


def test_the_drafter_is_the_targets_architecture_with_its_tokens_and_no_more(tiny_target):
    """A pad token of its own would shift or widen what acceptance indexes."""
    for name in ("llama", "llama_padded", "gpt2"):
        target = tiny_target(name)
        drafter = make(target, "pretrain").drafter
        assert drafter.model.config.model_type == target.model.config.model_type
        assert drafter.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        assert drafter.model.get_output_embeddings().weight.shape[0] == target.logits_width
        assert drafter.draft_logits(torch.zeros(1, 2, dtype=torch.long)).shape[-1] == VOCAB_SIZE


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_tied_embeddings_count_once(name, tiny_target):
    target = tiny_target(name)
    sizes, inner = {}, {}
    for tie in (None, False, True):
        drafter = make(target, "pretrain", tie_embeddings=tie).drafter
        sizes[tie], inner[tie] = drafter.num_parameters, _inner_parameters(drafter.model)
    matrix = 16 * target.logits_width
    assert sizes[False] - sizes[True] == matrix
    assert sizes[None] == sizes[target.model.config.tie_word_embeddings]
    assert len(set(inner.values())) == 1
    assert inner[True] == sizes[True] - matrix


def searched(target, **options):
    options = {"search_parameters": [600, 6000], "search_layers": [1, 2]} | options
    return SizeSearch(Config(**options), target)


def test_every_number_of_parameters_is_tried_at_every_depth(target):
    shapes = searched(target).shapes
    assert {layers for layers, _ in shapes} == {1, 2}
    assert searched(target, search_layers=[3]).shapes == [(3, 8), (3, 16)]
    for layers in (1, 2):
        widths = [width for depth, width in shapes if depth == layers]
        sizes = {
            width: _inner_parameters(
                CausalLMDrafter.from_target(target, num_layers=layers, hidden_size=width).model
            )
            for width in (8, 16, 24, 32)
        }
        expected = {min(sizes, key=lambda w: abs(sizes[w] - n)) for n in (600, 6000)}
        assert set(widths) == expected


@pytest.mark.parametrize("by", ["mbsu_params", "mbsu", "modelled_speedup"])
def test_the_search_takes_the_best_prediction_and_keeps_it(by, target, tmp_path):
    search = searched(target, search_by=by, search_layers=[1])
    tried = []

    def trial(number, name, drafter):
        tried.append(name)
        return TrialResult(alpha=0.5, tokens_per_round=1 + 0.1 * number)

    search.run(tmp_path, trial, 3, True, lambda: None)
    predictions = [row[by] for row in search.rows]
    assert predictions == sorted(predictions, reverse=True)
    assert len(tried) == len(search.shapes) == len(predictions)
    best = search.rows[0]
    chosen = search.chosen()
    assert chosen.num_parameters == best["parameters"]
    assert chosen.model.config.num_hidden_layers == best["layers"]
    whole = read_per_step(target.model)[1]
    ratio = 3 * read_per_step(chosen.model)[1] / whole
    assert best["mbsu_params"] == pytest.approx(best["tokens_per_round"] / (1 + ratio))
    again = searched(target, search_by=by, search_layers=[1])
    again.run(tmp_path, lambda *_: pytest.fail("tried again"), 3, True, lambda: None)
    assert again.rows == search.rows


def test_the_search_measures_drafters_as_they_are_served(target, tmp_path, monkeypatch):
    seen = []
    real = draft_size.cost_of

    def cost_of(drafter, *given):
        seen.append(any(module.training for module in drafter.modules()))
        return real(drafter, *given)

    def trial(number, name, drafter):
        drafter.train()
        return TrialResult(alpha=0.5, tokens_per_round=2.0)

    monkeypatch.setattr(draft_size, "cost_of", cost_of)
    searched(target, search_layers=[1]).run(tmp_path, trial, 3, True, lambda: None)
    assert seen
    assert not any(seen)


def test_measured_times_of_a_target_in_parts_choose_no_size(target):
    parts = dataclasses.replace(target, sharded=object())
    assert searched(parts, search_by="mbsu").shapes
    with pytest.raises(UserError, match=r"method\.search_by=modelled_speedup .* take mbsu"):
        searched(parts, search_by="modelled_speedup")


# --- stages -----------------------------------------------------------------------------------


def test_stages_are_those_named_and_the_last_is_what_the_report_is_about(target):
    def rows(*names):
        stages = Recipe(Config(stages=list(names)), target).stages()
        return [(stage.name, stage.start, stage.row) for stage in stages]

    assert rows("pretrain", "continue", "align") == [
        ("pretrain", "base", "pretrained"),
        ("continue", "previous", "continued"),
        ("align", "previous", "after"),
    ]
    assert rows("pretrain", "align") == [
        ("pretrain", "base", "pretrained"),
        ("align", "previous", "after"),
    ]
    assert rows("continue") == [("continue", "base", "after")]


def test_the_rate_of_every_stage_is_warmed_up_anew(target):
    config = Config(pretrain_steps=200, pretrain_lr=1e-2, continue_steps=100, continue_lr=5e-3)
    pretrain, again, align_ = Recipe(config, target).stages()
    for stage, lr, steps, warm in ((pretrain, 1e-2, 200, 4), (again, 5e-3, 100, 2)):
        settings = TrainerConfig(**stage.overrides)
        assert settings.max_steps == steps
        assert settings.lr_warmup_steps == warm
        assert learning_rate(0, settings) == pytest.approx(lr / warm)
        assert learning_rate(warm, settings) == pytest.approx(lr)
        assert learning_rate(steps, settings) == pytest.approx(0.1 * lr)
        assert settings.weight_decay == 0.1
    assert align_.overrides == {}
    decayed = Recipe(Config(weight_decay=0.3), target).stages()[0].overrides
    assert TrainerConfig(**decayed).weight_decay == 0.3


def test_the_vetted_setting_trains_on_several_temperatures():
    """On greedy text alone the drafter grows too sharp for T=1."""
    config, _ = pipeline.resolve(["recipe=fastdraft"])
    assert config.data.temperature == [0, 0.6, 0.8, 1]
    assert config.data.prompts == "toy"  # code too: it is forgotten where no prompt asks for it
    assert config.eval.K == 3


def test_the_dry_run_says_how_much_raw_text_is_read(tmp_path, capsys):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": str(i)} for i in range(40)])
    words = ["recipe=fastdraft", "dry_run=true", "method.pretrain_steps=10", "trainer.batch_size=4",
             f"data.prompts={prompts}"]  # fmt: skip
    assert train.main(words) == 0
    out = capsys.readouterr().out
    assert "raw text of stage pretrain: 5120 tokens per process from {'toy:prose': 1.0}" in out
    assert "raw text of stage continue" in out
    assert train.main([*words, "method.stages=[pretrain]"]) == 0
    assert "raw text of stage continue" not in capsys.readouterr().out


# --- whole runs -------------------------------------------------------------------------------


def words_of(folder, target, *given):
    settings = (
        "recipe=fastdraft", "trainer.max_steps=4", "trainer.save_every=2", "trainer.log_every=1",
        "trainer.eval_every=2", "data.max_new_tokens=16", "data.temperature=[0, 1]",
        "eval.temperatures=[0.6]",
    )  # fmt: skip
    own = own_words("fastdraft", folder)
    own = [word for word in own if not word.startswith("data.temperature")]
    steps = {"method.pretrain_steps": STEPS, "method.continue_steps": STEPS}
    own = [word for word in own if word.partition("=")[0] not in steps]
    own += [f"{key}={value}" for key, value in steps.items()]
    words = command(folder, target, *settings)
    words = [word for word in words if not word.startswith("method.")]
    keys = {word.partition("=")[0] for word in given}
    return [w for w in (*words, *own) if w.partition("=")[0] not in keys] + list(given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("fastdraft")
    assert train.main(words_of(folder, tiny_folder("llama"))) == 0
    return folder


def report_of(run):
    return json.loads((run / "report.json").read_text())


def losses_of(run):
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    return {
        stage: [(row["step"], row["loss"], row["lr"]) for row in rows if row["stage"] == stage]
        for stage in dict.fromkeys(row["stage"] for row in rows)
    }


def test_every_stage_is_measured_on_its_own(finished):
    report = report_of(finished / "run")
    offline = {r["drafter"]: r for r in report["results"] if r["measured_by"] == "offline"}
    stages = ["before", "pretrained", "continued", "after"]
    assert set(stages) <= offline.keys()
    assert len({offline[name]["alpha"] for name in stages}) == 4
    for row in (offline[name] for name in stages):
        # acceptance rate, block efficiency, MBSU of the paper: exact where nothing is cut
        rate = row["engine_accepted"] / row["engine_drafted"]
        assert row["engine_tokens_per_round"] == pytest.approx(1 + row["K"] * rate)
        assert row["K"] == 3
        assert row["mbsu_params"] is not None
    pairs = {(c["a"], c["b"]) for c in report["comparisons"] if c["metric"] == "alpha"}
    assert pairs == {
        ("after", "before"), ("pretrained", "before"), ("continued", "pretrained"),
        ("after", "continued"),
    }  # fmt: skip
    markdown = (finished / "run" / "report.md").read_text()
    assert "## By stage" in markdown
    assert "| pretrained | 0." in markdown.partition("## By stage")[2].partition("##")[2]
    reached = report["drafter"]["stages"]
    # raw text is watched by acceptance and trained to its end
    assert [reached[name]["best_step"] for name in ("pretrain", "continue")] == [None, None]
    assert reached["align"]["best_step"] in (0, 2, 4)


def test_the_optimiser_of_a_stage_is_fresh_and_its_rate_begins_anew(finished):
    losses = losses_of(finished / "run")
    assert list(losses) == ["pretrain", "continue", "align"]
    for stage, lr in (("pretrain", 3e-3), ("continue", 1.5e-3)):
        rates = [rate for _, _, rate in losses[stage]]
        assert len(rates) == STEPS
        assert rates[0] == max(rates) == pytest.approx(lr)  # so few steps have no warm-up
        assert rates[-1] < 0.5 * lr
    for number, stage in enumerate(losses):
        folder = finished / "run" / "stages" / f"{number}-{stage}" / "checkpoints"
        state = torch.load(next(folder.glob("step-000004/state.pt")), weights_only=True)
        counts = {int(one["step"]) for one in state["optimizer"]["state"].values()}
        assert counts == {4}


def test_what_the_target_wrote_keeps_its_temperature_and_gets_no_false_end(finished):
    (store,) = training_stores(finished / "cache")
    found = stored_traces(store)
    assert {trace.temperature for trace in found} == {0.0, 1.0}
    cut = [trace for trace in found if trace.finish_reason == "length"]
    assert cut
    assert all(EOS not in trace.response_ids for trace in cut)


def test_the_runs_raw_text_is_part_of_what_it_is_made_of(finished, tiny_folder, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "all")
    made_of = json.loads((finished / "run" / "run.json").read_text())["contents"]
    assert {"raw text of stage pretrain", "raw text of stage continue"} <= made_of.keys()
    words = words_of(finished, tiny_folder("llama"), f"run.dir={tmp_path / 'all' / 'run'}")
    (tmp_path / "all" / "run" / "report.json").unlink()
    raw = finished / "raw.jsonl"
    before = raw.read_text()
    raw.write_text(before.replace("and", "but"))
    try:
        assert train.main(words) == 2
    finally:
        raw.write_text(before)
    assert "begun with another raw text of stage pretrain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "step"),
    [pytest.param("pretrain", 2, marks=pytest.mark.slow), ("continue", 4), ("align", 0)],
)
def test_stopped_anywhere_it_goes_on_with_the_same_rows(
    stage, step, finished, tiny_folder, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    names = ["pretrain", "continue", "align"]
    for number, name in enumerate(names):
        folder = run / "stages" / f"{number}-{name}"
        if names.index(name) > names.index(stage):
            shutil.rmtree(folder)
        elif name == stage:
            (folder / "finished.json").unlink()
            for found in (folder / "checkpoints").glob("step-*"):
                if int(found.name[5:]) > step:
                    shutil.rmtree(found)
    (run / "report.json").unlink()
    rows = [row for row in read_jsonl(run / "metrics.jsonl")
            if names.index(row["stage"]) <= names.index(stage)]  # fmt: skip
    write_jsonl(run / "metrics.jsonl", rows)
    shutil.rmtree(run / "drafter")
    words = words_of(finished, tiny_folder("llama"), f"run.dir={run}", "run.stage=align")
    assert train.main(words) == 0
    assert losses_of(run) == losses_of(finished / "run")


def test_a_stage_alone_is_what_the_whole_run_goes_on_from(finished, tiny_folder, tmp_path):
    words = words_of(finished, tiny_folder("llama"), f"run.dir={tmp_path / 'run'}")
    assert train.main([*words, "run.stage=pretrain"]) == 0
    assert list(losses_of(tmp_path / "run")) == ["pretrain"]
    assert not (tmp_path / "run" / "report.json").exists()
    assert train.main([*words, "run.stage=continue"]) == 0
    losses = losses_of(tmp_path / "run")
    whole = losses_of(finished / "run")
    assert losses == {name: whole[name] for name in ("pretrain", "continue")}


@pytest.mark.slow
def test_a_pretrained_drafter_is_continued_and_aligned(finished, tiny_folder, tmp_path):
    drafter = finished / "run" / "drafter"
    words = words_of(
        finished, tiny_folder("llama"), f"run.dir={tmp_path / 'run'}", f"model.drafter={drafter}",
        "method.stages=[align]", "method.divergence=fkl", "method.teacher=compressed",
        "data.teacher_top_k=4", "data.teacher_samples=4", "eval.temperatures=[1]",
        "method.ce_share=0.5",
    )  # fmt: skip
    assert train.main(words) == 0
    assert list(losses_of(tmp_path / "run")) == ["align"]
    assert "By stage" not in (tmp_path / "run" / "report.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "drafter").config.hidden_size


@pytest.mark.slow
def test_options_of_the_raw_text_change_what_is_learnt(finished, tiny_folder, tmp_path):
    first = [loss for _, loss, _ in losses_of(finished / "run")["pretrain"]]
    for number, word in enumerate(
        ("method.context=24", f"method.corpus={{{finished / 'code.jsonl'}: 1}}",
         "method.pretrain_lr=0.01")
    ):  # fmt: skip
        run = tmp_path / str(number)
        given = (word, f"run.dir={run}", "run.stage=pretrain")
        assert train.main(words_of(finished, tiny_folder("llama"), *given)) == 0
        losses = [loss for _, loss, _ in losses_of(run)["pretrain"]]
        assert losses != pytest.approx(first, rel=1e-6), word


@pytest.mark.slow
def test_two_processes_read_the_rows_of_one(finished, tiny_folder, tmp_path):
    shutil.copytree(finished / "cache" / "traces", tmp_path / "cache" / "traces")
    words = words_of(
        finished, tiny_folder("llama"), f"run.dir={tmp_path / 'run'}", "trainer.batch_size=2",
        f"data.cache_dir={tmp_path / 'cache'}", "run.stage=continue",
    )  # fmt: skip
    code, _, err = finish(start(*TWO, "train.py", *words))
    assert code == 0, err
    together, alone = losses_of(tmp_path / "run"), losses_of(finished / "run")
    for stage in ("pretrain", "continue"):
        found, expected = ([loss for _, loss, _ in x[stage]] for x in (together, alone))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_search_picks_the_shape_that_is_trained(finished, tiny_folder, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(finished / "cache", cache)
    words = words_of(
        finished, tiny_folder("llama"), f"run.dir={tmp_path / 'run'}", f"data.cache_dir={cache}",
        "method.search_parameters=[600, 6000]", "method.search_layers=[1]",
        "method.search_steps=2", "method.draft_hidden_size=null",
    )  # fmt: skip
    assert train.main(words) == 0
    report = report_of(tmp_path / "run")
    found = report["drafter"]["size_search"]
    assert [(row["layers"], row["hidden_size"]) for row in found] in (
        [(1, 8), (1, 32)], [(1, 32), (1, 8)], [(1, 8), (1, 24)], [(1, 24), (1, 8)],
    )  # fmt: skip
    assert found[0]["modelled_speedup"] >= found[1]["modelled_speedup"]
    assert report["drafter"]["parameters"] == found[0]["parameters"]
    (folder,) = (cache / "size_search").iterdir()
    rows = read_jsonl(folder / "metrics.jsonl")
    assert {row["step"] for row in rows if "loss" in row} == {1, 2}


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method.stages=[align, pretrain]", "method.stages must be some of pretrain"),
        ("method.stages=[]", "method.stages"),
        ("method.stages=[continue, align]", "set method.from_scratch=true"),
        ("method.stages=[align]", "method.stages begins with align, which starts from a pre-tr"),
        ("method.corpus={toy:prose: 0}", "ConfigError: method.corpus must name sources"),
        ("method.corpus={}", "ConfigError: method.corpus must name sources"),
        ("method.corpus=toy:prose", "method.corpus must be a mapping"),
        ("method.continue_corpus={toy:cod: 1}", "unknown corpus 'toy:cod'"),
        ("method.corpus={nothing.txt: 1}", "corpus file nothing.txt does not exist"),
        ("method.context=1", "method.context must be >= 2, got 1"),
        ("method.context=257", "ContextError: method.context must be at most the target's context"),
        ("method.pretrain_steps=0", "method.pretrain_steps must be >= 1, got 0"),
        ("method.continue_lr=0", "method.continue_lr must be > 0, got 0.0"),
        ("method.weight_decay=-1", "method.weight_decay must be >= 0"),
        ("method.ce_share=0.5", "method.ce_share mixes cross-entropy with another"),
        ("method.teacher=compressed", "serves another method.divergence than ce_hard"),
        ("method.ce_share=1", "method.ce_share must lie in [0, 1)"),
        ("method.divergence=kl", "method.divergence must be one of fkl["),
        ("method.search_by=size", "method.search_by must be one of mbsu_params, mbsu, modelled"),
        ("method.search_layers=[0]", "method.search_layers must be >= 1"),
        ("method.search_parameters=[600]", "leave out method.draft_hidden_size, or the search"),
        ("method.search_steps=9", "leave it out, or set method.search_parameters"),
        ("method.draft_hidden_size=17", "method.draft_hidden_size"),
    ],
)
def test_bad_settings_end_in_one_line(word, says, finished, tiny_folder, tmp_path, capsys):
    given = (word, f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}")
    assert train.main(words_of(finished, tiny_folder("llama"), *given)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert says in line
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("method.divergence=fkl", "method.teacher=compressed"),
            "set data.teacher_top_k and data.teacher_samples, got 0 and 0",
        ),
        (
            ("method.stages=[align]", "model.drafter={drafter}", "method.search_parameters=[9]",
             "method.draft_hidden_size=null"),
            "method.search_parameters chooses the size of a fresh drafter",
        ),
        (("model.drafter={short}",), "ContextError: method.context must be at most the drafter's"),
        (
            ("model.drafter={short}", "method.stages=[align]", "method.context=8"),
            "ContextError: the drafter sees 16 tokens; an evaluation prompt of",
        ),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(words, says, finished, tiny_folder, tmp_path, capsys):
    names = {
        "drafter": finished / "run" / "drafter",
        "short": tiny_folder("llama", layers=1, width=16, max_position_embeddings=16),
    }
    given = [word.format(**names) for word in words]
    run = f"run.dir={tmp_path / 'run'}"
    assert train.main(words_of(finished, tiny_folder("llama"), run, *given)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert says in line


def test_a_corpus_shorter_than_one_context_is_known_before_anything_is_generated(
    tiny_folder, tmp_path, capsys
):
    short = write_jsonl(tmp_path / "short.jsonl", [{"text": "a few words"}])
    words = words_of(tmp_path, tiny_folder("llama"), f"method.corpus={{{short}: 1}}")
    assert train.main(words) == 2
    says = f"DataError: corpus {short} has 12 tokens, method.context=32 needs at least that many"
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("cache/traces/*/*.parquet"))


def test_the_alignments_checks_are_distillspecs(target):
    assert isinstance(Config(divergence="jsd:0.3").alignment(), distillspec.Config)
    with pytest.raises(UserError, match=r"method\.approx=bucket is for a compressed teacher"):
        Config(divergence="fkl", approx="bucket")
    assert isinstance(target, Target)
