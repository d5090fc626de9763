"""LoRA on a drafter for as long as it trains, through peft; what is given back is ordinary again.

Hu et al. 2021, arXiv:2106.09685: W + alpha / rank * B A on every linear layer inside, B begins at
zero, nothing else trains. Output heads stay as they are: losses read their matrix, not their
module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from peft import LoraConfig, LoraModel
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.config import TrainerConfig, UserError


def attach(drafter: nn.Module, config: TrainerConfig) -> Callable[[], None]:
    """Adapters around the layers of `drafter`, in place. Called at the end, what is returned adds
    them into the weights and takes them away."""
    heads = _head_weights(drafter)
    names = [
        name
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module.weight.requires_grad
        and id(module.weight) not in heads
    ]
    if not names:
        raise UserError("trainer.lora_rank must be 0: the drafter has no linear layer to adapt")
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=names  # type: ignore[arg-type]
    )  # fmt: skip
    with warnings.catch_warnings():  # of GPT-2's layout
        warnings.simplefilter("ignore")
        adapted: Any = LoraModel(drafter, settings, "default")

    def merge() -> None:
        adapted.merge_and_unload()
        for name, p in drafter.named_parameters():
            p.requires_grad_(name in trained)

    return merge


def _head_weights(drafter: nn.Module) -> set[int]:
    found: set[int] = set()
    module: Any
    for module in drafter.modules():
        if hasattr(module, "output_head"):
            depths = range(1, (getattr(module, "max_depth", None) or 1) + 1)
            found |= {id(module.output_head(depth).weight) for depth in depths}
    return found
