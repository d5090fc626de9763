"""SpecDec++: labels, mixed contexts, the weighted loss, and a whole run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import train
from data.batches import collate
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from drafters.acceptance_head import SETTINGS
from drafters.causal_lm import CausalLMDrafter
from drafters.eagle3 import Eagle3Settings
from drafters.load import load_drafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.text import Text
from recipes.base import Context
from recipes.specdecpp import Config, Recipe, area, binary_kl, quality, weighted_loss
from scripts import evaluate, export
from target.outputs import TargetOutputs
from target.sampling import Sampling, warp
from tests.helpers.commands import TWO, command, finish, read_jsonl, start
from tests.helpers.eagle import build_eagle
from tests.helpers.heads import randomised
from tests.helpers.losses import listed
from tests.helpers.objectives import trained
from tests.helpers.tiny import EOS, perturbed
from tests.helpers.watch import Watch
from trainer.errors import UserError

PROMPTS = 12


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    prompts = [Prompt(f"Question {i}: ", None, None, "test", "", f"c{i}") for i in range(PROMPTS)]
    plan = GenerationPlan("test", tuple(prompts), (1.0,), max_new_tokens=24)
    folder = tmp_path_factory.mktemp("traces")
    made = [*generate_traces(target, plan, folder, batch_size=16, rows_per_shard=16)]
    for trace in made:
        trace.response_ids = [*trace.response_ids[: 6 + trace.index % 15], EOS]
    return made


def recipe_of(target, kind="causal_lm", **options):
    """In its second stage."""
    if kind == "causal_lm":
        drafter = CausalLMDrafter._of(perturbed(target.model, 0.1), target, "draft")
    else:
        settings = Eagle3Settings([0, 1], target.hidden_size)
        drafter = randomised(build_eagle(target, settings), 0.1)
    recipe = Recipe(Config(**{"num_layers": 1} | options), target, drafter)
    assert len(recipe.stages()) == 1
    torch.manual_seed(0)
    stage = trained(recipe, drafter, max_steps=9, new=24)
    randomised(stage.drafter.train().acceptance, 0.1)
    return stage


def batch_of(traces, index=0):
    texts = [t.prompt_ids for t in traces], [t.response_ids for t in traces]
    return collate(*texts, ["target"] * len(traces), index)


def outputs_of(recipe, batch):
    request = recipe.target_request(batch, 0)
    return recipe.target.outputs(batch.input_ids, layers=request.layers, logits=request.logits)


def drawn_of(recipe, traces, index=0):
    batch = batch_of(traces, index)
    context = Context(batch, recipe.drafter, lambda *_: [], lambda: outputs_of(recipe, batch))
    return recipe.refresh(0, context)


def loss_of(recipe, drawn):
    assert recipe.target_request(drawn, 0) is None  # the target has read the text already
    output = recipe.loss(drawn, None, 0)
    ((total, mass, weight),) = listed(output.terms)
    assert recipe.denominators(drawn, 0) == {"acceptance": pytest.approx(float(mass))}
    assert weight == 1
    return total / mass.detach()


# --- draws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=5), Sampling(0.0)])
def test_labels_are_the_chance_of_acceptance_under_the_laws_as_served(sampling, target, traces):
    """By hand, position by position: p and q behind the target's own text, mixed or not."""
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k}
    recipe = recipe_of(target, **options)
    drawn = drawn_of(recipe, traces)
    p = warp(target.outputs(drawn.input_ids).logits, sampling)
    q = warp(recipe.drafter.draft_logits(drawn.input_ids), sampling)
    for row, place, accept in zip(drawn.rows, drawn.places, drawn.accept, strict=True):
        token = drawn.mixed[row, place]
        assert q[row, place - 1, token] > 0
        ratio = p[row, place - 1, token] / q[row, place - 1, token]
        torch.testing.assert_close(accept, ratio.clamp(max=1), rtol=1e-3, atol=1e-5)
    assert 0 < float(drawn.accept.mean()) < 1
    if sampling.top_k:
        assert bool((drawn.accept == 0).any())  # outside the target's top k
    if not sampling.temperature:
        assert set(drawn.accept.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3"])
def test_tokens_and_labels_do_not_depend_on_the_chunks(kind, target, traces, monkeypatch):
    recipe = recipe_of(target, kind)
    whole = drawn_of(recipe, traces)
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 5 * target.vocab_size)
    with Watch() as watch:
        parts = drawn_of(recipe, traces)
    assert torch.equal(parts.mixed, whole.mixed)
    torch.testing.assert_close(parts.accept, whole.accept, rtol=1e-5, atol=1e-6)
    assert (5, target.vocab_size) in watch.shapes


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3"])
def test_contexts_are_the_targets_text_with_drafted_tokens_where_it_trains(kind, target, traces):
    """A share of `mix` is the target's, the rest drafted: and nothing but drafted tokens of the
    response is trained on, its EOS included."""
    recipe = recipe_of(target, kind, mix=0.15, depths=2)
    eagle = kind == "eagle3"
    counts = torch.zeros(2)
    ends = 0
    for index in range(20):
        drawn = drawn_of(recipe, traces, index)
        depths = 2 if eagle else 1
        assert drawn.mixed.shape == (depths * PROMPTS, drawn.input_ids.shape[1])
        assert drawn.num_supervised == len(drawn.rows)
        text = drawn.input_ids.repeat(depths, 1)
        inside = drawn.loss_mask.repeat(depths, 1)
        trained = torch.zeros_like(inside)
        trained[drawn.rows, drawn.places] = True
        assert torch.equal(drawn.mixed[~trained], text[~trained])
        assert bool(inside[trained].all())
        assert torch.equal(drawn.depth - 1, drawn.rows // PROMPTS)
        if eagle:  # the first token of an answer is the prefill's, then d tokens lie behind a depth
            first = torch.tensor([len(t.prompt_ids) for t in traces]).repeat(depths)
            assert bool((drawn.places >= first[drawn.rows] + drawn.depth).all())
        possible = sum(
            int(drawn.loss_mask.sum()) - eagle * PROMPTS * depth for depth in range(1, depths + 1)
        )
        counts += torch.tensor([possible - len(drawn.rows), possible])
        last = torch.tensor([len(t.prompt_ids + t.response_ids) - 1 for t in traces])
        ends += int((drawn.places == last[drawn.rows % PROMPTS]).sum())
    assert float(counts[0] / counts[1]) == pytest.approx(0.15, abs=0.03)
    assert ends > 0


def test_tokens_are_drawn_anew_at_every_visit(target, traces):
    recipe = recipe_of(target)
    first, again, later = (drawn_of(recipe, traces, index) for index in (0, 0, 7))
    assert torch.equal(first.mixed, again.mixed)
    assert not torch.equal(first.mixed, later.mixed)
    # whatever stands beside a text in its batch
    alone = drawn_of(recipe, traces[:1])
    width = alone.mixed.shape[1]
    assert torch.equal(alone.mixed[0], first.mixed[0, :width])


def test_without_mixing_every_position_is_drafted(target, traces):
    drawn = drawn_of(recipe_of(target, mix=0.0), traces)
    assert len(drawn.rows) == drawn.loss_mask.sum()


def test_a_label_that_is_no_probability_is_named(target, traces):
    recipe, batch = recipe_of(target), batch_of(traces)
    outputs = outputs_of(recipe, batch)
    outputs.logits[3] = torch.nan
    with pytest.raises(UserError, match=r"DataError: .* got nan in row 3 of batch 0, .*Question 3"):
        recipe.draw(recipe.drafter, batch, outputs)


# --- the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3"])
def test_the_loss_is_the_weighted_cross_entropy_at_the_drafted_tokens(kind, target, traces):
    """Against float64 by hand; the state of each token is read from its own context alone."""
    recipe = recipe_of(target, kind, depths=2)
    drawn = drawn_of(recipe, traces[:4])
    drafter, total, mass = recipe.drafter, 0.0, 0.0
    outputs = outputs_of(recipe, batch_of(traces[:4])) if kind == "eagle3" else None
    rows = zip(drawn.rows, drawn.places, drawn.accept, drawn.depth, strict=True)
    for row, place, accept, depth in rows:
        line = int(row) % 4
        states = {} if outputs is None else {k: v[line, None] for k, v in outputs.hidden.items()}
        *_, own = drafter.states(
            Text(drawn.mixed[row, None]), TargetOutputs(states), int(depth) + 1
        )
        logits = drafter.acceptance(own[0, place]).double()
        f, a = logits.softmax(-1)[1], accept.double()
        total += -6 * (1 - a) * (1 - f).log() - a * f.log()
        mass += 6 * (1 - a) + a
    assert loss_of(recipe, drawn).item() == pytest.approx((total / mass).item(), rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"reject_weight": 1.0},
        {"mix": 0.5},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"shared_blocks": True},
        {"num_layers": 2},
    ],
)
def test_every_option_changes_the_loss(change, target, traces):
    common = {"num_layers": 3} if "shared_blocks" in change else {}
    losses = [
        loss_of(recipe, drawn_of(recipe, traces, 5)).item()
        for recipe in (recipe_of(target, **common), recipe_of(target, **(common | change)))
    ]
    assert abs(losses[0] - losses[1]) > 1e-5


def test_more_depths_of_a_head_change_its_loss(target, traces):
    losses = {}
    for depths in (1, 2):
        recipe = recipe_of(target, "eagle3", depths=depths)
        losses[depths] = loss_of(recipe, drawn_of(recipe, traces)).item()
    assert abs(losses[1] - losses[2]) > 1e-5


def test_only_the_head_trains_and_a_batch_without_drafts_gives_nothing(target, traces):
    recipe = recipe_of(target)
    trained = [n for n, p in recipe.drafter.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.startswith("acceptance.") for name in trained)
    loss_of(recipe, drawn_of(recipe, traces)).backward()
    for name, parameter in recipe.drafter.named_parameters():
        assert (parameter.grad is not None) == name.startswith("acceptance.")
    raw = batch_of(traces)
    raw.loss_mask[:] = False
    assert recipe.denominators(raw, 0) == {"acceptance": 0.0}
    ((total, mass, _),) = listed(recipe.loss(raw, None, 0).terms)
    assert total.item() == mass.item() == 0
    assert total.requires_grad


def test_the_head_learns_what_its_states_tell(target, traces):
    """P7: better than a constant. One text over and over: its states tell the labels apart, those
    of the token before do not belong to them."""
    recipe = recipe_of(target, num_layers=1)
    drawn = drawn_of(recipe, traces)
    optimizer = torch.optim.Adam(recipe.drafter.acceptance.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(recipe, drawn).backward()
        optimizer.step()
    f = recipe.judge(recipe.drafter, drawn).softmax(-1)[:, 1].detach()
    found = quality(f, drawn.accept, 6.0)
    assert found["binary_kl"] < 0.8 * found["binary_kl_constant"]
    assert found["auc"] > 0.8


# --- metrics ----------------------------------------------------------------------------------


def test_metrics_by_hand():
    a = torch.tensor([0.0, 1.0, 0.25])
    f = torch.tensor([0.5, 0.5, 0.25])
    log2 = torch.tensor(2.0).log()
    torch.testing.assert_close(binary_kl(a, f).float(), torch.stack([log2, log2, 0 * log2]))
    assert bool(binary_kl(a, torch.tensor([0.0, 1.0, 1.0])).isfinite().all())
    score, hard = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0, 1, 1])
    assert area(score.double(), hard.double()) == pytest.approx(0.75)
    assert area(torch.zeros(4).double(), hard.double()) == pytest.approx(0.5)
    assert area(score.double(), torch.ones(4).double()) == 0.5
    # both f say a = 0.6 once inverted: f = a / (a + 6 (1 - a))
    same = torch.full((2,), 0.2)
    assert quality(same, torch.tensor([0.5, 0.7]), 6.0)["calibration_error"] < 1e-6
    assert quality(same, torch.tensor([0.4, 0.4]), 6.0)["calibration_error"] == pytest.approx(0.2)
    found = quality(same, torch.tensor([0.6, 0.6]), 6.0)
    assert found["binary_kl"] == pytest.approx(0, abs=1e-9)
    assert found["binary_kl_as_trained"] > 0.1
    total = weighted_loss(torch.zeros(1, 2), torch.tensor([0.25]), 6.0)
    assert float(total) == pytest.approx((6 * 0.75 + 0.25) * float(log2))


# --- a whole run ------------------------------------------------------------------------------

SETTINGS_OF_RUN = ("recipe=specdecpp", "method.K_max=5", "method.num_layers=1", "eval.K=3",
                   "eval.temperatures=0", "trainer.max_steps=4", "trainer.eval_every=2",
                   "trainer.log_every=1", "trainer.save_every=2", "trainer.keep_checkpoints=9",
                   "eval.timing_prompts=2", "eval.num_prompts=3")  # fmt: skip


def words_of(folder, target, *given):
    return command(folder, target, *SETTINGS_OF_RUN, *given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("specdecpp")
    assert train.main(words_of(folder, tiny_folder("llama"))) == 0
    return folder


@pytest.mark.slow
def test_a_run_without_a_drafter_makes_one_first(finished):
    rows = read_jsonl(finished / "run" / "metrics.jsonl")
    assert list(dict.fromkeys(row["stage"] for row in rows)) == ["draft", "acceptance"]
    judged = [row["eval"] for row in rows if row["stage"] == "acceptance" and "eval" in row]
    assert {"binary_kl", "auc", "calibration_error", "binary_kl_constant"} < judged[0].keys()
    assert all(one["select"] == -one["binary_kl"] for one in judged)


def test_the_report_compares_policies(finished):
    report = json.loads((finished / "run" / "report.json").read_text())
    stored = json.loads((finished / "run" / "drafter" / SETTINGS).read_text())
    points = report["policies"]
    chosen = {one["family"]: one for one in points if one["chosen"]}
    assert chosen.keys() == {"fixed", "confidence", "product", "heuristic", "head"}
    assert all(one["decoded"]["verification_rate"] > 0 for one in chosen.values())
    assert [one["K"] for one in points if one["family"] == "fixed"] == [1, 2, 3, 4, 5]
    assert stored["tuned"]["0"]["head"] == [chosen["head"]["policy"], 5]
    (row,) = [r for r in report["results"] if r["policy"] == chosen["head"]["policy"]]
    assert (row["drafter"], row["measured_by"], row["lossless"]) == ("after", "decoding", True)
    assert row["identical_to_plain"] == 1
    assert "trained for Sampling(temperature=1.0" in row["note"]  # served at 0
    compared = [c for c in report["comparisons"] if c["metric"].startswith("modelled")]
    assert {c["a"] for c in compared} == {chosen["head"]["policy"]}
    assert len(compared) == 8  # four other families at two costs
    page = (finished / "run" / "report.html").read_text()
    assert "Discarded drafts against verification" in page
    assert "Policies of draft length" in (finished / "run" / "report.md").read_text()


@pytest.mark.slow
def test_training_a_drafter_on_leaves_the_head_of_its_former_weights_out(
    finished, tiny_folder, tiny_target, tmp_path, capsys
):
    """What comes of it can be loaded and trained on."""
    drafter = finished / "run" / "drafter"
    for run in (tmp_path / "first", tmp_path / "second"):
        words = command(
            tmp_path, tiny_folder("llama"), f"model.drafter={drafter}", f"run.dir={run}",
            "method.control=false", "eval.timing_prompts=0",
        )  # fmt: skip
        words = [word for word in words if not word.startswith("method.draft")]
        assert train.main(words) == 0
        told = "its acceptance head was trained for the present weights" in capsys.readouterr().out
        assert told == (run.name == "first")
        drafter = run / "drafter"
        assert not (drafter / SETTINGS).exists()
        assert load_drafter(str(drafter), tiny_target("llama")).acceptance is None


def test_the_export_carries_head_and_threshold(finished, tiny_target):
    run = finished / "run"
    tuned = json.loads((run / "drafter" / SETTINGS).read_text())["tuned"]["0"]
    how = json.loads((run / "export" / "transformers" / "generation_config.json").read_text())
    assert how["assistant_confidence_threshold"] == tuned["matching_confidence"] > 0
    assert how["num_assistant_tokens"] == 5
    drafter = load_drafter(str(run / "export" / "transformers"), tiny_target("llama"))
    assert drafter.acceptance is not None
    out = finished / "out"
    words = (f"drafter={run / 'drafter'}", "engine=transformers", f"out={out}")
    assert export.main([f"script.{word}" for word in words]) == 0
    for name in ("generation_config.json", SETTINGS, "model.safetensors"):
        written = run / "export" / "transformers" / name
        assert (out / name).read_bytes() == written.read_bytes()
    assert "up to 5 tokens, fewer after one less likely" in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["head:0.9", "heuristic"])
def test_the_policy_of_a_finished_drafter_is_a_setting(policy, finished, tmp_path):
    drafter = finished / "run" / "drafter"
    words = (f"eval.policy={policy}", "eval.K=5", f"script.out={tmp_path}", "eval.temperatures=0")
    assert evaluate.main([f"eval.drafter={drafter}", *words]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["results"]
    own = {row["measured_by"]: row for row in rows if row["drafter"] == "drafter"}
    assert own["decoding"]["policy"] == policy
    assert own["decoding"]["identical_to_plain"] == 1
    head = policy.startswith("head")
    # a rule with a memory is known from decoding only; baselines have no head
    assert own["offline"]["policy"] == (policy if head else "fixed")
    (untrained,) = [row for row in rows if row["drafter"] == "untrained"]
    assert untrained["policy"] == "fixed"
    if head:
        assert own["offline"]["tokens_per_round"] == own["decoding"]["tokens_per_round"]
    else:
        assert own["offline"]["speedup"] is None
    (plain,) = [row for row in rows if row["drafter"] == "plain"]
    assert plain["plain_tokens_per_s"] == own["decoding"]["plain_tokens_per_s"] > 0


def test_stopped_in_the_second_stage_it_goes_on_with_the_same_draws(
    finished, tiny_folder, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    stage = run / "stages" / "1-acceptance"
    (stage / "finished.json").unlink()
    (run / "report.json").unlink()
    for found in (stage / "checkpoints").glob("step-*"):
        if int(found.name[5:]) > 2:
            shutil.rmtree(found)
    again = words_of(finished, tiny_folder("llama"), f"run.dir={run}", "run.stage=acceptance")
    assert train.main(again) == 0
    then, now = (read_jsonl(folder / "metrics.jsonl") for folder in (finished / "run", run))
    for row in (*then, *now):
        row.pop("tokens_per_s", None)
    assert now == then


@pytest.mark.slow
def test_two_processes_train_as_one_does(finished, tiny_folder, tmp_path):
    """The draws belong to a text and a visit, not to a process."""
    words = words_of(tmp_path, tiny_folder("llama"), "trainer.batch_size=2")
    code, _, err = finish(start(*TWO, "train.py", *words))
    assert code == 0, err
    for stage in ("draft", "acceptance"):
        both = [
            [row["loss"] for row in read_jsonl(folder / "run" / "metrics.jsonl")
             if row["stage"] == stage and "loss" in row]
            for folder in (finished, tmp_path)
        ]  # fmt: skip
        assert both[1] == pytest.approx(both[0], rel=1e-4)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method.reject_weight=0", "method.reject_weight must be > 0, got 0"),
        ("method.mix=1.5", "method.mix must lie in [0, 1], got 1.5"),
        ("method.mix=1", "DataError: method.mix=1 leaves no drafted token to train on"),
        ("method.K_min=0", "method.K_min must be >= 1, got 0"),
        ("method.K_min=6", "method.K_max must be >= method.K_min=6, got 5"),
        ("method.num_layers=-1", "method.num_layers must be >= 0, got -1"),
        ("method.depths=0", "method.depths must be >= 1, got 0"),
        ("method.temperature=-1", "method.temperature must be >= 0"),
        ("method.top_k=-1", "method.top_k must be >= 0"),
        ("method.top_p=0", "method.top_p must lie in (0, 1]"),
        ("eval.policy=head:1", "eval.policy='head:1': threshold must lie in (0, 1), got 1.0"),
    ],
)
def test_bad_settings_end_in_one_line(word, says, tiny_folder, tmp_path, capsys):
    assert train.main(words_of(tmp_path, tiny_folder("llama"), word)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert says in line
    assert not (tmp_path / "run").exists()


def test_a_drafter_without_states_and_a_policy_without_a_head_are_refused(
    target, tiny_folder, tmp_path, capsys
):
    medusa = MedusaDrafter.build(target, MedusaSettings(num_heads=2))
    with pytest.raises(UserError, match="CapabilityError: a drafter of kind 'medusa'"):
        Recipe(Config(), target, medusa)
    words = command(tmp_path, tiny_folder("llama"), "eval.policy=head:0.5")
    assert train.main(words) == 2
    assert "CapabilityError: eval.policy=head:..." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_eagle_head_is_judged_as_well(target, tiny_folder, tmp_path):
    """Its law changes with the depth; trained, decoded, saved, exported and measured again."""
    settings = Eagle3Settings([0, 1], target.hidden_size)
    start = randomised(build_eagle(target, settings), 0.1)
    start.save_pretrained(tmp_path / "eagle")
    given = (f"model.drafter={tmp_path / 'eagle'}", "method.depths=2")
    words = words_of(tmp_path, tiny_folder("llama"), *given)
    words = [word for word in words if not word.startswith("method.draft_")]
    assert train.main(words) == 0
    run = tmp_path / "run"
    assert {row["stage"] for row in read_jsonl(run / "metrics.jsonl")} == {"acceptance"}
    report = json.loads((run / "report.json").read_text())
    (row,) = [r for r in report["results"] if r["policy"].startswith("head")]
    assert row["identical_to_plain"] == 1
    after = load_drafter(str(run / "drafter"), target)
    assert after.acceptance is not None
    same = start.draft_weights().items()
    assert all(torch.equal(after.draft_weights()[name], tensor) for name, tensor in same)
    again = (f"eval.drafter={run / 'drafter'}", "eval.policy=head:0.9", f"script.out={tmp_path}")
    assert evaluate.main(list(again)) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["results"]
    own = {r["measured_by"]: r for r in rows if r["policy"] == "head:0.9"}
    assert own["offline"]["tokens_per_round"] == own["decoding"]["tokens_per_round"]
