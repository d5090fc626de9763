"""A key-value cache with slots that the caller chooses, on unchanged transformers models.

Rows of a batch accept different numbers of tokens, so a cache that grows by concatenation cannot
be used. Here keys and values lie in preallocated buffers, every forward gives the slot of each
token, and an explicit mask gives the slots that a token may see. Rejected tokens need no rollback:
their slots are masked until they are overwritten.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutput

from target.attention import Pair
from target.devices import decoder_of, device_of
from target.graphs import Graphs, Weights
from target.masks import FULL, SLIDING, LayerMasks
from target.model import captured, last_columns
from target.nodes import PlacedNodes, place_tree
from target.outputs import LayerId
from trainer.errors import RunFault, UserError

# Relative difference of logits. Rounding differs with the shape of a pass, in bfloat16 by some per
# cent, and one token may be routed to another expert: of two tokens the closer one counts. A wrong
# slot or mask makes far more.
TOLERANCE = 0.1
FEWEST_SLOTS = 64  # visible to a captured forward, whose number of slots is a power of two
LATER, TREE, BRANCHES = "later tokens", "a path of a tree", "a tree behind a prefix"
_SAME: dict[str, weakref.WeakSet[PreTrainedModel]] = {
    way: weakref.WeakSet() for way in (LATER, TREE, BRANCHES)
}


@dataclass
class _Placement:
    """The slots of the current call's tokens; shared by all layers."""

    slots: torch.Tensor | None = None  # [R, T]
    first: int | None = None  # all rows write the consecutive slots first, first+1, ...
    rows: torch.Tensor | None = None  # [R] batch rows of this call; None: all
    used: int = 0  # slots 0..used-1 are visible to attention
    past: int = 0  # slots that were written before this call, as far as models ask


class _SlotLayer(CacheLayerMixin):
    def __init__(self, placement: _Placement, rows: int, capacity: int):
        super().__init__()
        self.placement, self.num_rows, self.capacity = placement, rows, capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # zeros, not empty: a masked slot still enters the weighted sum, as 0 * value
        self.keys = key_states.new_zeros(
            self.num_rows, key_states.shape[1], self.capacity, key_states.shape[3]
        )
        self.values = value_states.new_zeros(
            self.num_rows, value_states.shape[1], self.capacity, value_states.shape[3]
        )
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.placement
        # layers of a model may lie on other devices than its input
        slots, rows = (t if t is None else t.to(self.device) for t in (place.slots, place.rows))
        both = []
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            if rows is not None:
                buffer[rows.unsqueeze(1), :, slots] = new.transpose(1, 2)
                both.append(buffer[rows, :, : place.used])
            else:
                if place.first is not None:
                    buffer[:, :, place.first : place.first + new.shape[2]] = new
                else:
                    index = slots[:, None, :, None].expand_as(new)  # type: ignore[index]
                    buffer.scatter_(2, index, new)
                both.append(buffer[:, :, : place.used])
        return tuple(both)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.used, 0

    def get_seq_length(self) -> int:
        return self.placement.past

    def get_max_length(self) -> int:
        return self.capacity


class CachedModel:
    """A causal LM with a slot cache: `forward` takes token ids and their positions (slot = position
    unless slots are given) for all rows of the batch or for some of them."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        config = model.config.get_text_config()
        self.num_layers = config.num_hidden_layers
        self.eager = config._attn_implementation == "eager"
        if config._attn_implementation not in ("eager", "sdpa"):
            raise UserError(
                f"attention implementation {config._attn_implementation!r} takes no explicit mask: "
                "load the model with attn_implementation='sdpa'"
            )
        self.layer_masks = LayerMasks.of(model)
        unknown = set(self.layer_masks.kinds) - {FULL, SLIDING}
        if unknown or not hasattr(config, "num_attention_heads"):
            raise UserError(
                f"model.target has layers of type "
                f"{', '.join(sorted(unknown)) or 'without attention'}: only "
                "full and sliding-window attention keep a cache that speculative decoding can "
                "roll back"
            )
        if config.model_type in ("bloom", "gpt_neo") or getattr(config, "alibi", False):
            raise UserError(
                f"{config.model_type} masks or biases attention in a way of its own (ALiBi or "
                "local attention), which the cache of speculative decoding cannot follow"
            )
        if not self.layer_masks.is_known:
            raise UserError(
                f"{type(decoder_of(model)).__name__} mixes layers of several kinds and takes no "
                "mask for each: this version of transformers cannot be used with it"
            )
        self.cache: Cache | None = None

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def begin(self, rows: int, capacity: int) -> None:
        """Make an empty cache for `rows` sequences of `capacity` slots."""
        self.rows, self.capacity = rows, capacity
        self.graphs = Graphs(self.model) if Weights.of(self.model).captured else None
        self.placement = _Placement()
        self.cache = Cache(
            layers=[_SlotLayer(self.placement, rows, capacity) for _ in range(self.num_layers)]
        )

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these batch rows, in this order (finished rows are dropped)."""
        assert self.cache is not None
        self.rows = len(rows)
        if self.graphs is not None:  # they read and write the buffers of before
            self.graphs = Graphs(self.model)
        for layer in self.cache.layers:
            layer.num_rows = self.rows  # type: ignore[union-attr]
            if layer.is_initialized:  # type: ignore[union-attr]
                own = rows.to(layer.keys.device)  # type: ignore[union-attr]
                layer.keys, layer.values = layer.keys[own], layer.values[own]  # type: ignore[union-attr, index]

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        used: int,
        rows: torch.Tensor | None = None,
        first: int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        tree: PlacedNodes | None = None,
        layers: Sequence[LayerId] = (),
        found: dict[LayerId, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logits [R, T', V] of ids [R, T] int64 at positions [R, T] int64: of the last
        `logits_to_keep` tokens, 0: of all, or [R] int64: of one column of each row, T' = 1.

        `used`: one past the largest visible slot; `rows`: [R] int64, None for all; `first`: given
        where every row writes slots first..first+T-1; `tree`: the tokens are nodes of a tree, with
        slots of their own; `found` receives the outputs [R, T, H] of `layers`."""
        assert self.cache is not None
        self.require_same(LATER if tree is None else TREE, partial(_scored, tree is not None))
        length = ids.shape[1]
        inputs = (ids, positions, *(() if tree is None else vars(tree).values()))
        if self.graphs and first != 0 and rows is None and isinstance(logits_to_keep, int):
            outputs = self.graphs(
                self._run,
                inputs,
                used=min(self.capacity, max(FEWEST_SLOTS, 1 << (used - 1).bit_length())),
                logits_to_keep=logits_to_keep,
                layers=tuple(layers),
            )
        else:
            # whole texts are causal: fused kernels need no mask, which has length^2 entries
            causal = first == 0 and length > 1 and used <= length and tree is None
            causal = causal and not self.eager
            # few shapes: kernels and allocations are reused
            used = length if causal else min(self.capacity, -(-used // 16) * 16)
            outputs = self._run(
                *inputs, used=used, logits_to_keep=logits_to_keep, layers=layers, first=first,
                rows=rows, causal=causal,
            )  # fmt: skip
        logits, *states = outputs
        if found is not None:
            found.update(zip(layers, states, strict=True))
        return logits

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *nodes: torch.Tensor,
        used: int,
        logits_to_keep: int | torch.Tensor,
        layers: Sequence[LayerId],
        first: int | None = None,
        rows: torch.Tensor | None = None,
        causal: bool = False,
    ) -> list[torch.Tensor]:
        """Logits and the outputs of `layers`. `nodes`: the tensors of `PlacedNodes`, if any;
        `causal`: whole texts, which need no mask."""
        place, tree = self.placement, PlacedNodes(*nodes) if nodes else None
        place.slots = positions if tree is None else tree.slots
        place.first, place.rows, place.used = first, rows, used
        place.past = 0 if causal else used
        states: dict[LayerId, torch.Tensor] = {}
        columns = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else None
        if layers and isinstance(logits_to_keep, int):
            logits_to_keep = last_columns(logits_to_keep, ids)
        with captured(self.model, layers, states), _projected(self.model, columns):
            logits = self.model(
                input_ids=ids,
                attention_mask=None if causal else self._mask(positions, used, tree),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep if columns is None else 0,
            ).logits
        return [logits, *(states[layer] for layer in layers)]

    @torch.no_grad()
    def require_same(
        self, way: str, scored: Callable[[CachedModel, torch.Tensor, PlacedNodes], torch.Tensor]
    ) -> None:
        """UserError where the model scores tokens in this way, one of LATER, TREE and BRANCHES,
        otherwise than the same tokens in one pass: its state is not a cache of keys and values, or
        it counts slots instead of positions (ALiBi). Checked once for each model.

        scored(cache, ids [1, N], nodes): logits of the last tokens, which are `nodes` behind the
        first two; the last one is a child of the one before.
        """
        if self.model in _SAME[way]:
            return
        _SAME[way].add(self.model)  # or the trial would check again
        siblings, device = 1 if way == LATER else 15, self.device  # the last: far from its position
        rows = self.model.get_input_embeddings().get_parameter("weight").shape[0]
        ids = (torch.arange(siblings + 3, device=device) % rows).unsqueeze(0)
        ancestors = torch.eye(siblings + 1, dtype=torch.bool, device=device).unsqueeze(0)
        ancestors[:, -1, -2] = True
        depths = torch.ones(1, siblings + 1, dtype=torch.long, device=device)
        depths[:, -1] = 2
        placed = place_tree(torch.tensor([2], device=device), ancestors, depths)
        try:
            found = scored(copy.copy(self), ids, placed)
            alone = torch.cat([ids[:, :2], ids[:, -2:]], 1)
            expected = self.model(input_ids=alone, use_cache=False).logits
        except (UserError, RunFault, torch.OutOfMemoryError):
            _SAME[way].discard(self.model)
            raise
        except Exception as error:  # of a model that takes no such cache, mask or positions
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            what = f"cannot be decoded with this slot cache ({reason})"
        else:
            difference = _relative(found[0, -2:].float(), expected[0, -2:].float())
            if not difference > TOLERANCE:
                return
            what = f"scores {way} otherwise than all in one pass, by {difference:.0%}"
            what += "" if way == LATER else " (ALiBi?): measure chains, eval.tree=null"
        _SAME[way].discard(self.model)
        raise UserError(f"{type(self.model).__name__} {what}")

    def stored(self) -> list[Pair]:
        """Keys and values [B, G, capacity, D] of every layer, by slot."""
        assert self.cache is not None
        return [(layer.keys, layer.values) for layer in self.cache.layers]  # type: ignore[union-attr, misc]

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy keys and values from slots `source` to slots `destination`, each [B, D] int64: an
        accepted path of a tree is appended to the committed text."""
        assert self.cache is not None
        for layer in self.cache.layers:
            if not layer.is_initialized:  # type: ignore[union-attr]  # it reads an earlier one's keys
                continue
            for buffer in (layer.keys, layer.values):  # type: ignore[union-attr]
                assert buffer is not None
                shape = (-1, buffer.shape[1], -1, buffer.shape[3])
                taken, put = (
                    at.to(buffer.device)[:, None, :, None].expand(shape)
                    for at in (source, destination)
                )
                buffer.scatter_(2, put, buffer.gather(2, taken))

    def _mask(
        self, positions: torch.Tensor, used: int, tree: PlacedNodes | None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        slots = torch.arange(used, device=positions.device)
        query = positions.unsqueeze(-1)

        def visible(window: int | None) -> torch.Tensor:
            if tree is not None:
                return tree.visible(used, window)
            seen = slots <= query
            return seen if window is None else seen & (slots > query - window)

        return self.masks(visible)

    def masks(
        self, visible: Callable[[int | None], torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive or bool masks [R, 1, T, S] of the keys that tokens see, by layer type where the
        model chooses by it. `visible`: from a window of keys, None: no limit, to [R, T, S] bool."""

        def mask(window: int | None) -> torch.Tensor:
            allowed = visible(window).unsqueeze(1)
            if not self.eager:
                return allowed
            dtype = self.model.dtype  # eager attention adds its mask
            return torch.zeros_like(allowed, dtype=dtype).masked_fill(
                ~allowed, torch.finfo(dtype).min
            )

        return self.layer_masks.each(mask)


@contextmanager
def _projected(model: PreTrainedModel, columns: torch.Tensor | None) -> Iterator[None]:
    """Inside the block, the head of `model` reads the state of one column [R] int64 of each row.

    transformers projects the same columns of all rows: with prompts of R lengths, R x R states.
    """

    def chosen(module: nn.Module, inputs: object, output: BaseModelOutput) -> BaseModelOutput:
        assert columns is not None
        states = output.last_hidden_state
        assert states is not None
        at = columns.to(states.device)
        output.last_hidden_state = states[torch.arange(len(at), device=at.device), at].unsqueeze(1)
        return output

    handle = None if columns is None else decoder_of(model).register_forward_hook(chosen)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _scored(tree: bool, cache: CachedModel, ids: torch.Tensor, nodes: PlacedNodes) -> torch.Tensor:
    """Logits of later tokens or of a tree, for `CachedModel.require_same`."""
    cache.begin(1, 32)
    cache.forward(ids[:, :2], torch.arange(2, device=ids.device).unsqueeze(0), used=2, first=0)
    used = ids.shape[1]
    return cache.forward(ids[:, 1:], nodes.positions, used=used, tree=nodes if tree else None)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The least relative difference of the rows' logits, each without its mean."""
    found, expected = (x - x.mean(-1, keepdim=True) for x in (found, expected))
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).min())
