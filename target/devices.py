"""A frozen model over several devices, or quantised: how it is loaded, and how it is read.

The devices of one process: GPUs, the CPU's memory, the disk. Accelerate's hooks bring what a layer
needs to where it computes, and the output back to where the input was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import align_module_device, get_max_memory
from torch import nn
from transformers.quantizers.auto import AutoQuantizationConfig

from trainer.config import UserError


def spread(
    device: torch.device | str,
    device_map: str | dict[str, Any] | None,
    max_memory: dict[Any, str],
    quantization: dict[str, Any],
) -> dict[str, Any]:
    """What `from_pretrained` is told; nothing for a model that is whole on one device as it is."""
    given: dict[str, Any] = {}
    if quantization:
        try:
            given["quantization_config"] = AutoQuantizationConfig.from_dict(dict(quantization))
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"model.quantization={quantization}: {reason}") from error
        given["device_map"] = {"": str(device)}
    if device_map == "fsdp2":  # of whole layers on the CPU each process takes its share
        return {"device_map": "cpu"} if dist.is_initialized() and dist.get_world_size() > 1 else {}
    if device_map is not None:
        given["device_map"] = device_map
    if isinstance(device_map, str):
        local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        given["max_memory"] = max_memory or own_memory(get_max_memory(), *local)
    return given


def own_memory(free: dict[Any, int], local_rank: int, local_world: int) -> dict[Any, int]:
    """Of the free bytes of each device, those of this process, where several are on one machine:
    every `local_world`-th GPU from its own one on, and an equal part of the CPU's memory."""
    gpus = sorted(key for key in free if isinstance(key, int))
    found = {key: free[key] for key in gpus[local_rank::local_world]}
    return found | {key: free[key] // local_world for key in free if not isinstance(key, int)}


def decoder_of(model: Any) -> Any:
    """The part of a causal LM from ids to final-normed states, without its output head."""
    found = model.get_decoder()
    if found is model:
        raise UserError(
            f"{type(model).__name__} names no decoder, whose states drafters are made from"
        )
    return found


def device_of(model: Any) -> torch.device:
    """Where a model takes its input: of its embedding, whose weights may be stored elsewhere."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return next(model.parameters()).device if device is None else torch.device(device)


@contextmanager
def in_place(*modules: nn.Module | None) -> Iterator[None]:
    """Inside, all parameters of `modules` are there to be read."""
    with ExitStack() as stack:
        for module in modules:
            for part in [] if module is None else module.modules():
                stack.enter_context(align_module_device(part))
        yield


def is_elsewhere(module: Any, device: torch.device) -> bool:
    """Whether its weight is not to be had on `device` at any time."""
    hook = getattr(module, "_hf_hook", None)
    return bool(getattr(hook, "offload", False)) or module.weight.device != device


def is_plain(weight: torch.Tensor) -> bool:
    """Whether its numbers are those of the network: quantised ones need their scales."""
    return weight.is_floating_point() and weight.element_size() > 1
