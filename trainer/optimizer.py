"""The optimiser: AdamW, or Muon for hidden matrices and AdamW for all else.

Muon is of Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". The
momentum of a matrix is replaced by a matrix with the same singular vectors whose singular values
are all near 1, so that no direction of its input waits for the others. torch's own Muon computes
that in bfloat16 on every device, which is slow on a CPU, and holds matrices alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.hidden import hidden_layers

T = TypeVar("T")
MOMENTUM = 0.95  # published, with Nesterov's look ahead
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # published


def make_optimizer(
    drafter: nn.Module,
    config: TrainerConfig,
    multiplier: Callable[[str], float] = lambda name: 1.0,
    *,
    fused: bool = False,
) -> torch.optim.AdamW:
    """The optimiser of the parameters that require a gradient; norms and biases (1-D) are not
    decayed. `multiplier`: a factor of the learning rate, by the parameter's name; `fused`: one
    kernel for all of AdamW's. UserError where there is no such parameter or one is not float32."""
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    if not trained:
        raise UserError("the drafter has no trainable parameter: nothing to fit")
    for name, p in trained.items():
        if p.dtype != torch.float32:  # bfloat16 weights lose small updates
            remedy = "build the drafter in float32; trainer.precision is what it computes in"
            raise UserError(f"trained parameter {name!r} must be float32, got {p.dtype}: {remedy}")
    muon = config.optimizer == "muon"
    hidden = [layer for _, layer in hidden_layers(drafter)] if muon else []
    matrices = {id(layer.weight) for layer in hidden}
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, p in trained.items():
        decay = config.weight_decay if p.ndim > 1 else 0.0
        orthogonal = id(p) in matrices
        factor = multiplier(name) * (config.muon_lr / config.lr if orthogonal else 1.0)
        groups.setdefault((factor, decay, orthogonal), []).append(p)
    options = [
        {"params": found, "lr_multiplier": factor, "weight_decay": decay, "orthogonal": orthogonal}
        for (factor, decay, orthogonal), found in groups.items()
    ]
    betas = 0.9, config.adam_beta2
    kind = Muon if muon else torch.optim.AdamW
    made = kind(options, lr=config.lr, betas=betas, fused=fused or None)
    if isinstance(made, Muon):
        made.transposed = {id(layer.weight) for layer in hidden if isinstance(layer, Conv1D)}
    return made


class Muon(torch.optim.AdamW):
    """AdamW, but for the groups whose `orthogonal` is true, which hold matrices. `transposed`: the
    `id` of each matrix [n, m] of a layer with n inputs and m outputs, as GPT-2 stores them.

    An update of a matrix [m, n] is `lr` * sqrt(max(1, m / n)) times a nearly orthogonal matrix: the
    rate means the same at every width. Matrices of a shard are gathered for it.
    """

    transposed: Collection[int] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:  # type: ignore[override]
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["orthogonal"]]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, p.grad, group["lr"], group["weight_decay"])
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, lr: float, decay: float) -> None:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
            state["step"] = torch.zeros(())  # AdamW looks for one when it restores a state
        momentum = state["momentum"].lerp_(grad, 1 - MOMENTUM)
        ahead = grad.lerp(momentum, MOMENTUM)
        rows, columns = reversed(p.shape) if id(p) in self.transposed else p.shape
        p.mul_(1 - lr * decay)
        p.add_(orthogonal(ahead), alpha=-lr * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of `matrix` [m, n] float and singular values of
    about 0.7 to 1.2, by Newton-Schulz iterations; in bfloat16 where there are tensor cores for it.
    A matrix of zeros stays one."""
    if isinstance(matrix, DTensor):
        whole = orthogonal(matrix.full_tensor())
        mesh = matrix.device_mesh
        copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim)
        return copies.redistribute(mesh, matrix.placements)
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.device.type == "cuda" else matrix.float()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)


def learning_rate(step: int, config: TrainerConfig) -> float:
    """The learning rate of update `step`, from 0; it reaches lr * lr_min_ratio at `max_steps`."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    hold = config.lr_hold_share if config.lr_schedule == "hold_cosine" else 0.0
    start = max(config.lr_warmup_steps, hold * config.max_steps)
    if config.lr_schedule == "constant" or step <= start:
        return config.lr
    share = (step - start) / (config.max_steps - start)
    fall = share if config.lr_schedule == "linear" else (1 - math.cos(math.pi * share)) / 2
    return config.lr * (1 - (1 - config.lr_min_ratio) * fall)
