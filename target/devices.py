"""A frozen model over several devices, or quantised: how it is loaded, and how it is read.

The devices are those of one process: GPUs, the CPU's memory, the disk. Accelerate's hooks move the
weights and inputs of a layer to its device, and the output back to the device of the input.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypedDict

import torch
import torch.distributed as dist
from accelerate.utils import align_module_device, get_max_memory
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoQuantizationConfig

from trainer.errors import UserError

Device = int | str  # a GPU by its number, or "cpu", "disk"


class Loading(TypedDict, total=False):
    """Arguments of `from_pretrained` that place and quantise a model."""

    quantization_config: object
    device_map: str | Mapping[str, object]
    max_memory: Mapping[Device, int | str]


def spread(
    device: torch.device | str,
    device_map: str | Mapping[str, object] | None,
    max_memory: Mapping[Device, str],
    quantization: Mapping[str, object],
) -> Loading:
    """The arguments of `from_pretrained`, none for a model that is whole on one device and not
    quantised. UserError for a quantization that transformers refuses."""
    given: Loading = {}
    if quantization:
        try:
            given["quantization_config"] = AutoQuantizationConfig.from_dict(dict(quantization))
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"model.quantization={quantization}: {reason}") from error
        given["device_map"] = {"": str(device)}
    if device_map == "fsdp2":  # each process shards the layers that lie on the CPU
        return {"device_map": "cpu"} if dist.is_initialized() and dist.get_world_size() > 1 else {}
    if device_map is not None:
        given["device_map"] = device_map
    if isinstance(device_map, str):
        local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        given["max_memory"] = max_memory or own_memory(get_max_memory(), *local)
    return given


def own_memory(free: Mapping[Device, int], local_rank: int, local_world: int) -> dict[Device, int]:
    """The part of the free bytes by device that belongs to this one of several processes on a
    machine: every `local_world`-th GPU from its own on, and an equal part of the CPU's memory."""
    gpus = sorted(key for key in free if isinstance(key, int))
    found = {key: free[key] for key in gpus[local_rank::local_world]}
    return found | {key: free[key] // local_world for key in free if not isinstance(key, int)}


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal LM from ids to final-normed states, without its output head. UserError
    where the model has no such part."""
    found = model.get_decoder()
    if found is model:
        raise UserError(
            f"{type(model).__name__} has no decoder of its own, whose states drafters read"
        )
    return found


def device_of(model: PreTrainedModel) -> torch.device:
    """The device of a model's inputs: that of its embedding, whose weights may lie elsewhere."""
    embedding: nn.Module = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return next(embedding.parameters()).device if device is None else torch.device(device)


@contextmanager
def in_place(*modules: nn.Module | None) -> Iterator[None]:
    """Inside the block, all parameters of `modules` can be read."""
    with ExitStack() as stack:
        for module in modules:
            for part in [] if module is None else module.modules():
                stack.enter_context(align_module_device(part))
        yield


def is_elsewhere(module: nn.Module, device: torch.device) -> bool:
    """Whether the weight of `module` is not on `device` all the time."""
    hook = getattr(module, "_hf_hook", None)
    return bool(getattr(hook, "offload", False)) or module.get_parameter("weight").device != device


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight is stored as floating point numbers; a quantised one needs its scales."""
    return weight.is_floating_point() and weight.element_size() > 1
