"""DeepSpeed's ZeRO below the loop: what it does by itself, and what it must be asked for.

DeepSpeed clips, steps and zeroes gradients inside `backward` of a step's last micro-batch. Stages 1
and 2 share out optimiser states and gradients; stage 3 shares out parameters too, here only in the
optimiser: a drafter is small beside its target, and the losses read its output head outside of the
module that owns it, so its parameters stay whole on every process.

Used: `accelerate launch --config_file scripts/accelerate/zero2.yaml train.py ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trainer.config import UserError
from trainer.replicated import Replicated


def used(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def load_whole() -> None:
    """Once accelerate has told transformers of stage 3, `from_pretrained` gives each process only a
    share of the weights: not of a target, whose head and embedding drafters read themselves."""
    unset_hf_deepspeed_config()


class Zero(Replicated):
    shares = True

    def prepare(
        self, drafter: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[Any, Any]:
        """The loop accumulates and has its batch size by itself. In stage 3, parameters are whole
        from the first step on, not only after it, and are let go by nobody."""
        plugin: Any = self.accelerator.state.deepspeed_plugin
        stage = plugin.zero_stage
        if stage not in (1, 2, 3):
            raise UserError(f"DeepSpeed's zero_stage must be 1, 2 or 3, got {stage}: use DDP")
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.max_grad_norm,
        }  # fmt: skip
        if stage == 3:
            plugin.deepspeed_config["zero_optimization"] |= {
                "stage3_param_persistence_threshold": sys.maxsize,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        model, optimizer = super().prepare(drafter, make_optimizer)
        kept = getattr(model.optimizer, "persistent_parameters", None)
        if kept:
            kept[0].all_gather(kept)
            for p in kept:
                p.is_external_param = True
        return model, optimizer

    def micro_step(self, model: Any, last: bool) -> AbstractContextManager[Any]:
        self.accelerator.sync_gradients = last
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Accelerate's bf16 would round the weights that are trained."""
        if self.config.precision == "bf16":
            return torch.autocast(self.accelerator.device.type, torch.bfloat16)
        return self.accelerator.autocast()

    def optimizer_state(self, model: Any, optimizer: Any) -> list[dict[str, Any]]:
        """This process's share: tensors and numbers only, unlike DeepSpeed's own checkpoints, which
        are pickles of its classes."""
        state = model.optimizer.optimizer.state
        return [dict(state[part]) for part in _partitions(model)]

    def load_optimizer_state(self, model: Any, optimizer: Any, state: list[dict[str, Any]]) -> None:
        into = model.optimizer.optimizer.state
        for part, own in zip(_partitions(model), state, strict=True):
            into[part] = {
                name: value.to(part.device) if torch.is_tensor(value) and value.ndim else value
                for name, value in own.items()
            }

    def end(self, model: Any, drafter: nn.Module) -> None:
        super().end(model, drafter)
        model.destroy()
        for module in drafter.modules():
            if hasattr(module, "_original_parameters"):  # stage 3 gave it a dictionary of its own
                module._parameters = dict(module._parameters)
                del module._original_parameters


def _partitions(model: Any) -> list[torch.Tensor]:
    """What this process's share of the optimiser updates."""
    found = getattr(model.optimizer, "fp32_partitioned_groups_flat", None)  # stage 3
    return found or model.optimizer.single_partition_of_fp32_groups
