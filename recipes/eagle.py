"""EAGLE-1 training; its drafter decodes chains, the static tree, and EAGLE-2's dynamic tree.

Li et al. 2024, arXiv:2401.15077: regress the target's next final-normed state and match its
distribution through its own head. `method.steps` > 1 is HASS's multi-step alignment (Zhang et al.
2024, arXiv:2408.15766), in this project's indexing: later steps feed the head's own states,
detached; `method.top_weight` is its loss on the target's ten best tokens. HASS starts from a
trained EAGLE head: that of `model.drafter`, or one that a first stage of `method.base_max_steps`
trains.

The loss is `recipes.common.heads.HeadObjective`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.eagle1 import Eagle1Drafter, Eagle1Settings
from recipes.base import Stage, check_kind
from recipes.common.heads import HeadConfig, HeadObjective, HeadRecipe
from target.model import Target
from trainer.keys import key


@dataclass
class Config(HeadConfig):
    divergence_weight: float = 0.1  # weight of the divergence; published: 0.1
    # weight of SmoothL1 between the head's states and the target's; published: 1
    feature_weight: float = 1.0
    # half width of the uniform noise on the target's states, in a text of 512 tokens; a text of n
    # tokens gets 512 / n times that; published: 0.1
    feature_noise: float = 0.01
    depth_decay: float = 1.0
    steps: int = key(1, ge=1)  # times the head reads its own states in training; more than 1: HASS

    # steps of a first stage that trains EAGLE-1's head, for HASS to start from; left out where
    # model.drafter names a trained head; null: no such stage
    base_max_steps: int | None = key(None, ge=1)
    base_lr: float = key(1e-3, gt=0)  # rate of that stage; published: 3e-5


class Recipe(HeadRecipe[Config]):
    drafter_type = Eagle1Drafter

    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        super().__init__(config, target, given)
        # EAGLE-1's: one step, and no loss on the best tokens
        one = dataclasses.replace(config, steps=1, top_weight=0.0)
        self._base_objective = HeadObjective(one, target, one.steps, self.captures)

    def check_given(self, drafter: TrainedDrafter) -> None:
        super().check_given(drafter)
        head = check_kind(drafter, Eagle1Drafter, "eagle")
        head.settings.detach_recycled = self.config.steps > 1

    def stages(self) -> list[Stage]:
        (own,) = super().stages()
        if self.given is not None or self.config.base_max_steps is None:
            return [own]
        first = dataclasses.replace(
            own,
            name="base",
            objective=self._base_objective,
            overrides={"max_steps": self.config.base_max_steps, "lr": self.config.base_lr},
            row="before",
            shared={"recipe": __name__, **dataclasses.asdict(self._base_objective.config)},
        )
        return [first, dataclasses.replace(own, start="previous")]

    @property
    def depth(self) -> int:
        return self.config.steps

    @property
    def unroll(self) -> tuple[str, int] | None:
        # one step is EAGLE-1, whose regression of states prepares it for its own
        return ("method.steps", self.config.steps) if self.config.steps > 1 else None

    def build(self, traces: Sequence[Trace]) -> Eagle1Drafter:
        settings = Eagle1Settings(
            list(self.captures), self.target.hidden_size, detach_recycled=self.config.steps > 1
        )
        return Eagle1Drafter.build(self.target, settings)
