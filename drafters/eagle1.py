"""EAGLE-1: a head that reads the target's final-normed state and drafts through its output head.

Li et al. 2024, arXiv:2401.15077. EAGLE-2 (arXiv:2406.16858) is the same network under a dynamic
tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from drafters.eagle import EagleDrafter, EagleSettings, Index
from drafters.layers import DecoderLayer, layer_config
from target.model import Target
from target.outputs import LayerId
from trainer.errors import UserError
from trainer.logits import OutputHead


@dataclass
class Eagle1Settings(EagleSettings):
    """Settings of an EAGLE-1 head: `captures` names one layer; engines feed `final_norm`.

    `fc_bias`: its `fc` has a bias, as in published heads; fresh heads have none, because vLLM drops
    it.
    """

    fc_bias: bool = False

    def __post_init__(self) -> None:
        if len(self.captures) != 1:
            raise UserError(f"EAGLE-1 reads the states of one layer, got {self.captures}")


class Eagle1Drafter(EagleDrafter):
    """An EAGLE-1 head."""

    kind = "eagle"
    version = 1
    settings_type = Eagle1Settings
    settings: Eagle1Settings

    @classmethod
    def build(cls, target: Target, settings: Eagle1Settings) -> Eagle1Drafter:
        """A fresh head in the target's shape."""
        return cls(settings, layer_config(target.model.config), target)

    def make_network(self, kept: torch.Tensor | None) -> None:
        if kept is not None:
            raise UserError("EAGLE-1 drafts through the target's head: no reduced vocabulary")
        width = self.config.hidden_size
        reads = width + self.settings.target_width
        self.fc = nn.Linear(reads, width, bias=self.settings.fc_bias)
        self.layer = DecoderLayer(self.config, width)

    def fuse(self, hidden: Mapping[LayerId, torch.Tensor], *index: Index) -> torch.Tensor:
        (layer,) = self.target_layers
        return hidden[layer][index].to(self.fc.weight.dtype)

    def layer_inputs(
        self, feature: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = self.fc(torch.cat([embedded, feature], -1))
        return mixed, mixed

    def layer_outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, hidden

    def output_head(self, depth: int = 1) -> OutputHead:
        return self.shared.target.head
