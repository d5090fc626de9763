"""What the slots of a block weigh by the survival of their prefix."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from data.batches import Batches
from data.shares import TextShares
from recipes.common.heads import Depth
from recipes.common.survival import FLOOR, SURVIVAL, accept_until_fail, dpace, slot_weights
from recipes.common.target_logits import TargetLogits
from target.model import Target
from target.shared_text import TextGroup
from tests.helpers.losses import listed, ordered
from tests.recipes.test_heads import batch_of, loss_of, make, outputs_of, recipe_of
from tests.recipes.test_packed_texts import assert_same_terms, one_a_row, packed, texts_of
from trainer.errors import UserError
from trainer.logits import OutputHead

BLOCK = {"block_size": 5, "draft_layers": 1}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return texts_of(target, tmp_path_factory.mktemp("traces"))


# --- the weights ----------------------------------------------------------------------------------


def test_dpace_weighs_by_the_gradient_of_the_expected_accepted_length():
    torch.manual_seed(0)
    probability = torch.rand(5, 7, dtype=torch.float64)
    trained = torch.arange(5).unsqueeze(1) < torch.tensor([5, 5, 4, 3, 1, 0, 2])
    smoothed = ((1 - FLOOR) * probability + FLOOR).log().requires_grad_()
    length = (smoothed.cumsum(0).exp() * trained).sum()
    (expected,) = torch.autograd.grad(length, smoothed)
    found = dpace(probability, probability > 0.5, trained)
    torch.testing.assert_close(found[trained], expected[trained])
    hopeless = dpace(torch.zeros(3, 1), torch.zeros(3, 1).bool(), torch.ones(3, 1).bool())
    assert hopeless[:, 0].tolist() == [0.5 + 0.25 + 0.125, 0.25 + 0.125, 0.125]


def test_a_loss_stops_behind_the_first_wrong_slot():
    right = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool().T
    found = accept_until_fail(torch.rand(4, 4), right, torch.ones(4, 4).bool())
    assert found.T.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_a_label_that_the_drafter_lacks_is_wrong_for_sure():
    """The head drafts the tokens 1, 4 and 6, whose logits are the states."""
    head = OutputHead(torch.eye(3), kept=torch.tensor([1, 4, 6]))
    states = torch.tensor([[9.0, 0.0, 0.0]])
    final = TargetLogits(head, torch.zeros(1, 8, 3))
    depths = [
        Depth(final.at(torch.tensor([0]), torch.tensor([index])), states, torch.tensor([label]),
              torch.ones(1), torch.ones(()), 1.0, head, None, 1.0)
        for index, label in ((3, 1), (4, 2), (5, 1))
    ]  # fmt: skip
    right = (1 - FLOOR) * float(states[0].softmax(-1)[0]) + FLOOR
    survival = [right, right * FLOOR, right * FLOOR * right]
    expected = {"dpace": [sum(survival[k:]) for k in range(3)], "accept_until_fail": [1, 1, 0]}
    for name, wanted in expected.items():
        found = slot_weights(name, depths, torch.Size([1, 8]))
        assert torch.cat(found).tolist() == pytest.approx(wanted)


# --- the loss -------------------------------------------------------------------------------------


def with_right_slots(recipe, batch, outputs):
    """The batch with labels behind each anchor that the drafter predicts, but for one slot, which
    is another for every block: what a block predicts does not depend on them, though on those of a
    block that begins before it."""
    ids, drafter = batch.input_ids.clone(), recipe.drafter
    anchors = recipe.objective.anchors(batch, 0)
    for number, (row, anchor) in enumerate(anchors.nonzero().tolist()):
        for k in range(1, recipe.depth + 1):
            if k != number % recipe.depth + 1 and anchor + k < ids.shape[1]:
                best = drafter.draft_logits(batch.input_ids, outputs, k)[row, anchor + k - 1]
                ids[row, anchor + k] = best.argmax()
    return dataclasses.replace(batch, input_ids=ids)


def dense(recipe, batch, outputs):
    """Total and number of positions of each depth, block by block and through autograd."""
    config, drafter = recipe.config, recipe.drafter
    teacher = recipe.target.head.logits(outputs.hidden["final_norm"]).log_softmax(-1)
    # each depth through a pass of its own over the texts
    depths = range(1, recipe.depth + 1)
    drafted = [drafter.draft_logits(batch.input_ids, outputs, k).log_softmax(-1) for k in depths]
    anchors = recipe.objective.anchors(batch, 0)
    found = [[] for _ in depths]  # of each text, its values
    for row, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        own = [[] for _ in depths]
        for anchor in anchors[row].nonzero()[:, 0].tolist():
            factors, first_wrong, values = [], math.inf, []
            for k in depths:
                if anchor + k >= len(prompt) + len(response):
                    break
                at, label = (row, anchor + k - 1), batch.input_ids[row, anchor + k]
                log_q, log_p = drafted[k - 1][at], teacher[at]
                values.append((log_p.exp() * (log_p - log_q)).sum())
                factors.append((1 - FLOOR) * float(log_q[label].detach().exp()) + FLOOR)
                if int(log_q.argmax()) != int(label):
                    first_wrong = min(first_wrong, k)
            survival = [math.prod(factors[:k]) for k in range(1, len(factors) + 1)]
            for k, value in enumerate(values, start=1):
                weight = sum(survival[k - 1 :]) if config.weights == "dpace" else k <= first_wrong
                own[k - 1].append(value * weight)
        for mine, all_of in zip(own, found, strict=True):
            all_of.append(mine)
    for texts in found:
        if config.reduction == "token":
            values = [value for text in texts for value in text]
            yield sum(values), len(values)
        else:
            means = [sum(text) / len(text) for text in texts if text]
            yield sum(means), len(means)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("weights", SURVIVAL)
def test_losses_and_gradients_are_those_of_all_blocks_one_by_one(
    weights, reduction, traces, tiny_folder
):
    target = Target.load(str(tiny_folder("llama")), dtype="float64")
    options = {"weights": weights, "reduction": reduction, "anchors": 2, **BLOCK}
    recipe = make("dflash", target, traces, **options)
    recipe.drafter.double()
    batch = batch_of(traces)
    outputs = outputs_of(recipe, batch)
    batch = with_right_slots(recipe, batch, outputs)
    losses, gradients = [], []
    terms = listed(recipe.loss(batch, outputs, 0).terms)
    for made in (terms, [(*term, 1.0) for term in dense(recipe, batch, outputs)]):
        losses.append([(float(total.detach()), float(n), weight) for total, n, weight in made])
        recipe.drafter.zero_grad()
        sum(total / count for total, count, _ in made).backward()
        gradients.append([p.grad.clone() for p in recipe.drafter.parameters()])
    assert losses[0] == [pytest.approx(one, rel=1e-6) for one in losses[1]]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weights", SURVIVAL)
def test_rows_of_texts_and_processes_that_share_them_change_nothing(
    weights, target, traces, monkeypatch
):
    monkeypatch.setattr("target.shared_text.BLOCK", 5)
    recipe = make("dflash", target, traces, weights=weights, anchors=4, **BLOCK)
    source = packed(traces)
    assert_same_terms(recipe, source.at(0), one_a_row(source.at(0)))
    whole, *parts = (source, *(TextShares(source, TextGroup(part, 3)) for part in range(3)))
    found = []
    for batch in (whole.at(0), *(share.at(0) for share in parts)):
        terms = listed(recipe.loss(batch, outputs_of(recipe, batch), 0).terms)
        assert [float(n) for _, n, _ in terms] == ordered(recipe.denominators(batch, 0))
        found.append(torch.tensor([[float(total.detach()), float(n)] for total, n, _ in terms]))
    torch.testing.assert_close(sum(found[1:]), found[0], rtol=1e-4, atol=1e-5)


def test_every_weighting_gives_another_loss(target, traces):
    batch = Batches(traces, {"target": 1.0}, 6, seed=0).at(0)
    options = {"decay": {}, "decay, 1": {"depth_decay": 1.0}}
    options |= {name: {"weights": name} for name in SURVIVAL}
    made = [make("dflash", target, traces, **BLOCK, **one) for one in options.values()]
    losses = [loss_of(recipe, batch).item() for recipe in made]
    assert len({round(loss, 4) for loss in losses}) == len(options)
    counted = [recipe.denominators(batch, 0) for recipe in made]
    assert all(one == counted[0] for one in counted)  # known before the forward pass


@pytest.mark.parametrize("weights", SURVIVAL)
def test_a_decay_beside_them_is_refused(weights, target):
    with pytest.raises(UserError, match=rf"method\.depth_decay must .* method\.weights={weights}"):
        recipe_of("dflash", target, weights=weights, depth_decay=0.9)
    recipe_of("dflash", target, weights=weights, depth_decay=1.0)
    with pytest.raises(UserError, match=r"method\.weights must be one of decay, dpace, accept"):
        recipe_of("dflash", target, weights="exp")
