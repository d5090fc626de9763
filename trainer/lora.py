"""LoRA on a drafter while it trains, through peft; afterwards the drafter is an ordinary module.

Hu et al. 2021, arXiv:2106.09685: W + alpha / rank * B A on every linear layer, B starts at zero,
nothing else trains. Output heads get no adapter: losses read their matrix, not their module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from peft import LoraConfig, LoraModel
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.config import TrainerConfig, UserError


def attach(drafter: nn.Module, config: TrainerConfig) -> Callable[[], None]:
    """Put adapters around the linear layers of `drafter`, in place. Returns a function that merges
    them into the weights and removes them. UserError where there is no linear layer."""
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
        adapted = LoraModel(drafter, settings, "default")

    def merge() -> None:
        adapted.merge_and_unload()
        for name, p in drafter.named_parameters():
            p.requires_grad_(name in trained)

    return merge


def _head_weights(drafter: nn.Module) -> set[int]:
    """The `id` of each weight that a loss reads through an output head."""
    found: set[int] = set()
    for module in drafter.modules():
        output_head = getattr(module, "output_head", None)
        if output_head is not None:
            depths = range(1, (getattr(module, "max_depth", None) or 1) + 1)
            found |= {id(output_head(depth).weight) for depth in depths}
    return found
