"""Attention over whole texts: which kernel computes it, and which keys each query sees.

SDPA reads a dense mask of queries x keys and returns no log-sum-exp of the scores. Flex attention
computes its mask from two numbers per token, skips blocks of keys that no query sees, and returns
the log-sum-exp with a gradient; once compiled it stores nothing of the length squared.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)
from torch.utils._triton import has_triton
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from target.devices import device_of
from target.masks import FULL, LayerMasks
from trainer.losses import wide

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BLOCK = 128  # queries, and keys, of one entry of a block mask
DROPOUT = ("attention_dropout", "attn_pdrop")  # of attention, in the families' configurations
NARROWEST = 16  # of the heads that flex attention's kernels take
# Not the kernel for fewer than BLOCK queries: where these, times the heads that share keys, are
# more than BLOCK, torch 2.13 finds no tile for it and raises NoValidChoicesError.
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass(frozen=True)
class Capability:
    """What decides which kernel computes attention.

    `device`: its type; `dtype`: to compute in; `width`: of a head; `compiles`: whether torch can
    compile kernels for the device here.
    """

    device: str
    dtype: torch.dtype
    width: int
    compiles: bool

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype, width: int) -> Capability:
        """What this device can compile with the torch that is installed."""
        return cls(device.type, dtype, width, device.type == "cuda" and _compiles())

    @property
    def flex(self) -> bool:
        """Whether flex attention computes it, else SDPA.

        On a CPU flex attention has no backward pass, and the log-sum-exp that SDPA's kernel there
        returns has no gradient.
        """
        fits = self.width >= NARROWEST and self.dtype != torch.float64
        return self.device == "cuda" and self.compiles and fits


@functools.cache
def _compiles() -> bool:
    """Whether Triton is installed and finds the C compiler that its launchers are built with."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if has_triton() and compiler:
        return True
    missing = "C compiler" if has_triton() else "Triton that works with this GPU"
    warnings.warn(
        f"no {missing} is installed: attention takes dense masks, which grow with the square of "
        "the text's length",
        stacklevel=2,
    )
    return False


@dataclass(eq=False)
class Visible:
    """The keys that each query sees: columns 0..t of the query's own document, or the last
    `window` of them.

    `length`: number of keys T; `columns` [B, C] int64: those of the queries; `documents` [B, T]
    int64, None: one per row; `causal`: the queries are all columns of one document, in order. A
    mask is made at its first use, once for all steps.
    """

    length: int
    columns: torch.Tensor
    documents: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None

    @functools.cached_property
    def dense(self) -> torch.Tensor | None:
        """The mask [B, C, T] bool, None: causal."""
        if self.causal:
            return None
        keys, queries = torch.arange(self.length, device=self.columns.device), self.columns
        seen = keys <= queries.unsqueeze(-1)
        if self.window is not None:
            seen &= keys > queries.unsqueeze(-1) - self.window
        if self.documents is not None:
            own = self.documents.gather(1, self.columns)
            seen &= self.documents.unsqueeze(1) == own.unsqueeze(-1)
        return seen

    @functools.cached_property
    def blocks(self) -> BlockMask:
        """The mask as flex attention reads it, made from the least and largest column and document
        of each block.

        A block that may hold a visible key is computed with the mask; one whose keys are all
        visible, without it. torch's own `create_block_mask` begins with the dense mask.
        """
        columns, documents = self.columns.contiguous(), self.documents
        window = self.window
        if documents is None:
            documents = columns.new_zeros(len(columns), self.length)
        own = documents.gather(1, columns)

        def seen(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
            before = (key <= columns[row, query]) & (documents[row, key] == own[row, query])
            return before if window is None else before & (key > columns[row, query] - window)

        first, last = _ranges(columns)
        low, high = _ranges(own)
        key_low, key_high = (end.unsqueeze(1) for end in _ranges(documents))
        begin = torch.arange(0, self.length, BLOCK, device=columns.device)
        some = (begin <= last.unsqueeze(-1)) & (key_low <= high.unsqueeze(-1))
        some &= key_high >= low.unsqueeze(-1)
        every = (begin + BLOCK - 1 <= first.unsqueeze(-1)) & (key_low == key_high)
        every &= (low == high).unsqueeze(-1) & (key_low == low.unsqueeze(-1))
        if window is not None:
            some &= begin + BLOCK - 1 > first.unsqueeze(-1) - window
            every &= begin > last.unsqueeze(-1) - window
        every[:, columns.shape[1] // BLOCK :] = False  # the kernels mask what fills a last block
        return BlockMask.from_kv_blocks(
            *_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=seen,
            seq_lengths=(columns.shape[1], self.length),
        )  # fmt: skip


def _ranges(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each block of numbers [B, n], [B, blocks] each."""
    count = numbers.shape[1]
    index = torch.arange(count + -count % BLOCK, device=numbers.device).clamp(max=count - 1)
    low, high = numbers[:, index].unflatten(1, (-1, BLOCK)).aminmax(dim=-1)
    return low, high


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number [B, 1, Q] of key blocks of each query block in blocks [B, Q, K] bool, and their
    indices [B, 1, Q, K] int32, those that are none last."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


@functools.cache
def _compiled(backend: str = "inductor"):
    """Flex attention as a kernel. More variants than torch allows by itself, as rows, dtypes and
    gradients come and go; behind its limit it would compute without one, in length squared."""
    more = torch._dynamo.config.patch(recompile_limit=64)
    return more(torch.compile(flex_attention, fullgraph=True, backend=backend))


def flex(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: BlockMask,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [B, H, C, D] over grouped keys and values [B, G, T, D], in the dtype of
    the values: [B, H, C, D], and the log-sum-exp of the scores [B, H, C] float32. `scale`: of the
    scores, None: D ** -0.5."""
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)  # autocast does not reach it
    # a layer that is compiled holds the kernel in its own graph
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    mixed, further = attend(
        queries, keys, values, block_mask=blocks, scale=scale, enable_gqa=True,
        return_aux=AuxRequest(lse=True), kernel_options=KERNEL,
    )  # fmt: skip
    assert further.lse is not None
    return mixed, further.lse


@dataclass(eq=False)
class Branches:
    """What nodes of trees behind prefixes of one text see: the prefix, and nodes of their own tree.

    `lengths` [R] int64: keys of the text that the nodes of each tree see, at least one; `length`:
    all of the text's keys S; `allowed` [R, n, m] bool: the keys of its own tree that a node sees.
    """

    lengths: torch.Tensor
    length: int
    allowed: torch.Tensor

    @functools.cached_property
    def visible(self) -> Visible:
        """What the nodes of all trees, as one row of R * n queries, see of the text."""
        columns = (self.lengths - 1).repeat_interleave(self.allowed.shape[1])
        return Visible(self.length, columns.unsqueeze(0))

    @functools.cached_property
    def ends(self) -> list[int]:
        """`lengths` on the host."""
        return self.lengths.tolist()


def branched(
    queries: torch.Tensor, text: Pair, own: Pair, branches: Branches, scale: float | None = None
) -> torch.Tensor:
    """Attention of nodes to the text, whose keys all trees share, and to their own tree.

    queries [R, H, n, D]; text: keys and values [1, G, S, D]; own: [R, G, m, D] -> [R, H, n, D].
    `scale`: of the scores, None: D ** -0.5.
    """
    scale = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    values = text[1]
    if not Capability.here(values.device, values.dtype, values.shape[-1]).flex:
        return _tree_by_tree(queries, text, own, branches, scale)
    rows, _, count, _ = queries.shape
    flat = queries.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    mixed, total = flex(flat, *text, branches.visible.blocks, scale)
    mixed, total = (one[0].unflatten(1, (rows, count)).transpose(0, 1) for one in (mixed, total))
    return with_own(mixed, total, queries, own, branches.allowed, scale)


def with_own(
    mixed: torch.Tensor,
    total: torch.Tensor,
    queries: torch.Tensor,
    own: Pair,
    allowed: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Add the nodes of the own tree, or the slots of the own block, to attention over the text,
    `mixed` [R, H, n, D], by `total` [R, H, n], the log-sum-exp of its scores: one softmax over
    both, in float32.

    own: keys and values [R, G, m, D]; `allowed` [R or 1, n, m] bool: which of them a query sees."""
    groups = own[0].shape[1]
    keys, values = (wide(one).unsqueeze(2) for one in own)  # [R, G, 1, m, D]
    scores = wide(queries).unflatten(1, (groups, -1)) @ keys.transpose(-1, -2) * scale
    scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)
    total = total.unflatten(1, (groups, -1)).unsqueeze(-1)
    share, weights = torch.cat([total, scores], -1).softmax(-1).split([1, scores.shape[-1]], -1)
    both = share * wide(mixed).unflatten(1, (groups, -1)) + weights @ values
    return both.flatten(1, 2).to(mixed.dtype)


def _tree_by_tree(
    queries: torch.Tensor, text: Pair, own: Pair, branches: Branches, scale: float
) -> torch.Tensor:
    """`branched` by SDPA: the text up to a tree's own position and no key behind it."""
    found = []
    for row, end in enumerate(branches.ends):
        keys, values = (
            torch.cat([shared[:, :, :end], mine[row : row + 1]], 2)
            for shared, mine in zip(text, own, strict=True)
        )
        seen = F.pad(branches.allowed[row], (end, 0), value=True)[None, None]
        found.append(_grouped(queries[row : row + 1], (keys, values), seen, scale))
    return torch.cat(found)


def _grouped(
    query: torch.Tensor, text: Pair, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of queries [B, H, C, D] to keys and values [B, G, S, D] by a mask [B, 1, C, S].

    The queries of heads that share keys are one row of queries. transformers repeats the keys and
    values for each head: H / G times the cache, in every layer of every forward.
    """
    heads = query.unflatten(1, (text[0].shape[1], -1))
    own = mask.repeat(1, 1, heads.shape[2], 1)
    mixed = F.scaled_dot_product_attention(heads.flatten(2, 3), *text, attn_mask=own, scale=scale)
    return mixed.unflatten(2, heads.shape[2:4]).flatten(1, 2)


class OwnMask(torch.Tensor):
    """A mask that attends by itself; the layers of a model hand it on as they do any other."""

    def attend(self, queries: torch.Tensor, own: Pair, scale: float | None) -> torch.Tensor:
        """Attention of queries [B, H, C, D] to keys and values that the mask knows beside `own`
        [B, G, C, D] -> [B, H, C, D]. `scale`: of the scores, None: D ** -0.5."""
        raise NotImplementedError


def _attended(mask: OwnMask, queries: torch.Tensor, own: Pair, scale: float | None) -> torch.Tensor:
    return mask.attend(queries, own, scale)


# a compiled layer would be compiled again for every text's lengths
_uncompiled: Callable[..., torch.Tensor] = torch.compiler.disable(_attended)  # type: ignore[assignment]


def _sdpa_or_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """transformers' "sdpa", which also reads a block mask and an `OwnMask`: [B, T, H, D]."""
    if isinstance(attention_mask, OwnMask):
        mixed = _uncompiled(attention_mask, query, (key, value), scaling)
    elif isinstance(attention_mask, BlockMask):
        mixed, _ = flex(query, key, value, attention_mask, scaling)
    elif attention_mask is not None and _reads_a_cache(query, key, attention_mask, options):
        mixed = _grouped(query, (key, value), attention_mask, scaling)
    else:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    return mixed.transpose(1, 2).contiguous(), None


def _reads_a_cache(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, options: Mapping[str, object]
) -> bool:
    """Whether few queries, whose heads share keys, see many keys by one mask for all heads, on a
    GPU: a CPU's SDPA reads shared keys with a mask, see `target.layout`."""
    where = Capability.here(key.device, key.dtype, key.shape[-1])
    shared = mask.shape[1] == 1 and key.shape[1] < query.shape[1]
    more = options.get("position_bias") is not None
    more = more or bool(options.get("softcap") or options.get("dropout"))
    return where.device == "cuda" and shared and not more and query.shape[2] < key.shape[2]


AttentionInterface.register("sdpa", _sdpa_or_blocks)


def packed(model: PreTrainedModel, position_ids: torch.Tensor | None) -> dict[str, object]:
    """The arguments with which `model` reads whole rows: `position_ids` [B, L] int64, which tell
    the texts of a row apart, and their mask.

    transformers makes a dense mask [B, 1, L, L] of positions that begin again, and of windows.
    Where flex attention computes, block masks take their place, and layers that see all of a row of
    one text need none. Models with dropout of attention or on several devices keep transformers'
    masks.
    """
    if position_ids is None or not _reads_blocks(model):
        return {"position_ids": position_ids}
    length, masks = position_ids.shape[1], LayerMasks.of(model)
    columns = torch.arange(length, device=position_ids.device).expand_as(position_ids)
    alone = torch.equal(columns, position_ids)
    if alone and (masks.window is None or masks.window >= length):
        return {}

    def mask(window: int | None) -> BlockMask | None:
        if alone and window is None:
            return None
        # the column of a text's first token is the text's number
        return Visible(length, columns, columns - position_ids, window=window).blocks

    return {"position_ids": position_ids, "attention_mask": masks.each(mask)}


def _reads_blocks(model: PreTrainedModel) -> bool:
    """Whether all layers can read block masks, on a device where flex attention computes."""
    if not reads_masks(model):
        return False
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Capability.here(device_of(model), model.dtype, width).flex


def attends_here(model: PreTrainedModel) -> bool:
    """Whether attention of all layers is computed by `_sdpa_or_blocks` with the one mask that the
    model is given."""
    return LayerMasks.of(model).kinds == (FULL,) and reads_masks(model)


def reads_masks(model: PreTrainedModel) -> bool:
    """Whether attention of all layers is computed by `_sdpa_or_blocks` with the masks that the
    model is given, see `LayerMasks`."""
    config: PreTrainedConfig = model.config.get_text_config()
    if not LayerMasks.of(model).is_known:
        return False
    if config._attn_implementation != "sdpa" or not model._supports_flex_attn:
        return False
    if model.training and any(getattr(config, name, 0) for name in DROPOUT):
        return False
    return len(getattr(model, "hf_device_map", "1")) <= 1
