"""The one place that aligns logits, labels and mask: logits at index i score token i + 1.

All code after this works on the N supervised positions only, in a fixed order: sequence by
sequence, left to right. What is stored per response token (a compressed teacher, hidden states)
has the same order, so that plain concatenation aligns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import UserError, require


@dataclass
class Aligned:
    """The supervised positions of a batch; N may be 0."""

    draft: Tensor  # [N, V] float, carries the gradient
    teacher: Tensor | None  # [N, V] float, detached
    labels: Tensor  # [N] int64, the token that the logits score
    rows: Tensor  # [N] int64 in 0..B-1, the sequence each position belongs to


def response_mask(
    lengths_prompt: Tensor | list[int], lengths_total: Tensor | list[int], length: int
) -> Tensor:
    """The response tokens of right-padded rows, [B, length] bool, the terminating EOS included.

    lengths_prompt, lengths_total: [B] int, prompt <= total <= length; the total counts prompt and
    response with its EOS. Built from lengths and never from `ids != pad`: where the pad token is
    also the EOS, that test drops the EOS from training.
    """
    start = torch.as_tensor(lengths_prompt)
    end = torch.as_tensor(lengths_total, device=start.device)
    valid = ((start >= 0) & (start <= end) & (end <= length)).all()
    rule = f"lie between the prompt's length and the padded length {length}"
    require(bool(valid), "lengths_total", rule, end.tolist())
    index = torch.arange(length, device=start.device)
    return (index >= start[:, None]) & (index < end[:, None])


def supervised(
    loss_mask: Tensor, depth: int = 0, documents: Tensor | None = None,
    own: Tensor | None = None, anchors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The trained logit indices, [B, L-1] bool: those whose next token is in the mask.

    loss_mask: [B, L] bool over tokens. A token at index 0 has no logits and is never trained.
    depth > 0: the tokens that a head can draft as the depth-th of a round. The round's anchor, the
    last committed token, lies `depth` tokens earlier and must be supervised too, since the first
    token of a response comes from the prefill. These are the positions that decoding visits.
    documents: [B, L] int64, where a row holds several texts; the anchor must be of the same one.
    own: [L] bool, the columns whose logits (depth 0) or anchors count; None: all.
    anchors: [B, L] bool over tokens, or [depth, B, L] of each depth: those that count; None: all.
    """
    assert loss_mask.dtype == torch.bool, "an integer mask would index instead of select"
    trained = loss_mask[:, 1:]
    if depth:
        begins = loss_mask if own is None else loss_mask & own
        if anchors is not None:
            begins = begins & (anchors if anchors.dim() == 2 else anchors[depth - 1])
        anchored = F.pad(begins, (depth - 1, 0))[:, : trained.shape[1]]
        if documents is not None:
            anchored[:, depth - 1 :] &= documents[:, :-depth] == documents[:, depth:]
        return trained & anchored
    return trained if own is None else trained & own[:-1]


def at_index(columns: Tensor, depth: int, length: int) -> Tensor:
    """Move head states from columns to logit indices: [B, T, d] -> [B, length, d].

    The state that a head computes at `depth` from the target's state at position t scores the token
    at t + 1 + depth, logit index t + depth. Zero at indices without a column."""
    out = columns.new_zeros(columns.shape[0], length, *columns.shape[2:])
    count = min(columns.shape[1], length - depth)
    if count > 0:
        out[:, depth : depth + count] = columns[:, :count]
    return out


def align(
    input_ids: Tensor,
    loss_mask: Tensor,
    draft_logits: Tensor,
    teacher_logits: Tensor | None,
    vocab_size: int | None = None,
) -> Aligned:
    """Gather the supervised positions, so that only these are computed.

    input_ids: [B, L] int64; loss_mask: [B, L] bool over tokens; draft_logits: [B, L, V'] and
    teacher_logits: [B, L, V''] float. Heads padded beyond `vocab_size` are cut to it before any
    softmax, so pad rows hold no probability. Selecting by mask costs one host synchronisation.
    """
    widths = [t.shape[-1] for t in (draft_logits, teacher_logits) if t is not None]
    if vocab_size is None:
        vocab_size = widths[0]
        if widths[-1] != vocab_size:
            raise UserError(
                f"the draft's logits have width {widths[0]}, the target's {widths[-1]}: "
                "pass the true vocab_size if one is padded, else the vocabularies differ"
            )
    require(
        0 < vocab_size <= min(widths),
        "vocab_size",
        f"lie in 1..{min(widths)}, the narrower head",
        vocab_size,
    )
    rows, index = supervised(loss_mask).nonzero(as_tuple=True)
    return Aligned(
        draft=draft_logits[rows, index, :vocab_size],
        teacher=None
        if teacher_logits is None
        else teacher_logits.detach()[rows, index, :vocab_size],
        labels=input_ids[rows, index + 1],
        rows=rows,
    )
