"""Batches as a function of their index, and the mask that decides what is trained on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from data.batches import Batches, collate, few_lengths, longest_text, preview
from data.packing import PackedTraces
from data.traces import Trace
from tests.helpers.aligned import align
from tests.helpers.tiny import EOS, PAD, tiny_tokenizer
from trainer.errors import UserError
from trainer.losses import compress


def make(number: int, **changes) -> Trace:
    """A trace that is known by the tokens of its prompt; lengths vary."""
    row = Trace(
        prompt_ids=[10 + number, 50, 51][: 1 + number % 3],
        response_ids=[20 + number] * (number % 4) + [EOS],
        source="target",
        domain="test",
        conversation_id=f"c{number}",
        turn=0,
        sample_index=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        finish_reason="eos",
        model_hash="m",
        tokenizer_hash="t",
        fixed_ids=[70 + number, EOS],
        index=number,
    )
    return dataclasses.replace(row, **changes)


TRACES = [make(i) for i in range(10)]
MIX = {"fixed": 0.2, "target": 0.5, "draft": 0.3}


def batches(traces=TRACES, mix=MIX, batch_size=4, seed=0, **options):
    return Batches(traces, mix, batch_size, seed=seed, **options)


def contents(batch):
    tensors = (batch.input_ids, batch.loss_mask, batch.position_ids, batch.document_ids)
    lists = (batch.prompts, batch.responses, batch.sources, batch.num_supervised, batch.index)
    return [t.tolist() for t in tensors], lists


def shares_of(some: Batches, count: int) -> dict[str, float]:
    found = Counter(source for i in range(count) for source in some.at(i).sources)
    return {source: number / found.total() for source, number in found.items()}


# a function of the index


@pytest.mark.parametrize("per", ["batch", "example"])
def test_a_batch_depends_on_its_index_alone(per):
    first = batches(per=per)
    forwards = [contents(first.at(i)) for i in range(12)]
    second = batches(per=per)
    assert [contents(second.at(i)) for i in reversed(range(12))] == forwards[::-1]
    assert contents(first.at(3)) == forwards[3]


def test_another_seed_is_another_order():
    def rows(seed):
        return [p for i in range(5) for p in batches(seed=seed).at(i).prompts]

    assert rows(0) != rows(1)
    assert sorted(rows(0)) == sorted(rows(1))


def test_every_epoch_is_a_permutation_of_its_own():
    some = batches(batch_size=3)  # epochs end inside of batches
    rows = [tuple(prompt) for i in range(10) for prompt in some.at(i).prompts]
    everything = sorted(tuple(t.prompt_ids) for t in TRACES)
    epochs = [rows[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_may_be_larger_than_the_data():
    assert sorted(batches(batch_size=20).at(0).prompts) == sorted(
        2 * [t.prompt_ids for t in TRACES]
    )


@pytest.mark.parametrize("per", ["batch", "example"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batch_of_one_process(per, world):
    whole = batches(batch_size=8, per=per)
    parts = [batches(batch_size=8 // world, per=per, rank=r, world=world) for r in range(world)]
    for index in range(6):
        expected = whole.at(index)
        found = [part.at(index) for part in parts]
        for name in ("prompts", "responses", "sources"):
            joined = [row for one in found for row in getattr(one, name)]
            assert joined == getattr(expected, name)


# sources


def test_random_numbers_of_a_text_are_its_own_wherever_it_stands():
    """In a resumed run, on two processes, and in a row with other texts."""
    whole = batches().at(5)
    drawn = whole.uniform("anchors")
    assert drawn.shape == whole.input_ids.shape
    assert torch.equal(batches().at(5).uniform("anchors"), drawn)
    for rank in range(2):
        half = batches(batch_size=2, rank=rank, world=2).at(5)
        columns = half.input_ids.shape[1]
        assert torch.equal(half.uniform("anchors"), drawn[2 * rank : 2 * rank + 2, :columns])
    joined = PackedTraces(TRACES, "target", 40, 4, seed=0).at(5)
    alone = collate(joined.prompts, joined.responses, joined.sources, joined.index)
    assert len(joined.prompts) > len(joined.input_ids)
    packed, plain = joined.uniform("anchors"), alone.uniform("anchors")
    for text, (row, first) in enumerate(joined.starts()):
        size = len(joined.prompts[text]) + len(joined.responses[text])
        assert torch.equal(packed[row, first : first + size], plain[text, :size])


def test_random_numbers_differ_by_token_text_batch_and_stream():
    batch = batches().at(5)
    drawn = batch.uniform("anchors")
    assert drawn.unique().numel() == drawn.numel()
    assert bool(((drawn >= 0) & (drawn < 1)).all())
    assert not bool((batch.uniform("other") == drawn).any())
    again = dataclasses.replace(batch, index=5 + len(TRACES))  # another epoch
    assert not bool((again.uniform("anchors") == drawn).any())
    other = dataclasses.replace(batch, seed=1)  # another run, whose order happens to be the same
    assert not bool((other.uniform("anchors") == drawn).any())


@pytest.mark.parametrize("per", ["batch", "example"])
def test_shares_are_respected(per):
    found = shares_of(batches(per=per), 1500)
    # 1500 draws at least: four standard errors are below 0.052
    assert found == pytest.approx(MIX, abs=0.052)


def test_per_batch_has_one_source_and_per_example_mixes_them():
    assert all(len(set(batches().at(i).sources)) == 1 for i in range(20))
    assert any(len(set(batches(per="example").at(i).sources)) > 1 for i in range(20))


def test_responses_come_from_their_source():
    by_prompt = {tuple(t.prompt_ids): t for t in TRACES}
    some = batches(per="example")
    for index in range(20):
        batch = some.at(index)
        for prompt, response, source in zip(
            batch.prompts, batch.responses, batch.sources, strict=True
        ):
            trace = by_prompt[tuple(prompt)]
            assert response == {
                "fixed": trace.fixed_ids, "target": trace.response_ids, "draft": []
            }[source]  # fmt: skip


def test_draft_text_rises_to_its_share_and_the_others_fill_in():
    some = batches(ramp=1000)
    assert some._shares(0) == pytest.approx([0.2 * 0.9997 / 0.7, 0.5 * 0.9997 / 0.7, 0.0003])
    assert some._shares(499) == pytest.approx([0.2 * 0.85 / 0.7, 0.5 * 0.85 / 0.7, 0.15])
    assert some._shares(1000) == pytest.approx([0.2, 0.5, 0.3])
    early = Counter(s for i in range(150) for s in some.at(i).sources)
    late = Counter(s for i in range(1000, 1150) for s in some.at(i).sources)
    assert early["draft"] < 0.1 * early.total() < 0.2 * late.total() < late["draft"]


def test_draft_text_alone_has_nothing_to_fill_in():
    assert batches(mix={"draft": 1.0}, ramp=100).at(0).sources == ["draft"] * 4


def test_a_share_of_zero_asks_for_nothing():
    bare = [make(i, fixed_ids=[]) for i in range(4)]
    assert batches(bare, {"fixed": 0.0, "target": 1.0}).at(0).sources == ["target"] * 4
    with pytest.raises(UserError, match=r"4 of 4 prompts have none: name data.response_column"):
        batches(bare, {"fixed": 0.5, "target": 0.5})


def test_traces_without_any_response_are_refused():
    with pytest.raises(UserError, match="nothing is supervised"):
        batches([make(0, response_ids=[])], {"target": 1.0})


# the mask


def test_the_mask_is_the_response_with_its_eos_and_nothing_else():
    batch = collate([[5, 6, 7], [8]], [[9, EOS], [10, 11, EOS]], ["target"] * 2)
    assert batch.input_ids.tolist() == [[5, 6, 7, 9, EOS], [8, 10, 11, EOS, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.document_ids.tolist() == [[0] * 5, [0, 0, 0, 0, -1]]
    assert batch.num_supervised == 5


def test_eos_stays_supervised_when_pad_equals_eos():
    batch = collate([[5], [5, 6, 7]], [[9, EOS], [EOS]], ["target"] * 2)
    assert (batch.input_ids[0, 3], EOS) == (EOS, 0)  # padding has the id of the EOS
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 1]]


def test_the_first_response_token_is_scored_by_the_last_prompt_position():
    batch = collate([[5, 6, 7]], [[9, EOS]], ["target"])
    logits = torch.arange(5.0).view(1, 5, 1).expand(1, 5, 4)  # every logit says where it stands
    aligned = align(batch.input_ids, batch.loss_mask, logits, None)
    assert aligned.labels.tolist() == [9, EOS]
    assert aligned.draft[:, 0].tolist() == [2, 3]  # prompt_len - 1, prompt_len


def test_a_first_token_that_nothing_precedes_is_not_supervised():
    batch = collate([[]], [[9, EOS]], ["target"])
    assert batch.loss_mask.int().tolist() == [[0, 1]]
    assert batch.num_supervised == 1


def test_a_row_of_draft_text_waits_without_supervised_tokens():
    batch = collate([[5, 6]], [[]], ["draft"])
    assert batch.num_supervised == 0
    assert not batch.loss_mask.any()


# the compressed teacher


def with_teacher(number: int, width: int = 30, samples: int = 3) -> Trace:
    """The teacher's logits at every position are known from the trace and the place."""
    trace = make(number)
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(len(trace.response_ids), width, generator=generator)
    block = compress(logits, 5, samples, generator)
    tails = {}
    if samples:
        tails = {"tail_ids": block.tail_ids.tolist(), "tail_logp": block.tail_logp.tolist()}
    return dataclasses.replace(
        trace, teacher_ids=block.ids.tolist(), teacher_logp=block.logp.tolist(),
        teacher_log_tail=block.log_tail.tolist(), **tails,
    )  # fmt: skip


@pytest.mark.parametrize("samples", [0, 3])
def test_the_teacher_lines_up_with_the_supervised_positions(samples):
    traces = [with_teacher(i, samples=samples) for i in range(10)]
    some = Batches(traces, {"target": 1.0}, 4, seed=0, teacher=True)
    by_prompt = {tuple(t.prompt_ids): t for t in traces}
    for index in range(5):
        batch = some.at(index).to("cpu")
        assert batch.teacher is not None
        logits = torch.zeros(*batch.input_ids.shape, 30)
        aligned = align(batch.input_ids, batch.loss_mask, logits, None)
        rows = [by_prompt[tuple(prompt)] for prompt in batch.prompts]
        wanted = [(row, place) for row in rows for place in range(len(row.response_ids))]
        assert len(wanted) == len(batch.teacher.ids) == batch.num_supervised
        for position, (row, place) in enumerate(wanted):
            assert aligned.labels[position] == row.response_ids[place]
            assert batch.teacher.ids[position].tolist() == row.teacher_ids[place]
            assert batch.teacher.logp[position].tolist() == pytest.approx(row.teacher_logp[place])
        assert (batch.teacher.tail_ids is None) == (samples == 0)


def test_draws_of_the_tail_count_where_every_text_has_them():
    traces = [with_teacher(i, samples=3 * (i % 2)) for i in range(4)]
    batch = Batches(traces, {"target": 1.0}, 4, seed=0, teacher=True).at(0)
    assert batch.teacher is not None
    assert len(batch.teacher.ids) == batch.num_supervised
    assert batch.teacher.tail_ids is None


def test_a_teacher_that_is_not_stored_is_asked_for():
    with pytest.raises(UserError, match=r"set data.teacher_top_k and data.teacher_samples"):
        Batches(TRACES, {"target": 1.0}, 4, seed=0, teacher=True)


# the look before step 1


def test_the_preview_marks_the_trained_tokens():
    tokenizer = tiny_tokenizer()
    prompt, response = tokenizer("Hi [x]").input_ids, [*tokenizer("yes").input_ids, EOS]
    text = preview(collate([[PAD], prompt], [[], response], ["draft", "target"]), tokenizer)
    assert "row 1 (target): 6 prompt tokens, 4 trained" in text
    assert text.endswith("\nHi [x][y][e][s][<|endoftext|>]")


def test_the_preview_marks_no_token_that_is_not_trained():
    tokenizer = tiny_tokenizer()
    batch = collate([tokenizer("Q").input_ids], [tokenizer("abc").input_ids], ["target"])
    batch.loss_mask[0, 2] = False
    assert "1 prompt tokens, 2 trained, in brackets\nQ[a]b[c]" in preview(batch, tokenizer)


def test_the_preview_of_text_that_is_not_there_yet_says_so():
    assert "no response yet" in preview(collate([[5]], [[]], ["draft"]), tiny_tokenizer())


def test_shares_that_miss_1_by_a_users_rounding_are_drawn_from():
    thirds = dict.fromkeys(("fixed", "target", "draft"), 0.333333)
    rows = [make(0, fixed_ids=[1])]
    drawn = {Batches(rows, thirds, 1, seed=0).at(index).sources[0] for index in range(40)}
    assert drawn == {*thirds}


def test_the_longest_text_of_a_mix_counts_what_the_drafter_is_to_write():
    traces = [make(0, prompt_ids=[1] * 5, response_ids=[2] * 4, fixed_ids=[3] * 9)]
    found = {
        source: longest_text(traces, {source: 1.0}, 7) for source in ("target", "fixed", "draft")
    }
    assert found == {"target": 9, "fixed": 14, "draft": 12}
    assert longest_text(traces, {"target": 0.5, "draft": 0.5, "fixed": 0.0}, 7) == 12
    assert longest_text(traces, {}, 7) == 0


@pytest.mark.parametrize("longest", [5, 64, 700, 8192])
def test_rows_of_few_lengths_have_fewer_than_twelve_shapes_in_an_epoch(longest):
    """And hold the same texts as others, with the same mask."""
    drawn = torch.Generator().manual_seed(0)
    sizes = [longest, *torch.randint(2, longest + 1, (399,), generator=drawn).tolist()]
    traces = [make(i, prompt_ids=[10], response_ids=[20] * (n - 1)) for i, n in enumerate(sizes)]
    mix = {"target": 1.0}
    lengths = few_lengths(traces, mix, 0)
    few, plain = (batches(traces, mix, 4, lengths=given) for given in (lengths, ()))
    shapes, others = set(), set()
    for index in range(100):
        padded, batch = few.at(index), plain.at(index)
        size = batch.input_ids.shape[1]
        shapes.add(padded.input_ids.shape)
        others.add(batch.input_ids.shape)
        assert size <= padded.input_ids.shape[1] <= min(longest, size + max(64, longest // 8 + 63))
        assert padded.input_ids[:, :size].equal(batch.input_ids)
        assert padded.loss_mask[:, :size].equal(batch.loss_mask)
        assert not padded.loss_mask[:, size:].any()
        assert (padded.document_ids[:, size:] == -1).all()
        assert padded.num_supervised == batch.num_supervised
    assert len(shapes) <= 8
    assert len(shapes) < len(others) or len(others) == 1


def test_a_mix_of_texts_is_padded_for_the_longest_of_each_source():
    traces = [make(0, response_ids=[20], fixed_ids=[30] * 80), make(1, response_ids=[20] * 90)]
    for mix, longest in (
        ({"fixed": 1.0, "target": 0.0}, 81), ({"fixed": 0.5, "target": 0.5}, 92), ({"draft": 1}, 66)
    ):  # fmt: skip
        assert few_lengths(traces, mix, max_new_tokens=64) == [64, longest]


def test_a_batch_is_copied_to_a_gpu_beside_the_host(monkeypatch):
    """From pinned memory: from other memory the host would wait for all work before it."""
    copies = []

    def pinned(tensor):
        return SimpleNamespace(
            to=lambda device, non_blocking: copies.append((device, non_blocking))
        )

    traces = [with_teacher(i) for i in range(4)]
    batch = batches(traces, {"target": 1.0}, teacher=True).at(0)
    assert batch.to("cpu").input_ids is batch.input_ids
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    batch.to("cuda")
    assert copies == [("cuda", True)] * (4 + 5)  # those of the batch, and of its teacher
