"""Where the target's outputs on a batch come from: the disk, the memory, or the target now."""

from __future__ import annotations

import pytest
import torch

from data import cached_logits
from data.batches import Batches, collate
from data.features import write_features
from data.features_layout import FeaturesPlan
from data.teacher import Teacher
from target.outputs import TargetRequest
from tests.data.test_cached_logits import TRACES

STATES = TargetRequest(("final_norm",), logits=False)
LOGITS = TargetRequest()
OTHERS = collate([[7, 8]], [[9, 10, 11]], ["draft"])


@pytest.fixture(scope="module")
def target(tiny_target):
    target = tiny_target("llama")
    assert target.head  # which is checked at its first use, by a forward of its own
    return target


@pytest.fixture
def forwards(target):
    """The input ids of every forward pass of the target."""
    found = []
    hook = target.model.register_forward_pre_hook(
        lambda _, given, named: found.append(named["input_ids"].tolist()), with_kwargs=True
    )
    yield found
    hook.remove()


@pytest.fixture
def batch():
    return Batches(TRACES, {"target": 1.0}, 3, seed=0).at(0)


def teacher_of(target, stored=None):
    return Teacher(target, TRACES, {"target": 1.0}, stored, target.device)


def live(target, batch):
    return target.outputs(batch.input_ids, batch.position_ids, layers=("final_norm",))


def test_nothing_is_computed_where_nothing_is_asked_for(target, forwards, batch):
    assert teacher_of(target).outputs(batch, None) is None
    assert not forwards


def test_kept_logits_cost_one_pass_and_are_the_targets(target, forwards, batch):
    teacher = teacher_of(target)
    scored = batch.supervised().nonzero(as_tuple=True)
    first = teacher.outputs(batch, LOGITS).logits[scored]
    assert len(forwards) == 1  # over all texts
    assert torch.equal(teacher.outputs(batch, LOGITS).logits[scored], first)
    assert len(forwards) == 1
    torch.testing.assert_close(first, live(target, batch).logits[scored], rtol=0, atol=1e-4)


def test_states_are_not_answered_from_kept_logits(target, batch):
    found = teacher_of(target).outputs(batch, TargetRequest(("final_norm",), logits=True))
    expected = live(target, batch)
    assert torch.equal(found.hidden["final_norm"], expected.hidden["final_norm"])
    rows, index = batch.loss_mask[:, 1:].nonzero(as_tuple=True)
    torch.testing.assert_close(found.logits[rows, index], expected.logits[rows, index])


def test_logits_that_do_not_fit_are_computed_at_every_step(target, forwards, batch, monkeypatch):
    monkeypatch.setattr(cached_logits.CachedLogits.fits, "__defaults__", (10,))
    teacher = teacher_of(target)
    for _ in range(2):
        teacher.outputs(batch, LOGITS)
    assert forwards == [batch.input_ids.tolist()] * 2


def test_text_that_is_neither_kept_nor_stored_is_computed_now(target, forwards, batch, tmp_path):
    plan = FeaturesPlan(("final_norm",), "fp32")
    stored = teacher_of(target, write_features(target, TRACES, plan, tmp_path, batch_size=2))
    forwards.clear()
    found = [stored.outputs(batch, STATES), stored.outputs(OTHERS, STATES)]
    assert forwards == [OTHERS.input_ids.tolist()]
    for one, outputs in zip((batch, OTHERS), found, strict=True):
        expected, text = live(target, one).hidden["final_norm"], one.document_ids >= 0
        torch.testing.assert_close(outputs.hidden["final_norm"][text], expected[text])
    assert teacher_of(target).outputs(OTHERS, LOGITS) is not None


def test_logits_of_stored_text_follow_from_its_final_state(target, forwards, batch, tmp_path):
    plan = FeaturesPlan(LOGITS.states, "fp32")
    stored = teacher_of(target, write_features(target, TRACES, plan, tmp_path, batch_size=2))
    forwards.clear()
    found = stored.outputs(batch, LOGITS).logits
    assert not forwards
    rows, index = batch.loss_mask[:, 1:].nonzero(as_tuple=True)
    expected = live(target, batch).logits[rows, index]
    torch.testing.assert_close(found[rows, index], expected)
