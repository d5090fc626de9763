"""The training of one stage: its batches, its target outputs, and the loop around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from accelerate.utils import gather_object
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
from phases import shared
from phases.dev import dev_evaluation, sharing, split_dev
from phases.run import Run
from phases.states import target_states
from phases.uses import note_use
from recipes.base import Context, Needs, Stage, unwrapped
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling, row_key
from target.shared_text import TextGroup, can_share
from trainer.compiled import compiled
from trainer.config import TrainerConfig
from trainer.errors import UserError, require
from trainer.interrupt import Interrupt, stop_requested
from trainer.loop import Fit, FitResult, fit
from trainer.objective import BatchSource
from trainer.redaction import redacted
from trainer.tracking import Tracker


def settings_of(run: Run, stage: Stage) -> TrainerConfig:
    """The settings trainer.* of a stage."""
    key, size = "trainer.context_parallel_size", run.config.trainer.context_parallel_size
    processes = run.accelerator.num_processes
    try:
        rule = f"divide the number of processes, {processes}"
        require(processes % size == 0, key, rule, size)
        rule = "be 1 for a stage that does not share texts (docs/devices.md says which do)"
        require(size == 1 or stage.shares_texts, key, rule, size)
        return dataclasses.replace(run.config.trainer, **stage.overrides)
    except UserError as error:  # a stage may be shorter than the recipe's last one
        raise UserError(f"stage {stage.name} of recipe={run.config.recipe}: {error}") from error


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


@dataclasses.dataclass
class StageRun:
    """One training of a stage. `number`: its place among the recipe's stages."""

    run: Run
    stage: Stage
    number: int
    drafter: TrainedDrafter
    text: RunText

    def __post_init__(self) -> None:
        self.settings = settings_of(self.run, self.stage)
        self._announced = -1
        accelerator, parts = self.run.accelerator, self.settings.context_parallel_size
        self.group: TextGroup | None = None
        if parts > 1:
            self.group = TextGroup.here(accelerator.process_index, accelerator.num_processes, parts)
        self.folder = self.run.folder / "stages" / f"{self.number}-{self.stage.name}"

    def fit(self) -> FitResult:
        """Train `drafter` in place, or restore a finished stage. SystemExit(75) after a request to
        stop, even one that came in the last step."""
        run, stage, objective = self.run, self.stage, self.stage.objective
        accelerator, target = run.accelerator, run.target
        data, batches = self._batches()
        request = objective.target_request(batches.at(0), 0)
        usual = dev_evaluation(run, self.text.dev, self.drafter, chooses=data.text is None)
        evaluate = objective.evaluated(usual, self.text.dev, sharing(run))
        if self.group is not None:
            self.drafter.check_group(self.group)
        cached = self._restore_from_cache()
        tracker = Tracker(
            self.settings, run.folder, run.folder.name, run.config.to_dict(),
            accelerator.is_main_process, stage=stage.name,
        )  # fmt: skip
        if accelerator.is_main_process:
            print(
                f"stage {stage.name}: {self.settings.max_steps} steps of "
                f"{self.settings.batch_size} rows from "
                f"{data.mix if data.text is None else dict(data.text.shares)}"
            )

        def outputs(batch: Batch, step: int) -> TargetOutputs | None:
            found = teacher.outputs(batch, objective.target_request(batch, step))
            if states is not None:
                self._announce(states, batches, step + 1)
            return found

        def context(step: int, batch: Batch, drafter: nn.Module) -> Context:
            return self._context(
                batch, unwrapped(drafter), lambda on_device: outputs(on_device, step)
            )

        Interrupt.latest = None  # a request to an earlier training has ended that one
        try:
            with (
                # of all, so that a run with another seed, which holds out others, finds them
                target_states(run, request, self.text.traces) as states,
                compiled(self.settings.compile, target.model),
            ):
                if self.group is not None and states is None and request is not None:
                    self._check_target(self.group)
                teacher = Teacher(target, self.text.train, data.mix, states, accelerator.device)
                result = fit(Fit(
                    objective=objective, drafter=self.drafter, batches=batches, evaluate=evaluate,
                    outputs=outputs, config=self.settings, folder=self.folder,
                    seed=run.config.run.seed, accelerator=accelerator, tracker=tracker,
                    context=context, lr_multiplier=stage.lr_multiplier, sync=target.sync,
                    describe=lambda batch: redacted(preview(batch, target.tokenizer)),
                ))  # fmt: skip
        finally:
            tracker.finish()
        if cached is not None:
            shared.save(run, self.folder, cached)
        if any(gather_object([stop_requested()])):  # after its last step
            if accelerator.is_main_process:
                print(f"stage {stage.name} is finished: rerun the same command for what follows")
            raise SystemExit(75)
        return result

    def _check_target(self, group: TextGroup) -> None:
        """Check that processes can share what the target reads, or say that they do not."""
        model = self.run.target.model
        if can_share(model):
            group.check(model, "the target")
        elif self.run.accelerator.is_main_process:
            print(
                f"the target reads whole texts on each of the {group.parts} processes that share "
                "them: docs/devices.md says which models do not"
            )

    def _announce(
        self,
        states: FeaturesStore | ServedStates,
        batches: BatchSource[Batch],
        step: int,
    ) -> None:
        """Ask for the states of that step's batches, once, while the step before is computed."""
        if step <= self._announced or step >= self.settings.max_steps:
            return
        self._announced = step
        number = self.settings.gradient_accumulation_steps
        for index in range(step * number, (step + 1) * number):
            batch = batches.at(index)
            if batch.loss_mask.any():  # nobody asks for the states of others
                states.ahead(batch)

    def _batches(self) -> tuple[Needs, BatchSource[Batch]]:
        """Make the batches of the stage. Returns them behind the text that they come from."""
        data, settings, accelerator = self.stage.data, self.settings, self.run.accelerator
        seed, parts = self.run.config.run.seed, settings.context_parallel_size
        rank, world = accelerator.process_index // parts, accelerator.num_processes // parts
        if self.stage.row == "control" and not lengths(self.text.train, "fixed_ids").all():
            data = dataclasses.replace(data, mix={"target": 1.0})
            if accelerator.is_main_process:
                print(
                    "control: cross-entropy on the target's text, since the prompts come without "
                    "responses"
                )
        batches: BatchSource[Batch]
        if self.stage.name in self.text.raw:
            batches = self.text.raw[self.stage.name]
        elif settings.pack_tokens:
            (source,) = (name for name, share in data.mix.items() if share)
            batches = PackedTraces(
                self.text.train, source, settings.pack_tokens, settings.batch_size, seed,
                data.teacher, rank, world,
            )  # fmt: skip
        else:
            of_rows: list[int] = []
            if accelerator.device.type == "cuda" or settings.compile is not None:
                of_rows = few_lengths(
                    self.text.train, data.mix, self.run.config.data.max_new_tokens
                )
            micro_steps = settings.max_steps * settings.gradient_accumulation_steps
            batches = Batches(
                self.text.train, data.mix, settings.batch_size, seed=seed, per=data.per,
                ramp=int(data.ramp_share * micro_steps), teacher=data.teacher,
                rank=rank, world=world, lengths=of_rows,
            )  # fmt: skip
        return data, batches if self.group is None else TextShares(batches, self.group)

    def _context(
        self,
        batch: Batch,
        drafter: TrainedDrafter,
        outputs: Callable[[Batch], TargetOutputs | None],
    ) -> Context:
        """Make the context of `Objective.refresh`."""
        run, accelerator = self.run, self.run.accelerator
        seed = run.config.run.seed

        def generate(
            prompts: list[list[int]], temperature: float, max_new_tokens: int, stream: int
        ) -> list[list[int]]:
            return sample_drafter(
                drafter, prompts, run.target, temperature, max_new_tokens,
                seed=hash((seed, stream, accelerator.process_index)),
            )  # fmt: skip

        def of_batch() -> TargetOutputs | None:
            return outputs(batch.to(accelerator.device))

        return Context(batch, drafter, generate, of_batch, seed, run.folder)

    def _restore_from_cache(self) -> Path | None:
        """Restore a stage that another run has trained. Returns its place in the cache, None for a
        stage that runs do not share."""
        if self.stage.shared is None or self.settings.resume != "auto":
            return None
        traces = chain(self.text.train, self.text.dev)
        place = shared.place(self.run, self.stage.shared, self.settings, self.drafter, traces)
        shared.restore(self.run, place, self.folder)
        note_use(self.run, place)
        return place


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
