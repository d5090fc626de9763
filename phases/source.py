"""What a stage reads: the run's text, batches of it, and the target's outputs for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from data.batches import Batch, Batches, few_lengths, preview
from data.features import FeaturesStore
from data.packing import PackedBatches, PackedTraces
from data.served_states import ServedStates
from data.shares import TextShares
from data.teacher import Teacher
from data.trace_rows import lengths
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from phases.dev import split_dev
from phases.run import Run
from recipes.base import Context, Needs, Stage, unwrapped
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling, row_key
from target.shared_text import TextGroup
from trainer.config import TrainerConfig
from trainer.objective import BatchSource, Source
from trainer.redaction import redacted


@dataclasses.dataclass(frozen=True)
class RunText:
    """The text that the stages of a run train on. `traces`: all answers; `train`, `dev`: those that
    are trained on and those held out; `raw`: raw text by stage."""

    traces: Sequence[Trace]
    train: Sequence[Trace]
    dev: list[Trace]
    raw: Mapping[str, PackedBatches]

    @classmethod
    def split(
        cls, run: Run, traces: Sequence[Trace], raw: Mapping[str, PackedBatches] | None = None
    ) -> RunText:
        """Hold out some conversations of `traces`."""
        return cls(traces, *split_dev(traces, run.config.run.seed), raw or {})


def stage_batches(
    run: Run, stage: Stage, settings: TrainerConfig, text: RunText, group: TextGroup | None
) -> tuple[Needs, BatchSource[Batch]]:
    """Make the batches of a stage. Returns them behind the text that they come from. `group`: the
    processes that share texts."""
    data, accelerator = stage.data, run.accelerator
    seed, parts = run.config.run.seed, settings.context_parallel_size
    rank, world = accelerator.process_index // parts, accelerator.num_processes // parts
    if stage.row == "control" and not lengths(text.train, "fixed_ids").all():
        data = dataclasses.replace(data, mix={"target": 1.0})
        if accelerator.is_main_process:
            print(
                "control: cross-entropy on the target's text, since the prompts come without "
                "responses"
            )
    batches: BatchSource[Batch]
    if stage.name in text.raw:
        batches = text.raw[stage.name]
    elif settings.pack_tokens:
        (source,) = (name for name, share in data.mix.items() if share)
        batches = PackedTraces(
            text.train, source, settings.pack_tokens, settings.batch_size, seed, data.teacher,
            rank, world,
        )  # fmt: skip
    else:
        of_rows: list[int] = []
        if accelerator.device.type == "cuda" or settings.compile is not None:
            of_rows = few_lengths(text.train, data.mix, run.config.data.max_new_tokens)
        micro_steps = settings.max_steps * settings.gradient_accumulation_steps
        batches = Batches(
            text.train, data.mix, settings.batch_size, seed=seed, per=data.per,
            ramp=int(data.ramp_share * micro_steps), teacher=data.teacher,
            rank=rank, world=world, lengths=of_rows,
        )  # fmt: skip
    return data, batches if group is None else TextShares(batches, group)


class StageSource(Source[Batch, TargetOutputs | None]):
    """Batches of a stage with what its objective asks of the target. `states`: the target's states
    of the training text, on disk or from an engine, which are asked for a step ahead."""

    def __init__(
        self,
        run: Run,
        stage: Stage,
        settings: TrainerConfig,
        batches: BatchSource[Batch],
        teacher: Teacher,
        states: FeaturesStore | ServedStates | None,
    ):
        super().__init__(batches, self._outputs)
        self.run, self.objective, self.settings = run, stage.objective, settings
        self.teacher, self.states = teacher, states
        self._announced = -1

    def _outputs(self, batch: Batch, step: int) -> TargetOutputs | None:
        found = self.teacher.outputs(batch, self.objective.target_request(batch, step))
        self._announce(step + 1)
        return found

    def _announce(self, step: int) -> None:
        """Ask for the states of that step's batches, once, while the step before is computed."""
        if self.states is None or not self._announced < step < self.settings.max_steps:
            return
        self._announced = step
        number = self.settings.gradient_accumulation_steps
        for index in range(step * number, (step + 1) * number):
            batch = self.at(index)
            if batch.loss_mask.any():  # nobody asks for the states of others
                self.states.ahead(batch)

    def refreshed(self, step: int, batch: Batch, drafter: nn.Module) -> Batch | None:
        run, inner = self.run, unwrapped(drafter)
        generate = partial(self._generate, inner)
        outputs = partial(self._on_device, batch, step)
        return self.objective.refresh(
            step, Context(batch, inner, generate, outputs, run.config.run.seed, run.folder)
        )

    def _generate(
        self,
        drafter: TrainedDrafter,
        prompts: list[list[int]],
        temperature: float,
        max_new_tokens: int,
        stream: int,
    ) -> list[list[int]]:
        seed = hash((self.run.config.run.seed, stream, self.run.accelerator.process_index))
        return sample_drafter(drafter, prompts, self.run.target, temperature, max_new_tokens, seed)

    def _on_device(self, batch: Batch, step: int) -> TargetOutputs | None:
        return self.outputs(batch.to(self.run.accelerator.device), step)

    def describe(self, batch: Batch) -> str:
        return redacted(preview(batch, self.run.target.tokenizer))

    def sync(self) -> None:
        self.run.target.sync()


def sample_drafter(
    drafter: TrainedDrafter,
    prompts: list[list[int]],
    target: Target,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Sample the drafter's own text: [B] lists of ids with the ending EOS; no top-k or top-p,
    dropout off."""
    assert isinstance(drafter, CausalLMDrafter), "only a causal LM writes text by itself"
    training = drafter.training
    drafter.eval()
    requests = [
        Request(ids, row_key(seed, ids, index), Sampling(temperature), index)
        for index, ids in enumerate(prompts)
    ]
    drawn: dict[int, list[int]] = {}
    for row in decode(
        CachedModel(drafter.model), requests, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids,
        batch_size=len(prompts), vocab_size=target.vocab_size,
    ):  # fmt: skip
        drawn[row.request.tag] = row.response_ids
    drafter.train(training)
    return [drawn[i] for i in range(len(prompts))]
