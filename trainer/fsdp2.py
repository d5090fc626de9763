"""FSDP2 below the loop: torch's own `fully_shard`, the same on every kind of device.

Optimiser states and gradients are shared out, and parameters between steps. They are gathered once
per step, all in one group, and let go when its last backward pass is over: a drafter is small
beside its target, and it drafts, scores and projects through methods that are not `forward`, which
find them in place. Accelerate knows FSDP2 on accelerators only, and is told of plain processes.

Used: `accelerate launch --config_file scripts/accelerate/fsdp2.yaml train.py ...`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.config import UserError
from trainer.losses import LossOutput
from trainer.replicated import Replicated

ASKED, OURS = "ACCELERATE_USE_FSDP", "DRAFTSMITH_FSDP2"


def take_over() -> None:
    """Before the accelerator is made: what a launch asked of accelerate is done here."""
    if os.environ.pop(ASKED, "false").lower() != "true":
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            f"fsdp_version must be 2, got {version}: take scripts/accelerate/fsdp2.yaml"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # one process has nothing to share out
        os.environ[OURS] = "true"


def used() -> bool:
    return os.environ.get(OURS) == "true"


@cache
def _look_into_losses() -> None:
    """The backward pass of a sharded module is found through the tensors it returned."""
    torch.export.register_dataclass(LossOutput)


class FSDP2(Replicated):
    shares = True

    @property
    def name(self) -> str:
        return "FSDP2"

    def prepare(
        self, drafter: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[Any, Any]:
        """A copy is shared out; `drafter` stays the ordinary module that is given back, and waits
        on the CPU."""
        _look_into_losses()
        accelerator = self.accelerator
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        model: Any = fully_shard(copy.deepcopy(drafter), mesh=mesh, reshard_after_forward=False)
        drafter.to("cpu")
        return model, accelerator.prepare(make_optimizer(model))

    def gather(self, model: Any) -> None:
        model.unshard()

    def micro_step(self, model: Any, last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        return nullcontext()

    def clip(self, model: Any) -> torch.Tensor:
        return super().clip(model).full_tensor()  # type: ignore[attr-defined]

    def weights(self, model: Any) -> dict[str, torch.Tensor]:
        state = model.state_dict()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}

    def optimizer_state(self, model: Any, optimizer: Any) -> list[dict[str, Any]]:
        """This process's share of each trained parameter's, in their order."""
        state = optimizer.state
        return [
            {name: _local(value) for name, value in state.get(p, {}).items()}
            for group in optimizer.param_groups for p in group["params"]
        ]  # fmt: skip

    def load_optimizer_state(self, model: Any, optimizer: Any, state: list[dict[str, Any]]) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for p, own in zip(trained, state, strict=True):
            if own:
                optimizer.state[p] = {name: _like(p, value) for name, value in own.items()}

    def end(self, model: Any, drafter: nn.Module) -> None: ...


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(p: Any, value: Any) -> Any:
    """A number such as the count of steps stays one; the rest is shared out as the parameter is."""
    if not torch.is_tensor(value) or value.shape != p.to_local().shape or not p.ndim:
        return value
    return DTensor.from_local(
        value.to(p.device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )
