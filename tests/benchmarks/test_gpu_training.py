"""The benchmark of training on a GPU, through the kernels that a GPU has."""

from __future__ import annotations

import contextlib
import importlib
import statistics

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu_training
from benchmarks.gpu import SHAPES, random_target
from benchmarks.gpu_training import METHODS, STEPS, TOKENS, Arm, arms, make_traces, measure
from data.batches import Batches
from data.packing import PackedTraces
from tests.helpers.kernels import chosen_as_on_a_gpu
from tests.helpers.losses import listed
from trainer.loop import Fit

pytestmark = pytest.mark.tools

EAGER = {"trainer.compile": "null"}


def target_of(vocab_size=300):
    torch.manual_seed(0)
    shapes = {**SHAPES["tiny"], "common": {**SHAPES["tiny"]["common"], "vocab_size": vocab_size}}
    return random_target(shapes, "tiny", "cpu", torch.float32)


@pytest.fixture
def counted(monkeypatch):
    """The FLOPs of each step of the loop, as torch counts them: on a CPU without attention."""
    found, update = [], Fit.update

    def counting(self, batches, denominators):
        with FlopCounterMode(display=False) as counter:
            update(self, batches, denominators)
        found.append(counter.get_total_flops())

    monkeypatch.setattr(Fit, "update", counting)
    return found


@pytest.mark.parametrize("kernel", [contextlib.nullcontext, chosen_as_on_a_gpu])
@pytest.mark.parametrize("recipe", METHODS["tiny"])
def test_an_arm_is_measured_whichever_kernel_computes_attention(recipe, kernel):
    with kernel():
        found = measure(target_of(), "tiny", Arm(recipe, 64, "packed", EAGER))
    assert found["tokens_per_s"] > found["supervised_tokens_per_s"] > 0
    assert 0.5 < found["filled_share"] <= 1


@pytest.mark.parametrize("texts", ["chat", "packed"])
@pytest.mark.parametrize("recipe", METHODS["tiny"])
def test_the_loss_is_that_of_the_steps_batches(recipe, texts):
    """The weights stay as they begin: no rate of learning is smaller than what is rounded away."""
    target, arm = target_of(), Arm(recipe, 64, texts, {**EAGER, "trainer.lr": "1e-30"})
    found = measure(target, "tiny", arm)
    module, traces = importlib.import_module(f"recipes.{recipe}"), make_traces(arm, "tiny", 300)
    made = module.Recipe(module.Config(**METHODS["tiny"][recipe]), target)
    torch.manual_seed(0)
    drafter, objective = made.build(traces), made.stages()[-1].objective
    batches = PackedTraces(traces, "target", TOKENS["tiny"], 1, seed=0)
    if texts == "chat":
        batches = Batches(traces, {"target": 1.0}, 4 * TOKENS["tiny"] // arm.length, seed=0)
    losses = []
    for index in range(STEPS, 2 * STEPS):
        batch = batches.at(index)
        request = objective.target_request(batch, index)
        outputs = target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits
        )
        terms = listed(objective.loss(drafter.train(), batch, outputs, index).terms)
        losses.append(sum(weight * float(total.detach() / count) for total, count, weight in terms))
    # kernels add up in another order
    assert found["loss"] == pytest.approx(statistics.mean(losses), rel=1e-5)


def test_from_stored_states_only_the_drafted_rows_of_the_targets_head_are_useful(counted):
    """The useful share of the operations is as live, few of which are attention here."""
    shares, target = [], target_of(3000)
    for features in ("live", "cached"):
        counted.clear()
        settings = {**EAGER, "data.features": features, "method.draft_vocab_size": 20}
        found = measure(target, "tiny", Arm("eagle3", 128, "packed", settings))
        shares.append(found["useful_flops_per_step"] / statistics.mean(counted[STEPS : 2 * STEPS]))
    live, stored = shares
    assert 0.8 < live < 1
    assert stored == pytest.approx(live, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", METHODS["tiny"])
def test_what_is_computed_again_is_not_useful(recipe, counted):
    useful, computed = [], []
    for again in ("false", "true"):
        counted.clear()
        settings = {**EAGER, "trainer.gradient_checkpointing": again}
        found = measure(target_of(), "tiny", Arm(recipe, 64, settings=settings))
        useful.append(found["useful_flops_per_step"])
        computed.append(statistics.mean(counted))
    assert useful[0] == useful[1]
    assert computed[0] < computed[1]


def test_the_loss_at_once_is_the_loss_in_chunks(monkeypatch):
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 5 * 300)
    target, found = target_of(), []
    for at_once in (False, True):
        found.append(measure(target, "tiny", Arm("eagle3", 64, settings=EAGER, at_once=at_once)))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4)
    assert gpu_training.trainer.logits.CHUNK_ELEMENTS == 5 * 300


def test_the_arms_that_matter_most_come_first_and_each_has_a_name():
    full = arms("full")
    assert len({arm.name for arm in full}) == len(full)
    heads = [(arm.recipe, arm.length) for arm in full[:6]]
    lengths = gpu_training.LENGTHS["full"]
    assert heads == [(r, n) for r in ("eagle3", "distillspec") for n in lengths]
    assert full[2].name == "eagle3, 32768 tokens, whole, trainer.gradient_checkpointing=true"
