"""DeepSpeed's ZeRO below the loop.

DeepSpeed clips, steps and zeroes gradients inside `backward` of a step's last micro-batch. Stages 1
and 2 shard optimiser states and gradients. Stage 3 shards parameters too, here only in the
optimiser: a drafter is small beside its target, and the losses read its output head outside the
module that owns it, so its parameters stay whole on every process.

Used: `accelerate launch --config_file scripts/accelerate/zero2.yaml train.py ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trainer.config import TrainerConfig
from trainer.device import computes_in_bfloat16
from trainer.errors import UserError
from trainer.replicated import Replicated


def used(accelerator: Accelerator) -> bool:
    """Whether this launch uses DeepSpeed."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def compares_calls(accelerator: Accelerator) -> bool:
    """Whether all processes must call the same modules, in evaluations too. Stage 3 records the
    calls of a step; after others it compares those of all processes. One that made none compares
    nothing, and the rest wait for it for ever."""
    plugin = accelerator.state.deepspeed_plugin if used(accelerator) else None
    return plugin is not None and plugin.zero_stage == 3


def load_whole() -> None:
    """Make `from_pretrained` load whole weights. In stage 3 accelerate has it load a shard for each
    process, but drafters read head and embedding of the target directly."""
    unset_hf_deepspeed_config()


class Zero(Replicated):
    """Several processes under DeepSpeed, each with a shard of the optimiser."""

    shares = True

    def __init__(self, accelerator: Accelerator, config: TrainerConfig):
        super().__init__(accelerator, config)
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        if plugin.zero_stage not in (1, 2, 3):
            raise UserError(
                f"DeepSpeed's zero_stage must be 1, 2 or 3, got {plugin.zero_stage}: use DDP"
            )
        self.plugin = plugin

    def prepare(
        self, drafter: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The loop itself accumulates and chooses the batch size. In stage 3, parameters are whole
        from the first step on, not only after it, and are never released."""
        plugin = self.plugin
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.max_grad_norm,
        }
        if plugin.zero_stage == 3:
            plugin.deepspeed_config["zero_optimization"] |= {
                "stage3_param_persistence_threshold": sys.maxsize,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        if isinstance(context := self.autocast(), torch.autocast):
            # on a GPU the engine switches off an autocast that begins outside of it
            drafter.forward = context(drafter.forward)
        model, optimizer = super().prepare(drafter, make_optimizer)
        persistent = getattr(_engine(model).optimizer, "persistent_parameters", None)
        if persistent:
            persistent[0].all_gather(persistent)
            for p in persistent:
                p.is_external_param = True
        return model, optimizer

    def micro_step(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        self.accelerator.sync_gradients = last
        return nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the loss. Accelerate's own bf16 would round the weights that train."""
        device = self.accelerator.device.type
        if computes_in_bfloat16(self.config.precision, device == "cuda"):
            return torch.autocast(device, torch.bfloat16)
        return self.accelerator.autocast()

    def optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[dict[str, object]]:
        """This process's shard: tensors and numbers only, unlike DeepSpeed's own checkpoints, which
        are pickles of its classes."""
        state = _engine(model).optimizer.optimizer.state
        return [dict(state[part]) for part in _partitions(model)]

    def load_optimizer_state(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: object,
    ) -> None:
        shards = cast("list[dict[str, object]]", state)
        wrapped = _engine(model).optimizer.optimizer
        fused = any(group["fused"] for group in wrapped.param_groups)
        for part, own in zip(_partitions(model), shards, strict=True):
            wrapped.state[part] = {
                # one kernel looks for the count of steps beside the weights, else the CPU counts
                name: value.to(part.device)
                if isinstance(value, torch.Tensor) and (value.ndim or fused)
                else value
                for name, value in own.items()
            }

    def end(self, model: nn.Module, drafter: nn.Module) -> None:
        super().end(model, drafter)
        _engine(model).destroy()
        drafter.__dict__.pop("forward", None)
        for module in drafter.modules():
            if hasattr(module, "_original_parameters"):  # stage 3 gave it a dictionary of its own
                module._parameters = dict(module._parameters)
                del module._original_parameters


class _Optimizer(Protocol):
    """What is used of DeepSpeed's optimisers."""

    optimizer: torch.optim.Optimizer  # the one it wraps
    single_partition_of_fp32_groups: list[torch.Tensor]  # stages 1 and 2


class _DeepSpeedEngine(Protocol):
    """What is used of DeepSpeed's engine, a package that is not required."""

    optimizer: _Optimizer

    def destroy(self) -> None: ...


def _engine(model: nn.Module) -> _DeepSpeedEngine:
    """`model` as the DeepSpeed engine that `prepare` returned."""
    return model  # type: ignore[return-value]


def _partitions(model: nn.Module) -> list[torch.Tensor]:
    """The flat tensors that this process's shard of the optimiser updates."""
    found = getattr(_engine(model).optimizer, "fp32_partitioned_groups_flat", None)  # stage 3
    return found or _engine(model).optimizer.single_partition_of_fp32_groups
