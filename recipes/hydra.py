"""Hydra: Medusa's heads, each fed the tokens drafted before it.

Ankner et al. 2024, arXiv:2402.05109: one block per head, cross-entropy on the text, every head
weighted alike. Departures: layers are independent, only positions that decoding visits are trained,
and the residual projection starts as the identity on the target's state
(`method.identity_residual`).

The loss is `recipes.common.heads.HeadObjective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.hydra import HydraDrafter, HydraSettings
from recipes.base import check_kind
from recipes.common.draft_vocabulary import VocabularyConfig, VocabularyRecipe
from trainer.keys import key


@dataclass
class Config(VocabularyConfig):
    divergence: str = "ce_hard"
    depth_decay: float = 1.0
    num_heads: int = key(4, ge=1)  # tokens a round can draft, one by each head
    num_layers: int = key(1, ge=1)  # blocks per head
    prefix_layer: bool = False  # a decoder layer over the prefix, whose states the heads read
    dropout: float = key(0.0, ge=0, lt=1)  # in the heads
    shared_lm_head: bool = False  # the target's output matrix, frozen, instead of one per head
    identity_residual: bool = True  # the residual projection starts as the target's state
    tie_layers: bool = False  # one module for all blocks of a head, as the published code has it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_lm_head:
            self.draft_whole_vocabulary("method.shared_lm_head is true")


class Recipe(VocabularyRecipe[Config]):
    drafter_type = HydraDrafter

    @staticmethod
    def max_depth(method: Config) -> int:
        return method.num_heads

    @property
    def depth(self) -> int:
        return self.config.num_heads

    def check_given(self, drafter: TrainedDrafter) -> None:
        super().check_given(drafter)
        check_kind(drafter, HydraDrafter, "hydra").set_dropout(self.config.dropout)

    def build(self, traces: Sequence[Trace]) -> HydraDrafter:
        config = self.config
        settings = HydraSettings(
            num_heads=config.num_heads, num_layers=config.num_layers,
            prefix_layer=config.prefix_layer, dropout=config.dropout,
            shared_lm_head=config.shared_lm_head, identity_residual=config.identity_residual,
            tie_layers=config.tie_layers,
        )  # fmt: skip
        return HydraDrafter.build(self.target, settings, self.kept(traces))
