"""Attention of the heads' layer: over slots, and over a text with the unrolled steps' columns or
with blocks that begin behind it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from target.attention import Capability, Pair, Visible, flex, with_own
from trainer.losses import wide

SLOTS = 128  # of the blocks that are attended together: as many keys that one block sees none of


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of queries [B, H, T, D] over grouped keys and values [B, G, S, D]: [B, H, T, D].

    `allowed`: [B, T, S] bool, None: causal; `scale`: of the scores, None: D ** -0.5.
    """
    shared = queries.shape[1] // keys.shape[1]
    if allowed is not None and shared > 1:  # on GPUs no fused kernel takes both mask and groups
        keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if allowed is None else allowed.unsqueeze(1),
        is_causal=allowed is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def attend_unrolled(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: list[Pair],
    visible: Visible,
) -> torch.Tensor:
    """One unrolled step: column t sees the first step's columns 0..t and of every later step its
    own column only (Li et al. 2025, EAGLE-3, training-time test).

    queries [B, H, C, D] of the columns of `visible`; keys, values [B, G, T, D]: the first step's,
    of all; own: [B, G, C, D] each, the later steps' keys and values of the queries' columns ->
    [B, H, C, D]
    """
    if Capability.here(values.device, values.dtype, values.shape[-1]).flex:
        return _merged(*flex(queries, keys, values, visible.blocks), queries, own)
    return _by_further_dimensions(queries, keys, values, own, visible.dense)


def _merged(
    mixed: torch.Tensor, total: torch.Tensor, queries: torch.Tensor, own: list[Pair]
) -> torch.Tensor:
    """Add own columns to attention over the shared ones, `mixed` [B, H, C, D], by `total`
    [B, H, C], the log-sum-exp of its scores: one softmax over both, in float32."""
    if not own:
        return mixed
    groups = own[0][0].shape[1]
    grouped = wide(queries).unflatten(1, (groups, -1)) * queries.shape[-1] ** -0.5
    scores = [(grouped * wide(key).unsqueeze(2)).sum(-1).flatten(1, 2) for key, _ in own]
    scores = torch.stack([total, *scores], -1)
    shared, *weights = scores.softmax(-1).unsqueeze(-1).unbind(-2)
    out = (shared * wide(mixed)).unflatten(1, (groups, -1))
    for weight, (_, value) in zip(weights, own, strict=True):
        out = out + weight.unflatten(1, (groups, -1)) * wide(value).unsqueeze(2)
    return out.flatten(1, 2).to(mixed.dtype)


def _by_further_dimensions(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: list[Pair],
    allowed: torch.Tensor | None,
) -> torch.Tensor:
    """`attend_unrolled` for a kernel without the log-sum-exp; `allowed` [B, C, T] bool, None:
    causal, C = T.

    Fused kernels share keys among queries, which own columns are not. So the i-th own column is one
    more key for all: 0 but for a dimension of its own, in which each query carries its score there;
    what it adds to the output, in a dimension of its own too, is its weight.
    """
    if not own:
        return attend(queries, keys, values, allowed)
    batch, heads, count, width = queries.shape
    groups, number = keys.shape[1], len(own)
    grouped = queries.unflatten(1, (groups, heads // groups))
    scores = torch.stack([(grouped * key.unsqueeze(2)).sum(-1) for key, _ in own], -1).flatten(1, 2)
    further = F.pad(torch.eye(number, dtype=keys.dtype, device=keys.device), (width, 0))
    further = further.expand(batch, groups, -1, -1)
    keys, values = (torch.cat([further, F.pad(one, (0, number))], 2) for one in (keys, values))
    queries = torch.cat([queries, scores.to(queries.dtype)], -1)
    if allowed is None:  # causal masks are square: as many queries in front that nobody reads
        queries = F.pad(queries, (0, 0, number, 0))
    else:
        allowed = F.pad(allowed, (number, 0), value=True)
    mixed = attend(queries, keys, values, allowed, scale=width**-0.5)[:, :, -count:]
    mixed, weights = mixed.split([width, number], -1)
    mixed, weights = (part.unflatten(1, (groups, heads // groups)) for part in (mixed, weights))
    for i, (_, value) in enumerate(own):
        mixed = mixed + weights[..., i : i + 1] * value.unsqueeze(2)
    return mixed.flatten(1, 2)


@dataclass(eq=False)
class Blocks:
    """What the slots of blocks see: the text up to their block's column, and their own block.

    `columns` [B, A] int64: the last key of the text that the slots of each block see; `size`: slots
    of a block S; `length`: keys of the text T; `documents` [B, T] int64, None: one per row;
    `causal`: a slot sees its block up to itself, else all of it.
    """

    columns: torch.Tensor
    size: int
    length: int
    documents: torch.Tensor | None = None
    causal: bool = False

    @functools.cached_property
    def own(self) -> torch.Tensor:
        """The slots of its block that each slot sees, [S, S] bool."""
        seen = torch.ones(self.size, self.size, dtype=torch.bool, device=self.columns.device)
        return seen.tril() if self.causal else seen

    @functools.cached_property
    def text(self) -> Visible:
        """What all slots, a row of A * S queries, see of the text; made once for all layers."""
        columns = self.columns.repeat_interleave(self.size, 1)
        return Visible(self.length, columns, self.documents)

    def dense(self, columns: torch.Tensor) -> torch.Tensor:
        """The mask [B, a * S, T + a * S] bool of some of the blocks, those of `columns` [B, a]:
        keys of the text, and behind them the slots of these blocks."""
        text = Visible(self.length, columns, self.documents).dense
        assert text is not None
        own = torch.block_diag(*[self.own] * columns.shape[1])
        own = own.expand(len(text), -1, -1)
        return torch.cat([text.repeat_interleave(self.size, 1), own], -1)


def attend_blocks(queries: torch.Tensor, text: Pair, own: Pair, blocks: Blocks) -> torch.Tensor:
    """Attention of the slots of A blocks to the text and to their own block.

    queries [B, H, A * S, D]; text: keys and values [B, G, T, D]; own: those of the slots,
    [B, G, A * S, D] -> [B, H, A * S, D]
    """
    values, count = text[1], blocks.columns.shape[1]
    fused = Capability.here(values.device, values.dtype, values.shape[-1]).flex
    if not fused or count * blocks.size <= SLOTS:
        return _by_dense_masks(queries, text, own, blocks)
    mixed, total = flex(queries, *text, blocks.text.blocks)
    # [B, H, A * S, ..] -> [B * A, H, S, ..]
    by_block = [
        one.unflatten(2, (count, blocks.size)).transpose(1, 2).flatten(0, 1)
        for one in (mixed, total, queries, *own)
    ]
    mixed, total, queries, keys, values = by_block
    scale = queries.shape[-1] ** -0.5
    found = with_own(mixed, total, queries, (keys, values), blocks.own.unsqueeze(0), scale)
    return found.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def _by_dense_masks(queries: torch.Tensor, text: Pair, own: Pair, blocks: Blocks) -> torch.Tensor:
    """`attend_blocks` by SDPA, SLOTS at a time, so that no mask holds every slot beside every
    slot."""
    mixed, step = [], max(1, SLOTS // blocks.size)
    for first, columns in enumerate(blocks.columns.split(step, 1)):
        begin = first * step * blocks.size
        slots = slice(begin, begin + columns.shape[1] * blocks.size)
        keys, values = (
            torch.cat([shared, mine[:, :, slots]], 2)
            for shared, mine in zip(text, own, strict=True)
        )
        mixed.append(attend(queries[:, :, slots], keys, values, blocks.dense(columns)))
    return torch.cat(mixed, 2)
