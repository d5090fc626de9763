"""How the loop's drafter and optimiser lie on its processes: whole on each of them, in this file.

`zero` and `fsdp2` shard them instead. The loop and its checkpoints call the same methods of all
three; `trainer.setup.placement` chooses the one that a launch asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from trainer.config import TrainerConfig


class Replicated:
    """One process, or several under DDP."""

    shares = False  # each process holds a shard of the optimiser's state, and stores it

    def __init__(self, accelerator: Accelerator, config: TrainerConfig):
        self.accelerator, self.config = accelerator, config

    @property
    def name(self) -> str:
        return self.accelerator.distributed_type.name

    @property
    def fuses(self) -> bool:
        """Whether the optimiser is one kernel."""
        return self.accelerator.device.type == "cuda"

    def prepare(
        self, drafter: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model that the objective calls, and its optimiser."""
        return self.accelerator.prepare(drafter, make_optimizer(drafter))

    def gather(self, model: nn.Module, exact: bool = False) -> None:
        """Make all parameters available to every method, before a step, or `exact` ones before an
        evaluation."""

    def micro_step(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """The context of one micro-step; gradients are exchanged in the last one only."""
        return nullcontext() if last else self.accelerator.no_sync(model)

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the loss, in the precision of `trainer.precision`."""
        return self.accelerator.autocast()

    def clip(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients; returns their norm before that, [] float."""
        norm = self.accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm)
        assert norm is not None, "None is for XLA alone"
        return norm

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole weights by name, gathered from all processes; every process calls it."""
        return self.accelerator.get_state_dict(model)  # type: ignore[return-value]

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        """The state to store: of the whole optimiser, or of this process's shard (`shares`)."""
        return optimizer.state_dict()

    def load_optimizer_state(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: object,
    ) -> None:
        """Restore what `optimizer_state` returned."""
        optimizer.load_state_dict(cast("dict[str, Any]", state))

    def end(self, model: nn.Module, drafter: nn.Module) -> None:
        """Make `drafter` an ordinary module again; its weights are loaded afterwards."""
        self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
