"""DSpark: DFlash with a correction by the token before and a confidence, trained on acceptance.

arXiv:2607.05147. Every slot predicts, the anchor's too. The loss of slot k of a block is

    exp(-(k - 1) / 4) (0.1 CE(label) + 0.9 sum_v |p_v - q_v| + 1.0 BCE(c_k, 1 - TV(p, q)))

where c_k is the confidence and 1 - TV(p, q), without gradient, the probability that a token drawn
from q is accepted at temperature 1. After training the confidence gets a temperature for each
position, by grid search for the least calibration error on held-out text; it ends chains under
eval.policy=head:<threshold>. Departures: the means of slots are weighed, not a mean over all slots;
the labels of the confidence follow the text's tokens, as published, where a round follows drawn
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from data.batches import collate
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.block import BlockDrafter
from eval.calibration import best_temperature, calibration_error
from recipes.common.block import BlockConfig, BlockObjective, BlockRecipe
from recipes.common.heads import Depth, Scored, rounds_of
from recipes.common.target_logits import TargetLogits
from target.padding import by_length
from trainer.chunked import ChunkedLoss, chunked_divergence
from trainer.divergence import CE_HARD, DIVERGENCES, Divergence
from trainer.errors import UserError
from trainer.keys import key
from trainer.losses import Term

TEXTS = 16  # of held-out text that are read together


@dataclass
class Config(BlockConfig):
    block_size: int = 7
    from_anchor: bool = True
    correction: str = "markov"
    divergence: str = "tvd"
    # weight of the divergence: 0.9 of sum_v |p_v - q_v|, which is twice tvd
    divergence_weight: float = key(1.8, gt=0)
    # weight of cross-entropy on the text's token
    label_weight: float = key(0.1, ge=0)
    # weight of the confidence's cross-entropy; 0: the drafter has no confidence
    confidence_weight: float = key(1.0, ge=0)

    @property
    def has_confidence(self) -> bool:
        return self.confidence_weight > 0


class DSparkObjective(BlockObjective):
    """The loss of block drafters with cross-entropy on the text's tokens and on the confidence."""

    @property
    def own(self) -> Config:
        """The settings, with those of DSpark."""
        assert isinstance(self.config, Config)
        return self.config

    def divergences(self, step: int) -> dict[str, tuple[Divergence, float]]:
        found = super().divergences(step)
        if self.own.label_weight:
            found["label"] = (CE_HARD, self.own.label_weight)
        return found

    def terms(self, step: int) -> list[str]:
        return [*super().terms(step), *["confidence"] * self.own.has_confidence]

    def of_depth(self, scored: Scored, depth: Depth) -> tuple[ChunkedLoss, dict[str, Term]]:
        found, terms = super().of_depth(scored, depth)
        if not self.own.has_confidence:
            return found, terms
        assert isinstance(scored.drafter, BlockDrafter)
        assert scored.drafter.confidence is not None
        logits = scored.drafter.confidence.logits(depth.states)
        accept = found.overlap.clamp(0, 1).to(logits)
        values = F.binary_cross_entropy_with_logits(logits, accept, reduction="none")
        total = (values * depth.weights).sum()
        return found, {**terms, "confidence": depth.term(total, self.own.confidence_weight)}


class Recipe(BlockRecipe[Config]):
    objective_type = DSparkObjective
    errors: dict[str, list[float]] | None = None  # of the confidence, by depth

    def check_network(self, drafter: TrainedDrafter) -> None:
        super().check_network(drafter)
        if self.config.has_confidence and not drafter.judges:
            raise UserError(
                "model.drafter has no confidence to train: set method.confidence_weight=0"
            )

    def calibrate(self, drafter: TrainedDrafter, dev: Sequence[Trace]) -> None:
        """Choose the temperatures of the confidence on the texts `dev`."""
        assert isinstance(drafter, BlockDrafter)
        if drafter.confidence is None or not any(len(trace.response_ids) > 1 for trace in dev):
            return
        temperatures = drafter.confidence.temperatures
        self.errors = {"calibration_error": [], "calibration_error_uncalibrated": []}
        for depth, (logits, accept) in enumerate(self._judged(drafter, dev)):
            if not len(logits):  # no answer is so long
                continue
            temperatures[depth] = best_temperature(logits, accept)
            for name, T in zip(self.errors, (float(temperatures[depth]), 1.0), strict=True):
                error = calibration_error((logits.double() / T).sigmoid(), accept)
                self.errors[name].append(round(error, 4))

    def about(self) -> dict[str, object]:
        return {} if self.errors is None else {"confidence": self.errors}

    @torch.no_grad()
    def _judged(
        self, drafter: BlockDrafter, dev: Sequence[Trace]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each depth the confidence's logits [N], and the probability that a drawn token is
        accepted [N], behind all tokens that decoding can begin a round behind."""
        assert drafter.confidence is not None
        found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(self.depth)]
        layers = tuple(dict.fromkeys((*self.captures, "final_norm")))
        for group in by_length(dev, lambda trace: trace.num_tokens, TEXTS):
            texts = [t.prompt_ids for t in group], [t.response_ids for t in group]
            batch = collate(*texts, ["target"] * len(group)).to(self.target.device)
            outputs = self.target.outputs(
                batch.input_ids, batch.position_ids, layers=layers, logits=False
            )
            where = [batch.supervised(depth) for depth in range(1, self.depth + 1)]
            teacher = TargetLogits(self.target.head, outputs.hidden["final_norm"])
            unrolled = drafter.states(rounds_of(batch, where), outputs, self.depth)
            for depth, (states, judged) in enumerate(zip(unrolled, where, strict=True)):
                rows, index = judged.nonzero(as_tuple=True)
                picked, head = states[rows, index], drafter.output_head(depth + 1)
                value = chunked_divergence(
                    DIVERGENCES["tvd"](), picked, head, teacher.at(rows, index),
                    batch.input_ids[rows, index + 1],
                )  # fmt: skip
                found[depth].append((drafter.confidence.logits(picked), value.overlap))
        parts = [zip(*one, strict=True) for one in found]
        return [tuple(torch.cat(part).cpu() for part in one) for one in parts]  # type: ignore[misc]
