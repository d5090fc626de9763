"""Alignment, masks from lengths, padded heads."""

import pytest
import torch

from tests.helpers.aligned import align
from trainer.errors import UserError
from trainer.shift import at_index, response_mask, supervised

EOS = PAD = 2


def _batch(width=7, length=8):
    """Two rows, prompts of 3 and 2, totals of 8 and 5, the last token an EOS; pad = EOS."""
    ids = torch.tensor([[4, 5, 6, 3, 4, 5, 6, EOS], [3, 4, 5, 6, EOS, PAD, PAD, PAD]])
    mask = response_mask([3, 2], [8, 5], length)
    logits = torch.randn(2, length, width, generator=torch.Generator().manual_seed(0))
    return ids, mask, logits


def test_eos_stays_supervised_when_pad_equals_eos():
    ids, mask, logits = _batch()
    aligned = align(ids, mask, logits, None)
    assert (aligned.labels == EOS).sum() == 2  # one EOS per row, none of the three pads
    assert aligned.labels.tolist() == [3, 4, 5, 6, EOS, 5, 6, EOS]
    assert aligned.rows.tolist() == [0] * 5 + [1] * 3


def test_first_response_token_is_scored_by_the_last_prompt_position():
    ids, mask, logits = _batch()
    aligned = align(ids, mask, logits, logits + 1)
    assert torch.equal(aligned.draft[0], logits[0, 3 - 1])
    assert torch.equal(aligned.draft[5], logits[1, 2 - 1])
    assert torch.equal(aligned.draft[4], logits[0, 6])  # the EOS at index 7
    assert torch.equal(aligned.teacher, aligned.draft + 1)


def test_a_token_without_logits_is_not_trained():
    mask = response_mask([0], [3], 3)
    assert mask.all()
    assert supervised(mask).tolist() == [[True, True]]


def test_padded_heads_are_cut_before_the_softmax():
    ids, mask, logits = _batch()
    padded = torch.cat([logits, torch.full((2, 8, 3), 50.0)], -1)
    aligned = align(ids, mask, padded, logits, vocab_size=7)
    assert aligned.draft.shape == aligned.teacher.shape == (8, 7)
    assert torch.equal(aligned.draft.softmax(-1), aligned.teacher.softmax(-1))


def test_different_widths_without_a_vocab_size_are_refused():
    ids, mask, logits = _batch()
    with pytest.raises(UserError, match="width 7, the target's 6"):
        align(ids, mask, logits, logits[..., :6])
    with pytest.raises(UserError, match=r"vocab_size must lie in 1\.\.6"):
        align(ids, mask, logits, logits[..., :6], vocab_size=7)


def test_gradient_reaches_supervised_draft_positions_only():
    ids, mask, logits = _batch()
    draft, teacher = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    aligned = align(ids, mask, draft, teacher)
    assert not aligned.teacher.requires_grad
    aligned.draft.sum().backward()
    expected = torch.zeros(2, 8, dtype=torch.bool)
    expected[:, :-1] = supervised(mask)
    assert torch.equal(draft.grad.abs().sum(-1) > 0, expected)
    assert teacher.grad is None


def test_an_all_masked_batch_gives_no_positions():
    ids, mask, logits = _batch()
    aligned = align(ids, torch.zeros_like(mask), logits, logits)
    assert aligned.draft.shape == (0, 7)
    assert aligned.labels.shape == (0,)


def test_lengths_are_checked():
    assert response_mask(torch.tensor([2]), torch.tensor([2]), 4).sum() == 0  # empty response
    for prompt, total in (([3], [2]), ([1], [5]), ([-1], [2])):
        with pytest.raises(UserError, match="lengths_total must lie between"):
            response_mask(prompt, total, 4)


def test_a_deeper_token_needs_an_anchor_of_its_own_text():
    """Its round begins at a token of the same response, `depth` before it."""
    mask = response_mask([1], [8], 8)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    masked = mask.clone()
    masked[0, 4] = False  # the prompt of the second text
    assert supervised(masked, 0).int().tolist() == [[1, 1, 1, 0, 1, 1, 1]]
    assert supervised(masked, 1).int().tolist() == [[0, 1, 1, 0, 0, 1, 1]]
    assert supervised(masked, 2).int().tolist() == [[0, 0, 1, 0, 1, 0, 1]]
    assert supervised(masked, 2, documents).int().tolist() == [[0, 0, 1, 0, 0, 0, 1]]
    assert supervised(mask, 3).int().tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert supervised(mask, 3, documents).int().tolist() == [[0, 0, 0, 0, 0, 0, 1]]


def test_only_rounds_behind_sampled_anchors_are_trained():
    mask = response_mask([1], [8], 8)
    anchors = torch.tensor([[1, 0, 1, 0, 0, 0, 1, 0]]).bool()  # the first is the prompt's
    assert supervised(mask, 1, anchors=anchors).int().tolist() == [[0, 0, 1, 0, 0, 0, 1]]
    assert supervised(mask, 3, anchors=anchors).int().tolist() == [[0, 0, 0, 0, 1, 0, 0]]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    assert supervised(mask, 1, documents, anchors=anchors).nonzero().tolist() == [[0, 2], [0, 6]]
    assert not bool(supervised(mask, 2, documents, anchors=anchors).any())
    own = torch.arange(8) > 4
    assert supervised(mask, 1, own=own, anchors=anchors).nonzero().tolist() == [[0, 6]]
    each = torch.stack([anchors, ~anchors])  # depth 2 has others
    assert torch.equal(supervised(mask, 1, anchors=each), supervised(mask, 1, anchors=anchors))
    assert supervised(mask, 2, anchors=each).int().tolist() == [[0, 0, 1, 0, 1, 1, 1]]


def test_columns_stand_where_they_score():
    columns = torch.tensor([[[1.0], [2.0], [3.0]]])
    assert at_index(columns, 0, 5).flatten().tolist() == [1, 2, 3, 0, 0]
    assert at_index(columns, 2, 4).flatten().tolist() == [0, 0, 1, 2]
    assert at_index(columns, 4, 4).flatten().tolist() == [0, 0, 0, 0]
