"""Rows of raw text: which text, which mask, which positions, and in which shares."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from data import corpus
from data.batches import preview
from data.packing import PackedBatches, PackedTraces, RawText
from data.traces import Trace
from tests.helpers.commands import write_jsonl
from tests.helpers.tiny import EOS, tiny_tokenizer
from trainer.errors import UserError

CONTEXT = 16


@pytest.fixture(scope="module")
def made(tiny_target, tmp_path_factory):
    """make(shares by name, **options of PackedBatches)."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = {
        "prose": [f"Sentence {i} of {i % 7}" for i in range(60)],
        "code": [f"f({i})={i * i}" for i in range(60)],
        "math": [f"{i}+{i}={2 * i}" for i in range(60)],
    }
    paths = {
        name: str(write_jsonl(folder / f"{name}.jsonl", [{"text": t} for t in rows]))
        for name, rows in texts.items()
    }

    def make(context=CONTEXT, batch_size=4, seed=0, **shares):
        rank, world = shares.pop("rank", 0), shares.pop("world", 1)
        named = {paths[name]: share for name, share in (shares or {"prose": 1}).items()}
        text = RawText(named, context)
        files = text.load(tiny_target("llama"), 10**6, folder)
        return PackedBatches(files, text, batch_size, seed, rank, world)

    return make


def contents(batch):
    return [t.tolist() for t in (batch.input_ids, batch.loss_mask, batch.position_ids)], batch.index


def test_eos_is_trained_and_the_first_token_of_a_document_is_not(made):
    for index in range(8):
        batch = made().at(index)
        follows_eos = torch.zeros_like(batch.loss_mask)
        follows_eos[:, 1:] = batch.input_ids[:, :-1] == EOS
        expected = ~follows_eos
        expected[:, 0] = False
        assert torch.equal(batch.loss_mask, expected)
        assert batch.loss_mask[:, 1:][batch.input_ids[:, 1:] == EOS].all()
        assert batch.num_supervised == int(expected.sum())
        assert (batch.position_ids[follows_eos] == 0).all()
        assert batch.document_ids.diff(dim=1)[follows_eos[:, 1:]].eq(1).all()


def test_a_batch_follows_from_its_index_alone(made):
    forwards = [contents(made(prose=1, code=2).at(i)) for i in range(10)]
    again = made(prose=1, code=2)
    assert [contents(again.at(i)) for i in reversed(range(10))] == forwards[::-1]
    assert contents(made(prose=1, code=2, seed=1).at(0)) != forwards[0]


def test_ranks_share_the_rows_of_one_process(made):
    for index in range(3):
        whole = made(batch_size=6, prose=1, code=2).at(index)
        parts = [
            made(batch_size=3, prose=1, code=2, rank=rank, world=2).at(index) for rank in (0, 1)
        ]
        joined = torch.cat([part.input_ids for part in parts])
        assert torch.equal(joined, whole.input_ids)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(made):
    batches = made(batch_size=1)
    (file,) = batches.files
    rows = file.num_tokens // CONTEXT
    epochs = [[tuple(batches.at(e * rows + i).responses[0]) for i in range(rows)] for e in (0, 1)]
    expected = sorted(tuple(file.row(i, CONTEXT)[0].tolist()) for i in range(rows))
    assert [sorted(epoch) for epoch in epochs] == [expected, expected]
    assert epochs[0] != epochs[1]


def test_each_source_has_an_order_of_its_own(tiny_target, tmp_path):
    shares = {
        str(write_jsonl(tmp_path / f"{letter}.jsonl", [{"text": f"{letter}{i:06}"}
                                                       for i in range(40)])): 1
        for letter in "ab"
    }  # fmt: skip
    text = RawText(shares, 8)
    batches = PackedBatches(text.load(tiny_target("llama"), 10**6, tmp_path), text, 1, seed=0)
    first, second = batches.files
    rows = {tuple(f.row(i, 8)[0]): i for f in (first, second) for i in range(40)}
    order = [rows[tuple(batches.at(i).responses[0])] for i in range(80)]
    assert sorted(order[::2]) == sorted(order[1::2]) == list(range(40))
    assert order[::2] != order[1::2]


@pytest.mark.parametrize("shares", [{"code": 2, "prose": 1}, {"code": 5, "prose": 3, "math": 0.5}])
def test_shares_are_exact_at_every_length_and_no_row_is_skipped(made, shares):
    batches = made(batch_size=1, **shares)
    total = sum(shares.values())
    seen: Counter = Counter()
    for number in range(200):
        which, rank = batches._place(number)
        assert rank == seen[which]  # the next of its source
        seen[which] += 1
        for place, share in enumerate(shares.values()):
            assert abs(seen[place] - (number + 1) * share / total) < 2
    assert {batches.at(i).sources[0] for i in range(40)} == {f.source for f in batches.files}


def test_only_what_the_mixture_asks_for_is_tokenised(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_DOCUMENTS", 8)
    text = RawText({"toy:math": 3, "toy:prose": 1}, CONTEXT)
    files = text.load(tiny_target("llama"), 8000, tmp_path)
    assert all(
        file.num_tokens >= share * 2000 + CONTEXT for file, share in zip(files, (3, 1), strict=True)
    )
    assert all(
        file.num_tokens < 3 * share * 2000 for file, share in zip(files, (3, 1), strict=True)
    )


def test_a_corpus_shorter_than_one_context_is_refused(tiny_target, tmp_path):
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"text": "too short"}])
    says = r"DataError: corpus .*raw\.jsonl has 10 tokens, method\.context=16"
    with pytest.raises(UserError, match=says):
        RawText({str(raw): 1}, 16).load(tiny_target("llama"), 100, tmp_path)


def test_the_preview_marks_exactly_what_is_trained(made):
    batch = made().at(0)
    text = preview(batch, tiny_tokenizer()).partition("\n")[2]
    row, mask = batch.input_ids[0].tolist(), batch.loss_mask[0].tolist()
    tokens = [tiny_tokenizer().decode([one]) for one in row]
    marked = [f"[{one}]" if on else one for one, on in zip(tokens, mask, strict=True)]
    assert text == "".join(marked)


# several whole traces a row


def trace(prompt, response):
    rest = ("target", "code", "c", 0, 0, 1.0, 0, 1.0, 0, "eos", "m", "t")
    return Trace(prompt, response, *rest)


def test_texts_that_just_fit_share_a_row_and_each_begins_anew():
    traces = [trace([5, 6], [7, 8]), trace([], [9, 10]), trace([11], [12, 13])]
    batches = PackedTraces(traces, "target", 9, 1, seed=0)
    batch = batches.at(0)
    assert len(batch.prompts) == 3
    assert batches.at(1).prompts != []  # the next epoch
    for prompt, response, (row, first) in zip(
        batch.prompts, batch.responses, batch.starts(), strict=True
    ):
        span = slice(first, first + len(prompt) + len(response))
        length = span.stop - span.start
        assert batch.input_ids[row, span].tolist() == prompt + response
        assert batch.position_ids[row, span].tolist() == list(range(length))
        trained = [False] * max(1, len(prompt))  # nothing stands before the first token of a text
        assert batch.loss_mask[row, span].tolist() == trained + [True] * (length - len(trained))
    assert batch.num_supervised == 2 + 1 + 2
