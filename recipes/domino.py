"""Domino: DFlash with a correction by a GRU over the tokens of the block before a slot.

arXiv:2605.29707. The loss of a slot is (1 - w) D(p, q) + w D(p, q'), where q has the correction and
q' has not, and w falls linearly from 1 to 0 over the first `base_share` of training: the slots are
trained alone at first. In step s of S it is 1 - (s + 1) / S, so that the correction trains in the
first one too. The first slot that predicts takes no correction. Departures: those of
`recipes.dflash`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from drafters.base import TrainedDrafter
from recipes.base import Stage, Start
from recipes.common.block import BlockConfig, BlockObjective, BlockRecipe
from recipes.common.heads import Depth, Scored
from trainer.chunked import ChunkedLoss
from trainer.divergence import Divergence
from trainer.errors import UserError, require
from trainer.keys import key
from trainer.losses import Term

HAS_ONE = "be markov, gated or gru with recipe=domino"


@dataclass
class Config(BlockConfig):
    correction: str = "gru"
    # share of the steps over which the loss without correction falls to 0; published: 0.5 to 1
    base_share: float = key(1.0, gt=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.correction != "none", "method.correction", HAS_ONE, self.correction)


class DominoObjective(BlockObjective):
    """The loss of block drafters on the corrected and on the plain logits. `steps`: after which the
    latter weigh nothing."""

    steps: int = 1

    def base_weight(self, step: int) -> float:
        """The weight w of the loss without correction in this step, counted from 0."""
        return max(0.0, 1 - (step + 1) / self.steps)

    def divergences(self, step: int) -> dict[str, tuple[Divergence, float]]:
        base, found = self.base_weight(step), super().divergences(step)
        return {name: (one, (1 - base) * weight) for name, (one, weight) in found.items()}

    def terms(self, step: int) -> list[str]:
        return [*super().terms(step), "base"]

    def of_depth(self, scored: Scored, depth: Depth) -> tuple[ChunkedLoss, dict[str, Term]]:
        found, terms = super().of_depth(scored, depth)
        weight = self.base_weight(scored.step) * self.config.divergence_weight
        if not weight:
            return found, {**terms, "base": depth.term(depth.states.new_zeros(()), 0.0)}
        states, head = depth.states[:, : depth.head.weight.shape[1]], depth.head.plain()
        plain = dataclasses.replace(depth, states=states, head=head)
        total = plain.chunked(self.divergence, weight).total
        return found, {**terms, "base": depth.term(total, weight)}


class Recipe(BlockRecipe[Config]):
    objective_type = DominoObjective

    def stages(self) -> list[Stage]:
        (stage,) = super().stages()
        return [dataclasses.replace(stage, prepare=self._begin)]

    def _begin(self, start: Start) -> TrainedDrafter:
        """Set over how many steps the loss without correction falls to 0."""
        assert isinstance(self.objective, DominoObjective)
        self.objective.steps = max(1, round(self.config.base_share * start.max_steps))
        return start.drafter

    def check_network(self, drafter: TrainedDrafter) -> None:
        super().check_network(drafter)
        if drafter.output_head(1).extra is None:
            raise UserError(
                "model.drafter has no correction to train: name one of recipe=domino, or train it "
                "with recipe=dflash"
            )
