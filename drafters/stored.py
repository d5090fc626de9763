"""The project's own format of a head: drafter.json and one file of tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafters.base import DrafterJson, TrainedDrafter, check_fingerprint
from target.model import Target
from trainer.errors import UserError
from trainer.files import load_json


def without(settings: dict[str, object], *names: str) -> dict[str, object]:
    """The settings but for these."""
    return {name: value for name, value in settings.items() if name not in names}


def save_tensors(drafter: TrainedDrafter, folder: Path) -> None:
    """Write all tensors of the drafter to model.safetensors."""
    # copies: a tied module is written once per name
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")


def read_stored(folder: Path, target: Target) -> tuple[DrafterJson, dict[str, torch.Tensor]]:
    """Read drafter.json and the tensors that `save_tensors` wrote.

    Raises UserError where the drafter was made for another target.
    """
    about: DrafterJson = load_json(folder / "drafter.json")
    check_fingerprint(about["target"], target.fingerprint, str(folder))
    return about, load_file(folder / "model.safetensors")


def restore(
    drafter: TrainedDrafter, folder: Path, about: DrafterJson, tensors: dict[str, torch.Tensor]
) -> None:
    """Load what `read_stored` read: the weights, and the accuracies of drafter.json.

    Raises UserError where weights and settings disagree.
    """
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: weights and drafter.json disagree ({reason})") from error
    drafter.rank_accuracy = about.get("rank_accuracy")
