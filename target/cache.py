"""A key-value cache with slots that the caller chooses, on unchanged transformers models.

Rows of a batch accept different numbers of tokens, so a cache that grows by concatenation cannot
be used. Here keys and values lie in preallocated buffers, every forward gives the slot of each
token, and an explicit mask gives the slots that a token may see. Rejected tokens need no rollback:
their slots are masked until they are overwritten.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from target.devices import decoder_of, device_of
from trainer.config import RunFault, UserError

# Relative difference of logits. Rounding differs with the shape of a pass, in bfloat16 by some per
# cent, and one token may be routed to another expert: of two tokens the closer one counts. A wrong
# slot or mask makes far more.
TOLERANCE = 0.1
_SAME: dict[bool, weakref.WeakSet[PreTrainedModel]] = {
    False: weakref.WeakSet(),
    True: weakref.WeakSet(),
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

    def copy_rows(self, other: _SlotLayer, rows: torch.Tensor) -> None:
        """Copy these rows of another layer that has been written to."""
        assert other.keys is not None
        assert other.values is not None
        rows = rows.to(other.keys.device)
        self.keys, self.values = other.keys[rows], other.values[rows]
        self.dtype, self.device, self.is_initialized = other.dtype, other.device, True

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


@dataclass
class PlacedNodes:
    """The slots of the tree nodes of one forward, and the slots that they may see.

    slots, positions: [B, T] int64; first: [B] int64, lower slots hold committed text and are
    visible to all; ancestors: [B, T, M] bool, of the M nodes fed so far, in slots first, first + 1,
    ...; depths: [B, M] int64, from 1."""

    slots: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    ancestors: torch.Tensor
    depths: torch.Tensor

    def visible(self, used: int, window: int | None = None) -> torch.Tensor:
        """The visible slots, [B, T, used] bool; with `window`, only keys closer than that."""
        batch, count, size = self.ancestors.shape
        slots = torch.arange(used, device=self.first.device)
        allowed = (slots < self.first.unsqueeze(1)).unsqueeze(1).repeat(1, count, 1)
        nodes = self.first.unsqueeze(1) + torch.arange(size, device=self.first.device)
        allowed.scatter_(2, nodes.unsqueeze(1).expand(-1, count, -1), self.ancestors)
        if window is not None:
            keys = slots.expand(batch, -1).clone()
            keys.scatter_(1, nodes, self.first.unsqueeze(1) + self.depths - 1)
            allowed &= keys.unsqueeze(1) > self.positions.unsqueeze(-1) - window
        return allowed


class TreeSlots:
    """The nodes of one round, placed in consecutive slots from `first` [B] on in the order in which
    they are fed; their positions are those of their depth."""

    def __init__(self, first: torch.Tensor):
        self.first, self.count = first, 0
        batch, device = len(first), first.device
        self.ancestors = torch.zeros(batch, 0, 0, dtype=torch.bool, device=device)
        self.depths = torch.zeros(batch, 0, dtype=torch.long, device=device)

    def add(self, parents: torch.Tensor, depth: int) -> PlacedNodes:
        """parents [B, n]: among the nodes added before, -1 for none; all of them `depth` deep."""
        batch, new = parents.shape
        old, size = self.count, self.count + new
        rows = torch.arange(batch, device=parents.device).unsqueeze(1)
        grown = torch.zeros(batch, size, size, dtype=torch.bool, device=parents.device)
        grown[:, :old, :old] = self.ancestors
        if old:
            above = self.ancestors[rows, parents.clamp(min=0)]
            grown[:, old:, :old] = above & (parents >= 0).unsqueeze(-1)
        grown[:, old:, old:] = torch.eye(new, dtype=torch.bool, device=parents.device)
        self.ancestors = grown
        self.depths = torch.cat([self.depths, torch.full_like(parents, depth)], 1)
        self.count = size
        slots = self.first.unsqueeze(1) + torch.arange(old, size, device=parents.device)
        positions = (self.first + (depth - 1)).unsqueeze(1).expand(-1, new)
        return PlacedNodes(slots, positions, self.first, grown[:, old:], self.depths)


def place_tree(lengths: torch.Tensor, ancestors: torch.Tensor, depths: torch.Tensor) -> PlacedNodes:
    """The last committed token and behind it a whole tree, for its verification. lengths [B];
    ancestors [B, N, N], depths [B, N] of the nodes."""
    first = lengths.unsqueeze(1)
    nodes = torch.arange(-1, depths.shape[1], device=lengths.device)
    none = torch.zeros_like(ancestors[:, :1])
    return PlacedNodes(
        first + nodes,
        first - 1 + torch.nn.functional.pad(depths, (1, 0)),
        lengths,
        torch.cat([none, ancestors], 1),
        depths,
    )


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
        types = getattr(config, "layer_types", None) or ["full_attention"]
        window = getattr(config, "sliding_window", None)
        self.mask_types = sorted(set(types))
        unknown = set(types) - {"full_attention", "sliding_attention"}
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
        base = decoder_of(model)
        # Models either choose a mask by layer type from a dict, or take one mask for all layers.
        self.takes_dict = (
            "isinstance(causal_mask_mapping := attention_mask, dict)"
            in inspect.getsource(type(base).forward)
        )
        if not self.takes_dict and len(self.mask_types) > 1:
            raise UserError(
                f"{type(base).__name__} mixes layers of several kinds and takes no mask for each: "
                "this version of transformers cannot be used with it"
            )
        if not self.takes_dict:
            self.mask_types = ["sliding_attention" if window is not None else "full_attention"]
        self.window = window if "sliding_attention" in self.mask_types else None
        self.cache: Cache | None = None

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def begin(self, rows: int, capacity: int) -> None:
        """Make an empty cache for `rows` sequences of `capacity` slots."""
        self.rows, self.capacity = rows, capacity
        self.placement = _Placement()
        self.cache = Cache(
            layers=[_SlotLayer(self.placement, rows, capacity) for _ in range(self.num_layers)]
        )

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these batch rows, in this order (finished rows are dropped)."""
        assert self.cache is not None
        self.rows = len(rows)
        for layer in self.cache.layers:
            layer.num_rows = self.rows  # type: ignore[union-attr]
            if layer.is_initialized:  # type: ignore[union-attr]
                own = rows.to(layer.keys.device)  # type: ignore[union-attr]
                layer.keys, layer.values = layer.keys[own], layer.values[own]  # type: ignore[union-attr, index]

    def repeated(self, rows: torch.Tensor) -> CachedModel:
        """Another cache of the same model with copies of these rows, [n] int64; a row may be named
        several times. This cache does not change."""
        assert self.cache is not None
        other = copy.copy(self)
        other.begin(len(rows), self.capacity)
        assert other.cache is not None
        for mine, new in zip(self.cache.layers, other.cache.layers, strict=True):
            new.copy_rows(mine, rows)  # type: ignore[union-attr]
        return other

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
    ) -> torch.Tensor:
        """Logits [R, T', V] of ids [R, T] int64 at positions [R, T] int64.

        `used`: one past the largest visible slot; `rows`: [R] int64, None for all; `first`: given
        where every row writes slots first..first+T-1; `tree`: the tokens are nodes of a tree, with
        slots of their own."""
        assert self.cache is not None
        self._require_same(tree is not None)
        place, length = self.placement, ids.shape[1]
        # whole texts are causal: fused kernels need no mask for them, which has length^2 entries
        causal = first == 0 and length > 1 and used <= length and tree is None and not self.eager
        # few shapes: kernels and allocations are reused
        used = length if causal else min(self.capacity, -(-used // 16) * 16)
        place.slots, place.first, place.rows, place.used = positions, first, rows, used
        place.past = 0 if causal else used
        if tree is not None:
            place.slots = tree.slots
        return self.model(
            input_ids=ids,
            attention_mask=None if causal else self._mask(positions, used, tree),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits

    @torch.no_grad()
    def _require_same(self, tree: bool) -> None:
        """UserError where the model scores later tokens, or a path of a tree, otherwise than the
        same tokens in one pass: its state is not a cache of keys and values, or it counts slots
        instead of positions (ALiBi). Checked once for each model."""
        if self.model in _SAME[tree]:
            return
        _SAME[tree].add(self.model)  # or the trial would check again
        siblings, device = 15 if tree else 1, self.device  # the last one: far from its position
        rows = self.model.get_input_embeddings().get_parameter("weight").shape[0]
        ids = (torch.arange(siblings + 3, device=device) % rows).unsqueeze(0)
        ancestors = torch.eye(siblings + 1, dtype=torch.bool, device=device).unsqueeze(0)
        ancestors[:, -1, -2] = True
        depths = torch.ones(1, siblings + 1, dtype=torch.long, device=device)
        depths[:, -1] = 2
        placed = place_tree(torch.tensor([2], device=device), ancestors, depths)
        trial = copy.copy(self)
        trial.begin(1, 32)
        try:
            trial.forward(ids[:, :2], torch.arange(2, device=device).unsqueeze(0), used=2, first=0)
            found = trial.forward(
                ids[:, 1:], placed.positions, used=siblings + 3, tree=placed if tree else None
            )
            alone = torch.cat([ids[:, :2], ids[:, -2:]], 1)
            expected = self.model(input_ids=alone, use_cache=False).logits
        except (UserError, RunFault, torch.OutOfMemoryError):
            _SAME[tree].discard(self.model)
            raise
        except Exception as error:  # of a model that takes no such cache, mask or positions
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            what = f"cannot be decoded with this slot cache ({reason})"
        else:
            difference = _relative(found[0, -2:].float(), expected[0, -2:].float())
            if not difference > TOLERANCE:
                return
            which = "a path of a tree" if tree else "later tokens"
            what = f"scores {which} otherwise than all in one pass, by {difference:.0%}"
            what += " (ALiBi?): measure chains, eval.tree=null" if tree else ""
        _SAME[tree].discard(self.model)
        raise UserError(f"{type(self.model).__name__} {what}")

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy keys and values from slots `source` to slots `destination`, each [B, D] int64: an
        accepted path of a tree is appended to the committed text."""
        assert self.cache is not None
        for layer in self.cache.layers:
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
        """Additive or bool masks [R, 1, T, S], by layer type where the model chooses by it."""
        slots = torch.arange(used, device=positions.device)
        query = positions.unsqueeze(-1)
        masks: dict[str, torch.Tensor] = {}
        for kind in self.mask_types:
            window = self.window if kind == "sliding_attention" else None
            if tree is not None:
                allowed = tree.visible(used, window)
            else:
                allowed = slots <= query
                if window is not None:
                    allowed &= slots > query - window
            allowed = allowed.unsqueeze(1)  # [R, 1, T, S]
            if self.eager:  # eager attention adds its mask
                dtype = self.model.dtype
                allowed = torch.zeros_like(allowed, dtype=dtype).masked_fill(
                    ~allowed, torch.finfo(dtype).min
                )
            masks[kind] = allowed
        return masks if self.takes_dict else next(iter(masks.values()))


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The least relative difference of the rows' logits, each without its mean."""
    found, expected = (x - x.mean(-1, keepdim=True) for x in (found, expected))
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).min())
