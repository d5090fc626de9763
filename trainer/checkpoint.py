"""Complete checkpoints, written atomically, verified when read.

    folder/checkpoints/step-000100/        drafter.safetensors, state.pt, checkpoint.json
    folder/checkpoints/best/step-000050/   drafter.safetensors, checkpoint.json
    folder/finished.json                   the result, once training is over

A checkpoint is written to a `.tmp-*` sibling, synced to disk, and renamed; `checkpoint.json` holds
the counters and the size and SHA-256 of every other file. `state.pt` holds optimiser, generators
and the objective's state and is read with `weights_only=True`: that state is made of tensors,
numbers, strings, lists and dicts. The folder is one that all processes see.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.config import FREE_SETTINGS, RunFault, TrainerConfig, UserError
from trainer.files import fingerprint, read_json, sync, write_json
from trainer.objective import Objective
from trainer.replicated import Replicated

WEIGHTS, STATE, MANIFEST = "drafter.safetensors", "state.pt", "checkpoint.json"
SHARE = "optimizer-{rank}.pt"  # of one process, where they share it out


@dataclass
class FitResult:
    """How a training ended."""

    steps: int
    best_step: int | None  # None where nothing was evaluated
    best_metric: float | None
    skipped_batches: int  # micro-batches without a supervised token, all ranks
    series: list[dict[str, Any]]  # evaluation rows by step


@dataclass
class Counters:
    """Where a run stands; equal on all processes, kept in `checkpoint.json`."""

    step: int = 0  # steps done: the data cursor and the position in the schedule
    num_tokens: int = 0  # supervised tokens trained on, all ranks
    skipped_batches: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    series: list[dict[str, Any]] = field(default_factory=list)  # one row per evaluation

    def improved_by(self, metrics: dict[str, Any]) -> bool:
        """Note an evaluation at this step; True where `metrics["select"]` is the best so far. None
        chooses nothing: then the last weights are the result."""
        if metrics["select"] is None:
            self.series.append({"step": self.step, **metrics})
            return False
        if not math.isfinite(metrics["select"]):
            raise RunFault(f"the evaluation at step {self.step} gave {metrics['select']}")
        self.series.append({"step": self.step, **metrics})
        if self.best_metric is not None and not metrics["select"] > self.best_metric:
            return False
        self.best_step, self.best_metric = self.step, metrics["select"]
        return True

    def result(self) -> FitResult:
        best = self.best_step, self.best_metric
        return FitResult(self.step, *best, self.skipped_batches, self.series)


class Interrupt(AbstractContextManager):
    """Turns SIGTERM and Ctrl-C into a request to stop after the step; a second stops at once."""

    requested = False
    latest: ClassVar[Interrupt | None] = None

    def __enter__(self) -> Interrupt:
        Interrupt.latest = self
        self._former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        self.requested = True
        self.__exit__()

    def __exit__(self, *exception: object) -> None:
        while self._former:
            signal.signal(*self._former.popitem())


def stop_requested() -> bool:
    """Of this process's training, for what waits inside of a step."""
    return Interrupt.latest is not None and Interrupt.latest.requested


def _result_dir(folder: Path, step: int, best_step: int | None) -> Path:
    """The best weights where some were measured, else the last."""
    return step_dir(folder, step) if best_step is None else best_dir(folder, best_step)


def step_dir(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


def best_dir(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / "best" / f"step-{step:06d}"


class Store:
    """The checkpoints of one `fit`. Every process calls each method; the main one writes."""

    def __init__(self, folder: Path, placement: Replicated, seed: int) -> None:
        self.folder, self.placement, self.accelerator = folder, placement, placement.accelerator
        config = asdict(placement.config)
        self.keep = config["keep_checkpoints"]
        kept = {f"trainer.{k}": v for k, v in config.items() if k not in FREE_SETTINGS}
        self.setting = {
            **kept,
            "run.seed": seed,
            "num_processes": self.accelerator.num_processes,
            "distributed": placement.name,
        }
        self._finished = folder / "finished.json"

    def on_main(self, action: Callable[[], None]) -> None:
        """Run on the main process while the others wait; a fault there is raised everywhere."""
        fault = None
        if self.accelerator.is_main_process:
            try:
                action()
            except RunFault as error:
                fault = error
        for error in filter(None, gather_object([fault])):
            raise error

    def finished(self) -> Counters | None:
        """How an earlier training in this folder ended, if it did. Where a damaged file says so,
        it goes on from its last checkpoint."""
        if not self._finished.exists():
            return None
        try:
            manifest = read_json(self._finished, "going on from the last checkpoint")
        except UserError as error:
            print(error)
            return None
        counters = self._counters(manifest, self._finished)
        result = _result_dir(self.folder, counters.step, counters.best_step)
        whole = gather_object([self.accelerator.is_main_process and is_whole(result)])[0]
        return counters if whole else None

    def finish(self, counters: Counters) -> None:
        content = {**asdict(counters), "setting": self.setting}
        self.on_main(lambda: write_json(self._finished, content))

    def find(self, resume: bool) -> tuple[Path | None, Counters]:
        """The checkpoint to go on from. What lies beyond it is removed, all of it if there is none:
        it was damaged, half-written, or belongs to a part of the run that is done again."""
        main = self.accelerator.is_main_process
        found = gather_object([latest(self.folder) if main and resume else None])[0]
        counters = Counters() if found is None else self._counters(_manifest(found), found)
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
        optimizer: Any,
        objective: Objective,
        window: dict,
    ) -> None:
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

    def _stage(self, directory: Path, share: list[dict[str, Any]]) -> None:
        """Every process writes its share of the optimiser; the checkpoint will take it."""
        shares, fault = _shares_of(directory), None

        def begin() -> None:
            shutil.rmtree(shares, ignore_errors=True)
            shares.mkdir(parents=True)

        self.on_main(begin)
        try:
            torch.save(share, shares / SHARE.format(rank=self.accelerator.process_index))
        except (OSError, RuntimeError) as error:  # torch wraps ENOSPC
            fault = RunFault(
                f"cannot write checkpoint {directory}: {error}; earlier checkpoints are intact, "
                "make room and run the same command again"
            )
        for error in filter(None, gather_object([fault])):
            raise error

    def load(
        self, found: Path, model: nn.Module, optimizer: Any, objective: Objective
    ) -> dict[str, list[float]]:
        """All but the weights; returns the numbers since the last logged row."""
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

    def save_best(self, step: int, model: nn.Module, metrics: dict[str, Any]) -> None:
        weights = self.placement.weights(model)
        directory = best_dir(self.folder, step)
        self.on_main(lambda: write(directory, weights, {"step": step, "metrics": metrics}))

    def load_final(self, counters: Counters, drafter: nn.Module) -> None:
        """The best weights where some were measured, else the last."""
        load_weights(_result_dir(self.folder, counters.step, counters.best_step), drafter)

    def _counters(self, manifest: dict[str, Any], path: Path) -> Counters:
        """Refuses to continue under settings with which it would be another run. One that was not
        there yet had what is its default now."""
        defaults = {f"trainer.{key}": value for key, value in asdict(TrainerConfig()).items()}
        for key, value in self.setting.items():
            former = (defaults | manifest["setting"]).get(key)
            if former != value:
                raise UserError(
                    f"{key} was {former!r} when {path} was written and is now {value!r}: choose "
                    "another run.dir, or trainer.resume=never to begin again"
                )
        return Counters(**{name: manifest[name] for name in Counters.__dataclass_fields__})


def write(
    directory: Path,
    weights: dict[str, Tensor],
    manifest: dict[str, Any],
    state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint at once or not at all. A full disk leaves no trace and raises RunFault."""
    temporary = directory.with_name(f".tmp-{directory.name}")
    aside = directory.with_name(f".tmp-old-{directory.name}")
    try:
        for stale in (temporary, aside):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_unshared(weights), temporary / WEIGHTS, metadata={"format": "pt"})
        if state is not None:
            torch.save(state, temporary / STATE)
        for share in _shares_of(directory).glob("*"):
            share.rename(temporary / share.name)
        files = {path.name: fingerprint(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if directory.exists():  # left by a trajectory that was abandoned, or damaged
            directory.rename(aside)
        temporary.rename(directory)
        sync(directory.parent)
        for left in (aside, _shares_of(directory)):
            shutil.rmtree(left, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap ENOSPC
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFault(
            f"cannot write checkpoint {directory}: {error}; earlier checkpoints are intact, make "
            "room and run the same command again"
        ) from error


def _shares_of(directory: Path) -> Path:
    return directory.with_name(f".tmp-shares-{directory.name}")


def verify(directory: Path) -> dict[str, Any]:
    """The manifest, once every file has the size and SHA-256 it names; else ValueError."""
    try:
        manifest = _manifest(directory)
        for name, expected in manifest["files"].items():
            if fingerprint(directory / name) != expected:
                raise ValueError(f"{name} does not have the checksum written with it")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return manifest


def is_whole(directory: Path) -> bool:
    """A damaged one is named in a line."""
    try:
        verify(directory)
        return True
    except ValueError as error:
        print(f"checkpoint {directory} is damaged ({error}); going back to the one before it")
        return False


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, with the best weights it names; each damaged one is
    named in a line and passed over."""
    for directory in reversed(_steps(folder / "checkpoints")):
        if is_whole(directory):
            best = _manifest(directory).get("best_step")
            if best is None or is_whole(best_dir(folder, best)):
                return directory
    return None


def load_weights(directory: Path, module: nn.Module) -> None:
    """Load a checkpoint's weights in place; a damaged file or another network is a RunFault."""
    try:
        verify(directory)
        module.load_state_dict(load_file(directory / WEIGHTS))
    except (ValueError, RuntimeError) as error:
        raise RunFault(f"cannot load weights from {directory}: {error}") from error


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints and the best weights any of them names.

    Call it after a new checkpoint is whole. Whatever lay beyond the one a run went on from was
    removed by `discard_after`, so the newest is never a damaged one.
    """
    root = folder / "checkpoints"
    steps = _steps(root)
    for directory in steps[:-keep]:
        shutil.rmtree(directory, ignore_errors=True)
    wanted = {_manifest(directory)["best_step"] for directory in steps[-keep:]}
    for directory in _steps(root / "best"):
        if int(directory.name[5:]) not in wanted:
            shutil.rmtree(directory, ignore_errors=True)


def save_batches(path: Path, batches: list[Any], step: int) -> None:
    """The micro-batches that broke a step, to look at: the first as `input_ids`, then `_1` ..."""
    tensors: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        for name in ("input_ids", "loss_mask"):
            tensors[name if i == 0 else f"{name}_{i}"] = getattr(batch, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(_unshared(tensors), path, metadata={"step": str(step)})


def discard_after(folder: Path, step: int) -> None:
    """Remove what a killed run left beyond `step`: damaged, abandoned and half-written ones."""
    root = folder / "checkpoints"
    for parent in (root, root / "best"):
        for directory in _steps(parent):
            if int(directory.name[5:]) > step:
                shutil.rmtree(directory, ignore_errors=True)
        for stale in parent.glob(".tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)


def rng_state() -> dict[str, Any]:
    """All generators of this process, in types that `weights_only=True` reads back."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - others may draw from it
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / MANIFEST).read_text())


def _steps(parent: Path) -> list[Path]:
    return sorted(parent.glob("step-*"), key=lambda directory: int(directory.name[5:]))


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors; a tied tensor is written once per name, so loading stays strict."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in weights.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return plain
