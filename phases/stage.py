"""The training of one stage: what it reads, and the loop around it."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path

from accelerate.utils import gather_object

from data.batches import Batch
from data.teacher import Teacher
from drafters.base import TrainedDrafter
from phases import shared
from phases.dev import dev_evaluation, sharing
from phases.run import Run
from phases.source import RunText, StageSource, stage_batches
from phases.states import target_states
from phases.uses import note_use
from recipes.base import Needs, Stage
from recipes.common.config import Config
from target.shared_text import TextGroup, can_share
from trainer.compiled import compiled
from trainer.config import TrainerConfig
from trainer.errors import UserError, require
from trainer.interrupt import Interrupt, stop_requested
from trainer.loop import Fit, FitResult, fit
from trainer.objective import BatchSource
from trainer.tracking import Tracker


def settings_of(run: Run, stage: Stage) -> TrainerConfig:
    """The settings trainer.* of a stage."""
    return settings(run.config, stage, run.accelerator.num_processes)


def settings(config: Config, stage: Stage, processes: int) -> TrainerConfig:
    """The same, of so many processes."""
    key, size = "trainer.context_parallel_size", config.trainer.context_parallel_size
    try:
        rule = f"divide the number of processes, {processes}"
        require(processes % size == 0, key, rule, size)
        rule = "be 1 for a stage that does not share texts (docs/devices.md says which do)"
        require(size == 1 or stage.shares_texts, key, rule, size)
        return dataclasses.replace(config.trainer, **stage.overrides)
    except UserError as error:  # a stage may be shorter than the recipe's last one
        raise UserError(f"stage {stage.name} of recipe={config.recipe}: {error}") from error


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
        accelerator, parts = self.run.accelerator, self.settings.context_parallel_size
        self.group: TextGroup | None = None
        if parts > 1:
            self.group = TextGroup.here(accelerator.process_index, accelerator.num_processes, parts)
        self.folder = self.run.folder / "stages" / f"{self.number}-{self.stage.name}"

    def batches(self) -> tuple[Needs, BatchSource[Batch]]:
        """The batches of the stage, behind the text that they come from."""
        return stage_batches(self.run, self.stage, self.settings, self.text, self.group)

    def fit(self) -> FitResult:
        """Train `drafter` in place, or restore a finished stage. SystemExit(75) after a request to
        stop, even one that came in the last step."""
        run, stage, objective = self.run, self.stage, self.stage.objective
        accelerator, target = run.accelerator, run.target
        data, batches = self.batches()
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
                source = StageSource(run, stage, self.settings, batches, teacher, states)
                result = fit(Fit(
                    objective=objective, drafter=self.drafter, source=source, evaluate=evaluate,
                    config=self.settings, folder=self.folder, seed=run.config.run.seed,
                    accelerator=accelerator, tracker=tracker, lr_multiplier=stage.lr_multiplier,
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
