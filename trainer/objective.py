"""What the loop requires of its caller: an objective, and a source of batches.

The loop does not look into a batch or into the target's outputs: it hands them from the source to
the objective. Their types are parameters here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from trainer.losses import LossOutput

State = dict[str, object]  # tensors and plain containers, the same on all ranks


class TrainingBatch(Protocol):
    """A batch of the caller's own dataclass. `num_supervised`: tokens that are trained on;
    `input_ids` [B, L] int64; `loss_mask` [B, L] bool: the trained tokens. On a rank that has
    nothing to train on, the loop replaces `num_supervised` by 0 and `loss_mask` by zeros."""

    num_supervised: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    def to(self: B, device: torch.device) -> B: ...


B = TypeVar("B", bound=TrainingBatch)  # the caller's batch
B_contra = TypeVar("B_contra", bound=TrainingBatch, contravariant=True)
B_co = TypeVar("B_co", bound=TrainingBatch, covariant=True)
O = TypeVar("O")  # what the target gives for a batch  # noqa: E741
O_contra = TypeVar("O_contra", contravariant=True)


class BatchSource(Protocol[B_co]):
    """The training text as a function of the batch's number: any rank can make any batch again."""

    def at(self, index: int) -> B_co: ...


class Source(Generic[B, O]):
    """What a training reads: batches, and `outputs(batch, step)` of the frozen target for them."""

    def __init__(self, batches: BatchSource[B], outputs: Callable[[B, int], O]):
        self.at, self.outputs = batches.at, outputs

    def refreshed(self, step: int, batch: B, drafter: nn.Module) -> B | None:
        """The batch to train on in place of the stored one, None to take no step on it; `drafter`
        is without the wrapper of several processes."""
        return batch

    def describe(self, batch: B) -> str:
        """What is printed of the first batch before step 1; "" for nothing."""
        return ""

    def sync(self) -> None:
        """Called before ranks wait for each other: they may have asked the target for different
        numbers of outputs."""


class Resumable(Protocol):
    """An objective's own state, stored in every checkpoint."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class TrainingObjective(Resumable, Protocol[B_contra, O_contra]):
    """What a stage trains on. `recipes.base.Objective` documents each member and has defaults.

    `loss`: `drafter` is the prepared one and may be wrapped, so an objective calls it and does not
    read its attributes. `denominators`: their sums over ranks and accumulation divide the terms of
    the loss, so that batch 1 x 4 steps = 4 x 1 for any lengths. All batches of a training announce
    the same terms. The exception is `losses.tvd_pp`, which divides by a deviation of its own batch,
    known only after the forward pass: recipes refuse it where a step has several batches. Where one
    rank of several has nothing to train on, it runs a batch with an empty mask, whose loss is a 0
    with a gradient. `computes_batches`: the source runs drafter or target to make them.
    `state_dict` is equal on all ranks.
    """

    @property
    def computes_batches(self) -> bool: ...

    def denominators(self, batch: B_contra, step: int) -> Mapping[str, float]: ...

    def loss(
        self,
        drafter: nn.Module,
        batch: B_contra,
        target_outputs: O_contra,
        step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput: ...
