"""Stages that many runs have in common, found by what decides their weights.

    <data.cache_dir>/stages/<hash>/    finished.json and the final weights, as `trainer.checkpoint`
                                       has them

A run that finishes such a stage leaves a copy there; another one takes it and goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data.traces import Trace
from phases.generate import contents
from phases.run import Run
from trainer.checkpoint import best_dir, is_whole, step_dir
from trainer.config import FREE_SETTINGS, RunFault, TrainerConfig, UserError
from trainer.files import read_json, whole_folder
from trainer.loop import placement

FINISHED = "finished.json"


def place(
    run: Run, made_by: dict[str, Any], settings: TrainerConfig, drafter: Any, traces: list[Trace]
) -> Path:
    """`made_by`: the recipe's settings of the stage; `drafter`: as it begins."""
    config = run.config
    kept = {k: v for k, v in dataclasses.asdict(settings).items() if k not in FREE_SETTINGS}
    made_of = {
        **contents(run, drafter, traces), "fingerprint": run.target.fingerprint,
        "method": made_by, "trainer": kept, "seed": config.run.seed, "depth": config.eval.K,
        "features": [config.data.features, config.data.features_dtype],
        "processes": run.accelerator.num_processes,
        "distributed": placement(run.accelerator, settings).name,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.data.cache_dir) / "stages" / digest


def take(run: Run, found: Path, folder: Path) -> None:
    """Put the finished stage into the run's folder, unless one was begun there. A damaged one is
    named and trained anew."""
    if run.accelerator.is_main_process and not folder.exists() and _is_whole(found):
        _copy(found, folder)
        print(f"{folder.name}: trained before, from {found}")
    run.barrier()


def leave(run: Run, folder: Path, kept: Path) -> None:
    """Keep what a finished stage consists of, if there is room: the run needs it not."""
    if run.accelerator.is_main_process and not _is_whole(kept):
        try:
            _copy(folder, kept)
        except (OSError, RunFault, UserError) as error:
            print(f"{folder.name}: not kept for other runs in {kept} ({error})")
    run.barrier()


def _is_whole(kept: Path) -> bool:
    try:
        return kept.exists() and is_whole(_weights(kept))
    except (UserError, KeyError) as error:
        print(f"{kept} is damaged ({error}): it is not taken")
        return False


def _weights(folder: Path) -> Path:
    """The final ones of a finished stage."""
    result = read_json(folder / FINISHED, "the stage is trained anew")
    best = result["best_step"]
    return step_dir(folder, result["step"]) if best is None else best_dir(folder, best)


def _copy(source: Path, destination: Path) -> None:
    """At once or not at all."""
    weights = _weights(source)
    with whole_folder(destination, ours=True) as partial:
        shutil.copytree(weights, partial / weights.relative_to(source))
        shutil.copy(source / FINISHED, partial / FINISHED)
