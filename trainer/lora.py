"""LoRA on a drafter while it trains, through peft; afterwards the drafter is an ordinary module.

Hu et al. 2021, arXiv:2106.09685: W + alpha / rank * B A on every linear layer, B starts at zero,
nothing else trains. Output heads get no adapter: losses read their matrix, not their module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.hidden import hidden_layers


def attach(drafter: nn.Module, config: TrainerConfig) -> Callable[[], None]:
    """Put adapters around the linear layers of `drafter`, in place. Returns a function that merges
    them into the weights and removes them. UserError where there is no linear layer."""
    from peft import LoraConfig, LoraModel  # here: every command would wait for it

    names = [name for name, _ in hidden_layers(drafter)]
    if not names:
        raise UserError("trainer.lora_rank must be 0: the drafter has no linear layer to adapt")
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules=names,
    )
    with warnings.catch_warnings():  # of GPT-2's layout
        warnings.simplefilter("ignore")
        adapted = LoraModel(drafter, settings, "default")

    def merge() -> None:
        adapted.merge_and_unload()
        for name, p in drafter.named_parameters():
            p.requires_grad_(name in trained)

    return merge
