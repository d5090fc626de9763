"""A head that training unrolls on its own states, and a first stage that trains one step of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from drafters.base import TrainedDrafter
from recipes.base import Stage
from recipes.common.heads import HeadConfig, HeadObjective, HeadRecipe
from trainer.config import require


@dataclass
class UnrolledConfig(HeadConfig):
    """Settings of a head that reads its own states."""

    steps: int = 1  # drafting steps that training unrolls
    # steps of a first stage that trains one drafting step; left out where model.drafter names a
    # trained head; null: no such stage
    base_max_steps: int | None = None
    base_lr: float = 1e-3  # rate of that stage

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, "method.steps", "be >= 1", self.steps)
        number = self.base_max_steps
        require(number is None or number >= 1, "method.base_max_steps", "be >= 1", number)
        require(self.base_lr > 0, "method.base_lr", "be > 0", self.base_lr)


ConfigT = TypeVar("ConfigT", bound=UnrolledConfig)


class UnrolledRecipe(HeadRecipe[ConfigT]):
    """A recipe of such a head."""

    _trained = False

    def accept(self, drafter: TrainedDrafter) -> None:
        super().accept(drafter)
        self._trained = True

    @property
    def depth(self) -> int:
        return self.config.steps

    def one_step(self) -> ConfigT:
        """The settings of the first stage's loss."""
        return dataclasses.replace(self.config, steps=1)

    def stages(self) -> list[Stage]:
        (own,) = super().stages()
        if self._trained or self.config.base_max_steps is None:
            return [own]
        first = dataclasses.replace(
            own,
            name="base",
            objective=self._base_objective,
            overrides={"max_steps": self.config.base_max_steps, "lr": self.config.base_lr},
            row="before",
            shared={
                "recipe": type(self).__module__,
                **dataclasses.asdict(self._base_objective.config),
            },
        )
        return [first, dataclasses.replace(own, start="previous")]

    @cached_property
    def _base_objective(self) -> HeadObjective:
        config = self.one_step()
        return HeadObjective(config, self.target, config.steps, self.captures)
