"""The checkpoints of one training: which to resume from, when to save, what the result is.

`trainer.checkpoint` writes, verifies and removes single checkpoints. All processes call every
method here; the main process writes. What is saved is copied to host memory and written by a thread
while the training goes on, one step's files at a time. torch's own asynchronous checkpoints have
another layout, and no single name that appears once all of it is on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
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
from trainer.config import FREE_SETTINGS, TrainerConfig
from trainer.device import on_host
from trainer.errors import RunFault, UserError
from trainer.files import read_json, write_json
from trainer.objective import Resumable
from trainer.processes import PATIENCE
from trainer.progress import working
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
        self._worker = ThreadPoolExecutor(1)
        self._writing: list[Future[None]] = []  # what was saved at `_step`
        self._step = -1
        # the writing threads of several processes wait for each other beside everything else
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if placement.shares else None
        self._writers = group

    def everywhere(self, action: Callable[[], None]) -> None:
        """Run `action`; the RunFault of any process is raised on all."""
        fault = None
        try:
            action()
        except RunFault as error:
            fault = error
        for error in filter(None, gather_object([fault])):
            raise error

    def on_main(self, action: Callable[[], None]) -> None:
        """Run `action` on the main process while the others wait; its RunFault is raised on all."""
        self.everywhere(action if self.accelerator.is_main_process else lambda: None)

    @property
    def failed(self) -> bool:
        """Whether this process could not write what was saved; `settle` says why."""
        return any(one.done() and one.exception() is not None for one in self._writing)

    def settle(self) -> None:
        """Wait until what was saved is on the disk; a RunFault of any process is raised on all."""
        writing, self._writing = self._writing, []
        self.everywhere(lambda: _await(writing))

    def close(self) -> None:
        """Wait for the thread, whether it succeeds or not; nothing is saved any more."""
        self._worker.shutdown()

    def _make_room(self, step: int) -> None:
        """Wait for the files of the step before: they and the copies of this one take memory."""
        if step != self._step:
            self.settle()
            self._step = step

    def _write_later(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread, unless what was saved before it at this step failed: a
        checkpoint names the best weights."""
        before = list(self._writing)

        def write_after_others() -> None:
            _await(before)
            action()

        self._writing.append(self._worker.submit(write_after_others))

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
        """Record in `finished.json` that the training has ended, once its result is on the disk."""
        self.settle()
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

    @working("saving a checkpoint")
    def save(
        self,
        counters: Counters,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Resumable,
        window: Sums,
    ) -> None:
        """Begin to write the checkpoint of `counters.step`, then remove the ones that are too old.

        `window`: the sums of the metrics since the last logged row. Returns once all is copied.
        Raises RunFault where what was saved before found a full disk, as `settle` does."""
        self._make_room(counters.step)
        shares, main = self.placement.shares, self.accelerator.is_main_process
        weights = self.placement.weights(model)
        own = self.placement.optimizer_state(model, optimizer)
        state: dict[str, object] = {
            "optimizer": None if shares else own,
            "ranks": gather_object([{"rng": rng_state(), "window": window}]),
            "recipe": objective.state_dict(),
        }
        manifest = {**asdict(counters), "setting": self.setting}
        directory = step_dir(self.folder, counters.step)
        weights, state = on_host((weights, state)) if main else ({}, {})
        share = on_host(own) if shares else None

        def write_and_prune() -> None:
            if shares:
                self._stage(directory, share)
            if main:
                write(directory, weights, manifest, state)
                prune(self.folder, self.keep)

        if main or shares:
            self._write_later(write_and_prune)

    def _stage(self, directory: Path, share: object) -> None:
        """Write this process's share of the optimiser state, which `write` moves to the checkpoint,
        and wait for those of the others; a RunFault of any process is raised on all."""
        shares, fault = shares_of(directory), None
        try:
            shares.mkdir(parents=True, exist_ok=True)
            torch.save(share, shares / SHARE.format(rank=self.accelerator.process_index))
        except (OSError, RuntimeError) as error:  # torch wraps ENOSPC
            fault = RunFault(
                f"cannot write checkpoint {directory}: {error}; earlier checkpoints are intact: "
                "free disk space and run the same command again"
            )
        faults: list[RunFault | None] = [None] * self.accelerator.num_processes
        dist.all_gather_object(faults, fault, group=self._writers)
        for error in filter(None, faults):
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
        """Begin to write the weights of the best evaluation so far, with its metrics, as `save`."""
        self._make_room(step)
        weights, directory = self.placement.weights(model), best_dir(self.folder, step)
        if self.accelerator.is_main_process:
            weights = on_host(weights)
            manifest = {"step": step, "metrics": metrics}
            self._write_later(lambda: write(directory, weights, manifest))

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


def _await(writing: Sequence[Future[None]]) -> None:
    for one in writing:
        one.result()
