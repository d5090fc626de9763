"""Recipes whose drafters read the layers of the target that `method.layers` names."""

from __future__ import annotations

from typing import TypeVar

from drafters.base import TrainedDrafter
from recipes.common.heads import HeadConfig, HeadRecipe
from target.model import check_layers
from target.outputs import LayerId
from trainer.errors import UserError

ConfigT = TypeVar("ConfigT", bound=HeadConfig)


class ChosenLayers(HeadRecipe[ConfigT]):
    @property
    def named_layers(self) -> list[int]:
        """`method.layers`; [] where none are named."""
        raise NotImplementedError

    def usual_layers(self, count: int) -> list[LayerId]:
        """Those that are read of a target of `count` layers where none are named."""
        raise NotImplementedError

    @property
    def captures(self) -> tuple[LayerId, ...]:
        if self.given is not None:
            return self.given.target_layers
        count = self.target.num_layers
        return check_layers(self.named_layers or self.usual_layers(count), count)

    def check_given(self, drafter: TrainedDrafter) -> None:
        super().check_given(drafter)
        if self.named_layers and tuple(self.named_layers) != drafter.target_layers:
            raise UserError(
                f"model.drafter reads the layers {list(drafter.target_layers)}, got "
                f"method.layers={self.named_layers}: leave method.layers out"
            )
