"""FastDraft: a drafter from scratch, pre-trained on raw text, then aligned with the target.

Zafrir et al. 2024, arXiv:2411.11055. A small network with the target's tokenizer learns in stages:
`pretrain` (next-token cross-entropy on packed raw text), `continue` (the same on another mixture,
with a fresh optimiser and the rate warmed up again) and `align` (on the target's generations:
cross-entropy, i.e. sequence-level distillation, or a divergence from the target's distribution,
live or stored compressed). The paper's acceptance rate is `draft_acceptance_rate` at eval.K=3, its
block efficiency `tokens_per_round`, its MBSU `mbsu_params`. Departures: learning rates and batch
sizes are not published, so the ones here are ours; weights start as transformers draws them;
`align` ends with its best weights by acceptance on held-out text of the target, the others with
their last; documents packed into one row do not see each other (the paper does not say)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from data.batches import Batch
from data.packing import RawText, check_separation
from data.raw_text import Source
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from recipes import base, distillspec
from recipes.base import Needs, Stage, Start, check_kind
from recipes.common.config import Config as RunConfig
from recipes.common.divergence import DivergenceConfig
from recipes.common.draft_size import PREDICTIONS, WARMUP_SHARE, SizeSearch, check_search
from target.model import Target
from trainer.divergence import CE_HARD
from trainer.errors import UserError, require
from trainer.keys import Rule, key
from trainer.losses import LossOutput

STAGES = {"pretrain": "pretrained", "continue": "continued", "align": "after"}
IN_ORDER = Rule(
    f"be some of {', '.join(STAGES)}, in this order",
    lambda stages: bool(stages) and stages == [name for name in STAGES if name in stages],
)


@dataclass
class Config(DivergenceConfig):
    NAMES: ClassVar[tuple[str, ...]] = ("corpus", "continue_corpus")
    NEEDED: ClassVar[tuple[str, ...]] = NAMES
    stages: list[str] = key([*STAGES], IN_ORDER)  # stages that are trained
    from_scratch: bool = False  # continue or align a drafter that was not pre-trained
    # raw text of stage pretrain by source, with its share: toy:<domain>, a file or folder, or
    # org/name#split=train&column=text of the Hub
    corpus: dict[str, float] = key({"toy:prose": 1.0})
    # raw text of stage continue; published: two parts code to one part text
    continue_corpus: dict[str, float] = key({"toy:code": 2.0, "toy:prose": 1.0})
    context: int = key(128, ge=2)  # tokens of a row of raw text
    pretrain_steps: int = key(2000, ge=1)  # steps of stage pretrain
    pretrain_lr: float = key(1e-3, gt=0)  # rate of stage pretrain
    continue_steps: int = key(1000, ge=1)  # steps of stage continue
    continue_lr: float = key(5e-4, gt=0)  # rate of stage continue
    # weight decay of these two stages; align has trainer.weight_decay
    weight_decay: float = key(0.1, ge=0)
    divergence: str = "ce_hard"  # loss of stage align
    # share of cross-entropy beside another divergence; published: 0.5
    ce_share: float = key(0.0, ge=0, lt=1)
    # mean over tokens, or over the means of the sequences
    reduction: str = key("token", one_of=("token", "sequence"))
    # the target's distribution: computed in training, or stored compressed with the traces
    teacher: str = key("live", one_of=("live", "compressed"))
    # how the compressed teacher's tail counts; bucket: as one token
    approx: str | None = key(None, one_of=(None, "bucket"))
    draft_layers: int | None = key(None, ge=1)  # layers of the drafter; null: 1
    # width of the drafter; null: half the target's
    draft_hidden_size: int | None = key(None, ge=1)
    tie_embeddings: bool | None = None  # embedding and output matrix are one; null: as the target
    # sizes to try, in parameters besides embedding and output matrix; []: no search
    search_parameters: list[int] = key(list[int](), ge=1)
    search_layers: list[int] = key([1, 2, 4], Rule("name a depth", bool), ge=1)  # depths to try
    search_steps: int = key(100, ge=1)  # steps of the first stage for every shape
    # what chooses the size: tokens per round over measured times, by which depth costs and width
    # hardly does, over parameters or over bytes read
    search_by: str = key("modelled_speedup", one_of=PREDICTIONS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("corpus", "continue_corpus"):
            check_shares(f"method.{name}", getattr(self, name))
        if self.divergence == "ce_hard" and self.ce_share:
            raise UserError(
                "method.ce_share mixes cross-entropy with another method.divergence: leave it at 0"
            )
        check_search(self)
        self.alignment()  # for its checks

    def alignment(self) -> distillspec.Config:
        """The settings of stage align, as those of recipe distillspec."""
        return distillspec.Config(
            divergence=self.divergence, reduction=self.reduction, teacher=self.teacher,
            approx=self.approx, data_mix={"target": 1.0}, control=False,
        )  # fmt: skip


SMALLEST_SHARE = 1e-5  # smaller shares would never be drawn


def check_shares(key: str, shares: Mapping[str, float]) -> None:
    """Refuse shares that are no positive numbers and names that are no sources; read no source."""
    values = list(shares.values()) if shares else [0]
    numbers = all(type(s) in (int, float) and math.isfinite(s) and s > 0 for s in values)
    good = numbers and min(values) >= SMALLEST_SHARE * max(1.0, *values)
    rule = (
        "name sources with shares > 0, as {toy:code: 2, toy:prose: 1}, none below "
        f"{SMALLEST_SHARE:g} of the largest or of 1"
    )
    require(good, f"ConfigError: {key}", rule, shares)
    for name in shares:
        Source.parse(name)


class Alignment(distillspec.Distillation):
    """DistillSpec on the target's text, with a share of cross-entropy on its tokens."""

    def __init__(self, config: Config, target: Target):
        super().__init__(config.alignment(), target)
        self.ce_share = config.ce_share

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        own = super().denominators(batch, step)
        return {**own, "labels": own["divergence"]} if self.ce_share else own

    def score(self, scored: distillspec.Scored, step: int) -> LossOutput:
        """Compute both losses of the same states."""
        soft = super().score(scored, step)
        if not self.ce_share:
            return soft
        hard = self.summed(CE_HARD, scored)
        terms = {
            "divergence": soft.terms["divergence"].times(1 - self.ce_share),
            "labels": hard.terms["divergence"].times(self.ce_share),
        }
        return LossOutput(terms, soft.metrics)


class Recipe(base.Recipe):
    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        self.config, self.target = config, target
        self.pretraining = distillspec.LabelObjective(config.alignment(), target)
        self.alignment = Alignment(config, target)
        self.size_search = SizeSearch(config, target) if config.search_parameters else None
        require(
            config.context <= target.context, "ContextError: method.context",
            f"be at most the target's context {target.context}", config.context,
        )  # fmt: skip
        if given is not None:
            self._check_given(check_kind(given, CausalLMDrafter, "fastdraft"))

    @property
    def builds_from_traces(self) -> bool:
        return self.size_search is not None

    def stages(self) -> list[Stage]:
        config = self.config
        raw, teacher = self.pretraining, config.teacher == "compressed"
        parts = {
            "pretrain": (raw, self._text(config.corpus),
                         self._overrides(config.pretrain_steps, config.pretrain_lr)),
            "continue": (raw, self._text(config.continue_corpus),
                         self._overrides(config.continue_steps, config.continue_lr)),
            "align": (self.alignment, Needs({"target": 1.0}, teacher=teacher), {}),
        }  # fmt: skip
        return [
            Stage(
                name,
                *parts[name],
                start="previous" if number else "base",
                row="after" if name == config.stages[-1] else STAGES[name],
                shares_texts=config.reduction == "token",
                prepare=self._prepare,
            )
            for number, name in enumerate(config.stages)
        ]

    def _text(self, shares: dict[str, float]) -> Needs:
        return Needs({}, text=RawText(shares, self.config.context))

    def _overrides(self, steps: int, lr: float) -> dict[str, object]:
        return {
            "max_steps": steps,
            "lr": lr,
            "lr_schedule": "cosine",
            "lr_warmup_steps": round(WARMUP_SHARE * steps),
            "weight_decay": self.config.weight_decay,
        }

    def build(self, traces: Sequence[Trace]) -> CausalLMDrafter:
        first, config = self.config.stages[0], self.config
        if first != "pretrain" and not config.from_scratch:
            raise UserError(
                f"ConfigError: method.stages begins with {first}, which starts from a pre-trained "
                "drafter: name one as model.drafter, add pretrain, or set method.from_scratch=true"
            )
        if self.size_search is not None:
            return self.size_search.chosen()
        drafter = CausalLMDrafter.from_target(
            self.target,
            num_layers=config.draft_layers or 1,
            hidden_size=config.draft_hidden_size or self.target.hidden_size // 2,
            tie_embeddings=config.tie_embeddings,
        )
        return self._checked(drafter)

    def _check_given(self, drafter: CausalLMDrafter) -> None:
        if self.size_search is not None:
            raise UserError(
                "method.search_parameters chooses the size of a fresh drafter: leave it out, or "
                "set model.drafter=null"
            )
        require(
            self.config.context <= drafter.context, "ContextError: method.context",
            f"be at most the drafter's context {drafter.context}", self.config.context,
        )  # fmt: skip
        self._checked(drafter)

    def _prepare(self, start: Start) -> CausalLMDrafter:
        return self._checked(check_kind(start.drafter, CausalLMDrafter, "fastdraft"))

    def _checked(self, drafter: CausalLMDrafter) -> CausalLMDrafter:
        """Refuse a drafter that cannot separate the documents that share a row."""
        if set(self.config.stages) != {"align"}:
            check_separation(drafter.model, "leave pretrain and continue out of method.stages")
        return drafter

    @staticmethod
    def describe(config: RunConfig) -> str:
        """Describe the raw text that the stages read, for `dry_run`."""
        method, trainer, lines = config.method, config.trainer, []
        row = trainer.batch_size * trainer.gradient_accumulation_steps * method.context
        for stage, steps, shares in (
            ("pretrain", method.pretrain_steps, method.corpus),
            ("continue", method.continue_steps, method.continue_corpus),
        ):
            if stage in method.stages:
                tokens = steps * row
                lines.append(
                    f"raw text of stage {stage}: {tokens} tokens per process from {shares}, "
                    f"at most {4 * tokens / 1e6:.1f} MB in {config.data.cache_dir}"
                )
        return "\n".join(lines)

    def about(self) -> dict[str, object]:
        return {"size_search": self.size_search.rows} if self.size_search else {}
