"""Medusa-2: what its loss is, what it trains, and that every row knows its own target."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

import train
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from data.traces import TraceStore
from drafters.load import load_drafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.medusa2 import Medusa2Drafter
from drafters.round import Budget
from recipes.medusa2 import RAMPS, Config, Recipe
from scripts import evaluate, export
from target.adapted import DROPOUT
from target.model import Target
from tests.helpers.commands import command, read_jsonl
from tests.helpers.heads import (
    assert_branches_follow_the_unroll,
    assert_drafts_kept_tokens_only,
    assert_greedy_text_is_the_targets,
    assert_rounds_follow_the_unroll,
)
from tests.helpers.losses import divergence, listed, ordered
from tests.helpers.objectives import trained
from tests.helpers.tiny import VOCAB_SIZE
from tests.recipes.test_heads import batch_of, make, outputs_of, terms_of
from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.optimizer import make_optimizer
from trainer.shift import supervised

STEPS = 10
JOINT = -1  # the last stage


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    prompts = [Prompt(f"Question {i}: ", None, "yes.", "test", "", f"c{i}") for i in range(16)]
    plan = GenerationPlan("test", tuple(prompts), (1.0,), max_new_tokens=12)
    folder = tmp_path_factory.mktemp("traces")
    made = [*generate_traces(target, plan, folder, batch_size=16, rows_per_shard=16)]
    for trace in made:
        trace.response_ids = trace.response_ids[: 3 + trace.index % 9]
    return made


def joint(target, traces, moved=True, dropout=0.0, **options):
    """The recipe in its second stage. `moved`: with an adapter that does something; `dropout`: of
    the adapter, by default none, as where it serves."""
    heads = make("medusa2", target, traces, **options)
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("target.adapted.DROPOUT", dropout)
        recipe = trained(heads.recipe, heads.drafter, stage=JOINT, max_steps=STEPS)
    recipe.drafter.train()
    if moved:
        with torch.no_grad():
            for parameter in recipe.drafter.adapter.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return recipe


def loss_of(recipe, batch, step=STEPS - 1):
    torch.manual_seed(2)
    terms = listed(recipe.loss(batch, outputs_of(recipe, batch), step).terms)
    assert [float(n) for _, n, _ in terms] == ordered(recipe.denominators(batch, step))
    return sum(weight * total / max(float(n), 1) for total, n, weight in terms)


# --- the loss ---------------------------------------------------------------------------------


def test_the_target_is_held_to_itself_from_a_loss_and_a_gradient_of_zero(target, traces):
    recipe, batch = joint(target, traces, moved=False, dropout=DROPOUT), batch_of(traces)
    (total, count, weight), *heads = terms_of(recipe, batch)
    assert (float(count), weight) == (batch.num_supervised, 1.0)
    assert total.item() == pytest.approx(0, abs=1e-5)
    total.backward(retain_graph=True)
    for parameter in recipe.drafter.adapter.parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), atol=1e-5, rtol=0)
    assert all(h.item() > 0.1 for h, _, _ in heads)


@pytest.mark.parametrize("lm_loss", ["distill", "ce"])
def test_the_loss_is_that_of_the_adapted_targets_law(lm_loss, target, traces):
    """Term by term against the plain divergences of full logits, at the positions of decoding."""
    recipe, batch = joint(target, traces, lm_loss=lm_loss, divergence="jsd"), batch_of(traces)
    recipe.drafter.eval()
    served = recipe.drafter.served_target()
    original = target.outputs(batch.input_ids).logits[..., :VOCAB_SIZE]
    outputs = served.outputs(batch.input_ids, layers=("final_norm",))
    adapted = outputs.logits[..., :VOCAB_SIZE]
    (lm, _, _), *heads = terms_of(recipe, batch)
    where = supervised(batch.loss_mask)
    labels = batch.input_ids[:, 1:][where]
    mine, other = adapted[:, :-1][where], original[:, :-1][where]
    name, teacher = ("fkl", other) if lm_loss == "distill" else ("ce_hard", None)
    expected = divergence(name, mine, teacher, labels).sum()
    torch.testing.assert_close(lm, expected, rtol=1e-4, atol=1e-4)
    assert len(heads) == recipe.depth
    ramp = math.sin(math.pi / 2 / STEPS)
    for depth, (total, _, weight) in enumerate(heads, start=1):
        where = supervised(batch.loss_mask, depth)
        drafted = recipe.drafter.draft_logits(batch.input_ids, outputs, depth)[:, :-1][where]
        expected = divergence("jsd", drafted, adapted[:, :-1][where]).sum()
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
        assert weight == pytest.approx(recipe.config.heads_weight * ramp * 0.8**depth)


@pytest.mark.parametrize("ramp", RAMPS)
def test_the_heads_come_in_along_the_ramp(ramp, target, traces):
    recipe, batch = joint(target, traces, heads_ramp=ramp, heads_weight=0.5), batch_of(traces)
    outputs = outputs_of(recipe, batch)
    for step in (0, 3, 5, STEPS - 1):
        (_, _, held), *heads = listed(recipe.loss(batch, outputs, step).terms)
        share = (step + 1) / STEPS
        known = {"constant": 1.0, "linear": share, "sine": math.sin(math.pi / 2 * share)}
        assert held == 1
        found = [weight for _, _, weight in heads]
        wanted = [0.5 * known[ramp] * 0.8**k for k in range(1, recipe.depth + 1)]
        assert found == pytest.approx(wanted)


def test_the_published_weights_of_the_heads_go_with_the_loss_of_the_target():
    assert Config().heads_weight == 0.01
    assert Config().depth_decay == 0.8
    assert Config(lm_loss="ce").heads_weight == 0.2
    assert Config(lm_loss="ce", heads_weight=0.3).heads_weight == 0.3


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({}, {"lm_loss": "ce"}),
        ({}, {"heads_weight": 0.5}),
        ({}, {"heads_ramp": "linear"}),
        ({}, {"heads_ramp": "constant"}),
        ({}, {"lora_rank": 4}),
        ({}, {"dropout": DROPOUT}),
        ({}, {"lora_lm_head": True}),
        ({}, {"depth_decay": 0.5}),
        ({}, {"divergence": "jsd"}),
        ({}, {"own_head": False}),
        ({}, {"draft_vocab_size": 30}),
        ({"own_head": False}, {"lora_lm_head": True}),
        ({}, {"feature_weight": 1.0}),
        ({}, {"reduction": "sequence"}),
    ],
)
def test_every_option_changes_the_loss(common, change, target, traces):
    batch = batch_of(traces)
    strong = {"heads_weight": 1.0}
    before = joint(target, traces, **strong | common)
    after = joint(target, traces, **strong | common | change)
    values = [loss_of(recipe, batch, step=4).item() for recipe in (before, after)]
    assert abs(values[0] - values[1]) > 1e-5


def test_the_first_stage_is_recipe_medusa(target, traces):
    batch = batch_of(traces)
    plain = make("medusa", target, traces)
    recipe = make("medusa2", target, traces)
    assert trained(recipe.recipe, recipe.drafter, stage=0).drafter is recipe.drafter
    for (a, n, w), (b, m, v) in zip(terms_of(plain, batch), terms_of(recipe, batch), strict=True):
        assert torch.equal(a, b)
        assert (float(n), w) == (float(m), v)


# --- what is trained --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lora_lm_head": True, "own_head": False}])
def test_adapter_and_heads_move_and_the_targets_weights_do_not(options, target, traces):
    recipe, batch = (
        joint(target, traces, moved=False, heads_weight=1.0, **options),
        batch_of(traces),
    )
    weights = {n: p.clone() for n, p in target.model.named_parameters()}
    logits = target.outputs(batch.input_ids).logits
    before = {n: p.clone() for n, p in recipe.drafter.named_parameters()}
    settings = TrainerConfig(lr=1e-2)
    optimizer = make_optimizer(recipe.drafter, settings, recipe.stage.lr_multiplier)
    rates = {
        id(p): group["lr_multiplier"] for group in optimizer.param_groups for p in group["params"]
    }
    for name, parameter in recipe.drafter.named_parameters():
        assert rates[id(parameter)] == (1 if name.startswith("adapter.") else 4)
    losses = []
    for step in range(STEPS):
        loss = loss_of(recipe, batch, STEPS - 1)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        # at first the gradient of A is zero, for B is
        missing = [n for n, p in recipe.drafter.named_parameters() if p.grad is None]
        assert not missing, step
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in recipe.drafter.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None
    assert torch.equal(target.outputs(batch.input_ids).logits, logits)


def test_a_checkpoint_holds_heads_and_adapter_only(target, traces):
    drafter = joint(target, traces).drafter
    heads = sum(p.numel() for n, p in drafter.named_parameters() if not n.startswith("adapter."))
    assert {name.partition(".")[0] for name in drafter.state_dict()} == {
        "adapter", "blocks", "lm_heads",
    }  # fmt: skip
    assert sum(p.numel() for p in drafter.drafting_parameters()) == heads
    assert drafter.fresh().kind == "medusa"


def test_what_is_drafted_is_what_is_trained_on_the_adapted_target(target, traces):
    drafter = joint(target, traces).drafter.eval()
    served = drafter.served_target()
    assert_rounds_follow_the_unroll(drafter, served, 4)
    assert_branches_follow_the_unroll(drafter, served)
    assert_greedy_text_is_the_targets(drafter, served, Budget(4))


def test_a_reduced_vocabulary_stays_with_the_heads_of_the_adapted_target(target, traces, tmp_path):
    drafter = joint(target, traces, draft_vocab_size=60).drafter.eval()
    kept = drafter.kept
    assert_drafts_kept_tokens_only(drafter, target, kept, 4)
    drafter.save_pretrained(tmp_path / "own")
    again = Medusa2Drafter.from_pretrained(tmp_path / "own", target)
    heads, served = drafter.servable(tmp_path / "served")
    for other in (again, heads, drafter.fresh()):
        assert torch.equal(other.kept, kept)
    assert_rounds_follow_the_unroll(heads, served, 4)


def test_without_a_change_the_given_target_serves(target, traces):
    assert joint(target, traces, moved=False).drafter.served_target() is None


def test_saved_and_loaded_it_is_the_same(target, traces, tmp_path):
    drafter = joint(target, traces, lora_rank=4).drafter.eval()
    drafter.rank_accuracy = {"0": [[0.5, 0.1]]}
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    again = load_drafter(str(tmp_path), target)
    assert isinstance(again, Medusa2Drafter)
    assert again.lora == drafter.lora
    assert again.rank_accuracy == drafter.rank_accuracy
    pairs = zip(again.state_dict().items(), drafter.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert again.served_target().fingerprint == drafter.served_target().fingerprint
    shutil.rmtree(tmp_path / "adapter")
    with pytest.raises(UserError, match="is damaged"):
        load_drafter(str(tmp_path), target)


# --- a whole run ------------------------------------------------------------------------------

# one conversation leaves none to choose a checkpoint by: the last one is taken
SETTINGS = ("recipe=medusa2", "data.num_prompts=1", "eval.tree=null", "trainer.max_steps=6",
            "trainer.lr=3e-3", "trainer.log_every=1", "trainer.save_every=2",
            "trainer.keep_checkpoints=9", "method.heads_weight=1",
            "eval.temperatures=[0, 1]")  # fmt: skip


def words_of(folder, target, *given):
    words = command(folder, target, *SETTINGS, *given)
    return [word for word in words if not word.startswith("method.draft_")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("medusa2")
    assert train.main(words_of(folder, tiny_folder("llama"))) == 0
    return folder


def rows_of(folder, **wanted):
    rows = json.loads((folder / "report.json").read_text())["results"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_a_run_says_which_target_its_rows_are_about(finished):
    for temperature in (0.0, 1.0):
        rows = rows_of(finished / "run", temperature=temperature)
        assert {row["drafter"] for row in rows} == {
            "plain", "untrained", "before", "after", "prompt_lookup", "target",
        }  # fmt: skip
        for row in rows:
            assert bool(row.get("target_changed")) == (row["drafter"] == "after")
            if row["drafter"] == "after":
                losses = row["next_token_loss"]
                change = 100 * (losses["served"] / losses["original"] - 1)
                assert change == pytest.approx(losses["change_percent"])
                assert abs(change) > 1e-3
                assert f"{change:+.2f} %" in row["note"]
                assert row["lossless"]
    (decoded,) = rows_of(finished / "run", temperature=0.0, measured_by="decoding")
    assert decoded["identical_to_plain"] == 1
    (replayed,) = rows_of(finished / "run", temperature=0.0, drafter="after", measured_by="offline")
    assert replayed["replay_differs_from_decoding"] == 0
    assert "the target was trained too" in (finished / "run" / "report.md").read_text()


def test_text_of_the_adapted_target_lies_in_stores_of_its_own(finished, tiny_folder):
    own = Target.load(str(tiny_folder("llama"))).fingerprint["weights"]
    found = {}
    for path in finished.glob("cache/traces/*"):
        store = TraceStore.open(path, None, create=False)
        key = store.identity["lookahead"] > 0, tuple(store.identity["temperatures"])
        found.setdefault(key, []).append(store.identity["target"]["weights"])
    assert found.pop((False, (1.0,))) == [own]
    assert found.keys() == {(True, (0.0,)), (True, (1.0,))}
    for weights in found.values():
        assert len(weights) == 2
        (other,) = set(weights) - {own}
        assert other.startswith(f"{own}+")


def test_the_export_serves_as_measured(finished, tiny_folder):
    run = finished / "run"
    original = Target.load(str(tiny_folder("llama")))
    drafter = load_drafter(str(run / "drafter"), original)
    merged = Target.load(str(run / "export" / "vllm" / "target"))
    assert "`export/vllm/target`" in (run / "export" / "vllm" / "drafter" / "README.md").read_text()
    heads = load_drafter(str(run / "export" / "vllm" / "drafter"), merged)
    served = drafter.served_target()
    ids = torch.arange(10, 22).view(1, -1)
    pairs = [(drafter, served), (heads, merged)]
    outputs = [target.outputs(ids, layers=("final_norm",)) for _, target in pairs]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-4, atol=1e-4)
    for depth in (1, 4):
        laws = [
            one.draft_logits(ids, states, depth)
            for (one, _), states in zip(pairs, outputs, strict=True)
        ]
        torch.testing.assert_close(*laws, rtol=1e-4, atol=1e-4)
    words = (f"drafter={run / 'drafter'}", "engine=vllm", f"out={finished / 'out'}")
    assert export.main([f"script.{word}" for word in words]) == 0
    for name in ("target", "drafter"):
        written = (finished / "out" / name / "model.safetensors").read_bytes()
        assert written == (run / "export" / "vllm" / name / "model.safetensors").read_bytes()


def test_a_finished_drafter_is_measured_on_its_own_target(finished, tmp_path):
    drafter = finished / "run" / "drafter"
    assert evaluate.main([f"eval.drafter={drafter}", f"script.out={tmp_path}"]) == 0
    for temperature in (0.0, 1.0):
        (before,) = rows_of(
            finished / "run", temperature=temperature, drafter="after", measured_by="offline"
        )
        (now,) = rows_of(
            tmp_path, temperature=temperature, drafter="drafter", measured_by="offline"
        )
        for key in ("tokens_per_round", "alpha", "next_token_loss", "target_changed"):
            assert now[key] == pytest.approx(before[key])


@pytest.mark.usefixtures("unreported")
@pytest.mark.parametrize("step", [0, 2, 4])
def test_stopped_in_the_second_stage_it_goes_on_with_the_same_losses(
    step, finished, tiny_folder, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    stage = run / "stages" / "1-joint"
    (stage / "finished.json").unlink()
    (run / "report.json").unlink()
    shutil.rmtree(run / "drafter")
    for found in (stage / "checkpoints").glob("step-*"):
        if int(found.name[5:]) > step:
            shutil.rmtree(found)
    assert train.main(words_of(finished, tiny_folder("llama"), f"run.dir={run}")) == 0
    then, now = (read_jsonl(folder / "metrics.jsonl") for folder in (finished / "run", run))
    for row in (*then, *now):
        row.pop("tokens_per_s", None)
    assert now == then
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        written = (run / "drafter" / name).read_bytes()
        assert written == (finished / "run" / "drafter" / name).read_bytes()


def test_layers_may_be_computed_again_to_save_memory(finished, tiny_folder, tmp_path):
    words = ("trainer.gradient_checkpointing=true", "run.stage=joint")
    assert train.main(words_of(tmp_path, tiny_folder("llama"), *words)) == 0
    losses = [
        [row["loss"] for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]
        for folder in (finished, tmp_path)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "medusa2"])
def test_trained_heads_stand_for_the_first_stage(kind, finished, tiny_folder, tmp_path):
    target, start = tiny_folder("llama"), finished / "run" / "drafter"
    if kind == "medusa":
        start = tmp_path / "heads"
        loaded = Target.load(str(target))
        MedusaDrafter.build(loaded, MedusaSettings(num_heads=4)).save_pretrained(start)
    given = (f"model.drafter={start}", "eval.temperatures=0", "trainer.max_steps=2")
    assert train.main(words_of(tmp_path, target, *given)) == 0
    assert {r["stage"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")} == {"joint"}
    (before,) = rows_of(tmp_path / "run", drafter="before")
    assert bool(before.get("target_changed")) == (kind == "medusa2")


def test_one_stage_alone_trains_those_it_starts_from(tiny_folder, tmp_path):
    target = tiny_folder("llama")
    for stage, known in (("heads", {"heads"}), ("joint", {"heads", "joint"})):
        assert train.main(words_of(tmp_path, target, f"run.stage={stage}")) == 0
        rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert {row["stage"] for row in rows} == known
        assert len([row for row in rows if "loss" in row]) == 6 * len(known)
    assert not (tmp_path / "run" / "report.json").exists()


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method.lm_loss=kl", "method.lm_loss must be one of distill, ce, got 'kl'"),
        ("method.heads_ramp=cosine", "method.heads_ramp must be one of constant, linear, sine"),
        ("method.lora_rank=0", "method.lora_rank must be >= 1, got 0"),
        ("method.heads_weight=0", "method.heads_weight must be > 0"),
        ("method.heads_lr_multiplier=-1", "method.heads_lr_multiplier must be > 0"),
        ("method.feature_noise=0.1", "method.feature_noise must be 0"),
    ],
)
def test_bad_settings_end_in_one_line(word, says, tiny_folder, tmp_path, capsys):
    assert train.main(words_of(tmp_path, tiny_folder("llama"), word)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert says in line
    assert not (tmp_path / "run").exists()


def test_an_adapter_on_a_tied_head_is_refused_before_any_training(tiny_target):
    with pytest.raises(UserError, match=r"method\.lora_lm_head must be false"):
        Recipe(Config(lora_lm_head=True), tiny_target("llama_tied"))


def test_an_adapter_of_another_shape_is_not_gone_on_from(target, traces):
    drafter = joint(target, traces).drafter
    with pytest.raises(UserError, match=r"adapter of another shape, LoraSettings\(rank=32"):
        Recipe(Config(lora_rank=8), target, drafter)
    with pytest.raises(UserError, match=r"method\.num_heads=4"):
        Recipe(Config(num_heads=2), target, drafter)
    with pytest.raises(UserError, match="must be null, or one of 100 to 100"):
        Recipe(Config(draft_vocab_size=20), target, drafter)
    same = Recipe(Config(), target, drafter)
    assert [stage.name for stage in same.stages()] == ["joint"]
    assert trained(same, drafter, stage=0).drafter is drafter
