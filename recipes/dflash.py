"""DFlash: a few layers that fill a block of mask tokens in one pass, on five states of the target.

Chen et al. 2026, arXiv:2602.06036. Departures from the published code: the labels are the target's
distributions (`method.divergence=ce_hard`: the tokens of its text); the loss of each slot is a mean
of its own before it is weighed, where the published mean is over all slots; anchors are tokens of
answers behind which decoding can draft.

The loss is `recipes.common.heads.HeadObjective`, behind drawn anchors (`recipes.common.block`).
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.common.block import BlockConfig, BlockRecipe


@dataclass
class Config(BlockConfig):
    pass


class Recipe(BlockRecipe[Config]):
    pass
