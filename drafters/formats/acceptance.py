"""Published acceptance heads, in the layout of SpecDec++'s repository (Huang et al. 2024).

config.json holds `hidden_size` and `num_layers`, the weights are those of a sequence: residual
blocks `model.<j>.linear`, then two logits, of rejection and of acceptance in this order. The
published blocks are one module under several names, of which safetensors stores one. The files say
nothing of the draft model or of the training: the head is taken to be for sampling at T = 1 with
rejections counted six times, as in the paper. Training differs in the start: the published layers
begin as torch draws them, the blocks of this project at zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch

from drafters.acceptance_head import AcceptanceHead, AcceptanceSettings
from drafters.formats.files import check_keys, check_tensors, read_json, read_tensors
from trainer.errors import UserError

KEYS: dict[str, tuple[type, bool]] = {"hidden_size": (int, True), "num_layers": (int, False)}


class HeadConfig(TypedDict):
    """config.json of a published acceptance head."""

    hidden_size: int
    num_layers: int


def read_acceptance_head(folder: Path) -> AcceptanceHead:
    """The head in `folder`, in float32; UserError where it is not in the published layout."""
    config = read_json(folder / "config.json", HeadConfig)
    check_keys(folder, config, KEYS, strict=False)
    width, count = config["hidden_size"], config.get("num_layers") or 0
    tensors, last = read_tensors(folder), f"model.{count}.weight"
    if last not in tensors:
        raise UserError(f"{folder}: key 'num_layers' is {count}, and tensor {last!r} is missing")
    blocks = [f"model.{j}.linear" for j in range(count)]
    stored = [block for block in blocks if f"{block}.weight" in tensors]
    if len(stored) == 1:
        for block in blocks:
            for part in ("weight", "bias"):
                if f"{stored[0]}.{part}" in tensors:
                    tensors[f"{block}.{part}"] = tensors[f"{stored[0]}.{part}"]
    wanted: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        wanted |= {f"{block}.weight": (width, width), f"{block}.bias": (width,)}
    wanted |= {f"model.{count}.weight": (2, width), f"model.{count}.bias": (2,)}
    check_tensors(folder, tensors, wanted, {}, {})
    shared = count > 1 and all(
        torch.equal(tensors[f"{block}.{part}"], tensors[f"{blocks[0]}.{part}"])
        for block in blocks
        for part in ("weight", "bias")
    )
    head = AcceptanceHead(AcceptanceSettings(width, count, shared_blocks=shared))
    weights = {}
    for part in ("weight", "bias"):
        for j, block in enumerate(blocks):
            weights[f"blocks.layers.{j}.{part}"] = tensors[f"{block}.{part}"].float()
        weights[f"out.{part}"] = tensors[f"model.{count}.{part}"].float()
    head.load_state_dict(weights)
    return head.eval()
