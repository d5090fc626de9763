"""The training of one stage: its batches, its target outputs, and the loop around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from data.batches import Batch, Batches, preview
from data.features import FeaturesStore, write_features
from data.features_layout import FeaturesPlan, features_folder
from data.packing import PackedBatches, PackedTraces
from data.teacher import Teacher
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from phases import shared
from phases.dev import dev_evaluation
from phases.run import Run
from recipes.base import Context, Needs, Stage, unwrapped
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target, TargetOutputs, TargetRequest
from target.sampling import Sampling, row_key
from trainer.compiled import compiled
from trainer.config import TrainerConfig, UserError
from trainer.loop import Fit, FitResult, fit
from trainer.redaction import redacted
from trainer.tracking import Tracker


def settings_of(run: Run, stage: Stage) -> TrainerConfig:
    """The settings trainer.* of a stage."""
    try:
        return dataclasses.replace(run.config.trainer, **stage.overrides)
    except UserError as error:  # a stage may be shorter than the recipe's last one
        raise UserError(f"stage {stage.name} of recipe={run.config.recipe}: {error}") from error


@dataclasses.dataclass
class StageRun:
    """One training of a stage. `number`: its place among the recipe's stages; `train`, `dev`: the
    traces that are trained on and those held out; `texts`: raw text by stage."""

    run: Run
    stage: Stage
    number: int
    drafter: TrainedDrafter
    train: list[Trace]
    dev: list[Trace]
    texts: Mapping[str, PackedBatches]

    def __post_init__(self) -> None:
        self.settings = settings_of(self.run, self.stage)
        self.folder = self.run.folder / "stages" / f"{self.number}-{self.stage.name}"

    def fit(self) -> FitResult:
        """Train `drafter` in place, or restore a finished stage."""
        run, stage, objective = self.run, self.stage, self.stage.objective
        accelerator, target = run.accelerator, run.target
        data, batches = self._batches()
        request = objective.target_request(batches.at(0), 0)
        stored = stored_features(run, request, self.train)
        teacher = Teacher(target, self.train, data.mix, stored, accelerator.device)
        usual = dev_evaluation(run, self.dev, self.drafter, chooses=data.text is None)
        evaluate = objective.evaluated(usual, self.dev)
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
            return teacher.outputs(batch, objective.target_request(batch, step))

        def context(step: int, batch: Batch, drafter: nn.Module) -> Context:
            return self._context(
                batch, unwrapped(drafter), lambda on_device: outputs(on_device, step)
            )

        try:
            with compiled(self.settings.compile, target.model):
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
        return result

    def _batches(self) -> tuple[Needs, Batches | PackedBatches | PackedTraces]:
        """Make the batches of the stage. Returns them behind the text that they come from."""
        data, settings, accelerator = self.stage.data, self.settings, self.run.accelerator
        seed = self.run.config.run.seed
        if self.stage.row == "control" and any(not t.fixed_ids for t in self.train):
            data = dataclasses.replace(data, mix={"target": 1.0})
            if accelerator.is_main_process:
                print("control: cross-entropy on the target's text, since the prompts come without "
                      "responses")  # fmt: skip
        if self.stage.name in self.texts:
            return data, self.texts[self.stage.name]
        if settings.pack_tokens:
            (source,) = (name for name, share in data.mix.items() if share)
            return data, PackedTraces(
                self.train, source, settings.pack_tokens, settings.batch_size, seed, data.teacher,
                accelerator.process_index, accelerator.num_processes,
            )  # fmt: skip
        micro_steps = settings.max_steps * settings.gradient_accumulation_steps
        return data, Batches(
            self.train, data.mix, settings.batch_size, seed=seed, per=data.per,
            ramp=int(data.ramp_share * micro_steps), teacher=data.teacher,
            rank=accelerator.process_index, world=accelerator.num_processes,
        )  # fmt: skip

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
        place = shared.place(
            self.run, self.stage.shared, self.settings, self.drafter, [*self.train, *self.dev]
        )
        shared.restore(self.run, place, self.folder)
        return place


def stored_features(
    run: Run, request: TargetRequest | None, traces: list[Trace]
) -> FeaturesStore | None:
    """Write the target's states of the training text, or read them where they are stored; None
    where the target runs live."""
    data, accelerator = run.config.data, run.accelerator
    if data.features == "live":
        return None
    if request is None or request.logits or not request.layers:
        raise UserError(
            f"data.features=cached stores hidden states, recipe={run.config.recipe} asks for none: "
            "leave it at live"
        )
    plan = FeaturesPlan(request.layers, data.features_dtype)
    return write_features(
        run.target, traces, plan, features_folder(run.target, traces, plan, data.cache_dir),
        batch_size=data.batch_size, rank=accelerator.process_index,
        world=accelerator.num_processes, barrier=run.barrier,
    )  # fmt: skip


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
