"""The checkpoints of one training: which to resume from, when to save, what the result is.

`trainer.checkpoint` writes, verifies and removes single checkpoints. All processes call every
method here; the main process writes.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
from accelerate.utils import gather_object
from torch import nn

from trainer.checkpoint import (
    SHARE,
    STATE,
    Finished,
    Sums,
    best_dir,
    discard_after,
    is_whole,
    latest,
    load_weights,
    prune,
    read_manifest,
    rng_state,
    set_rng_state,
    shares_of,
    step_dir,
    write,
)
from trainer.config import FREE_SETTINGS, RunFault, TrainerConfig, UserError
from trainer.files import read_json, write_json
from trainer.objective import Resumable
from trainer.replicated import Replicated


@dataclass
class FitResult:
    """The result of a training."""

    steps: int
    best_step: int | None  # None where nothing was evaluated
    best_metric: float | None
    skipped_batches: int  # micro-batches without a supervised token, all ranks
    series: list[dict[str, object]]  # evaluation rows by step


@dataclass
class Counters:
    """The progress of a run; equal on all processes, stored in `checkpoint.json`."""

    step: int = 0  # steps done: the data cursor and the position in the schedule
    num_tokens: int = 0  # supervised tokens trained on, all ranks
    skipped_batches: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    series: list[dict[str, object]] = field(default_factory=list)  # one row per evaluation

    def improved_by(self, metrics: Mapping[str, object]) -> bool:
        """Record an evaluation at this step; True where `metrics["select"]` is the best so far.

        None selects nothing: the last weights are then the result. RunFault where the number is
        not finite."""
        select = metrics["select"]
        assert select is None or isinstance(select, float | int), (
            "an evaluation selects by a number"
        )
        if select is not None and not math.isfinite(select):
            raise RunFault(f"the evaluation at step {self.step} gave {select}")
        self.series.append({"step": self.step, **metrics})
        if select is None:
            return False
        if self.best_metric is not None and not select > self.best_metric:
            return False
        self.best_step, self.best_metric = self.step, select
        return True

    def result(self) -> FitResult:
        best = self.best_step, self.best_metric
        return FitResult(self.step, *best, self.skipped_batches, self.series)


def _result_dir(folder: Path, step: int, best_step: int | None) -> Path:
    """The checkpoint with the best weights if the drafter was evaluated, else the last one."""
    return step_dir(folder, step) if best_step is None else best_dir(folder, best_step)


class Store:
    """The checkpoints of one `fit`, in `folder`.

    `seed` and the settings of `placement` are stored with each checkpoint and validated on resume.
    """

    def __init__(self, folder: Path, placement: Replicated, seed: int) -> None:
        self.folder, self.placement, self.accelerator = folder, placement, placement.accelerator
        config = asdict(placement.config)
        self.keep = config["keep_checkpoints"]
        self.setting: dict[str, object] = {
            **{f"trainer.{k}": v for k, v in config.items() if k not in FREE_SETTINGS},
            "run.seed": seed,
            "num_processes": self.accelerator.num_processes,
            "distributed": placement.name,
        }
        self._finished = folder / "finished.json"

    def on_main(self, action: Callable[[], None]) -> None:
        """Run `action` on the main process while the others wait; its RunFault is raised on all."""
        fault = None
        if self.accelerator.is_main_process:
            try:
                action()
            except RunFault as error:
                fault = error
        for error in filter(None, gather_object([fault])):
            raise error

    def finished(self) -> Counters | None:
        """The counters of a training in this folder that has ended, else None.

        None also where `finished.json` or the weights it names are damaged: the training then
        resumes from its last checkpoint."""
        if not self._finished.exists():
            return None
        try:
            content = read_json(self._finished, "resuming from the last checkpoint")
        except UserError as error:
            print(error)
            return None
        counters = self._counters(cast(Finished, content), self._finished)
        result = _result_dir(self.folder, counters.step, counters.best_step)
        whole = gather_object([self.accelerator.is_main_process and is_whole(result)])[0]
        return counters if whole else None

    def finish(self, counters: Counters) -> None:
        """Record that the training has ended, in `finished.json`."""
        content = {**asdict(counters), "setting": self.setting}
        self.on_main(lambda: write_json(self._finished, content))

    def find(self, resume: bool) -> tuple[Path | None, Counters]:
        """The checkpoint to resume from, and its counters; None and fresh counters for a new run.

        Later checkpoints are removed: they are damaged, half-written, or belong to steps that will
        be repeated. Without a checkpoint to resume from, all are removed."""
        main = self.accelerator.is_main_process
        found = gather_object([latest(self.folder) if main and resume else None])[0]
        counters = Counters() if found is None else self._counters(read_manifest(found), found)
        step = -1 if found is None else counters.step

        def discard() -> None:
            self._finished.unlink(missing_ok=True)
            discard_after(self.folder, step)

        self.on_main(discard)
        return found, counters

    def save(
        self,
        counters: Counters,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Resumable,
        window: Sums,
    ) -> None:
        """Write the checkpoint of `counters.step` and remove the ones that are too old.

        `window`: the sums of the metrics since the last logged row. Raises RunFault on a full disk.
        """
        weights = self.placement.weights(model)
        directory = step_dir(self.folder, counters.step)
        own = self.placement.optimizer_state(model, optimizer)
        if self.placement.shares:
            self._stage(directory, own)
        state = {
            "optimizer": None if self.placement.shares else own,
            "ranks": gather_object([{"rng": rng_state(), "window": window}]),
            "recipe": objective.state_dict(),
        }
        manifest = {**asdict(counters), "setting": self.setting}

        def write_and_prune() -> None:
            write(directory, weights, manifest, state)
            prune(self.folder, self.keep)

        self.on_main(write_and_prune)

    def _stage(self, directory: Path, share: object) -> None:
        """Write this process's share of the optimiser state; `write` moves it to the checkpoint."""
        shares, fault = shares_of(directory), None

        def begin() -> None:
            shutil.rmtree(shares, ignore_errors=True)
            shares.mkdir(parents=True)

        self.on_main(begin)
        try:
            torch.save(share, shares / SHARE.format(rank=self.accelerator.process_index))
        except (OSError, RuntimeError) as error:  # torch wraps ENOSPC
            fault = RunFault(
                f"cannot write checkpoint {directory}: {error}; earlier checkpoints are intact: "
                "free disk space and run the same command again"
            )
        for error in filter(None, gather_object([fault])):
            raise error

    def load(
        self,
        found: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Resumable,
    ) -> Sums:
        """Restore optimiser, objective and random generators from the checkpoint `found`.

        The weights are loaded before, by `load_weights`. Returns the sums of the metrics since the
        last logged row."""
        state = torch.load(found / STATE, map_location="cpu", weights_only=True)
        share = state["optimizer"]
        if self.placement.shares:
            path = found / SHARE.format(rank=self.accelerator.process_index)
            share = torch.load(path, map_location="cpu", weights_only=True)
        self.placement.load_optimizer_state(model, optimizer, share)
        objective.load_state_dict(state["recipe"])
        own = state["ranks"][self.accelerator.process_index]
        set_rng_state(own["rng"])
        return own["window"]

    def save_best(self, step: int, model: nn.Module, metrics: Mapping[str, object]) -> None:
        """Write the weights of the best evaluation so far, with its metrics."""
        weights = self.placement.weights(model)
        directory = best_dir(self.folder, step)
        self.on_main(lambda: write(directory, weights, {"step": step, "metrics": metrics}))

    def load_final(self, counters: Counters, drafter: nn.Module) -> None:
        """Load the best weights if the drafter was evaluated, else the last ones."""
        load_weights(_result_dir(self.folder, counters.step, counters.best_step), drafter)

    def _counters(self, manifest: Finished, path: Path) -> Counters:
        """The counters of a manifest. UserError where a setting differs from the stored one, so
        that the run would be another one. A setting that was not stored had today's default."""
        defaults: dict[str, object] = {
            f"trainer.{key}": value for key, value in asdict(TrainerConfig()).items()
        }
        for key, value in self.setting.items():
            former = (defaults | manifest["setting"]).get(key)
            if former != value:
                raise UserError(
                    f"{key} was {former!r} when {path} was written and is now {value!r}: choose "
                    "another run.dir, or set trainer.resume=never to start again"
                )
        return Counters(
            step=manifest["step"],
            num_tokens=manifest["num_tokens"],
            skipped_batches=manifest["skipped_batches"],
            best_step=manifest["best_step"],
            best_metric=manifest["best_metric"],
            series=manifest["series"],
        )
