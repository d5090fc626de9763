"""What the loop asks of its caller: an objective, batches, and the text of a batch for its preview.

The loop never looks into a batch or into what the target says of it: it hands them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from trainer.losses import LossOutput

State = dict[str, object]  # tensors and plain containers, the same on all ranks


class TrainingBatch(Protocol):
    """`num_supervised`: tokens that are trained on; `loss_mask` [B, L] bool: where they are. A
    dataclass: the loop replaces both where a rank has nothing to train on."""

    num_supervised: int
    loss_mask: torch.Tensor
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to(self, device: torch.device) -> TrainingBatch: ...


class Batches(Protocol):
    """A training text as a function of the batch's number: any rank can make any batch again."""

    def at(self, index: int) -> TrainingBatch: ...


class Objective(Protocol):
    """What a stage trains on. `recipes.base.Objective` documents each member and has defaults.
    Batch, target outputs and context are the caller's own types, which the loop hands on."""

    def denominators(self, batch: Any, step: int) -> Sequence[float]: ...

    def loss(
        self, drafter: nn.Module, batch: Any, target_outputs: Any, step: int
    ) -> LossOutput: ...

    def refresh(self, step: int, context: Any) -> TrainingBatch | None: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...
