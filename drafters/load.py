"""Any drafter by name: a folder of this project, a published head, or a causal language model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from data.target import Target
from drafters import acceptance_head
from drafters.acceptance_head import attach
from drafters.bank import DrafterBank
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.eagle import EagleDrafter, EagleSettings
from drafters.export.files import read_json
from drafters.export.hf import real_ids
from drafters.export.reader import Head, layout_of, read
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.medusa2 import Medusa2Drafter
from trainer.checks import require_files
from trainer.config import UserError

HEADS: dict[str, Callable[[Path, Target], TrainedDrafter]] = {
    "bank": DrafterBank.from_pretrained,
    "eagle": EagleDrafter.from_pretrained,
    "medusa": MedusaDrafter.from_pretrained,
    "medusa2": Medusa2Drafter.from_pretrained,
    "hydra": HydraDrafter.from_pretrained,
}
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
    ones, in a layout that `drafters.export.reader` knows, become drafters of this target. `key`:
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
        kind = stored(folder, key)["kind"]
        if kind in HEADS:
            return _own(kind, folder, target, key)
    elif folder is not None:
        try:
            if layout_of(folder) is not None:
                return from_head(read(folder, num_target_layers=target.num_layers), target)
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
    known = (CausalLMDrafter.kind, *HEADS)
    if kind not in known:
        raise UserError(
            f"{key}: {folder} holds a drafter of kind {kind!r}; known: {', '.join(known)}"
        )
    if kind in HEADS and not isinstance(about.get("settings"), dict):
        raise UserError(f"{key}: {folder}, of kind {kind!r}, is damaged (no settings)")
    return about


def _own(kind: str, folder: Path, target: Target, key: str) -> TrainedDrafter:
    try:
        drafter = HEADS[kind](folder, target)
        drafter.rank_accuracy = read_json(folder / "drafter.json").get("rank_accuracy")
        return drafter
    except UserError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{key}: {folder}, of kind {kind!r}, is damaged ({reason})") from error


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


# --- published heads -----------------------------------------------------------------------------


@torch.no_grad()
def from_head(head: Head, target: Target) -> TrainedDrafter:
    """A drafter of this project with the weights of a published head, in float32."""
    width = target.fingerprint["vocab_size"]
    if head.vocab_size != width:
        raise UserError(
            f"CompatibilityError: the head was made for a vocabulary of {head.vocab_size}, the "
            f"target has {width}"
        )
    ids = torch.arange(target.vocab_size)
    _only_if_equal(head, "embed_tokens.weight", lambda: target.embedding(ids.to(target.device)))
    _only_if_equal(head, "lm_head.weight", lambda: target.head.weight, head.kind == "eagle")
    drafter = _medusa(head, target) if head.kind == "medusa" else _eagle(head, target)
    return drafter.eval()


def _only_if_equal(
    head: Head, name: str, table: Callable[[], torch.Tensor], applies: bool = True
) -> None:
    """Drafters here borrow the target's tables, so a head's own is left out if it is the same."""
    if not applies or name not in head.tensors:
        return
    ours = table()[: head.vocab_size].cpu().float()
    if not torch.equal(head.tensors[name][: len(ours)].float(), ours):
        raise UserError(
            f"tensor {name!r} differs from the target's: this head has a table of its own (or "
            "another target), and drafters here borrow the target's"
        )


def _eagle(head: Head, target: Target) -> EagleDrafter:
    assert head.layer is not None
    tensors = {name: tensor.float() for name, tensor in head.tensors.items()}
    state_width = target.hidden_size
    if head.kind == "eagle3":
        state_width = tensors["fc.weight"].shape[1] // len(head.captures)
    if state_width != target.hidden_size:
        raise UserError(
            f"CompatibilityError: the head reads states {state_width} wide, the target's are "
            f"{target.hidden_size}"
        )
    version = 1 if head.kind == "eagle" else 3
    settings = EagleSettings(version, head.captures, state_width, **head.flags)
    weights = {
        _own_name(name): tensor
        for name, tensor in tensors.items()
        if name not in ("embed_tokens.weight", "d2t", "t2d", "lm_head.weight")
    }
    kept = None
    if version == 3:
        kept, weights["lm_head.weight"] = _rows(head, tensors["lm_head.weight"], target.vocab_size)
        if kept is not None:
            weights["kept"] = kept
    drafter = EagleDrafter(settings, head.layer, target, kept)
    drafter.load_state_dict(weights)
    return drafter


def _own_name(name: str) -> str:
    """Of the reader's; the two norms before the layer stand outside of it here."""
    if name in ("layer.input_layernorm.weight", "layer.hidden_norm.weight"):
        return name.removeprefix("layer.")
    if name.startswith("fc_norm."):
        return name.replace("fc_norm.", "fc_norms.")
    return name.replace("layer.self_attn.", "layer.")


def _rows(
    head: Head, weight: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`kept`, ascending and without padding, and the rows in that order."""
    ids = torch.arange(len(weight)) if head.target_ids is None else head.target_ids
    kept, order = ids.sort()
    order, kept = order[kept < vocab_size], kept[kept < vocab_size]
    return (None if len(kept) == vocab_size else kept), weight[order]


def _medusa(head: Head, target: Target) -> MedusaDrafter:
    tensors = {name: tensor.float() for name, tensor in head.tensors.items()}
    real = real_ids(target.tokenizer)
    real = real[real < target.vocab_size]
    rows = tensors.get("rows")
    lent = rows is not None and torch.equal(rows[real], target.head.weight[real].cpu().float())
    settings = MedusaSettings(head.num_heads, head.num_layers, own_head=not lent)
    drafter = MedusaDrafter.build(target, settings)
    weights = drafter.state_dict()
    expected = target.hidden_size
    for i in range(head.num_heads):
        for j in range(head.num_layers):
            weight = tensors[f"block.{i}.{j}.weight"]
            if len(weight) != expected:
                raise UserError(
                    f"CompatibilityError: the heads read states {len(weight)} wide, the target's "
                    f"are {expected}"
                )
            bias = tensors.get(f"block.{i}.{j}.bias", torch.zeros(expected))
            weights[f"blocks.{i}.layers.{j}.weight"] = weight
            weights[f"blocks.{i}.layers.{j}.bias"] = bias
        if not lent:
            own = tensors[f"rows.{i}"] if rows is None else rows
            weights[f"lm_heads.{i}.weight"] = own[: target.vocab_size]
            if f"lm_heads.{i}.bias" in weights:
                weights[f"lm_heads.{i}.bias"] = torch.zeros(target.vocab_size)
    drafter.load_state_dict(weights)
    return drafter
