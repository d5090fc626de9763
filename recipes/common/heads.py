"""Settings, recipe and objective that the recipes of all heads on the target share.

A head drafts the token at depth j of a round from what the target has computed before the round.
For every depth the loss is a divergence between the target's distribution and the head's, at
exactly the positions that decoding visits, in chunks that never hold all logits; optionally a
regression of the head's states on the target's. The target's distribution is recomputed from its
final-normed state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from data.batches import Batch
from drafters.base import TrainedDrafter
from drafters.text import Text
from recipes.base import Needs, Objective, Recipe, Stage, check_kind, unwrapped
from recipes.common.divergence import DivergenceConfig
from recipes.common.target_logits import Positions, ReducedTargetLogits, TargetLogits
from target.model import Target
from target.outputs import LayerId, TargetOutputs, TargetRequest
from trainer.chunked import ChunkedLoss, JointGradients, chunked_divergence
from trainer.divergence import DIVERGENCES, Divergence
from trainer.errors import UserError
from trainer.keys import key
from trainer.logits import OutputHead
from trainer.losses import LossOutput, Term, position_weights

ConfigT = TypeVar("ConfigT", bound="HeadConfig")


@dataclass
class HeadConfig(DivergenceConfig):
    """Settings of every head."""

    depth_decay: float = key(0.8, gt=0)  # the loss of depth j weighs depth_decay ** (j - 1)
    divergence_weight: float = key(1.0, gt=0)  # weight of the divergence
    # weight of SmoothL1 between the head's states and the target's; 0: no regression of states
    feature_weight: float = key(0.0, ge=0)
    # weight of cross-entropy on the target's ten likeliest tokens
    top_weight: float = key(0.0, ge=0)
    # half width of the uniform noise on the target's states, in a text of 512 tokens; a text of n
    # tokens gets 512 / n times that
    feature_noise: float = key(0.0, ge=0)
    # mean over tokens, or over the means of the sequences
    reduction: str = key("token", one_of=("token", "sequence"))


class HeadRecipe(Recipe, Generic[ConfigT]):
    """A recipe that trains a head in one stage. `drafter_type`: the class of its drafters;
    `given`: the trained head that it starts from, None for a fresh one."""

    drafter_type: ClassVar[type[TrainedDrafter]]

    def __init__(self, config: ConfigT, target: Target, given: TrainedDrafter | None = None):
        self.config, self.target, self.given = config, target, given
        if given is not None:
            self.check_given(given)
        self.objective = self.make_objective()

    def make_objective(self) -> HeadObjective:
        """Make the objective of the stage; a recipe with a loss of its own overrides this."""
        return HeadObjective(self.config, self.target, self.depth, self.captures, self.is_reduced)

    @property
    def trains(self) -> type[TrainedDrafter]:
        return self.drafter_type

    @property
    def captures(self) -> tuple[LayerId, ...]:
        """The target's layers that the head reads."""
        return ("final_norm",)

    @property
    def depth(self) -> int:
        """The number of depths that are trained."""
        raise NotImplementedError

    @property
    def is_reduced(self) -> bool:
        """Whether the head drafts some of the target's tokens only."""
        return False

    def stages(self) -> list[Stage]:
        text = Needs({"target": 1.0})
        return [
            Stage(
                "train", self.objective, text, start="base", row="after", packs=True,
                shares_texts=self.config.reduction == "token",
            )
        ]  # fmt: skip

    def check_given(self, drafter: TrainedDrafter) -> None:
        """Refuse a head of another kind or network than the one that is asked for."""
        wanted, recipe = self.wanted_type(drafter), type(self).__module__.rpartition(".")[2]
        self.check_network(check_kind(drafter, wanted, recipe))

    def wanted_type(self, drafter: TrainedDrafter) -> type[TrainedDrafter]:
        """The class that a given drafter must have."""
        return self.drafter_type

    def check_network(self, drafter: TrainedDrafter) -> None:
        """Refuse a drafter with another number of heads than method.num_heads, and other settings
        of a network than its own, which would do nothing. Defaults stand for what it has."""
        if drafter.max_depth is not None and drafter.max_depth != self.depth:
            raise UserError(
                f"model.drafter has {drafter.max_depth} heads, method.num_heads={self.depth}: set "
                f"method.num_heads={drafter.max_depth}"
            )
        own = drafter.network()
        for field in dataclasses.fields(self.config):
            given = getattr(self.config, field.name)
            if given not in (own.get(field.name, given), field.default):
                has = own[field.name]
                raise UserError(
                    f"model.drafter has {field.name}={has}, got method.{field.name}={given}: set "
                    f"method.{field.name}={has}, since a trained head keeps its network"
                )


def rounds_of(batch: Batch, where: list[torch.Tensor]) -> Text:
    """The texts of a batch with the columns t of rounds: `where` has t + depth for some depth."""
    columns = [F.pad(one, (0, depth + 1))[:, depth:] for depth, one in enumerate(where, start=1)]
    return batch.text(torch.stack(columns).any(0))


@dataclass(frozen=True)
class Scored:
    """A forward pass whose depths are scored."""

    drafter: TrainedDrafter
    batch: Batch
    step: int
    where: list[torch.Tensor]  # the trained logit indices of each depth, [B, L-1] bool
    teacher: TargetLogits
    denominators: Mapping[str, float] | None


@dataclass(frozen=True)
class Depth:
    """The N trained positions of a depth, and what scores them."""

    at: Positions  # with the target's logits there
    states: torch.Tensor  # [N, d]
    labels: torch.Tensor  # [N] int64
    weights: torch.Tensor  # [N] float32, no gradient
    count: torch.Tensor  # [] float32, denominator of the weights
    scale: float  # what the depth weighs
    head: OutputHead
    joint: JointGradients | None
    divisor: float  # `count` of all ranks and micro-steps, where `joint` is given

    def chunked(self, divergence: Divergence, weight: float) -> ChunkedLoss:
        """The `divergence` at these positions, whose term weighs `weight`."""
        return chunked_divergence(
            divergence, self.states, self.head, self.at, self.labels, self.weights,
            joint=self.joint, factor=self.scale * weight / self.divisor,
        )  # fmt: skip

    def term(self, total: torch.Tensor, weight: float) -> Term:
        """A term of this depth; `total` [] float: sum of its values times `weights`."""
        return Term(total, self.count, self.scale * weight)


class HeadObjective(Objective):
    """The divergence between the target's distribution p and the head's q at each depth, and the
    further terms that `config` has weights for:

        loss = sum over depths j of depth_decay ** (j - 1) / N_j
               * sum over the N_j trained positions of depth j of w D(p, q)

    A drafter's `states` [B, L, d] of a depth are picked at its `positions` to [N_j, d]; the output
    head makes [n, V] of a chunk of them, the divergence [n], their sum []. The gradients by states
    and output head are taken in that forward pass (`trainer.chunked`); backward only scales them.

    `captures`: the target's layers that the head reads; `is_reduced`: whether it drafts some of the
    target's tokens only.

    An objective that trains some rounds of a text only overrides `anchors`. They are asked for more
    than once in a step, and on the host too: draws must be those of `batch.uniform`.
    """

    def __init__(
        self,
        config: HeadConfig,
        target: Target,
        depth: int,
        captures: tuple[LayerId, ...],
        is_reduced: bool = False,
    ):
        self.config, self.target, self.depth, self.captures = config, target, depth, captures
        self.is_reduced = is_reduced
        self.divergence: Divergence = config.parsed_divergence
        if is_reduced:
            self.divergence.check_reduced("method.divergence")
        self._kept_head: OutputHead | None = None  # the rows of the target's head that are kept

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        layers = tuple(dict.fromkeys((*self.captures, "final_norm")))
        return TargetRequest(layers, logits=False, summary=self.is_reduced)

    def anchors(self, batch: Batch, step: int) -> torch.Tensor | None:
        """Return the tokens that trained rounds begin behind, [B, L] or [depth, B, L] bool; None:
        all that decoding visits."""
        return None

    def positions(self, batch: Batch, step: int) -> list[torch.Tensor]:
        """List the trained logit indices of each depth, [B, L-1] bool."""
        anchors = self.anchors(batch, step)
        return [batch.supervised(depth, anchors) for depth in range(1, self.depth + 1)]

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        """Count the trained positions of each depth, for each of its terms."""
        counts = {}
        for depth, where in enumerate(self.positions(batch, step), start=1):
            count = batch.count(where, self.config.reduction)
            counts |= {f"depth_{depth}_{name}": count for name in self.terms(step)}
        return counts

    def terms(self, step: int) -> list[str]:
        """List the names of the terms of a depth."""
        return [*self.divergences(step), *["states"] * (self.config.feature_weight > 0)]

    def divergences(self, step: int) -> dict[str, tuple[Divergence, float]]:
        """Return the divergences of a depth and their weights, which are not 0, by the name of the
        term, the same names in every step."""
        found = {"divergence": (self.divergence, self.config.divergence_weight)}
        if self.config.top_weight:
            found["top"] = (DIVERGENCES["ce_top"](), self.config.top_weight)
        return found

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        assert target_outputs is not None
        network, hidden = unwrapped(drafter), target_outputs.hidden
        where = self.positions(batch, step)
        teacher = self.teacher(network, where, self.target.head, target_outputs)
        if self.config.feature_noise:
            hidden = {layer: self._noisy(states, batch) for layer, states in hidden.items()}
        scored = Scored(network, batch, step, where, teacher, denominators)
        score = partial(self.of_depths, scored)
        return drafter(rounds_of(batch, where), TargetOutputs(hidden), self.depth, score)

    def teacher(
        self,
        drafter: TrainedDrafter,
        where: list[torch.Tensor],
        head: OutputHead,
        outputs: TargetOutputs,
    ) -> TargetLogits:
        """The logits of `head` at the positions `where` of the target's final states."""
        kept, final = drafter.output_head(1).kept, outputs.hidden["final_norm"]
        found = TargetLogits(head, final)
        if kept is not None:
            if outputs.summary is not None and self._kept_head is None:
                self._kept_head = head.rows(kept)
            found = ReducedTargetLogits(head, final, kept, outputs.summary, self._kept_head)
        if self.depth > 1:
            found.hold(torch.stack(where).any(0))
        return found

    def of_depths(self, scored: Scored, unrolled: Iterator[torch.Tensor]) -> LossOutput:
        """Compute the terms from each depth's states [B, L, d]."""
        output = LossOutput({})
        for number, depth in enumerate(self.depths(scored, unrolled), start=1):
            found, terms = self.of_depth(scored, depth)
            output.terms |= {f"depth_{number}_{name}": term for name, term in terms.items()}
            count = float(len(depth.labels))
            output.metrics[f"alpha_{number}"] = (found.overlap.sum(), count)
            output.metrics[f"match_{number}"] = (found.match.float().sum(), count)
        return output

    def depths(self, scored: Scored, unrolled: Iterator[torch.Tensor]) -> Iterator[Depth]:
        """Yield each depth, out of its states [B, L, d]. If the denominators are known, all share
        one gradient by the output head."""
        drafter, batch, denominators = scored.drafter, scored.batch, scored.denominators
        joint = None if denominators is None else JointGradients()
        for depth, (states, where) in enumerate(zip(unrolled, scored.where, strict=True), start=1):
            rows, index = where.nonzero(as_tuple=True)
            texts = batch.texts_of(rows, index)
            weights, count = position_weights(texts, len(batch.prompts), self.config.reduction)
            # 0 where nobody has a position of this depth
            divisor = denominators[f"depth_{depth}_divergence"] or 1 if denominators else 1
            yield Depth(
                scored.teacher.at(rows, index), states[rows, index],
                batch.input_ids[rows, index + 1], weights, count,
                self.config.depth_decay ** (depth - 1), drafter.output_head(depth), joint, divisor,
            )  # fmt: skip

    def of_depth(self, scored: Scored, depth: Depth) -> tuple[ChunkedLoss, dict[str, Term]]:
        """Return what the term "divergence" of a depth has found, and its `terms` by name."""
        found, terms = dict[str, ChunkedLoss](), dict[str, Term]()
        for name, (divergence, weight) in self.divergences(scored.step).items():
            found[name] = depth.chunked(divergence, weight)
            terms[name] = depth.term(found[name].total, weight)
        if self.config.feature_weight:
            terms["states"] = depth.term(_state_error(depth), self.config.feature_weight)
        return found["divergence"], terms

    def _noisy(self, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Add uniform noise to states [B, L, H], as wide in each text as 512 / its tokens (Li et
        al. 2024, EAGLE)."""
        texts = zip(batch.prompts, batch.responses, strict=True)
        tokens = torch.tensor([len(p) + len(r) for p, r in texts], device=states.device)
        width = (self.config.feature_noise * 512 / tokens).to(states)
        documents = batch.documents
        # [B, 1], or [B, L] where texts share a row, whose padding has no text
        width = width.unsqueeze(1) if documents is None else width[documents.clamp(min=0)]
        return states + (2 * torch.rand_like(states) - 1) * width.unsqueeze(-1)


def _state_error(depth: Depth) -> torch.Tensor:
    """SmoothL1 between the states of a depth and the target's, summed over its positions."""
    wanted = depth.at.states.float()
    own = depth.states[:, : wanted.shape[1]].float()  # without the columns that correct logits
    error = F.smooth_l1_loss(own, wanted, reduction="none").mean(-1)  # [N]
    return (error * depth.weights).sum()
