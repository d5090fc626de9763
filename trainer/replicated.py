"""How the loop's drafter and optimiser lie on its processes: whole on each of them, in this file.

`zero` and `fsdp2` share them out instead. The loop and its checkpoints ask the same questions of
all three; `trainer.loop.placement` says which one a launch asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainer.config import TrainerConfig


class Replicated:
    """One process, or several under DDP."""

    shares = False  # each process holds a share of the optimiser's state, and stores it

    def __init__(self, accelerator: Accelerator, config: TrainerConfig):
        self.accelerator, self.config = accelerator, config

    @property
    def name(self) -> str:
        return self.accelerator.distributed_type.name

    def prepare(
        self, drafter: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[Any, Any]:
        """The model that the recipe calls, and its optimiser."""
        return self.accelerator.prepare(drafter, make_optimizer(drafter))

    def gather(self, model: Any) -> None:
        """Before a step, and before an evaluation: parameters are there for every method."""

    def micro_step(self, model: Any, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged in the last one only."""
        return nullcontext() if last else self.accelerator.no_sync(model)

    def autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast()

    def clip(self, model: Any) -> torch.Tensor:
        """The norm of all gradients before clipping, []."""
        norm: Any = self.accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm)
        return norm

    def weights(self, model: Any) -> dict[str, torch.Tensor]:
        """Whole, of every process's share; every process calls it."""
        weights: Any = self.accelerator.get_state_dict(model)
        return weights

    def optimizer_state(self, model: Any, optimizer: Any) -> Any:
        return optimizer.state_dict()

    def load_optimizer_state(self, model: Any, optimizer: Any, state: Any) -> None:
        optimizer.load_state_dict(state)

    def end(self, model: Any, drafter: nn.Module) -> None:
        """Give `drafter` back as an ordinary module; its weights are loaded afterwards."""
        self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
