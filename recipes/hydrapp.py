"""Hydra++: deeper heads, the target's distribution as label, and a decoder layer over the prefix.

Ankner et al. 2024, arXiv:2402.05109, Sec. 4; settings of the published command.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes import hydra


@dataclass
class Config(hydra.Config):
    divergence: str = "fkl"
    num_layers: int = 4
    prefix_layer: bool = True
    dropout: float = 0.2


class Recipe(hydra.Recipe):
    pass
