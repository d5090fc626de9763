"""EAGLE, DFlash and DSpark for SGLang (read in 0.5.23, not run: it needs another torch and a GPU).

EAGLE-1 has an architecture name of its own, which vLLM refuses, and an `fc` with a bias that stays
unset unless the file has one: a head without one gets zeros. EAGLE-3, DFlash and DSpark are vLLM's
folder unchanged; that blocks are causal is read at the top level, beside full `layer_types`. SGLang
ignores keys that it does not know, so heads that it cannot serve are refused here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from drafters.block import BlockDrafter, DSparkDrafter
from drafters.eagle1 import Eagle1Drafter
from drafters.eagle3 import Eagle3Drafter
from drafters.export import vllm
from drafters.export.card import Export
from drafters.export.heads import (
    Layered,
    captured_layers,
    eagle1_tensors,
    layer_keys,
    own_embedding,
    refuse_unserved_eagle1,
    write,
)
from trainer.errors import UserError


def check_eagle1(drafter: Eagle1Drafter) -> None:
    """Raise UserError for an EAGLE-1 head that SGLang cannot serve."""
    _check_embedding(drafter)
    refuse_unserved_eagle1(drafter)


def check_eagle3(drafter: Eagle3Drafter) -> None:
    """Raise UserError for an EAGLE-3 head that SGLang cannot serve."""
    vllm.check_eagle3(drafter)
    _check_embedding(drafter)
    if drafter.settings.norm_before_residual:
        raise UserError(
            "script.engine=sglang: SGLang has no norm_before_residual: train with "
            "method.norm_before_residual=false, or use script.engine=vllm"
        )
    _check_layers(drafter)
    if len(captured_layers(drafter)) == 1:
        raise UserError(
            "script.engine=sglang: SGLang reads a single captured state as the head's own "
            "and skips fc: train on several layers, or use script.engine=vllm"
        )


def check_dflash(drafter: BlockDrafter) -> None:
    """Raise UserError for a block drafter that SGLang cannot serve."""
    vllm.check_dflash(drafter)
    _check_embedding(drafter)
    _check_layers(drafter)
    if drafter.settings.own_head:
        raise UserError(
            "script.engine=sglang: SGLang projects block drafters by the target's output matrix, "
            "and skips the drafter's own, which drafts some tokens only: train with "
            "method.draft_vocab_size=0, or use script.engine=vllm"
        )


def write_eagle1(drafter: Eagle1Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-1 head."""
    bias = torch.zeros_like(drafter.fc.weight[:, 0]) if drafter.fc.bias is None else drafter.fc.bias
    config: dict[str, object] = {"architectures": ["LlamaForCausalLMEagle"], **layer_keys(drafter)}
    tensors = eagle1_tensors(drafter) | {"fc.bias": bias}
    return write(folder, (config, tensors), drafter, asked)


def write_eagle3(drafter: Eagle3Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-3 head."""
    return write(folder, vllm.eagle3(drafter), drafter, asked)


def write_dflash(drafter: BlockDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a block drafter."""
    return write(folder, vllm.dflash(drafter), drafter, asked)


def write_dspark(drafter: DSparkDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a DSpark drafter; SGLang knows both corrections."""
    return write(folder, vllm.dspark(drafter), drafter, asked)


def _check_layers(drafter: Layered) -> None:
    last = captured_layers(drafter)[-1]
    if last == drafter.shared.target.num_layers - 1:
        raise UserError(
            f"script.engine=sglang: SGLang never captures the output of the last layer ({last}): "
            "train on lower layers, or use script.engine=vllm"
        )


def _check_embedding(drafter: Layered) -> None:
    if own_embedding(drafter) is not None:
        raise UserError(
            "script.engine=sglang: the target scales its embeddings, and SGLang gives heads the "
            "unscaled table: use script.engine=vllm"
        )
