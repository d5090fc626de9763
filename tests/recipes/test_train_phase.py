"""The stages of a recipe: what each starts with, which are trained, what is refused before."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from drafters import widen
from drafters.acceptance import fresh_head
from drafters.base import TrainedDrafter, weights_hash
from drafters.causal_lm import CausalLMDrafter
from drafters.medusa2 import Medusa2Drafter
from phases.check import check_stage_context, deeper_than_trained, settings_of_the_toy
from phases.pipeline import resolve
from phases.run import Run
from phases.source import RunText, sample_drafter
from phases.train import chosen_stages, prepare, train_stages
from recipes import base, eagle, eagle3, medusa, medusa2
from recipes.base import Needs, Stage
from tests.data.test_traces import make
from tests.helpers.commands import command, read_jsonl
from tests.helpers.tiny import prompts_of
from trainer.errors import UserError
from trainer.setup import make_accelerator

TEXTS = zip(prompts_of([5, 8, 3, 6]), prompts_of([9, 7, 11, 4], seed=1), strict=True)
# of one conversation: none is held out to choose a checkpoint, so that the last weights are kept
TRACES = [
    make(i, prompt_ids=a, response_ids=b, conversation_id="c") for i, (a, b) in enumerate(TEXTS)
]


class Staged(medusa.Recipe):
    """Three stages. `begun`: the drafter that each began with, its weights then, and a number that
    was drawn."""

    def stages(self):
        def begin(start):
            self.begun.append((start.drafter, weights_hash(start.drafter), float(torch.rand(()))))
            return start.drafter

        def stage(name, **given):
            text = Needs({"target": 1.0})
            return Stage(name, self.objective, text, prepare=begin, **given)

        return [
            stage("first", start="base"), stage("second", row="middle"),
            stage("third", start="base", row="after", shared={"of": "all"}),
        ]  # fmt: skip


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama")


def run_of(folder, target, *given) -> Run:
    words = command(folder, target.name, "recipe=medusa", "trainer.max_steps=3", *given)
    config = resolve([w for w in words if not w.startswith("method.draft_hidden_size")])[0]
    return Run(config, make_accelerator(config.trainer, cpu=True), target, config.run_dir)


def trained(run, recipe, base):
    """What `train_stages` returns."""
    return train_stages(run, recipe, base, RunText.split(run, TRACES))


def staged(target) -> tuple[Staged, medusa.MedusaDrafter]:
    recipe = Staged(medusa.Config(num_heads=2), target)
    recipe.begun = []
    torch.manual_seed(0)
    return recipe, recipe.build([])


def test_each_stage_trains_a_copy_of_what_it_starts_from(target, tmp_path):
    recipe, base = staged(target)
    before = weights_hash(base)
    rows, results = trained(run_of(tmp_path, target), recipe, base)
    (first, *_), (second, *_), (third, *_) = recipe.begun
    starts = [begun[1] for begun in recipe.begun]
    assert weights_hash(base) == before
    assert starts == [before, weights_hash(first), before]
    assert len({before, weights_hash(first), weights_hash(second)}) == 3
    assert weights_hash(third) == weights_hash(first)
    assert rows == {"middle": second, "after": third}
    assert list(results) == ["first", "second", "third"]


def test_text_of_one_conversation_id_holds_nothing_out_and_says_so(target, tmp_path, capsys):
    recipe, base = staged(target)
    trained(run_of(tmp_path, target, "run.stage=first"), recipe, base)
    assert "warning: all training text has the conversation_id 'c'" in capsys.readouterr().out


def test_what_a_stage_draws_does_not_depend_on_whether_those_before_are_done(target, tmp_path):
    drawn = []
    for _ in range(2):
        recipe, base = staged(target)
        rows, _ = trained(run_of(tmp_path, target), recipe, base)
        drawn.append(([begun[2] for begun in recipe.begun], weights_hash(rows["after"])))
    assert drawn[0] == drawn[1]


def test_a_stage_asked_for_comes_with_those_it_starts_from(target, tmp_path):
    recipe, _ = staged(target)
    for wanted, names in (("first", ["first"]), ("second", ["first", "second"]),
                          ("third", ["third"])):  # fmt: skip
        run = run_of(tmp_path, target, f"run.stage={wanted}")
        assert [stage.name for stage in chosen_stages(run, recipe)] == names
    with pytest.raises(UserError, match=r"run\.stage must be one of first, second, third, got 'x'"):
        chosen_stages(run_of(tmp_path, target, "run.stage=x"), recipe)


def test_a_shared_stage_is_trained_again_where_nothing_may_be_resumed(target, tmp_path, capsys):
    found = []
    for name, resume in (("one", "auto"), ("two", "auto"), ("three", "never")):
        recipe, base = staged(target)
        words = f"run.dir={tmp_path / name}", f"trainer.resume={resume}", "run.stage=third"
        rows, _ = trained(run_of(tmp_path, target, *words), recipe, base)
        found.append(("third: trained before" in capsys.readouterr().out, rows["after"]))
    assert [taken for taken, _ in found] == [False, True, False]
    assert len({weights_hash(drafter) for _, drafter in found}) == 1


def test_a_text_longer_than_the_drafter_sees_is_refused(target):
    longest = {
        "target": max(len(t.prompt_ids) + len(t.response_ids) for t in TRACES),
        "draft": max(len(t.prompt_ids) for t in TRACES) + 9,
    }
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    for source, length in longest.items():
        stage = Stage("one", None, Needs({source: 1.0}))
        drafter.model.config.max_position_embeddings = length
        check_stage_context(drafter, stage, TRACES, max_new_tokens=9)
        drafter.model.config.max_position_embeddings = length - 1
        complaint = f"sees {length - 1} tokens, the longest text of stage one may have {length}:"
        with pytest.raises(UserError, match=complaint):
            check_stage_context(drafter, stage, TRACES, max_new_tokens=9)


def test_the_acceptance_head_of_a_drafter_that_is_trained_on_is_left_out(target, tmp_path, capsys):
    recipe = eagle.Recipe(eagle.Config(), target)
    given = recipe.build([])
    given.acceptance = fresh_head(given)
    given.save_pretrained(tmp_path / "given")
    run = run_of(tmp_path, target, "recipe=eagle", f"model.drafter={tmp_path / 'given'}")
    _, drafter = prepare(run, eagle.Recipe, [])
    assert drafter.acceptance is None
    assert "its acceptance head was trained for the present weights" in capsys.readouterr().out


@pytest.mark.parametrize("training", [True, False])
def test_text_of_its_own_is_drawn_without_dropout_and_leaves_the_mode_as_it_is(target, training):
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16).train(training)
    modes = []
    drafter.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    (text,) = sample_drafter(drafter, prompts_of([5]), target, 1.0, 4, seed=0)
    assert 1 <= len(text) <= 4
    assert not any(modes)
    assert drafter.training == drafter.model.training == training


@pytest.mark.slow
def test_a_large_target_with_the_settings_of_the_toy_is_named(
    tmp_path, target, capsys, monkeypatch
):
    config = resolve(["recipe=eagle3", "trainer.lr=5e-5"])[0]
    assert settings_of_the_toy(config, 10**9) == []
    found = settings_of_the_toy(config, 8 * 10**9)
    assert found == ["data.num_prompts=2600", "data.max_new_tokens=96", "trainer.max_steps=600"]
    gto, headed = (
        settings_of_the_toy(resolve(["recipe=gto", *words])[0], 8 * 10**9)
        for words in ((), ("model.drafter=head",))
    )
    assert {*gto} - {*headed} == {"method.base_preset=null"}
    fastdraft = settings_of_the_toy(resolve(["recipe=fastdraft"])[0], 8 * 10**9)
    assert "method.pretrain_lr=0.003" in fastdraft
    assert "method.context=128" in fastdraft
    for name in base.names():  # hydra's rate on the toy is the published one
        published = resolve([f"recipe={name}", "preset=published"])[0]
        assert settings_of_the_toy(published, 8 * 10**9) == []

    run = run_of(tmp_path, target, "trainer.lr=1e-3", "data.max_new_tokens=96")
    run.config.method = medusa.Config(num_heads=2)
    prepare(run, medusa.Recipe, [])
    assert "parameters" not in capsys.readouterr().out
    monkeypatch.setattr(target.model, "num_parameters", lambda: 7 * 10**9)
    prepare(run, medusa.Recipe, [])
    said = capsys.readouterr().out
    assert "data.max_new_tokens=96, trainer.lr=0.001: recipe=medusa has this for the toy" in said
    assert "7.0 B parameters" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("recipe=eagle3", None),
        ("recipe=eagle3 eval.K=6", "eval.K=6 drafts 6 tokens deep, training unrolls 5"),
        ("recipe=eagle3 method.steps=4", "eval.tree=dynamic:25:5:8 drafts 5 tokens deep"),
        ("recipe=eagle3 method.steps=7 eval.tree=eagle2:60:7:10", "drafts 8 tokens deep"),
        ("recipe=eagle3 eval.tree=calibrated:9 eval.K=6", "drafts 6 tokens deep"),
        ("recipe=gto", None),
        ("recipe=gto eval.K=6", "drafts 6 tokens deep"),
        ("recipe=eagle", None),  # one step: no unroll
        ("recipe=eagle method.steps=3", "drafts 5 tokens deep, training unrolls 3"),
        ("recipe=medusa eval.K=9", None),
    ],
)
def test_drafts_deeper_than_the_trained_unroll_are_named(words, says, tiny_target):
    target = tiny_target("llama", layers=8)
    config = resolve([*words.split(), "model.target=x"])[0]
    recipe = base.load(config.recipe)[0].Recipe(config.method, target)
    found = recipe.unroll and deeper_than_trained(config.eval, recipe.unroll[1])
    assert (says or "") in (found[1] if found else "")
    assert (found is None) == (says is None)


def test_drafts_deeper_than_the_trained_unroll_are_warned_of_before_training(
    target, tmp_path, capsys
):
    run = run_of(tmp_path, target, "eval.K=4")
    for steps, warned in ((3, True), (4, False)):
        run.config.method = eagle3.Config(layers=[0, 1], steps=steps)
        prepare(run, eagle3.Recipe, [])
        said = capsys.readouterr().out
        assert ("warning: eval" in said) == warned, said


@pytest.mark.slow
def test_preset_hass_trains_a_head_of_eagle_first_or_starts_from_one(tmp_path, tiny_folder, capsys):
    """Its held-out lines say that alpha is that of the first drafted token."""
    words = (
        "recipe=eagle", "preset=hass", "trainer.lr_warmup_steps=0", "trainer.precision=fp32",
        "data.num_prompts=8", "data.max_prompt_tokens=100", "eval.K=2", "eval.tree=dynamic:8:3:3",
        "trainer.max_steps=2", "trainer.save_every=2", "trainer.log_every=1",
        "eval.temperatures=0", "eval.timing_prompts=0",
    )  # fmt: skip
    folder = tiny_folder("llama")
    for run, given, stages in (
        ("own", ["method.base_max_steps=3"], ["base"] * 3 + ["train"] * 2),
        ("given", [f"model.drafter={tmp_path / 'own' / 'drafter'}"], ["train"] * 2),
    ):
        made = command(tmp_path, folder, *words, *given, f"run.dir={tmp_path / run}")
        assert train.main([w for w in made if not w.startswith("method.draft_")]) == 0
        rows = read_jsonl(tmp_path / run / "metrics.jsonl")
        assert [row["stage"] for row in rows if "loss" in row] == stages
        evaluations = [row["eval"] for row in rows if "eval" in row]
        assert all("alpha_at_depth_1" in one and "alpha" not in one for one in evaluations)
        (after,) = [
            row for row in json.loads((tmp_path / run / "report.json").read_text())["results"]
            if row["drafter"] == "after" and row["measured_by"] == "offline" and not row["tree"]
        ]  # fmt: skip
        assert after["alpha"] == after["alpha_by_depth"][0]
        said = capsys.readouterr().err
        assert f"alpha at depth 1 {evaluations[-1]['alpha_at_depth_1']:.4f}" in said
        about = json.loads((tmp_path / run / "drafter" / "drafter.json").read_text())
        assert about["trained_depth"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "medusa2"])
def test_a_run_adds_drafted_tokens_to_the_drafter_that_it_starts_with(
    tmp_path, tiny_folder, monkeypatch, capsys, name
):
    """One that stops after a step goes on from its checkpoint to the same weights, also where the
    new rows are rounded in another way."""
    folder = tiny_folder("llama")
    words = [f"recipe={name}", "eval.tree=null", "eval.temperatures=0", "trainer.save_every=1"]
    words += ["method.layers=[0,1]"] if name == "eagle3" else []

    def drafted(run, *given):
        made = command(tmp_path, folder, *given, *words, f"run.dir={tmp_path / run}")
        kept = [w for w in made if not w.startswith(("method.draft_l", "method.draft_h"))]
        assert train.main(kept) == 0
        return load_file(tmp_path / run / "drafter" / "model.safetensors")

    first = drafted("first", "method.draft_vocab_size=10", "trainer.max_steps=1")
    moved = {key: value for key, value in first.items() if "lm_head" in key}
    assert moved
    torch.manual_seed(0)
    for key, value in moved.items():  # the step may have been none, and the rows the target's own
        first[key] = value + 0.1 * torch.randn_like(value)
    save_file(first, tmp_path / "first" / "drafter" / "model.safetensors")
    given = [
        f"model.drafter={tmp_path / 'first' / 'drafter'}", "method.draft_vocab_size=14",
        "trainer.max_steps=2",
    ]  # fmt: skip
    whole = drafted("whole", *given)
    assert len(whole["kept"]) == 14
    assert set(first["kept"].tolist()) < set(whole["kept"].tolist())

    steps = iter([True])

    def stopping(forward):
        def stopped(*arguments, **options):
            if torch.is_grad_enabled() and not next(steps, False):
                raise InterruptedError
            return forward(*arguments, **options)

        return stopped

    with monkeypatch.context() as patched:
        for kind in (TrainedDrafter, Medusa2Drafter):  # which has a pass of its own
            patched.setattr(kind, "forward", stopping(kind.forward))
        with pytest.raises(InterruptedError):
            drafted("halves", *given)
    capsys.readouterr()
    monkeypatch.setattr(widen, "RIDGE", 10.0)
    halves = drafted("halves", *given)
    assert "step 0" not in capsys.readouterr().err
    assert halves.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(halves[key], value), key


def test_a_recipe_without_a_published_setting_trains_with_a_large_target(tmp_path, monkeypatch):
    for path in base.FOLDER.glob("eagle3.*"):
        if path.name != "eagle3.published.yaml":
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(base, "FOLDER", tmp_path)
    assert settings_of_the_toy(resolve(["recipe=eagle3"])[0], 8 * 10**9) == []


def test_heads_without_layers_to_compute_again_are_refused_at_the_start(tmp_path, tiny_target):
    target, checkpointed = tiny_target("llama"), "trainer.gradient_checkpointing=true"
    two = "method.num_heads=2"
    says = r"trainer\.gradient_checkpointing must be false for a MedusaDrafter, got true"
    with pytest.raises(UserError, match=says):
        prepare(run_of(tmp_path, target, checkpointed, two), medusa.Recipe, [])
    _, drafter = prepare(run_of(tmp_path, target, two), medusa.Recipe, [])
    drafter.save_pretrained(tmp_path / "heads")
    given = f"model.drafter={tmp_path / 'heads'}"
    with pytest.raises(UserError, match=says):
        prepare(run_of(tmp_path, target, checkpointed, given, two), medusa.Recipe, [])
    # its second stage trains in the target, which has layers
    for words in ((), (given,)):
        run = run_of(tmp_path, target, "recipe=medusa2", checkpointed, two, *words)
        assert prepare(run, medusa2.Recipe, [])[1].kind == "medusa"
