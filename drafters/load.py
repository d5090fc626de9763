"""Any drafter by name: a folder of this project, a published head, or a causal language model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from drafters import acceptance_head
from drafters.acceptance_head import attach
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.formats.files import read_json
from drafters.formats.reader import layout_of, read
from drafters.kinds import KINDS, Kind, stored_kind
from target.model import Target
from trainer.checks import require_files
from trainer.config import UserError

SETTINGS = ("*.json", acceptance_head.WEIGHTS)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def load_drafter(
    name: str,
    target: Target,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model.drafter",
) -> TrainedDrafter:
    """`name`: a folder or a Hub id. Heads of this project must be made for this target; published
    ones, in a layout that `drafters.formats.reader` knows, become drafters of this target. `key`:
    how errors call the setting. An acceptance head beside the drafter comes with it."""
    require_files(key, name)
    folder = _fetched(name, revision)
    drafter = _load(name, folder, target, revision, trust_remote_code, key)
    if folder is not None:
        attach(drafter, folder, key)
    return drafter


def _load(
    name: str,
    folder: Path | None,
    target: Target,
    revision: str | None,
    trust_remote_code: bool,
    key: str,
) -> TrainedDrafter:
    if folder is not None and (folder / "drafter.json").exists():
        kind = stored_kind(stored(folder, key))
        if kind.load is not None:
            return _own(kind, folder, target, key)
    elif folder is not None:
        try:
            if layout_of(folder) is not None:
                head = read(folder, num_target_layers=target.num_layers)
                return KINDS[head.kind].adopted(head, target)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
    return CausalLMDrafter.from_pretrained(
        name, target, revision=revision, trust_remote_code=trust_remote_code, key=key
    )


def stored(folder: Path, key: str) -> dict[str, Any]:
    """What drafter.json says, of a kind known here."""
    try:
        about = read_json(folder / "drafter.json")
        kind = about["kind"]
    except (UserError, KeyError) as error:
        raise UserError(f"{key}: {folder}/drafter.json is damaged ({error})") from error
    if kind not in KINDS:
        raise UserError(
            f"{key}: {folder} holds a drafter of kind {kind!r}; known: {', '.join(KINDS)}"
        )
    if KINDS[kind].load is not None and not isinstance(about.get("settings"), dict):
        raise UserError(f"{key}: {folder}, of kind {kind!r}, is damaged (no settings)")
    return about


def _own(kind: Kind, folder: Path, target: Target, key: str) -> TrainedDrafter:
    assert kind.load is not None
    try:
        drafter = kind.load(folder, target)
        drafter.rank_accuracy = read_json(folder / "drafter.json").get("rank_accuracy")
        return drafter
    except UserError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{key}: {folder}, of kind {kind.name!r}, is damaged ({reason})") from error


def _fetched(name: str, revision: str | None) -> Path | None:
    """A local folder as it is; of a repository on the Hub what tells heads from models, and the
    weights if it may be a head. None where there is nothing: the loader of causal LMs says why."""
    if os.path.isdir(name):
        return Path(name)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(SETTINGS)))
        if (folder / "drafter.json").exists() or _may_be_head(folder):
            everything = [*SETTINGS, *WEIGHTS]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=everything))
        elif not (folder / "config.json").exists():
            return None
    except (OSError, ValueError):
        return None
    return folder


def _may_be_head(folder: Path) -> bool:
    """By its configuration alone; EAGLE-1 has that of a Llama of one layer."""
    if not (folder / "config.json").exists():
        return False
    one_layer = read_json(folder / "config.json").get("num_hidden_layers") == 1
    return one_layer or layout_of(folder) is not None
