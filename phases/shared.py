"""The cache of stages that many runs have in common, by what decides their weights.

    <data.cache_dir>/stages/<hash>/    finished.json and the final weights, as `trainer.checkpoint`
                                       has them

A run that finishes such a stage saves a copy there; another run restores it instead of training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from data.traces import Trace
from drafters.base import TrainedDrafter
from phases.generate import contents
from phases.run import Run
from trainer.checkpoint import best_dir, is_whole, step_dir
from trainer.config import FORMAT, FREE_SETTINGS, TrainerConfig
from trainer.device import computes_in_bfloat16
from trainer.errors import RunFault, UserError
from trainer.files import read_json, whole_folder
from trainer.setup import placement

FINISHED = "finished.json"


def place(
    run: Run,
    made_by: Mapping[str, object],
    settings: TrainerConfig,
    drafter: TrainedDrafter,
    traces: Iterable[Trace],
) -> Path:
    """Name the stage's folder in the cache. `made_by`: the recipe's settings of the stage;
    `drafter`: the one that the stage starts with."""
    config = run.config
    of_trainer = {k: v for k, v in dataclasses.asdict(settings).items() if k not in FREE_SETTINGS}
    made_of = {
        **contents(run, drafter, traces), "fingerprint": run.target.fingerprint, "format": FORMAT,
        "method": made_by, "trainer": of_trainer, "seed": config.run.seed, "depth": config.eval.K,
        "features": [config.data.features, config.data.features_dtype],
        "processes": run.accelerator.num_processes,
        # of which trainer.precision=auto is another one on a GPU than on a CPU
        "bfloat16": computes_in_bfloat16(
            settings.precision, run.accelerator.device.type == "cuda"
        ),
        "distributed": placement(run.accelerator, settings).name,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.data.cache_dir) / "stages" / digest


def restore(run: Run, found: Path, folder: Path) -> None:
    """Copy the finished stage into the run's folder, unless the stage was begun there. A damaged
    copy is reported and not used."""
    if run.accelerator.is_main_process and not folder.exists() and _is_whole(found):
        _copy(found, folder)
        print(f"{folder.name}: trained before, from {found}")
    run.barrier()


def save(run: Run, folder: Path, cached: Path) -> None:
    """Copy a finished stage to the cache. The run does not need it, so a full disk is no error."""
    if run.accelerator.is_main_process and not _is_whole(cached):
        try:
            _copy(folder, cached)
        except (OSError, RunFault, UserError) as error:
            print(f"{folder.name}: not saved for other runs in {cached} ({error})")
    run.barrier()


def _is_whole(cached: Path) -> bool:
    try:
        return cached.exists() and is_whole(_weights(cached))
    except (UserError, KeyError) as error:
        print(f"{cached} is damaged ({error}): it is not used")
        return False


def _weights(folder: Path) -> Path:
    """The folder of a finished stage's final weights."""
    result = read_json(folder / FINISHED, "the stage is trained again")
    best = result["best_step"]
    return step_dir(folder, result["step"]) if best is None else best_dir(folder, best)


def _copy(source: Path, destination: Path) -> None:
    """Copy a finished stage, whole or not at all."""
    weights = _weights(source)
    with whole_folder(destination, ours=True) as partial:
        shutil.copytree(weights, partial / weights.relative_to(source))
        shutil.copy(source / FINISHED, partial / FINISHED)
