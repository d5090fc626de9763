"""EAGLE-3: one layer on three captured states of the target, unrolled on its own outputs.

Li et al. 2025, arXiv:2503.01840. Training-time test: every step after the first feeds the head's
own states under the mask that decoding has; no regression of states. Departures from the published
code: positions are those that decoding visits (the code takes prompt tokens as anchors too), a
token mean instead of a sum over all B L positions, and the head starts as the rows of the target's,
the layer as its last layer.

The loss is `recipes.common.heads.HeadObjective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from data.traces import Trace
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings, default_captures
from recipes.common.chosen_layers import ChosenLayers
from recipes.common.draft_vocabulary import VocabularyConfig, VocabularyRecipe
from target.outputs import LayerId
from trainer.keys import key


@dataclass
class Config(VocabularyConfig):
    # drafting steps that training unrolls, as many as are drafted at least; published: 7
    steps: int = key(5, ge=1)
    # layers of the target whose outputs are read, from 0; []: 1, L/2-1 and L-4 of L layers
    layers: list[int] = field(default_factory=list)
    head_from_target: bool = True  # the output matrix starts as rows of the target's
    layer_from_target: bool = True  # the layer starts as the target's last one
    norm_before_residual: bool = False  # the residual stream starts at the normed state
    fc_norm: bool = False  # EAGLE-3.1: normalise each captured state
    norm_output: bool = False  # EAGLE-3.1: the next step reads the normed state


class Recipe(ChosenLayers[Config], VocabularyRecipe[Config]):
    drafter_type = Eagle3Drafter

    @property
    def named_layers(self) -> list[int]:
        return self.config.layers

    def usual_layers(self, count: int) -> list[LayerId]:
        return default_captures(count)

    @property
    def depth(self) -> int:
        return self.config.steps

    @property
    def unroll(self) -> tuple[str, int]:
        return "method.steps", self.config.steps

    def build(self, traces: Sequence[Trace]) -> Eagle3Drafter:
        config = self.config
        settings = Eagle3Settings(
            list(self.captures), self.target.hidden_size,
            norm_before_residual=config.norm_before_residual, fc_norm=config.fc_norm,
            norm_output=config.norm_output,
        )  # fmt: skip
        return Eagle3Drafter.build(
            self.target,
            settings,
            kept=self.kept(traces),
            head_from_target=config.head_from_target,
            layer_from_target=config.layer_from_target,
        )
