"""Drafters by name: a folder of this project, a published head, or a causal language model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from drafters import acceptance_head
from drafters.acceptance import attach, check_exposed, check_width, weights_hash
from drafters.base import FORMAT, DrafterJson, TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.formats.acceptance import read_acceptance_head
from drafters.formats.files import read_json
from drafters.formats.keys import HeadConfig
from drafters.formats.reader import layout_of, read
from drafters.kinds import KINDS, Kind, stored_kind
from target.folder import check_config, check_folder, check_sizes, reading
from target.loading import check_finite, check_plain, stored_dtypes
from target.model import Target
from trainer.checks import require_files
from trainer.errors import UserError

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
    """Load a drafter by the name of a folder, of a run's folder or of a repository on the Hub.

    A head of this project must be made for this target. A published head, in a layout that
    `drafters.formats.reader` knows, becomes a drafter of this target. An acceptance head beside the
    drafter is loaded too. `key`: the setting that holds `name`, for messages. Raises UserError
    where the drafter is missing, damaged or does not fit the target.
    """
    name = drafter_folder(key, name)
    check_folder(key, name)
    folder = _fetched(name, revision)
    drafter = _load(name, folder, target, revision, trust_remote_code, key)
    if folder is not None:
        attach(drafter, folder, key)
    if drafter.target_layers and drafter.context and drafter.context < target.context:
        print(
            f"{name}: this head knows {drafter.context} positions, the target {target.context}; "
            "behind longer texts it drafts nothing, as in vLLM"
        )
    return drafter


def drafter_folder(key: str, name: str) -> str:
    """`name`, or the folder of the trained drafter where `name` is the folder of a run. UserError
    where the run has not trained it yet; `key`: the setting that holds `name`."""
    run = Path(name)
    if os.path.exists(run / "drafter.json") or not os.path.exists(run / "run.json"):
        return name
    if not os.path.exists(run / "drafter" / "drafter.json"):
        raise UserError(
            "the run in this folder has no trained drafter yet",
            key=key,
            value=name,
            remedy="rerun its command, which run.json holds, until it is finished",
        )
    return str(run / "drafter")


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
            with reading(f"{folder} cannot be read as a head"):
                if layout_of(folder) is not None:
                    head = read(folder, num_target_layers=target.num_layers)
                    return KINDS[head.kind].adopted(head, target)
        except UserError as error:
            raise _below(key, error) from error
    return CausalLMDrafter.from_pretrained(
        name, target, revision=revision, trust_remote_code=trust_remote_code, key=key
    )


def load_acceptance_head(name: str, drafter: TrainedDrafter, key: str) -> None:
    """Give the drafter the acceptance head in a folder or a repository on the Hub.

    The layout is this project's or the published one (`drafters.formats.acceptance`), which does
    not name its draft model: this drafter must be it. `key`: the setting that holds `name`, for
    messages. Raises UserError where the head is missing, damaged or does not fit the drafter.
    """
    require_files(key, name)
    check_exposed(drafter)
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, allow_patterns=[*SETTINGS, *WEIGHTS]))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{key}: cannot load {name!r} ({reason})") from error
    if (folder / acceptance_head.SETTINGS).exists():
        attach(drafter, folder, key)
        return
    try:
        with reading(f"{folder} cannot be read as an acceptance head"):
            head = read_acceptance_head(folder)
    except UserError as error:
        raise _below(key, error) from error
    check_width(drafter, head, folder, key)
    head.settings.draft = weights_hash(drafter)
    drafter.acceptance = head.to(next(drafter.parameters()).device)


def _below(key: str, error: UserError) -> UserError:
    """The same mistake, with the setting `key` that named the files it is in."""
    if not error.key:
        return UserError(f"{key}: {error}")
    name = f"{key}: {error.key}"
    return UserError(error.rule, key=name, value=error.value, remedy=error.remedy)


def stored(folder: Path, key: str) -> DrafterJson:
    """Read drafter.json; UserError where it is damaged or its kind is unknown."""
    try:
        about = read_json(folder / "drafter.json", DrafterJson)
        kind = about["kind"]
    except (UserError, KeyError) as error:
        raise UserError(f"{key}: {folder}/drafter.json is damaged ({error})") from error
    if about.get("format") != FORMAT:
        raise UserError(
            f"{key}: {folder} is stored in format {about.get('format')}, this version reads format "
            f"{FORMAT}: train it again, or load it with the version that stored it"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(
            f"{key}: {folder} holds a drafter of kind {kind!r}; known: {', '.join(KINDS)}"
        )
    if KINDS[kind].load is not None and not isinstance(about.get("settings"), dict):
        raise UserError(f"{key}: {folder}, of kind {kind!r}, is damaged (no settings)")
    return about


def _own(kind: Kind, folder: Path, target: Target, key: str) -> TrainedDrafter:
    assert kind.load is not None
    with reading(f"{key}: {folder}, of kind {kind.name!r}, is damaged"):
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")])
        check_plain(key, str(folder), files)
        about = read_json(folder / "drafter.json", DrafterJson)
        if files:
            _check_counts(f"{key}: {folder / 'drafter.json'}", about, files)
        drafter = kind.load(folder, target)
        check_finite(key, str(folder), drafter.state_dict().items())
        drafter.rank_accuracy = about.get("rank_accuracy")
        drafter.trained_depth = about.get("trained_depth")
        return drafter


def _check_counts(said: str, about: DrafterJson, files: Sequence[Path]) -> None:
    """UserError where drafter.json asks for more heads or layers, or larger ones, than the weights
    in `files` are: they would be built before they are compared with these."""
    tensors, numbers = len(stored_dtypes(files)), sum(path.stat().st_size for path in files)
    for name, value in {**about["settings"], **(about.get("lora") or {})}.items():
        most = tensors if name.startswith("num_") else numbers
        if type(value) is int and value > most:
            raise UserError(
                f"must fit the weights, {tensors} tensors of at most {numbers} numbers",
                key=f"{said}: {name}", value=value, remedy="download it again",
            )  # fmt: skip
    layer = about.get("layer") or {}
    check_config(f"{said}: layer", layer)
    check_sizes(f"{said}: layer", layer, files, ("intermediate_size",))


def _fetched(name: str, revision: str | None) -> Path | None:
    """The local folder of a drafter, after fetching it from the Hub where needed.

    From the Hub come the settings, and the weights if they may be a head's. None where there is no
    such repository: the loader of causal LMs reports why.
    """
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
    """Whether its configuration allows a head: that of EAGLE-1 is a Llama's with one layer."""
    if not (folder / "config.json").exists():
        return False
    one_layer = read_json(folder / "config.json", HeadConfig).get("num_hidden_layers") == 1
    return one_layer or layout_of(folder) is not None
