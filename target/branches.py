"""Trees behind prefixes of one text: the target reads the text once and all their nodes after it.

A node sees the text up to its tree's prefix, and the nodes above it. Keys and values of the text
are computed once and shared by all trees; those of the nodes live for one layer.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from target.attention import Branches, OwnMask, Pair, attends_here, branched
from target.cache import BRANCHES, CachedModel
from target.nodes import PlacedNodes


class NodeMask(OwnMask):
    """A mask [R, 1, n, m] bool with which a model reads nodes of trees: which keys of its own
    tree a node sees. `text`: keys and values of the text in the layer at work."""

    branches: Branches
    text: Pair

    @classmethod
    def of(cls, branches: Branches) -> NodeMask:
        mask = branches.allowed.unsqueeze(1).as_subclass(cls)
        mask.branches = branches
        return mask

    def attend(self, queries: torch.Tensor, own: Pair, scale: float | None) -> torch.Tensor:
        return branched(queries, self.text, own, self.branches, scale)


class _TextLayer(CacheLayerMixin):
    """A layer's keys and values of the text, to which nothing is added.

    With a `mask` attention joins them to those of the nodes; without one they are copied for each
    tree, in front of those.
    """

    def __init__(self, text: Pair, mask: NodeMask | None):
        super().__init__()
        self.text, self.mask = text, mask

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if self.mask is not None:
            self.mask.text = self.text
            return key_states, value_states
        keys, values = (one.expand(len(key_states), -1, -1, -1) for one in self.text)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.text[0].shape[2]

    def get_max_length(self) -> int:
        return -1


class TextBranches:
    """A target's keys and values of one text, behind whose prefixes it reads trees."""

    def __init__(self, model: CachedModel):
        self.model = model
        self.shares = attends_here(model.model)

    def read(self, ids: torch.Tensor) -> None:
        """Read the text, [1, S] int64. UserError where the model cannot read trees behind it."""
        self.model.require_same(BRANCHES, _scored)
        size = ids.shape[1]
        self.model.begin(1, size)
        positions = torch.arange(size, device=ids.device).unsqueeze(0)
        self.model.forward(ids, positions, used=size, first=0, logits_to_keep=1)
        self.size = size

    def score(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        ancestors: torch.Tensor,
        depths: torch.Tensor,
        logits_to_keep: int = 1,
    ) -> torch.Tensor:
        """Logits [R, n', V] of the last nodes of trees behind the prefixes of `lengths` [R] tokens.

        tokens, depths [R, n] int64; ancestors [R, n, n] bool: a node sees itself and those above.
        """
        positions = lengths.unsqueeze(1) + depths - 1
        if self.shares:
            masks = mask = NodeMask.of(Branches(lengths, self.size, ancestors))
        else:
            mask = None
            masks = self.model.masks(
                lambda window: self._seen(lengths, positions, ancestors, window)
            )
        cache = Cache(layers=[_TextLayer(text, mask) for text in self.model.stored()])
        return self.model.model(
            input_ids=tokens, attention_mask=masks, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=logits_to_keep,
        ).logits  # fmt: skip

    def _seen(
        self,
        lengths: torch.Tensor,
        positions: torch.Tensor,
        ancestors: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """The visible keys of text and own nodes, [R, n, S + n] bool; with `window`, only those
        closer than that."""
        text = torch.arange(self.size, device=lengths.device).expand(len(lengths), -1)
        keys = torch.cat([text, positions], 1).unsqueeze(1)
        prefix = (text < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, positions.shape[1], -1)
        seen = torch.cat([prefix, ancestors], -1)
        return seen if window is None else seen & (keys > positions.unsqueeze(-1) - window)


def _scored(model: CachedModel, ids: torch.Tensor, nodes: PlacedNodes) -> torch.Tensor:
    """Logits of the nodes behind the first two tokens, for `CachedModel.require_same`."""
    text = TextBranches(model)
    text.read(ids[:, :2])
    ancestors = nodes.ancestors[:, 1:]  # without the last token of the text
    return text.score(ids[:, 2:], nodes.first, ancestors, nodes.depths, logits_to_keep=0)
