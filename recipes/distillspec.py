"""DistillSpec: distil an existing small causal LM so that the target accepts more of its tokens.

Zhou et al. 2023 (ICLR 2024). Per batch, responses come from the data set ("fixed"), from the
target, or from the drafter as it is now, and the loss is a divergence between the target's law p
and the drafter's q at every response position. The paper's named algorithms are settings
(`method.algorithm`). Departures: the default is jsd(0.5) on target text, which was best on held-out
training prompts of the toy (benchmarks/distillspec_claims.py) and costs no forward of the target
once its logits are kept; the share of draft text, where there is some, rises over the first steps,
since early samples of a weak drafter teach little. Sampled tokens carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from data.batches import SOURCES, Batch, collate
from data.target import ProjectedLogits, Target, TargetOutputs
from data.traces import Trace
from drafters.causal_lm import CausalLMDrafter
from recipes.base import Context, Needs, Stage, TargetRequest, check_kind
from trainer.chunked import chunked_divergence
from trainer.config import RunFault, UserError, require
from trainer.losses import LossOutput, check_options, divergence, position_weights, reduce

# divergence and data mix of the algorithms the paper compares (Zhou et al. 2023, Table 1)
ALGORITHMS: dict[str, tuple[str, dict[str, float]]] = {
    "seqkd": ("ce_hard", {"target": 1.0}),
    "supervised_kd": ("fkl", {"fixed": 1.0}),
    "imitkd": ("fkl", {"fixed": 0.5, "draft": 0.5}),
    "f_distill": ("tvd", {"target": 0.5, "draft": 0.5}),
    "on_policy_gkd": ("fkl", {"draft": 1.0}),
}
DEFAULT_DIVERGENCE = "jsd"
ENDED_WINDOW = 16  # draft responses over which empty ones are counted


def _default_mix() -> dict[str, float]:
    return {"target": 1.0}


@dataclass
class Config:
    algorithm: str | None = None  # a named pair of divergence and data mix, see ALGORITHMS
    divergence: str = DEFAULT_DIVERGENCE
    beta: float = 0.5  # of jsd
    eta: float = 3.0  # of lk_hybrid
    mix: float = 0.9  # of kl_mix
    draft_temperature: float = 1.0
    teacher_temperature: float = 1.0
    loss_temperature_scale: bool = False
    reduction: str = "token"  # or sequence: the paper's formula
    data_mix: dict[str, float] = field(default_factory=_default_mix)
    mix_per: str = "batch"  # or example
    warm_start_steps: int = 0  # of fkl first: tvd stalls where the overlap is near 0
    draft_ramp_share: float = 0.1  # draft text rises to its share over this part of the steps
    refresh_every: int = 1  # generate draft text anew every so many draws
    gen_temperature: float = 1.0
    teacher: str = "live"  # or compressed: stored with the traces
    approx: str | None = None  # bucket: one bucket for the compressed teacher's tail
    control: bool = True  # also train on cross-entropy for the same number of steps
    draft_layers: int = 1  # of a fresh drafter, where model.drafter is null
    draft_hidden_size: int | None = None  # default: half the target's

    def __post_init__(self) -> None:
        if self.algorithm is not None:
            if self.algorithm not in ALGORITHMS:
                raise UserError(
                    f"unknown method.algorithm {self.algorithm!r}; available: "
                    f"{', '.join(ALGORITHMS)}"
                )
            own = ALGORITHMS[self.algorithm]
            given = (self.divergence, self.data_mix)
            if given != (DEFAULT_DIVERGENCE, _default_mix()) and given != own:
                raise UserError(
                    f"method.algorithm={self.algorithm} fixes method.divergence and "
                    "method.data_mix; "
                    "leave them out, or leave the algorithm out"
                )
            self.divergence, self.data_mix = own[0], dict(own[1])
        unknown = set(self.data_mix) - set(SOURCES)
        if unknown:
            raise UserError(
                f"ConfigError: method.data_mix knows {', '.join(SOURCES)}, got "
                f"{sorted(unknown)[0]!r}"
            )
        shares = list(self.data_mix.values())
        numbers = all(type(share) in (int, float) for share in shares)
        if not numbers or min(shares, default=-1) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise UserError(
                f"ConfigError: method.data_mix must be shares >= 0 that sum to 1, got "
                f"{self.data_mix}"
            )
        compressed = self.teacher == "compressed"
        check_options(
            self.divergence, self.draft_temperature, self.teacher_temperature, beta=self.beta,
            eta=self.eta, mix=self.mix, approx=self.approx, compressed=compressed,
        )  # fmt: skip
        require(
            self.teacher in ("live", "compressed"),
            "method.teacher",
            "be live or compressed",
            self.teacher,
        )
        if self.approx is not None and not compressed:
            raise UserError(
                f"method.approx={self.approx} is for a compressed teacher: set "
                "method.teacher=compressed or leave it out"
            )
        if compressed and self.data_mix.get("draft"):
            raise UserError(
                "ConfigError: on-policy data needs a live teacher: set method.teacher=live or "
                "method.data_mix={target: 1.0}"
            )
        if compressed and self.data_mix.get("fixed"):
            raise UserError(
                "ConfigError: the compressed teacher is stored for target text only: set "
                "method.teacher=live or method.data_mix={target: 1.0}"
            )
        require(
            self.mix_per in ("batch", "example"),
            "method.mix_per",
            "be batch or example",
            self.mix_per,
        )
        require(
            self.reduction in ("token", "sequence"),
            "method.reduction",
            "be token or sequence",
            self.reduction,
        )
        require(
            0 <= self.draft_ramp_share <= 1,
            "method.draft_ramp_share",
            "lie in [0, 1]",
            self.draft_ramp_share,
        )
        for name in ("refresh_every", "draft_layers"):
            require(getattr(self, name) >= 1, f"method.{name}", "be >= 1", getattr(self, name))
        require(
            self.warm_start_steps >= 0, "method.warm_start_steps", "be >= 0", self.warm_start_steps
        )
        require(self.gen_temperature > 0, "method.gen_temperature", "be > 0", self.gen_temperature)


class Recipe:
    target_access = "outputs"
    packs = True

    def __init__(self, config: Config, target: Target):
        self.config, self.target = config, target
        self.drafter: Any = None  # set by the loop
        self._pool: list[Batch] = []  # draft text, re-used between refreshes
        self._ended: list[bool] = []  # whether the latest draft responses were empty

    def stages(self) -> list[Stage]:
        config = self.config
        needs = Needs(
            dict(config.data_mix),
            per=config.mix_per,
            ramp_share=config.draft_ramp_share,
            teacher=config.teacher == "compressed",
        )
        main = Stage("distill", needs, start="base", row="after")
        if not config.control:
            return [main]
        # cross-entropy on the data set's own responses, on the target's where it has none
        return [Stage("control", Needs({"fixed": 1.0}), start="base", row="control"), main]

    def build(self, traces: Sequence[Trace]) -> CausalLMDrafter:
        width = (
            self.config.draft_hidden_size
            or self.target.model.config.get_text_config().hidden_size // 2
        )
        return CausalLMDrafter.from_target(
            self.target, num_layers=self.config.draft_layers, hidden_size=width
        )

    def accept(self, drafter: Any) -> None:
        check_kind(drafter, "causal_lm", "distillspec")

    def begin(self, stage: Stage, max_new_tokens: int) -> None:
        """Called before each stage; `max_new_tokens` bounds the drafter's own responses."""
        self.control = stage.row == "control"
        self.max_new_tokens = max_new_tokens
        self._pool, self._ended = [], []

    # --- data drawn anew -------------------------------------------------------------------------

    def refresh(self, step: int, context: Context) -> Batch | None:
        """Give the batch's draft rows a response sampled from the current drafter. Between
        refreshes a batch of the last `refresh_every` ones is used again."""
        batch = context.batch
        wanted = [i for i, source in enumerate(batch.sources) if source == "draft"]
        if not wanted:
            return batch
        if self._pool and batch.index % self.config.refresh_every:
            return self._pool[batch.index % len(self._pool)]
        prompts = [batch.prompts[i] for i in wanted]
        drawn = context.generate(
            prompts, self.config.gen_temperature, self.max_new_tokens, batch.index
        )
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
        fresh = collate(batch.prompts, responses, batch.sources, batch.index)
        self._pool = [*self._pool, fresh][-self.config.refresh_every :]
        return fresh

    def state_dict(self) -> dict[str, Any]:
        """The pools of draft text, one for each process, when they outlive a step."""
        kept = self._pool if self.config.refresh_every > 1 else []
        mine = [[b.prompts, b.responses, b.sources, b.index] for b in kept]
        return {"pools": gather_object([mine])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pool = [collate(*row) for row in state["pools"][PartialState().process_index]]

    # --- loss ------------------------------------------------------------------------------------

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        """Logits of the live target, unless hard labels or the stored teacher do."""
        if self._divergence(step) == "ce_hard" or batch.teacher is not None:
            return None
        return TargetRequest(logits=True)

    def denominators(self, batch: Batch, step: int) -> list[float]:
        return [batch.count(batch.supervised(), self.config.reduction)]

    def loss(self, batch: Batch, target_outputs: TargetOutputs | None, step: int) -> LossOutput:
        """Masked mean over response positions of D(p || q), prompts and padding excluded."""
        full = target_outputs.logits if target_outputs is not None else None
        rows, index = batch.supervised().nonzero(as_tuple=True)
        labels = batch.input_ids[rows, index + 1]
        scored = self.drafter(
            batch.input_ids,
            None,
            1,
            lambda _, states: self._score(
                states[rows, index], labels, rows, index, full, batch, step
            ),
            batch.position_ids,
        )
        return scored[0]

    def _score(
        self,
        states: torch.Tensor,
        labels: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor,
        full: torch.Tensor | ProjectedLogits | None,
        batch: Batch,
        step: int,
    ) -> LossOutput:
        """states [N, d] of the N supervised positions; their labels, rows and logit indices [N];
        full: the target's logits [B, L, V] where they are live or kept."""
        config, name = self.config, self._divergence(step)
        head = getattr(self.drafter, "module", self.drafter).output_head(1)
        options = {
            "beta": config.beta, "eta": config.eta, "mix": config.mix,
            "draft_temperature": config.draft_temperature,
            "teacher_temperature": config.teacher_temperature,
            "loss_temperature_scale": config.loss_temperature_scale,
        }  # fmt: skip
        texts, num_texts = batch.texts_of(rows, index), len(batch.prompts)
        if full is None and name != "ce_hard":
            values = divergence(
                name, head.logits(states), batch.teacher, labels, approx=config.approx, **options
            )
            total, count = reduce(values, texts, num_texts, config.reduction)
            return LossOutput([(total, count, 1.0)], self._metrics(batch))
        weights, count = position_weights(texts, num_texts, config.reduction)

        def teacher(span: slice) -> torch.Tensor:
            assert full is not None
            return full[rows[span], index[span]][..., : self.target.vocab_size]

        loss = chunked_divergence(
            name, states, head, teacher if full is not None else None, labels, weights, **options
        )
        metrics = self._metrics(batch)
        if full is not None:
            metrics["overlap"] = (loss.overlap.sum(), float(len(labels)))
        return LossOutput([(loss.total, count, 1.0)], metrics)

    def _divergence(self, step: int) -> str:
        if self.control:
            return "ce_hard"
        warm = step < self.config.warm_start_steps and self.config.divergence != "ce_hard"
        return "fkl" if warm else self.config.divergence

    def _metrics(self, batch: Batch) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        drawn = [r for r, s in zip(batch.responses, batch.sources, strict=True) if s == "draft"]
        if drawn:
            ended = sum(bool(r) and r[-1] in self.target.eos_ids for r in drawn)
            metrics["draft_eos_rate"] = (torch.tensor(float(ended)), float(len(drawn)))
        return metrics
