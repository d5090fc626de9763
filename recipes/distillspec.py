"""DistillSpec: distil an existing small causal LM so that the target accepts more of its tokens.

Zhou et al. 2023 (ICLR 2024). Per batch, responses come from the data set ("fixed"), from the
target, or from the drafter with its present weights, and the loss is a divergence between the
target's distribution p and the drafter's q at every response position. The paper's named algorithms
are settings (`method.algorithm`). Departures: the default is jsd(0.5) on target text, which was
best on held-out training prompts of the toy (benchmarks/distillspec_claims.py) and costs no forward
of the target once its logits are in memory; the share of draft text, where there is some, rises
over the first steps, since early samples of a weak drafter teach little. Sampled tokens carry no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from data.batches import SOURCES, Batch, collate
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from recipes import base
from recipes.base import (
    Context,
    Metrics,
    Needs,
    Objective,
    Stage,
    Start,
    check_kind,
    unwrapped,
)
from recipes.common.divergence import DivergenceConfig
from target.model import Target
from target.outputs import Logits, TargetOutputs, TargetRequest
from trainer.checks import require_read
from trainer.chunked import chunked_divergence
from trainer.divergence import CE_HARD, Divergence
from trainer.errors import RunFault, UserError
from trainer.keys import key
from trainer.logits import OutputHead, chunk_rows
from trainer.losses import CompressedTeacher, LossOutput, Term, position_weights, reduce

# divergence and data mix of the algorithms the paper compares (Zhou et al. 2023, Table 1)
ALGORITHMS: dict[str, tuple[str, dict[str, float]]] = {
    "seqkd": ("ce_hard", {"target": 1.0}),
    "supervised_kd": ("fkl", {"fixed": 1.0}),
    "imitkd": ("fkl", {"fixed": 0.5, "draft": 0.5}),
    "f_distill": ("tvd", {"target": 0.5, "draft": 0.5}),
    "on_policy_gkd": ("fkl", {"draft": 1.0}),
}
DEFAULT_DIVERGENCE, DEFAULT_MIX = "jsd", {"target": 1.0}
GENERATION_TEMPERATURE = 1.0  # at which the drafter writes its own text
ENDED_WINDOW = 16  # draft responses over which empty ones are counted


@dataclass
class Config(DivergenceConfig):
    # a divergence and a data mix by the name that the paper gives them; null: as set below
    algorithm: str | None = key(None, one_of=ALGORITHMS)
    # loss between the target's distribution and the drafter's; left out: this, or the algorithm's
    divergence: str = ""
    # mean over tokens, or over the means of the sequences, which is the paper's formula
    reduction: str = key("token", one_of=("token", "sequence"))
    # shares of the training text by who wrote it: fixed (the data set), target, draft; null: target
    # alone, or those of the algorithm
    data_mix: dict[str, float] | None = None
    # whether a batch or each of its rows draws its source
    mix_per: str = key("batch", one_of=("batch", "example"))
    # steps with fkl before the divergence that is set: tvd learns little where the overlap is small
    warm_start_steps: int = key(0, ge=0)
    # share of the steps over which the drafter's own text rises to its share
    draft_ramp_share: float = key(0.1, ge=0, le=1)
    # the target's distribution: computed in training, or stored compressed with the traces
    teacher: str = key("live", one_of=("live", "compressed"))
    # how the compressed teacher's tail counts; bucket: as one token
    approx: str | None = key(None, one_of=(None, "bucket"))
    # train a second drafter on cross-entropy for as many steps, as a row to compare with
    control: bool = True
    draft_layers: int = key(1, ge=1)  # layers of a fresh drafter, where model.drafter is null
    # width of a fresh drafter; null: half the target's
    draft_hidden_size: int | None = key(None, ge=1)

    def __post_init__(self) -> None:
        self._follow_algorithm()
        super().__post_init__()
        self._check_mix()
        self._check_teacher()
        changes = self.parsed_divergence.name not in ("fkl", "ce_hard")
        remedy = "another method.divergence than fkl, which it begins with, or ce_hard"
        require_read(self, "warm_start_steps", changes, remedy)

    def _follow_algorithm(self) -> None:
        """Fill in the divergence and the data mix that were left out: those of the algorithm, which
        takes no others, or the default ones."""
        divergence, mix = DEFAULT_DIVERGENCE, DEFAULT_MIX
        if self.algorithm in ALGORITHMS:
            divergence, mix = ALGORITHMS[self.algorithm]
            if self.divergence not in ("", divergence) or self.data_mix not in (None, mix):
                raise UserError(
                    f"method.algorithm={self.algorithm} fixes method.divergence={divergence} and "
                    f"method.data_mix={mix}: leave these out, or leave the algorithm out"
                )
        self.divergence = self.divergence or divergence
        self.data_mix = dict(mix) if self.data_mix is None else self.data_mix

    def _check_mix(self) -> None:
        unknown = set(self.mix) - set(SOURCES)
        if unknown:
            raise UserError(
                f"ConfigError: method.data_mix knows {', '.join(SOURCES)}, got "
                f"{sorted(unknown)[0]!r}"
            )
        shares = list(self.mix.values())
        numbers = all(type(share) in (int, float) and math.isfinite(share) for share in shares)
        if not numbers or min(shares, default=-1) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise UserError(
                f"ConfigError: method.data_mix must be shares >= 0 that sum to 1, got "
                f"{self.data_mix}"
            )

    def _check_teacher(self) -> None:
        compressed = self.teacher == "compressed"
        if compressed:
            self.parsed_divergence.check_compressed(self.approx, "method.approx")
        if self.approx is not None and not compressed:
            raise UserError(
                f"method.approx={self.approx} is for a compressed teacher: set "
                "method.teacher=compressed or leave it out"
            )
        if compressed and self.parsed_divergence.name == "ce_hard":
            raise UserError(
                "method.teacher=compressed serves another method.divergence than ce_hard, which "
                "needs no teacher: name one or leave it at live"
            )
        if compressed and self.mix.get("draft"):
            raise UserError(
                "ConfigError: on-policy data needs a live teacher: set method.teacher=live or "
                "method.data_mix={target: 1.0}"
            )
        if compressed and self.mix.get("fixed"):
            raise UserError(
                "ConfigError: the compressed teacher is stored for target text only: set "
                "method.teacher=live or method.data_mix={target: 1.0}"
            )

    @property
    def mix(self) -> dict[str, float]:
        """The shares of the training text by who wrote it."""
        assert self.data_mix is not None
        return self.data_mix


class Recipe(base.Recipe):
    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        self.config, self.target = config, target
        if given is not None:
            check_kind(given, CausalLMDrafter, "distillspec")
        self.distillation = OnPolicyDistillation(config, target)

    def stages(self) -> list[Stage]:
        config = self.config
        needs = Needs(
            dict(config.mix),
            per=config.mix_per,
            ramp_share=config.draft_ramp_share,
            teacher=config.teacher == "compressed",
        )
        main = Stage(
            "distill", self.distillation, needs, start="base", row="after", packs=True,
            # processes would draw texts of their own
            shares_texts=config.reduction == "token" and not config.mix.get("draft"),
            prepare=self._begin,
        )  # fmt: skip
        if not config.control:
            return [main]
        # cross-entropy on the data set's own responses, on the target's where it has none
        hard, text = LabelObjective(config, self.target), Needs({"fixed": 1.0})
        control = Stage(
            "control", hard, text, start="base", row="control", packs=True,
            shares_texts=config.reduction == "token",
        )  # fmt: skip
        return [control, main]

    def _begin(self, start: Start) -> TrainedDrafter:
        self.distillation.begin(start.max_new_tokens)
        return start.drafter

    def build(self, traces: Sequence[Trace]) -> CausalLMDrafter:
        width = (
            self.config.draft_hidden_size
            or self.target.model.config.get_text_config().hidden_size // 2
        )
        return CausalLMDrafter.from_target(
            self.target, num_layers=self.config.draft_layers, hidden_size=width
        )


@dataclass(frozen=True)
class Scored:
    """The N supervised positions of a batch. rows, index [N] int64: place of the logits of each;
    labels [N] int64; states [N, d] float and `head`: the drafter's; target: the target's logits
    [B, L, V] where they are live or in memory, else None."""

    batch: Batch
    rows: torch.Tensor
    index: torch.Tensor
    labels: torch.Tensor
    states: torch.Tensor
    head: OutputHead
    target: Logits | None


class LabelObjective(Objective):
    """Cross-entropy on every token of the responses, whoever wrote them, at temperature 1: the
    temperatures of the divergence in `config` are for the target's distribution."""

    def __init__(self, config: Config, target: Target):
        self.config, self.target = config, target
        self.divergence = config.parsed_divergence

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        return {"divergence": batch.count(batch.supervised(), self.config.reduction)}

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        """Sum `score` over the response positions; prompts and padding are excluded."""
        full = target_outputs.logits if target_outputs is not None else None
        rows, index = batch.supervised().nonzero(as_tuple=True)
        labels = batch.input_ids[rows, index + 1]

        def score(unrolled: Iterator[torch.Tensor]) -> LossOutput:
            states, head = next(unrolled)[rows, index], unwrapped(drafter).output_head(1)
            return self.score(Scored(batch, rows, index, labels, states, head, full), step)

        return drafter(batch.text(), None, 1, score)

    def score(self, scored: Scored, step: int) -> LossOutput:
        """Compute the loss of the positions."""
        return self.summed(CE_HARD, scored)

    def summed(self, divergence: Divergence, scored: Scored) -> LossOutput:
        """Sum `divergence` over the positions."""
        config, batch = self.config, scored.batch
        texts, num_texts = batch.texts_of(scored.rows, scored.index), len(batch.prompts)
        if scored.target is None and divergence.name != "ce_hard":
            assert batch.teacher is not None
            values = of_stored(divergence, scored.states, scored.head, batch.teacher, config.approx)
            total, count = reduce(values, texts, num_texts, config.reduction)
            return LossOutput({"divergence": Term(total, count)})
        weights, count = position_weights(texts, num_texts, config.reduction)

        def teacher(span: slice) -> torch.Tensor:
            assert scored.target is not None
            logits = scored.target[scored.rows[span], scored.index[span]]
            return logits[..., : self.target.vocab_size]

        loss = chunked_divergence(
            divergence, scored.states, scored.head,
            teacher if scored.target is not None else None, scored.labels, weights,
        )  # fmt: skip
        metrics: Metrics = {}
        if scored.target is not None:
            metrics["overlap"] = (loss.overlap.sum(), float(len(scored.labels)))
        return LossOutput({"divergence": Term(loss.total, count)}, metrics)


def of_stored(
    divergence: Divergence,
    states: torch.Tensor,
    head: OutputHead,
    teacher: CompressedTeacher,
    approx: str | None,
) -> torch.Tensor:
    """The divergence from a stored teacher at each of N positions, [N] float32, of which as many at
    a time as `chunk_rows` says: the backward pass computes their logits again."""
    size = chunk_rows(states.device, head.target_width)
    if divergence.name == "tvd_pp":
        size = len(states)  # its mean is over all positions
    stored = [getattr(teacher, field.name) for field in fields(teacher)]

    def some(states: torch.Tensor, *stored: torch.Tensor | None) -> torch.Tensor:
        part = CompressedTeacher(*stored)  # type: ignore[arg-type] - the last two may be None
        return divergence(head.logits(states), part, approx=approx)

    found = [
        checkpoint(
            some, states[span], *(None if one is None else one[span] for one in stored),
            use_reentrant=False, preserve_rng_state=False,
        )
        for span in (slice(i, i + size) for i in range(0, max(1, len(states)), max(1, size)))
    ]  # fmt: skip
    return torch.cat(found)


class Distillation(LabelObjective):
    """The divergence D(p || q) on stored text."""

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        """Request the logits of the live target, unless hard labels or the stored teacher
        suffice."""
        if self.divergence_at(step).name == "ce_hard" or batch.teacher is not None:
            return None
        return TargetRequest(logits=True)

    def divergence_at(self, step: int) -> Divergence:
        """The divergence of step `step`: fkl during the warm start."""
        warm = step < self.config.warm_start_steps
        return self.divergence.instead("fkl") if warm else self.divergence

    def score(self, scored: Scored, step: int) -> LossOutput:
        return self.summed(self.divergence_at(step), scored)


class OnPolicyDistillation(Distillation):
    """The divergence D(p || q) on a mixture of stored text and the drafter's own, which is sampled
    while it trains."""

    max_new_tokens: int

    def __init__(self, config: Config, target: Target):
        super().__init__(config, target)
        self.computes_batches = bool(config.mix.get("draft"))

    def begin(self, max_new_tokens: int) -> None:
        """Get ready for the first step. `max_new_tokens`: longest sampled response."""
        self.max_new_tokens = max_new_tokens
        self._ended: list[bool] = []  # whether the latest draft responses were empty

    def score(self, scored: Scored, step: int) -> LossOutput:
        output = super().score(scored, step)
        batch = scored.batch
        drawn = [r for r, s in zip(batch.responses, batch.sources, strict=True) if s == "draft"]
        if drawn:
            ended = sum(bool(r) and r[-1] in self.target.eos_ids for r in drawn)
            output.metrics["draft_eos_rate"] = (torch.tensor(float(ended)), float(len(drawn)))
        return output

    def refresh(self, step: int, context: Context) -> Batch | None:
        """Give the draft rows of the batch responses that the current drafter samples. RunFault if
        the drafter ends most of its responses at once."""
        batch = context.batch
        wanted = [i for i, source in enumerate(batch.sources) if source == "draft"]
        if not wanted:
            return batch
        prompts = [batch.prompts[i] for i in wanted]
        drawn = context.generate(prompts, GENERATION_TEMPERATURE, self.max_new_tokens, batch.index)
        self._ended += [not response or response[0] in self.target.eos_ids for response in drawn]
        self._ended = self._ended[-ENDED_WINDOW:]
        empty, seen = sum(self._ended), len(self._ended)
        if seen == ENDED_WINDOW and empty > seen / 2:
            raise RunFault(
                f"GenerationError: the drafter ended {empty} of its last {seen} responses at once "
                f"(EOS rate {empty / seen:.2f}): train it on stored text first (method.data_mix)"
            )
        responses = list(batch.responses)
        for i, response in zip(wanted, drawn, strict=True):
            responses[i] = response
        return collate(batch.prompts, responses, batch.sources, batch.index, batch.lengths)
