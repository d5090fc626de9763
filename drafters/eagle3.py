"""EAGLE-3: a head that reads the states of three layers and has an output head of its own.

Li et al. 2025, arXiv:2503.01840. Its output head scores the whole vocabulary, or the most frequent
tokens alone (`kept`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from drafters.eagle import EagleDrafter, EagleSettings, Index
from drafters.layers import DecoderLayer, RMSNorm, copy_gain, layer_config, start_from
from drafters.output_head import copy_rows, head_over
from target.devices import decoder_of
from target.model import Target, decoder_layers, logit_scale
from target.outputs import LayerId
from trainer.errors import UserError
from trainer.logits import OutputHead

FUSED_NOISE = 0.1  # of a projection that starts as the identity: the other captures are not dead


@dataclass
class Eagle3Settings(EagleSettings):
    """Settings of an EAGLE-3 head.

    `norm_before_residual`, `fc_norm`, `norm_output`: variants that engines know; the last two are
    EAGLE-3.1's.
    """

    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def default_captures(num_layers: int) -> list[LayerId]:
    """A low, a middle and a high capture: layers 1, L/2 - 1 and L - 4.

    Raises UserError where these are not distinct.
    """
    layers: list[LayerId] = [1, num_layers // 2 - 1, num_layers - 4]
    if len(set(layers)) < 3 or min(layers) < 0:  # type: ignore[type-var]
        raise UserError(
            f"method.layers: the defaults {layers} collide on a target of {num_layers} layers: "
            "name three distinct ones, for example method.layers=[0,1,2]"
        )
    return layers


class Eagle3Drafter(EagleDrafter):
    """An EAGLE-3 head."""

    kind = "eagle3"
    version = 3
    settings_type = Eagle3Settings
    settings: Eagle3Settings

    @classmethod
    def build(
        cls,
        target: Target,
        settings: Eagle3Settings,
        *,
        kept: torch.Tensor | None = None,
        head_from_target: bool = True,
        layer_from_target: bool = True,
    ) -> Eagle3Drafter:
        """A fresh head in the target's shape.

        `kept` [Vd] int64: target ids of a reduced vocabulary, ascending. `head_from_target`: the
        output head starts as rows of the target's; `layer_from_target`: the layer starts as the
        target's last one, fed with the last captured state.
        """
        drafter = cls(settings, layer_config(target.model.config), target, kept)
        if head_from_target:
            copy_rows(target, drafter.lm_head, kept)
            with torch.no_grad():
                drafter.lm_head.weight.mul_(logit_scale(target.model))
        if layer_from_target:
            drafter._start_from_target()
        return drafter

    def make_network(self, kept: torch.Tensor | None) -> None:
        settings, config = self.settings, self.config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(settings.captures) * settings.target_width, width, bias=False)
        if settings.fc_norm:
            self.fc_norms = nn.ModuleList(
                RMSNorm(settings.target_width, eps=eps) for _ in settings.captures
            )
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layer = DecoderLayer(config, 2 * width)
        self.norm = RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, self.vocab_size if kept is None else len(kept), bias=False)

    @torch.no_grad()
    def _start_from_target(self) -> None:
        """Start as if the layers between the last capture and the target's last one were left
        out."""
        target = self.shared.target
        model = target.model
        last, norm = decoder_layers(model)[-1], getattr(decoder_of(model), "norm", None)
        with target.in_place(last, norm):
            missing = start_from(self.layer, last)
            if not copy_gain(self.hidden_norm, getattr(last, "input_layernorm", None)):
                missing.append("input_layernorm")
            if not copy_gain(self.norm, norm):
                missing.append("norm")
        if missing:
            print(
                f"layer_from_target: a fresh start for {', '.join(missing)}, which the target's "
                "last layer has in another form"
            )
        width = self.fc.weight.shape[0]
        self.fc.weight.mul_(FUSED_NOISE)
        self.fc.weight[:, -width:].diagonal().add_(1)

    def fuse(self, hidden: Mapping[LayerId, torch.Tensor], *index: Index) -> torch.Tensor:
        states = [hidden[layer][index].to(self.fc.weight.dtype) for layer in self.target_layers]
        if self.settings.fc_norm:
            states = [norm(one) for norm, one in zip(self.fc_norms, states, strict=True)]
        return self.fc(torch.cat(states, -1))

    def layer_inputs(
        self, feature: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(feature)
        residual = normed if self.settings.norm_before_residual else feature
        return torch.cat([self.input_layernorm(embedded), normed], -1), residual

    def layer_outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(hidden)
        return normed, normed if self.settings.norm_output else hidden

    def output_layers(self) -> list[nn.Linear]:
        return [self.lm_head]

    def output_head(self, depth: int = 1) -> OutputHead:
        return head_over(self.lm_head, self.kept)
