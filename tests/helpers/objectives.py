"""A stage of a recipe with the drafter that it trains, as the loop has them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes.base import Objective, Stage, Start


@dataclass
class Trained:
    """Members of the objective and of the recipe are read through it."""

    recipe: Any
    stage: Stage
    drafter: Any

    @property
    def objective(self) -> Objective:
        return self.stage.objective

    def loss(self, batch, target_outputs, step, denominators=None):
        return self.objective.loss(self.drafter, batch, target_outputs, step, denominators)

    def __getattr__(self, name):
        found = self.__dict__["stage"].objective
        return getattr(found if hasattr(found, name) else self.__dict__["recipe"], name)


def trained(recipe, drafter, *, stage=-1, traces=(), drafters=None, max_steps=8, new=12) -> Trained:
    """The stage of that number, prepared for `drafter`."""
    chosen = recipe.stages()[stage]
    start = Start(drafter, list(traces), drafters or {}, max_steps, new)
    return Trained(recipe, chosen, chosen.prepare(start))
