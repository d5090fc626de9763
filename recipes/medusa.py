"""Medusa-1: independent heads on the target's last state, one per token ahead.

Cai et al. 2024, arXiv:2401.10774. Departures from the published code: biases start at zero, so
every head starts as the target's next-token predictor; layers of a head are independent (there they
are one module twice); only positions that decoding visits are trained; soft labels by default.

The loss is `recipes.common.heads.HeadObjective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.traces import Trace
from drafters.medusa import MedusaDrafter, MedusaSettings
from recipes.common.draft_vocabulary import VocabularyConfig, VocabularyRecipe
from trainer.keys import key


@dataclass
class Config(VocabularyConfig):
    num_heads: int = key(4, ge=1)  # tokens a round can draft, one by each head
    num_layers: int = key(1, ge=0)  # residual blocks per head
    own_head: bool = True  # each head has an output matrix of its own, else the target's, frozen
    tie_layers: bool = False  # one module for all blocks of a head, as the published code has it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.own_head:
            self.draft_whole_vocabulary("method.own_head is false")


class Recipe(VocabularyRecipe[Config]):
    drafter_type = MedusaDrafter

    @staticmethod
    def max_depth(method: Config) -> int:
        return method.num_heads

    @staticmethod
    def has_slots(method: Config) -> bool:
        return True

    @property
    def depth(self) -> int:
        return self.config.num_heads

    def build(self, traces: Sequence[Trace]) -> MedusaDrafter:
        config = self.config
        settings = MedusaSettings(
            config.num_heads,
            config.num_layers,
            own_head=config.own_head,
            tie_layers=config.tie_layers,
        )
        return MedusaDrafter.build(self.target, settings, self.kept(traces))
