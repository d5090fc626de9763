"""One checkpoint on disk: written atomically, verified when read.

    folder/checkpoints/step-000100/        drafter.safetensors, state.pt, checkpoint.json
    folder/checkpoints/best/step-000050/   drafter.safetensors, checkpoint.json
    folder/finished.json                   the result, once training is over

A checkpoint is written to a `.tmp-*` sibling, synced to disk, and renamed; `checkpoint.json` holds
the counters and the size and SHA-256 of every other file. `state.pt` holds optimiser, generators
and the objective's state and is read with `weights_only=True`: that state is made of tensors,
numbers, strings, lists and dicts. All processes must see the folder.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.errors import RunFault
from trainer.files import FileDigest, fingerprint, sync

WEIGHTS, STATE, MANIFEST = "drafter.safetensors", "state.pt", "checkpoint.json"
SHARE = "optimizer-{rank}.pt"  # of one process, where each holds a part

Sums = dict[str, list[float]]  # of metrics by name, [sum, count]


class Finished(TypedDict):
    """`finished.json`: the counters (`trainer.store.Counters`) and the settings that a resumed run
    must share."""

    step: int
    num_tokens: int
    skipped_batches: int
    best_step: int | None
    best_metric: float | None
    series: list[dict[str, object]]
    setting: dict[str, object]


class Manifest(Finished):
    """`checkpoint.json`; that of the best weights holds `step`, `metrics` and `files` alone."""

    files: dict[str, FileDigest]


class RandomState(TypedDict):
    """All generators of a process, in types that `weights_only=True` reads back."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: Tensor  # [n] uint8
    cuda: Tensor | None  # [n] uint8


def step_dir(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


def best_dir(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / "best" / f"step-{step:06d}"


def write(
    directory: Path,
    weights: dict[str, Tensor],
    manifest: Mapping[str, object],
    state: Mapping[str, object] | None = None,
) -> None:
    """Write a checkpoint completely or not at all. On a full disk nothing is left behind and
    RunFault is raised."""
    temporary = directory.with_name(f".tmp-{directory.name}")
    aside = directory.with_name(f".tmp-old-{directory.name}")
    try:
        for stale in (temporary, aside):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(unshared(weights), temporary / WEIGHTS, metadata={"format": "pt"})
        if state is not None:
            torch.save(state, temporary / STATE)
        for share in shares_of(directory).glob("*"):
            share.rename(temporary / share.name)
        files = {path.name: fingerprint(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if directory.exists():  # of an abandoned run, or damaged
            directory.rename(aside)
        temporary.rename(directory)
        sync(directory.parent)
        for left in (aside, shares_of(directory)):
            shutil.rmtree(left, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap ENOSPC
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFault(
            f"cannot write checkpoint {directory}: {error}; earlier checkpoints are intact: free "
            "disk space and run the same command again"
        ) from error


def shares_of(directory: Path) -> Path:
    """The folder that holds each process's share of the optimiser state until `write` moves it."""
    return directory.with_name(f".tmp-shares-{directory.name}")


def verify(directory: Path) -> Manifest:
    """The manifest of a checkpoint; ValueError where a file differs from its size or SHA-256."""
    try:
        manifest = read_manifest(directory)
        for name, expected in manifest["files"].items():
            if fingerprint(directory / name) != expected:
                raise ValueError(f"{name} does not have the checksum written with it")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return manifest


def is_whole(directory: Path) -> bool:
    """Whether a checkpoint passes `verify`; a damaged one is named in a printed line."""
    try:
        verify(directory)
        return True
    except ValueError as error:
        print(f"checkpoint {directory} is damaged ({error}); using the one before it")
        return False


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, as are the best weights it names; None without one.
    Each damaged one is named in a printed line and skipped."""
    for directory in reversed(_steps(folder / "checkpoints")):
        if is_whole(directory):
            best = read_manifest(directory).get("best_step")
            if best is None or is_whole(best_dir(folder, best)):
                return directory
    return None


def load_weights(directory: Path, module: nn.Module) -> None:
    """Load a checkpoint's weights in place; RunFault for a damaged file or another network."""
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
    wanted = {read_manifest(directory)["best_step"] for directory in steps[-keep:]}
    for directory in _steps(root / "best"):
        if int(directory.name[5:]) not in wanted:
            shutil.rmtree(directory, ignore_errors=True)


def discard_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step` and half-written ones, which a killed run left."""
    root = folder / "checkpoints"
    for parent in (root, root / "best"):
        for directory in _steps(parent):
            if int(directory.name[5:]) > step:
                shutil.rmtree(directory, ignore_errors=True)
        for stale in parent.glob(".tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)


def rng_state() -> RandomState:
    """The state of all random generators of this process."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - others may draw from it
    assert isinstance(numpy_state, tuple), "the legacy form is the default"
    name, keys, position, has_gauss, gauss = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: RandomState) -> None:
    """Restore what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    own = (name, np.array(keys, np.uint32), position, has_gauss, gauss)
    np.random.set_state(own)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def read_manifest(directory: Path) -> Manifest:
    """The content of `checkpoint.json`, unchecked."""
    return json.loads((directory / MANIFEST).read_text())


def _steps(parent: Path) -> list[Path]:
    return sorted(parent.glob("step-*"), key=lambda directory: int(directory.name[5:]))


def unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors; a tied tensor is written once per name, so loading stays strict."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in weights.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return plain
