"""What a launch decides: devices and processes, and how a training is placed on them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import parse_flag_from_env
from torch import nn

from trainer import fsdp2, zero
from trainer.config import TrainerConfig
from trainer.device import computes_in_bfloat16
from trainer.errors import UserError
from trainer.processes import PATIENCE
from trainer.replicated import Replicated


def make_accelerator(config: TrainerConfig, cpu: bool | None = None) -> Accelerator:
    """The accelerator of this process. `cpu`: use the CPU although there is a GPU. UserError for
    settings of the launch file that this loop has keys for."""
    fsdp2.take_over()
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        raise UserError(
            f"gradient_accumulation_steps of the launch file must be 1, got {steps}: set "
            "trainer.gradient_accumulation_steps in its place"
        )
    # naming a backend makes accelerate expect a process group, which one process does not have
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    gloo = several and (cpu or not torch.cuda.is_available())
    group = InitProcessGroupKwargs(timeout=PATIENCE, **({"backend": "gloo"} if gloo else {}))
    # Apple's GPUs have no float64, which exact sampling needs
    apple = torch.backends.mps.is_available() and not torch.cuda.is_available()
    # with cpu=True accelerate ignores DeepSpeed, which finds the devices by itself
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    cpu = (bool(cpu) or gloo or apple) and not deepspeed
    cuda = torch.cuda.is_available() and not (cpu or parse_flag_from_env("ACCELERATE_USE_CPU"))
    bfloat16 = computes_in_bfloat16(config.precision, cuda) and not deepspeed
    accelerator = Accelerator(
        mixed_precision="bf16" if bfloat16 else "no",
        cpu=cpu,
        kwargs_handlers=[group] if several else None,
    )
    if deepspeed:
        zero.load_whole()
    return accelerator


def placement(accelerator: Accelerator, config: TrainerConfig) -> Replicated:
    """How this launch places drafter and optimiser on its processes."""
    if zero.used(accelerator):
        if config.optimizer == "muon":
            raise UserError(
                "trainer.optimizer must be adamw under ZeRO, got 'muon', which needs whole "
                "matrices: launch with DDP or scripts/accelerate/fsdp2.yaml"
            )
        return zero.Zero(accelerator, config)
    return (fsdp2.FSDP2 if fsdp2.used() else Replicated)(accelerator, config)


def checkpointing_of(drafter: nn.Module) -> Callable[[], None]:
    """Return the function that makes `drafter` compute its layers again in the backward pass.
    UserError where it has none."""
    enable: Callable[[], None] | None = getattr(drafter, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UserError(
            f"trainer.gradient_checkpointing must be false for a {type(drafter).__name__}, got "
            "true: it cannot compute its layers again, leave the key out"
        )
    return enable
