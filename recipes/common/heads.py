"""Settings, recipe and objective that the recipes of all heads on the target share.

A head drafts the token at depth j of a round from what the target has computed before the round.
For every depth the loss is a divergence between the target's distribution and the head's, at
exactly the positions that decoding visits, in chunks that never hold all logits; optionally a
regression of the head's states on the target's. The target's distribution is recomputed from its
final-normed state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from data.batches import Batch
from drafters.base import TrainedDrafter
from recipes.base import Metrics, Needs, Objective, Recipe, Stage, check_kind, unwrapped
from recipes.common.divergence import DivergenceConfig
from target.model import Target
from target.outputs import LayerId, TargetOutputs, TargetRequest
from trainer.chunked import ChunkedLoss, JointGradients, chunked_divergence
from trainer.device import free_bytes
from trainer.divergence import DIVERGENCES, Divergence
from trainer.errors import UserError, require
from trainer.logits import LogitsSummary, OutputHead, ReducedLogits, TeacherLogits, chunk_rows
from trainer.losses import LossOutput, position_weights

Term = tuple[torch.Tensor, torch.Tensor | float, float]  # of LossOutput: sum, denominator, weight

ConfigT = TypeVar("ConfigT", bound="HeadConfig")

KEEP_TEACHER_BYTES = 1 << 28  # where free memory is not known; otherwise a quarter of that


@dataclass
class HeadConfig(DivergenceConfig):
    """Settings of every head."""

    depth_decay: float = 0.8  # the loss of depth j weighs depth_decay ** (j - 1)
    divergence_weight: float = 1.0  # weight of the divergence
    # weight of SmoothL1 between the head's states and the target's; 0: no regression of states
    feature_weight: float = 0.0
    top_weight: float = 0.0  # weight of cross-entropy on the target's ten likeliest tokens
    # half width of the uniform noise on the target's states, in a text of 512 tokens; a text of n
    # tokens gets 512 / n times that
    feature_noise: float = 0.0
    reduction: str = "token"  # mean over tokens, or over the means of the sequences

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depth_decay", "divergence_weight"):
            require(getattr(self, name) > 0, f"method.{name}", "be > 0", getattr(self, name))
        for name in ("feature_weight", "top_weight", "feature_noise"):
            require(getattr(self, name) >= 0, f"method.{name}", "be >= 0", getattr(self, name))
        require(
            self.reduction in ("token", "sequence"),
            "method.reduction",
            "be token or sequence",
            self.reduction,
        )


class HeadRecipe(Recipe, Generic[ConfigT]):
    """A recipe that trains a head in one stage. `drafter_type`: the class of its drafters."""

    drafter_type: ClassVar[type[TrainedDrafter]]

    def __init__(self, config: ConfigT, target: Target):
        self.config, self.target = config, target
        self._objective: HeadObjective | None = None

    @property
    def depth(self) -> int:
        """The number of depths that are trained."""
        raise NotImplementedError

    @property
    def captures(self) -> tuple[LayerId, ...]:
        """The target's layers that the head reads."""
        return ("final_norm",)

    @property
    def is_reduced(self) -> bool:
        """Whether the head drafts some of the target's tokens only."""
        return False

    @property
    def objective(self) -> HeadObjective:
        """The objective of the stage, made at its first use: a given drafter, which decides what is
        captured, is known by then."""
        if self._objective is None:
            self._objective = HeadObjective(
                self.config, self.target, self.depth, self.captures, self.is_reduced
            )
        return self._objective

    def stages(self) -> list[Stage]:
        text = Needs({"target": 1.0})
        return [
            Stage(
                "train", self.objective, text, start="base", row="after", packs=True,
                shares_texts=self.config.reduction == "token",
            )
        ]  # fmt: skip

    def accept(self, drafter: TrainedDrafter) -> None:
        """Refuse a head of another kind or network than the one that is asked for."""
        head = check_kind(drafter, self.drafter_type, type(self).__module__.rpartition(".")[2])
        self.check_network(head)

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


class HeadObjective(Objective):
    """The divergence between the target's distribution and the head's at each depth, and the
    further terms that `config` has weights for. `captures`: the target's layers that the head
    reads; `is_reduced`: whether it drafts some of the target's tokens only."""

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
        self._kept_rows: OutputHead | None = None  # of the target's head

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        layers = tuple(dict.fromkeys((*self.captures, "final_norm")))
        return TargetRequest(layers, logits=False, summary=self.is_reduced)

    def denominators(self, batch: Batch, step: int) -> list[float]:
        """Count the trained positions, for each term: the divergence of each depth, then the
        further terms of that depth."""
        out = []
        for depth in range(1, self.depth + 1):
            count = batch.count(batch.supervised(depth), self.config.reduction)
            out += [count] * (1 + self._further)
        return out

    @property
    def _further(self) -> int:
        """The number of terms of a depth besides the divergence."""
        return (self.config.feature_weight > 0) + (self.config.top_weight > 0)

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Sequence[float] | None = None,
    ) -> LossOutput:  # fmt: skip
        assert target_outputs is not None
        metrics: Metrics = {}
        final = target_outputs.hidden["final_norm"]
        summary = target_outputs.summary
        score = self.scorer(
            unwrapped(drafter), batch, final, self.target.head, metrics, summary, denominators
        )
        hidden = {k: self._noisy(v, batch) for k, v in target_outputs.hidden.items()}
        return LossOutput(self.scored(drafter, batch, TargetOutputs(hidden), score), metrics)

    def scored(
        self,
        drafter: nn.Module,
        batch: Batch,
        outputs: TargetOutputs | None,
        score: Callable[..., list[Term]],
    ) -> list[Term]:
        """Compute the terms of all depths in one forward of the drafter."""
        further: dict[str, object] = {}
        if batch.documents is not None:
            further["documents"] = batch.documents
        if outputs is None and batch.group is not None:  # the drafter reads the text itself
            further["group"] = batch.group
        scored = drafter(
            batch.input_ids,
            outputs,
            self.depth,
            score,
            batch.position_ids,
            batch.supervised(1)[:, 1:],  # logit index t + 1 is column t
            **further,
        )
        return [term for terms in scored for term in terms]

    def scorer(
        self,
        drafter: TrainedDrafter,
        batch: Batch,
        final: torch.Tensor,
        head: OutputHead,
        metrics: Metrics,
        summary: LogitsSummary | None = None,
        denominators: Sequence[float] | None = None,
    ) -> Callable[[int, torch.Tensor], list[Term]]:
        """Return (depth, states [B, L, d]) -> the terms of that depth, against the distribution
        that `head` gives the target's states `final` [B, L, H]. It adds acceptance to `metrics`.
        `summary`: of these logits, where it is known. `denominators`: what the terms of all depths
        will be divided by; the depths then share one gradient by the output head."""
        joint = None if denominators is None else JointGradients()
        teacher = self._teacher(batch, final, head, drafter.output_head(1).kept, summary)

        def score(depth: int, states: torch.Tensor) -> list[Term]:
            rows, index = batch.supervised(depth).nonzero(as_tuple=True)
            picked, wanted = states[rows, index], final[rows, index]
            labels = batch.input_ids[rows, index + 1]
            texts = batch.texts_of(rows, index)
            weights, count = position_weights(texts, len(batch.prompts), self.config.reduction)
            own = drafter.output_head(depth)
            scale, target_logits = self.config.depth_decay ** (depth - 1), teacher(rows, index)
            terms = list[Term]()

            def add(divergence: Divergence, weight: float) -> ChunkedLoss:
                # the terms of a depth have one denominator; 0 where nobody has a position
                divisor = denominators[(depth - 1) * (1 + self._further)] if denominators else 1
                made = chunked_divergence(
                    divergence, picked, own, target_logits, labels, weights,
                    joint=joint, factor=scale * weight / (divisor or 1),
                )  # fmt: skip
                terms.append((made.total, count, scale * weight))
                return made

            value = add(self.divergence, self.config.divergence_weight)
            if self.config.feature_weight:
                error = F.smooth_l1_loss(picked.float(), wanted.float(), reduction="none").mean(-1)
                total = (error * weights).sum()
                terms.append((total, count, scale * self.config.feature_weight))
            if self.config.top_weight:
                add(DIVERGENCES["ce_top"](), self.config.top_weight)
            number = float(len(rows))
            metrics[f"alpha_{depth}"] = (value.overlap.sum(), number)
            metrics[f"match_{depth}"] = (value.match.float().sum(), number)
            return terms

        return score

    def _teacher(
        self,
        batch: Batch,
        final: torch.Tensor,
        head: OutputHead,
        kept: torch.Tensor | None,
        summary: LogitsSummary | None,
    ) -> Callable[[torch.Tensor, torch.Tensor], Callable[[slice], TeacherLogits]]:
        """Return (rows [N], logit indices [N]) -> span -> the target's logits [n, V] at that span
        of them, or those `kept`. Depths ask for the same positions again, so all are computed once
        where they fit. With a `summary` only the rows `kept` of the head are read."""

        def whole(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return head.teacher_logits(final[rows, index])

        def reduced(rows: torch.Tensor, index: torch.Tensor) -> ReducedLogits:
            assert kept is not None
            if summary is None:
                return ReducedLogits.of(whole(rows, index), kept)
            if self._kept_rows is None:
                self._kept_rows = head.rows(kept)
            logits = self._kept_rows.teacher_logits(final[rows, index])
            return ReducedLogits(logits, summary.log_z[rows, index], summary.first[rows, index])

        read = whole if kept is None else reduced
        where = functools.reduce(torch.logical_or, map(batch.supervised, range(1, self.depth + 1)))
        rows, index = where.nonzero(as_tuple=True)
        width = self.target.vocab_size if kept is None else len(kept)
        size = len(rows) * width * final.element_size()
        free = free_bytes(final.device)
        if self.depth == 1 or size > (KEEP_TEACHER_BYTES if free is None else free // 4):
            return lambda rows, index: lambda span: read(rows[span], index[span])
        place = torch.zeros(where.shape, dtype=torch.long, device=where.device)
        place[rows, index] = torch.arange(len(rows), device=where.device)
        logits: TeacherLogits
        with torch.no_grad():
            if kept is None:
                logits = whole(rows, index)
            else:
                step = chunk_rows(final.device, self.target.vocab_size)
                spans = zip(rows.split(step), index.split(step), strict=True)
                logits = ReducedLogits.joined([reduced(row, at) for row, at in spans])
        return lambda rows, index: lambda span: logits[place[rows[span], index[span]]]

    def _noisy(self, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Add uniform noise to states [B, L, H], as wide in each text as 512 / its tokens (Li et
        al. 2024, EAGLE)."""
        if not self.config.feature_noise:
            return states
        texts = zip(batch.prompts, batch.responses, strict=True)
        tokens = torch.tensor([len(p) + len(r) for p, r in texts], device=states.device)
        width = (self.config.feature_noise * 512 / tokens).to(states)
        documents = batch.documents
        # [B, 1], or [B, L] where texts share a row, whose padding has no text
        width = width.unsqueeze(1) if documents is None else width[documents.clamp(min=0)]
        return states + (2 * torch.rand_like(states) - 1) * width.unsqueeze(-1)
