"""Texts of unequal length as the rows of a tensor, and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

MOST_TOKENS = 2**14  # of a forward without gradient, padding included


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


def by_length(items: Iterable[T], length: Callable[[T], int], most_rows: int) -> Iterator[list[T]]:
    """The items in batches of like length in tokens, the shortest first: at most `most_rows` and,
    but for a single one that is longer, `MOST_TOKENS` tokens each."""
    group: list[T] = []
    for item in sorted(items, key=length):
        if group and (len(group) == most_rows or (len(group) + 1) * length(item) > MOST_TOKENS):
            yield group
            group = []
        group.append(item)
    if group:
        yield group
