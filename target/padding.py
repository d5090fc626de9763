"""Texts of unequal length as the rows of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def right_padded(
    texts: Sequence[Sequence[int]], lengths: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """`texts` as [B, L] int64 token ids, padded on the right with 0, and their positions [B, L]
    int64, which count on through the padding. L is the longest length, or the first of the
    ascending `lengths` that holds it."""
    longest = max(len(text) for text in texts)
    width = next((length for length in lengths if length >= longest), longest)
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    positions = torch.arange(width).expand(len(texts), -1).contiguous()
    return ids, positions
