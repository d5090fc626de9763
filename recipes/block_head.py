"""JetSpec's head: DFlash's network with a causal mask inside of the block.

arXiv:2606.18394: a slot sees the context and the slots up to its own, and the labels are the
target's distributions. Departures: as in `recipes.dflash`; the children of all nodes of a depth are
the same tokens there too, as in the published code.

The loss is `recipes.common.heads.HeadObjective`, behind drawn anchors (`recipes.common.block`).
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.common.block import BlockConfig, BlockRecipe


@dataclass
class Config(BlockConfig):
    causal: bool = True


class Recipe(BlockRecipe[Config]):
    pass
