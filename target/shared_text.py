"""Texts that several processes read together: each computes some columns of every row.

A process computes the queries, keys and values of its own columns, and each layer gathers the keys
and values of all of them. Attention of a column sees all columns before it, so this is exact. All
processes of a group read the same rows at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PreTrainedModel

from target.attention import BLOCK, Capability, OwnMask, Pair, Visible, flex, reads_masks
from target.devices import decoder_of, device_of
from target.masks import LayerMasks
from target.rotary import by_length
from trainer.errors import UserError
from trainer.processes import PATIENCE, all_gather, reduce_scatter


@dataclass(frozen=True)
class TextGroup:
    """Process `part` of `parts` that read each text together; `processes`: all of them."""

    part: int
    parts: int
    processes: dist.ProcessGroup | None = None

    @classmethod
    def here(cls, process: int, count: int, parts: int) -> TextGroup:
        """The group of `process` among `count`: `parts` neighbours. All of them call it."""
        number, part = divmod(process, parts)
        own = _groups(count, parts)[number]
        assert isinstance(own, dist.ProcessGroup), "this process is in it"
        return cls(part, parts, own)

    def owner(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The part that computes each of `length` columns, [length] int64. Blocks of columns are
        dealt back and forth, because later ones see more keys."""
        turn = torch.arange(length, device=device) // BLOCK % (2 * self.parts)
        return torch.minimum(turn, 2 * self.parts - 1 - turn)

    def owns(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Which of `length` columns this process computes, [length] bool."""
        return self.owner(length, device) == self.part

    def reading(self, ids: torch.Tensor, position_ids: torch.Tensor | None) -> SharedReading:
        """How this process reads its columns of `ids`, both [B, L] int64."""
        length = ids.shape[1]
        padded = length + -length % (BLOCK * self.parts)  # as many columns for every part
        order = self.owner(padded, ids.device).argsort(stable=True)
        columns = order.view(self.parts, -1)[self.part]
        if position_ids is None:
            position_ids = torch.arange(length, device=ids.device).expand_as(ids)
        return SharedReading(self, ids, position_ids, columns, order.argsort()[:length])

    def check(self, model: PreTrainedModel, name: str, trains: bool = False) -> None:
        """Compare the states of a short text with those of `model` alone. UserError where they
        differ, or where its layers, in training mode if it `trains`, are not `can_share`'s."""
        training = model.training
        model.train(trains)
        shares = can_share(model)
        model.train(training)
        if not shares:
            raise UserError(
                f"trainer.context_parallel_size must be 1 for {name}, got {self.parts}: sharing a "
                "text needs attention by sdpa in every layer, without dropout in training, and "
                "rotary frequencies that do not depend on the text's length"
            )
        device = device_of(model)
        width = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
        ids = (torch.arange(self.parts * BLOCK - 1, device=device) % width).unsqueeze(0)
        model.eval()
        with torch.no_grad():
            alone = decoder_of(model)(ids, use_cache=False).last_hidden_state
            shared = self.reading(ids, None).states(model)
        model.train(training)
        error, size = (shared - alone).abs().max(), alone.abs().max()
        # what rounding makes of another order of sums, in half precision too
        if not error <= size * (1e-4 if alone.dtype == torch.float32 else 5e-2):
            raise UserError(
                f"{name} computes other states where {self.parts} processes share a text: set "
                "trainer.context_parallel_size=1"
            )


@dataclass(frozen=True)
class SharedReading:
    """A forward of one process over its columns of rows `ids`, `position_ids` [B, L] int64.

    `columns` [C] int64: its own; some lie behind the end of the rows, so that all processes have as
    many. `places` [L] int64: where each column lies among the columns of all parts, joined.
    """

    group: TextGroup
    ids: torch.Tensor
    position_ids: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor

    def arguments(self, masks: LayerMasks) -> dict[str, object]:
        """What a model that reads `masks` is called with in place of whole rows."""
        rows, length = self.ids.shape
        inside = self.columns.clamp(max=length - 1)
        starts = torch.arange(length, device=self.ids.device) - self.position_ids

        def mask(window: int | None) -> SharedMask:
            # the column of a text's first token is the text's number
            visible = Visible(length, inside.expand(rows, -1), starts, window=window)
            return SharedMask.of(visible, self.whole)

        return {
            "input_ids": self.ids[:, inside],
            "position_ids": self.position_ids[:, inside],
            "attention_mask": masks.each(mask),
        }

    def whole(self, own: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather what each process has computed for its C columns, in dimension `dim`: those of all
        L columns, in order. Differentiable."""
        every: torch.Tensor = _Gathered.apply(own, self.group)  # type: ignore[assignment]
        return torch.cat(every.unbind(), dim).index_select(dim, self.places)

    def states(self, model: PreTrainedModel) -> torch.Tensor:
        """The last states [B, L, H] that the decoder of `model` computes of the rows."""
        made = decoder_of(model)(use_cache=False, **self.arguments(LayerMasks.of(model)))
        return self.whole(made.last_hidden_state)


class SharedMask(OwnMask):
    """A mask [1, 1, 1, 1] with which a model reads some columns of rows, while other processes read
    the others. `visible`: the keys that these see; `whole` (tensor, dim): makes keys or values of
    all columns out of those of each process."""

    visible: Visible
    whole: Callable[[torch.Tensor, int], torch.Tensor]

    @classmethod
    def of(cls, visible: Visible, whole: Callable[[torch.Tensor, int], torch.Tensor]) -> SharedMask:
        mask = visible.columns.new_ones(1, 1, 1, 1, dtype=torch.bool).as_subclass(cls)
        mask.visible, mask.whole = visible, whole
        return mask

    def attend(self, queries: torch.Tensor, own: Pair, scale: float | None) -> torch.Tensor:
        """`own`: the share of this process of all keys and values."""
        # in one dtype: under autocast rotary embeddings make keys wider than values
        keys, values = (self.whole(one.to(own[1].dtype), 2) for one in own)
        queries = queries.to(values.dtype)
        if Capability.here(values.device, values.dtype, values.shape[-1]).flex:
            return flex(queries, keys, values, self.visible.blocks, scale)[0]
        assert self.visible.dense is not None
        seen = self.visible.dense.unsqueeze(1)
        grouped = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=grouped
        )


class _Gathered(torch.autograd.Function):
    """The tensors [...] of all processes of a group: [parts, ...]."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: TextGroup) -> torch.Tensor:
        ctx.group = group
        every = own.new_empty(group.parts, *own.shape)
        all_gather(every.flatten(0, 1), own.contiguous(), group=group.processes)
        return every

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (every,) = gradients
        own = every.new_empty(every.shape[1:])
        reduce_scatter(own, every.contiguous().flatten(0, 1), group=ctx.group.processes)
        return own, None


@functools.cache
def _groups(count: int, parts: int) -> list[object]:
    """The groups of `parts` neighbours among `count` processes, which all make them in the same
    order; a number in place of those that this process is not in."""
    return [
        dist.new_group(list(range(first, first + parts)), timeout=PATIENCE)
        for first in range(0, count, parts)
    ]


def can_share(model: PreTrainedModel) -> bool:
    """Whether a column's states follow from the keys and values of the columns before it, and from
    positions that are given."""
    return reads_masks(model) and not by_length(model.config.get_text_config())
