"""Settings, recipe and objective that the recipes of block drafters share.

A block is trained behind some tokens of each text, its anchors, which are drawn anew in every
epoch: behind each of them all slots predict at once, so that every token as an anchor would cost as
many times the work of a step. The loss is that of `recipes.common.heads`, slot by slot, by default
weighed by depth, else by `recipes.common.survival`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch.nn import functional as F

from data.batches import Batch
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.block import BlockDrafter, drafter_type
from drafters.block_heads import CORRECTIONS
from drafters.block_settings import BlockSettings, default_captures
from drafters.layers import layer_config
from drafters.mask_token import check_mask_token, default_mask_token
from recipes.common.chosen_layers import ChosenLayers
from recipes.common.draft_vocabulary import VocabularyConfig, VocabularyRecipe, frequent_tokens
from recipes.common.heads import Depth, HeadObjective, Scored
from recipes.common.survival import SURVIVAL, slot_weights
from target.outputs import LayerId
from trainer.errors import require
from trainer.keys import key
from trainer.shift import supervised


@dataclass
class BlockConfig(VocabularyConfig):
    """Settings of every block drafter."""

    # the loss of slot j weighs depth_decay ** (j - 1): exp(-1 / 4), published for blocks of 8
    depth_decay: float = key(0.78, gt=0)
    # what the slots of a block weigh against each other; decay: depth_decay; dpace: how much of the
    # accepted length hangs on a slot, by the probabilities of the labels so far; accept_until_fail:
    # 1 up to the first slot whose best token is not the label, 0 behind it. The latter two replace
    # depth_decay
    weights: str = key("decay", one_of=("decay", *SURVIVAL))
    # tokens that are drafted, the most frequent of the traces, by an output matrix of the drafter's
    # own; 0 or null: all, by the target's. With model.drafter: null leaves it as it is, a larger
    # number than it drafts adds the most frequent others, 0 all
    draft_vocab_size: int | None = key(None, ge=0)
    block_size: int = key(8, ge=2)  # slots of a block, of which the first one is the anchor
    draft_layers: int = key(5, ge=1)  # layers of the drafter
    # layers of the target whose outputs are read, from 0; []: five from 1 to L-3 of L layers
    layers: list[int] = field(default_factory=list)
    # anchors that are drawn in each text, all where it has fewer; 0: all that decoding visits
    anchors: int = key(32, ge=0)
    # what is added to the logits of a slot by the tokens drafted before it: none, markov (the last
    # one), gated (the same through a gate), gru (all of the block)
    correction: str = key("none", one_of=CORRECTIONS)
    correction_rank: int = key(256, ge=1)  # of the correction's matrices
    correction_width: int = key(1024, ge=1)  # of the GRU's state
    causal: bool = False  # a slot sees those before it alone, else its whole block
    from_anchor: bool = False  # the anchor's slot predicts too: one more token of a block
    # id that stands for a token to predict, a special one or a row of the embedding without a
    # token; null: the tokenizer's mask token, else its padding, such a row, a spare special token,
    # or the end of text, the first of them whose row of the embedding is not 0
    mask_token: int | None = key(None, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights != "decay":
            usual = type(self).depth_decay
            rule = f"be 1 or left out with method.weights={self.weights}, which replaces it"
            require(self.depth_decay in (1, usual), "method.depth_decay", rule, self.depth_decay)

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter says how likely its tokens are accepted."""
        return False

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - 1 + self.from_anchor


ConfigT = TypeVar("ConfigT", bound=BlockConfig)


class BlockObjective(HeadObjective):
    """The loss of heads behind some anchors of each text. `config.anchors`: how many."""

    config: BlockConfig

    def anchors(self, batch: Batch, step: int) -> torch.Tensor | None:
        return drawn_anchors(batch, self.config.anchors) if self.config.anchors else None

    def depths(self, scored: Scored, unrolled: Iterator[torch.Tensor]) -> Iterator[Depth]:
        """Weigh the slots of a block against each other, all of which are there at once."""
        depths = super().depths(scored, unrolled)
        if self.config.weights == "decay":
            yield from depths
            return
        known = list(depths)
        found = slot_weights(self.config.weights, known, scored.batch.input_ids.shape)
        for one, weights in zip(known, found, strict=True):
            yield replace(one, weights=one.weights * weights, scale=1.0)


class BlockRecipe(ChosenLayers[ConfigT], VocabularyRecipe[ConfigT]):
    """A recipe that trains a block drafter in one stage."""

    drafter_type = BlockDrafter
    objective_type: ClassVar[type[BlockObjective]] = BlockObjective

    @property
    def trains(self) -> type[TrainedDrafter]:
        return drafter_type(self.config.correction) if self.given is None else type(self.given)

    def make_objective(self) -> BlockObjective:
        given = (self.depth, self.captures, self.is_reduced)
        return self.objective_type(self.config, self.target, *given)

    @property
    def is_reduced(self) -> bool:
        if self.given is not None:
            return super().is_reduced
        return bool(self.config.draft_vocab_size)

    def wanted_type(self, drafter: TrainedDrafter) -> type[TrainedDrafter]:
        """That of any correction, which is checked with the rest of the network."""
        return type(drafter) if isinstance(drafter, BlockDrafter) else BlockDrafter

    def kept(self, traces: Sequence[Trace]) -> torch.Tensor | None:
        return frequent_tokens(traces, self.config.draft_vocab_size or 0, self.target)

    @staticmethod
    def max_depth(method: BlockConfig) -> int:
        return method.depth

    @staticmethod
    def has_slots(method: BlockConfig) -> bool:
        return method.correction == "none"

    @property
    def depth(self) -> int:
        return self.config.depth if self.given is None else self.given.max_depth or 0

    @property
    def named_layers(self) -> list[int]:
        return self.config.layers

    def usual_layers(self, count: int) -> list[LayerId]:
        return default_captures(count)

    def build(self, traces: Sequence[Trace]) -> BlockDrafter:
        config, target = self.config, self.target
        token = config.mask_token
        mask = default_mask_token(target) if token is None else check_mask_token(token, target)
        layers = layer_config(target.model.config)
        layers.num_hidden_layers = config.draft_layers
        kept = self.kept(traces)
        settings = BlockSettings(
            list(self.captures), mask, config.block_size, config.causal, config.from_anchor,
            own_head=kept is not None, correction=config.correction,
            correction_rank=config.correction_rank, correction_width=config.correction_width,
            confidence=config.has_confidence,
        )  # fmt: skip
        return BlockDrafter.build(target, settings, layers, kept)


def drawn_anchors(batch: Batch, count: int) -> torch.Tensor:
    """Draw `count` tokens of each text, [B, L] bool, of those behind which a round can draft a
    token that is trained; all of them where a text has fewer."""
    possible = F.pad(supervised(batch.loss_mask, 1, batch.documents), (0, 1)).flatten()
    numbers = batch.uniform("anchors").flatten().masked_fill(~possible, torch.inf)
    texts = batch.documents
    if texts is None:
        rows = torch.arange(len(batch.input_ids), device=numbers.device)
        texts = rows.unsqueeze(1).expand_as(batch.input_ids)
    order = numbers.argsort()
    order = order[texts.flatten()[order].argsort(stable=True)]  # text by text
    ordered = texts.flatten()[order]
    ranks = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    drawn = torch.zeros_like(possible)
    drawn[order] = ranks < count
    return (drawn & possible).view_as(batch.input_ids)
