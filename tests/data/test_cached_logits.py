"""Kept logits are the live ones, and a batch with unknown text is left to the live target."""

import dataclasses

import pytest
import torch

from data.batches import Batches, collate
from data.cached_logits import CachedLogits
from target.model import Target
from tests.data.test_batches import make
from tests.helpers.tiny import save_tiny, tiny_tokenizer  # noqa: F401
from tests.helpers.watch import Reads


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target.load(str(save_tiny(tmp_path_factory.mktemp("kept") / "t", "llama_padded")))


def small(number: int):
    trace = make(number)
    ids = {name: [5 + i % 60 for i in getattr(trace, name)] for name in
           ("prompt_ids", "response_ids", "fixed_ids")}  # fmt: skip
    return dataclasses.replace(trace, **ids)


TRACES = [small(i) for i in range(6)]


def test_kept_logits_are_the_live_ones_at_supervised_positions(target):
    batches = Batches(TRACES, {"target": 0.5, "fixed": 0.5}, 4, seed=0, per="example")
    kept = CachedLogits(target, TRACES, ("target", "fixed"))
    for index in range(6):
        batch = batches.at(index)
        ours = kept.outputs(batch).logits
        live = target.outputs(batch.input_ids, batch.position_ids).logits[..., : target.vocab_size]
        scored = batch.supervised().nonzero(as_tuple=True)
        torch.testing.assert_close(ours[scored], live[scored], rtol=0, atol=1e-4)


def test_the_same_numbers_whatever_was_asked_first(target):
    """A resumed run must see the bits of the straight one."""
    batches = Batches(TRACES, {"target": 1.0}, 2, seed=0)
    one, other = (CachedLogits(target, TRACES, ("target",)) for _ in range(2))
    first = [one.outputs(batches.at(i)).logits for i in range(4)]
    late = other.outputs(batches.at(3)).logits
    scored = batches.at(3).supervised().nonzero(as_tuple=True)
    assert torch.equal(first[3][scored], late[scored])


def test_unknown_text_is_left_to_the_live_target(target):
    kept = CachedLogits(target, TRACES, ("target",))
    assert kept.outputs(collate([[7, 8]], [[9, 10]], ["draft"])) is None
    assert CachedLogits(target, TRACES, ("draft",)).fits() is False
    assert kept.fits() is True
    assert kept.fits(limit_bytes=10) is False


def test_what_is_kept_decides_whether_it_fits(target):
    kept = CachedLogits(target, TRACES, ("target",))
    num_tokens = sum(len(trace.response_ids) for trace in TRACES)
    size = num_tokens * target.vocab_size * target.model.dtype.itemsize
    assert kept.fits(size) is True
    assert kept.fits(size - 1) is False


def test_only_the_logits_of_responses_are_computed_and_of_a_few_texts_at_a_time(
    target, monkeypatch
):
    whole = CachedLogits(target, TRACES, ("target", "fixed"))
    expected = whole._fill()
    tokens = 24
    monkeypatch.setattr("target.padding.MOST_TOKENS", tokens)
    kept = CachedLogits(target, TRACES, ("target", "fixed"))
    with Reads(target) as reads:
        table = kept._fill()
    reads.shapes.remove(tuple(table.shape))  # what is kept
    assert tokens / 2 < max(reads.forwards) <= tokens
    assert reads.positions == max(len(response) for _, response in kept._first)
    assert kept._first.keys() == whole._first.keys()
    assert table.shape == (sum(len(response) for _, response in kept._first), target.vocab_size)
    for row, first in kept._first.items():
        own = table[first : first + len(row[1])]
        other = expected[whole._first[row] :][: len(row[1])]
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4)


def test_a_large_store_is_not_read_to_see_that_it_does_not_fit(target):
    """Its rows would be held as Python lists, whatever their number."""

    def rows():
        yield from TRACES[:3]
        raise AssertionError("read on")

    assert CachedLogits(target, rows(), ("target",)).fits(limit_bytes=10) is False
