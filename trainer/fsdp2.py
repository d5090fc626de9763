"""FSDP2 below the loop: torch's own `fully_shard`, the same on every kind of device.

Optimiser states and gradients are sharded, and parameters are sharded between steps. Parameters
are gathered once per step and resharded after its last backward pass: a drafter is small beside its
target, and it drafts, scores and projects through methods that are not `forward`, which need whole
parameters. Each layer is a group of its own, so that its gradient is reduced while those before it
go on with the backward pass. Accelerate supports FSDP2 on accelerators only, so it is configured
for plain processes.

Used: `accelerate launch --config_file scripts/accelerate/fsdp2.yaml train.py ...`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.compiled import layers_of
from trainer.config import TrainerConfig
from trainer.device import computes_in_bfloat16
from trainer.errors import UserError
from trainer.losses import LossOutput, Term
from trainer.processes import all_gather
from trainer.replicated import Replicated

ASKED, OURS = "ACCELERATE_USE_FSDP", "DRAFTSMITH_FSDP2"
# options of accelerate's FSDP that this one does not have, and what to do instead
LACKED = {
    "fsdp_offload_params": "launch more processes, whose shards are smaller",
    "fsdp_activation_checkpointing": "set trainer.gradient_checkpointing=true",
}


def take_over() -> None:
    """Replace accelerate's FSDP, if a launch asked for it, by this one. Call it before the
    accelerator is made. UserError for FSDP version 1 and for options that this one lacks."""
    if os.environ.pop(ASKED, "false").lower() != "true":
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(f"fsdp_version must be 2, got {version}: use scripts/accelerate/fsdp2.yaml")
    for option, remedy in LACKED.items():
        if os.environ.get(option.upper(), "false").lower() == "true":
            raise UserError(f"{option} must be false, got true: {remedy}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # one process has nothing to shard
        os.environ[OURS] = "true"


def used() -> bool:
    """Whether this launch uses FSDP2 on several processes."""
    return os.environ.get(OURS) == "true"


@cache
def _register_losses() -> None:
    """Let FSDP2 see the tensors of a loss: it finds the backward pass of a module through them."""
    for kind in (LossOutput, Term):
        torch.export.register_dataclass(kind)


def precision_of(config: TrainerConfig, cuda: bool) -> MixedPrecisionPolicy:
    """How processes send each other gradients. In bfloat16 a step's are sent as the backward pass
    has computed them. Over several micro-steps they are not: torch would add them up in it too.
    Weights: see `Gather`."""
    rounded = computes_in_bfloat16(config.precision, cuda)
    once = config.gradient_accumulation_steps == 1
    return MixedPrecisionPolicy(
        reduce_dtype=torch.bfloat16 if rounded and once else None, cast_forward_inputs=False
    )


class Gather:
    """How processes send each other their shards of weights (torch's `AllGather`): in bfloat16 if
    `rounded`, and float32 weights are made of what arrives. Losses, norms and embeddings read them
    as such outside of any layer, and products round the same numbers again to the same."""

    rounded = False

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self.rounded:
            return all_gather(output_tensor, input_tensor, group, async_op)
        sent = input_tensor.bfloat16()
        arrived = torch.empty_like(output_tensor, dtype=sent.dtype)
        all_gather(arrived, sent, group)
        output_tensor.copy_(arrived)
        return None


class FSDP2(Replicated):
    """Several processes, each with a shard of drafter and optimiser."""

    shares = True

    @property
    def name(self) -> str:
        return "FSDP2"

    def prepare(
        self, drafter: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard a copy. `drafter` stays an ordinary module on the CPU until the training ends."""
        _register_losses()
        accelerator = self.accelerator
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        model = copy.deepcopy(drafter)
        cuda = accelerator.device.type == "cuda"
        self._rounds = computes_in_bfloat16(self.config.precision, cuda)
        self._gather, policy = Gather(), precision_of(self.config, cuda)
        for module in (*layers_of(model), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
            # torch does not export the class that it asks for
            _sharded(module).set_custom_all_gather(self._gather)  # type: ignore[arg-type]
        _set_outermost(model)
        drafter.to("cpu")
        return model, accelerator.prepare(make_optimizer(model))

    def gather(self, model: nn.Module, exact: bool = False) -> None:
        rounded = self._rounds and not exact
        if rounded != self._gather.rounded:
            for group in _groups(model):
                group.reshard()
        self._gather.rounded = rounded
        for group in _groups(model):
            group.unshard()

    def micro_step(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        _sharded(model).set_requires_gradient_sync(last)
        # a layer may be called several times in a step, and would be gathered again for each
        _sharded(model).set_reshard_after_backward(False)
        return nullcontext()

    def clip(self, model: nn.Module) -> torch.Tensor:
        for group in _groups(model):
            group.reshard()
        return super().clip(model).full_tensor()  # type: ignore[attr-defined]

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        state = model.state_dict()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}

    def optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[dict[str, object]]:
        """This process's shard of the state of each trained parameter, in their order."""
        state = optimizer.state
        return [
            {name: _local(value) for name, value in state.get(p, {}).items()}
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: object
    ) -> None:
        shards = cast("list[dict[str, object]]", state)
        groups = optimizer.param_groups
        trained = [(p, group["fused"]) for group in groups for p in group["params"]]
        for (p, fused), own in zip(trained, shards, strict=True):
            if own:
                optimizer.state[p] = {name: _like(p, value, fused) for name, value in own.items()}

    def end(self, model: nn.Module, drafter: nn.Module) -> None: ...


def _sharded(model: nn.Module) -> FSDPModule:
    """`model` as `prepare` returned it."""
    assert isinstance(model, FSDPModule)
    return model


def _set_outermost(model: nn.Module) -> None:
    """Let torch know that `model` is the outermost group. It would take the first module that is
    called, which in the evaluation before the first step is a layer."""
    model.forward = lambda: None
    with torch.no_grad():
        model()
    del model.forward
    _sharded(model).reshard()


def _groups(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules whose parameters are gathered together, without those of modules inside."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _local(value: object) -> object:
    """This process's part of a sharded tensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def _like(p: DTensor, value: object, fused: bool) -> object:
    """Shard a state as its parameter is. A number such as the count of steps stays one, which an
    optimiser of one kernel looks for beside the parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != p.to_local().shape or not p.ndim:
        return value.to(p.device) if fused else value
    return DTensor.from_local(
        value.to(p.device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )
