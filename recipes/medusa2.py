"""Medusa-2: Medusa's heads, then heads and target together, the target through LoRA.

Cai et al. 2024, arXiv:2401.10774, Sec. 3.2: L = L_LM + c s(t) sum_k decay^k D_k. L_LM keeps
the target close to its original: KL(p || p') of the original distribution p and the adapted p', or
next-token cross-entropy. Stage 1 trains heads alone, as recipe medusa does; it is left out where
model.drafter names trained ones. In stage 2 the heads follow p', the distribution that will verify
them. The row `before` of the report is the drafter of stage 1 or of model.drafter. Departures:
those of recipe medusa.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from data.batches import Batch
from drafters.base import TrainedDrafter
from drafters.medusa import MedusaDrafter
from drafters.medusa2 import ADAPTER, Medusa2Drafter
from recipes import medusa
from recipes.base import Metrics, Needs, Stage, Start, check_kind, unwrapped
from recipes.common.heads import HeadObjective, Scored, rounds_of
from recipes.common.target_logits import TargetLogits
from target.adapted import AdaptedTarget, LoraSettings
from target.model import Target
from target.outputs import TargetOutputs
from trainer.chunked import chunked_divergence
from trainer.divergence import DIVERGENCES
from trainer.errors import UserError, require
from trainer.keys import key
from trainer.logits import OutputHead
from trainer.losses import LossOutput, Term, position_weights

RAMPS: dict[str, Callable[[float], float]] = {  # of the share of steps, this one included
    "constant": lambda share: 1.0,
    "linear": lambda share: share,
    "sine": lambda share: math.sin(math.pi / 2 * share),
}
LM_LOSSES = {"distill": "fkl", "ce": "ce_hard"}
HEADS_WEIGHTS = {"distill": 0.01, "ce": 0.2}  # published


@dataclass
class Config(medusa.Config):
    # loss that keeps the target close to its original: distill, the divergence from it; ce,
    # next-token cross-entropy
    lm_loss: str = key("distill", one_of=LM_LOSSES)
    # weight of the heads' loss beside that of the target, where head k has depth_decay ** k of it;
    # null: 0.01 with distill, 0.2 with ce
    heads_weight: float | None = key(None, gt=0)
    heads_ramp: str = key("sine", one_of=RAMPS)  # how that weight rises to its full size in stage 2
    # rate of the heads over trainer.lr, that of the adapter
    heads_lr_multiplier: float = key(4.0, gt=0)
    lora_rank: int = key(32, ge=1)  # rank of the target's adapter
    lora_lm_head: bool = False  # put an adapter on the target's output matrix too

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads_weight is None:
            self.heads_weight = HEADS_WEIGHTS[self.lm_loss]
        rule = "be 0: stage 2 trains the states that the noise would be added to"
        require(self.feature_noise == 0, "method.feature_noise", rule, self.feature_noise)
        self.lora()  # for its checks

    def lora(self) -> LoraSettings:
        """The shape of the target's adapter."""
        return LoraSettings(self.lora_rank, self.lora_lm_head)


class Recipe(medusa.Recipe):
    config: Config
    needs_layers = "it trains the target too"
    no_lora = "recipe=medusa2 has an adapter of its own, see method.lora_rank"

    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        super().__init__(config, target, given)
        AdaptedTarget(target, config.lora())  # refuses a target before the first stage trains
        self._joint = JointObjective(config, target, self.depth, self.captures)

    def stages(self) -> list[Stage]:
        text, joint = Needs({"target": 1.0}), self._joint
        plain = {"gradient_checkpointing": False}  # stage 1 has no layers to compute again
        heads = Stage(
            "heads", self.objective, text, plain, start="base", row="before",
            shares_texts=self.config.reduction == "token",
            lr_multiplier=self._lr_multiplier,
        )  # fmt: skip
        second = Stage(
            "joint", joint, text, row="after", prepare=self._adapt,
            shares_texts=self.config.reduction == "token",
            lr_multiplier=self._lr_multiplier,
        )  # fmt: skip
        return [heads, second] if self.given is None else [second]

    @property
    def trains(self) -> type[TrainedDrafter]:
        return Medusa2Drafter

    def check_given(self, drafter: TrainedDrafter) -> None:
        """Refuse all but trained heads, with or without a trained adapter."""
        if drafter.kind != Medusa2Drafter.kind:
            check_kind(drafter, MedusaDrafter, "medusa2")
        elif (lora := check_kind(drafter, Medusa2Drafter, "medusa2").lora) != self.config.lora():
            raise UserError(
                f"model.drafter has an adapter of another shape, {lora}: set method.lora_* to that"
            )
        self.check_network(drafter)
        self.check_vocabulary(drafter)

    def _adapt(self, start: Start) -> Medusa2Drafter:
        """Give the heads an adapter of the target, where they have none yet."""
        self._joint.max_steps = start.max_steps
        if start.drafter.kind == Medusa2Drafter.kind:
            return check_kind(start.drafter, Medusa2Drafter, "medusa2")
        heads = check_kind(start.drafter, MedusaDrafter, "medusa2")
        return Medusa2Drafter.adapt(heads, self.config.lora())

    def _lr_multiplier(self, name: str) -> float:
        own = name.startswith(f"{ADAPTER}.")
        return 1.0 if own else self.config.heads_lr_multiplier


class JointObjective(HeadObjective):
    """The loss of heads and adapter together: that of the heads on the adapted target's states, and
    that of the adapted target against the original one. `max_steps`: number of steps of the stage,
    over which the heads' weight rises."""

    config: Config
    max_steps: int

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        sequences = self.config.reduction == "sequence"
        count = batch.loss_mask.any(1).sum() if sequences else batch.num_supervised
        return {"adapted_target": float(count), **super().denominators(batch, step)}

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        """Compute both losses in one forward. `target_outputs`: of the original target."""
        assert target_outputs is not None
        own = check_kind(unwrapped(drafter), Medusa2Drafter, "medusa2")
        original = target_outputs.hidden["final_norm"]
        where = self.positions(batch, step)
        score = partial(self._joint, own, batch, where, original, step, denominators)
        return drafter(rounds_of(batch, where), None, self.depth, score)

    def _joint(
        self,
        drafter: Medusa2Drafter,
        batch: Batch,
        where: list[torch.Tensor],
        original: torch.Tensor,
        step: int,
        denominators: Mapping[str, float] | None,
        unrolled: Iterator[torch.Tensor],
    ) -> LossOutput:
        """Compute the terms; `where`: the heads' `positions`; `unrolled` yields the adapted
        target's states, then those of the heads."""
        states, head = next(unrolled), drafter.adapted.head()
        teacher = self.teacher(drafter, where, head, TargetOutputs({"final_norm": states.detach()}))
        output = self._of_target(batch, original, states, head)
        scored = Scored(drafter, batch, step, where, teacher, denominators)
        heads = self.of_depths(scored, unrolled)
        # never 0: all that is left then is rounding, which Adam would scale up to whole steps
        ramp = RAMPS[self.config.heads_ramp]((step + 1) / self.max_steps)
        # published: the first head too weighs less than 1; its `weight` here is 1
        factor = (self.config.heads_weight or 0.0) * self.config.depth_decay * ramp
        for name, term in heads.terms.items():
            output.terms[name] = term.times(factor)
        output.metrics |= heads.metrics
        return output

    def _of_target(
        self, batch: Batch, original: torch.Tensor, states: torch.Tensor, head: OutputHead
    ) -> LossOutput:
        """The loss of the adapted target: its states [B, L, H] against the `original` ones [B, L,
        H], at every response token."""
        rows, index = batch.supervised().nonzero(as_tuple=True)
        weights, count = position_weights(rows, len(batch.input_ids), self.config.reduction)
        value = chunked_divergence(
            DIVERGENCES[LM_LOSSES[self.config.lm_loss]](),
            states[rows, index],
            head,
            TargetLogits(self.target.head, original).at(rows, index),
            batch.input_ids[rows, index + 1],
            weights,
        )
        metrics: Metrics = {
            "lm_loss": (value.total.detach(), count),
            "target_overlap": (value.overlap.sum(), float(len(rows))),
        }
        return LossOutput({"adapted_target": Term(value.total, count)}, metrics)
