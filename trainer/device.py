"""What a device has and can do, where the arithmetic of a training depends on it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from accelerate.utils.operations import recursively_apply

T = TypeVar("T")


def free_bytes(device: torch.device) -> int | None:
    """The bytes that this process can still allocate on a CUDA device, with those that its
    allocator holds and does not use. None for any other device: a CPU's memory is shared with
    others. The host asks the driver, it does not wait for the device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor` on `device`. A copy to a CUDA device runs beside the host from pinned memory only;
    from other memory the host would wait for all work before it."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def on_host(data: T) -> T:
    """A copy of nested lists, tuples and dicts with all their tensors in host memory. Those of a
    CUDA device are copied to pinned memory, and the host waits for them once."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", non_blocking=True, copy=True)

    found = cast("T", recursively_apply(copied, data))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return found


def shows_numbers_at_once(device: torch.device) -> bool:
    """Whether the host can look at a number without a wait for work that runs beside it."""
    return device.type == "cpu"


@functools.cache
def adds_products_in_float32(device: torch.device) -> bool:
    """Whether the device adds a product of bfloat16 matrices to a float32 sum in one pass, without
    rounding it to bfloat16 first. torch has this for some devices, so a small product is tried."""
    total = torch.ones(16, 16, device=device)
    factor = torch.full_like(total, 1 + 2**-7, dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
        return bool((total == 1 + 16 * (1 + 2**-7) ** 2).all())
    except RuntimeError:
        return False


def computes_in_bfloat16(precision: str, cuda: bool) -> bool:
    """Whether `trainer.precision` means bfloat16 on a CUDA device, or on one of another kind: auto
    does so on a GPU that has it, and keeps to float32 on a CPU, which computes bfloat16 slowly."""
    if precision == "auto":
        return cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


@contextmanager
def tensor_cores(precision: str) -> Iterator[None]:
    """Inside, `trainer.precision=auto` lets CUDA round the factors of float32 products to TF32, of
    10 bits. It is for training steps: an evaluation compares logits that lie close together."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or precision == "auto"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
