"""Which logits are trained: those at index i score token i + 1.

A round of a head begins behind its anchor, the last committed token, at index a. It reads the
target's states up to column t = a - 1; its draft of depth j is token a + j, which logit index
i = a + j - 1 = t + j scores:

    token         t       a = t + 1    a + 1 ...   a + j
    logit index   t - 1   t            t + 1 ...   t + j

All code after this works on the N supervised positions only, in a fixed order: sequence by
sequence, left to right. What is stored per response token (a compressed teacher, hidden states)
has the same order, so that plain concatenation aligns it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import require


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
        allowed = loss_mask if own is None else loss_mask & own  # anchors
        if anchors is not None:
            allowed = allowed & (anchors if anchors.dim() == 2 else anchors[depth - 1])
        anchored = F.pad(allowed, (depth - 1, 0))[:, : trained.shape[1]]
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
