"""EAGLE-1 and EAGLE-3 for SGLang (read in 0.5.23, not run: it needs another torch and a GPU).

EAGLE-1 has an architecture name of its own, which vLLM refuses, and an `fc` with a bias that stays
unset unless the file has one: it gets zeros. EAGLE-3 is vLLM's folder as it is. SGLang passes over
what it does not know in silence, so what it cannot serve is refused here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from drafters.eagle import EagleDrafter
from drafters.export import vllm
from drafters.export.heads import (
    Layout,
    captured_layers,
    eagle1_tensors,
    layer_keys,
    own_embedding,
    write,
)
from trainer.config import UserError


def export(drafter: EagleDrafter, folder: str | Path, *, card: str) -> Path:
    return write(folder, layout(drafter), drafter, card)


def layout(drafter: EagleDrafter) -> Layout:
    _refuse_unserved(drafter)
    if drafter.settings.version == 3:
        return vllm.eagle3(drafter)
    zeros = torch.zeros_like(drafter.fc.weight[:, 0])
    config = {"architectures": ["LlamaForCausalLMEagle"], **layer_keys(drafter)}
    return config, eagle1_tensors(drafter) | {"fc.bias": zeros}


def _refuse_unserved(drafter: EagleDrafter) -> None:
    settings, target = drafter.settings, drafter.shared.target
    if own_embedding(drafter) is not None:
        raise UserError(
            "script.engine=sglang: the target scales its embeddings, and SGLang gives heads the "
            "bare table: use script.engine=vllm"
        )
    if settings.norm_before_residual:
        raise UserError(
            "script.engine=sglang: SGLang has no norm_before_residual: train with "
            "method.norm_before_residual=false, or use script.engine=vllm"
        )
    if settings.version == 3:
        layers = captured_layers(drafter)
        if layers[-1] == target.num_layers - 1:
            raise UserError(
                f"script.engine=sglang: SGLang never captures the output of the last layer "
                f"({layers[-1]}): train on lower layers, or use script.engine=vllm"
            )
        if len(layers) == 1:
            raise UserError(
                "script.engine=sglang: SGLang takes a single captured state for the head's own "
                "and skips fc: train on several layers, or use script.engine=vllm"
            )
