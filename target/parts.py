"""A target without its decoder layers: `model.parts=head`.

A head on the target is trained with the target's embedding, final norm and output matrix, and with
states that a server or a store gives. What is no layer is read out of the checkpoint, tensor by
tensor; the layers stay on the device "meta", where they have shapes and no numbers. Files that hold
nothing but layers are neither opened nor fetched, and need not be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from target.layout import lay_out
from target.loading import FLOATS, check_finite, loaded_tensors
from target.model import Target, decoder_layers
from target.outline import KEY, outline
from trainer.errors import UserError
from trainer.files import load_json

WHOLE = "set model.parts=all"


def load_parts(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Target:
    """The target in a folder or on the Hub with the parts that heads need. UserError where it
    cannot be read, or not this way: quantised, or not in safetensors."""
    target = outline(
        name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
        whole=False,
    )  # fmt: skip
    if not target.fingerprint:
        raise UserError(
            "must not be quantised and name its dtype in config.json, where its layers are not "
            "loaded", key=KEY, value=name, remedy=WHOLE,
        )  # fmt: skip
    model: Any = target.model
    target.parts, target.checkpoint = "head", Checkpoint(name, revision, model)
    layers = {part for layer in decoder_layers(model) for part in layer.modules()}
    target.checkpoint.fill([part for part in model.modules() if part not in layers], device)
    check_finite(KEY, name, loaded_tensors(model))
    lay_out(model)
    return target


class Checkpoint:
    """The tensors of a model in safetensors, each read when it is asked for. `model`: on "meta"."""

    def __init__(self, name: str, revision: str | None, model: PreTrainedModel):
        self.name, self.revision, self.model = name, revision, model
        self._files = self._index()
        self._names: dict[nn.Parameter | torch.Tensor, list[str]] = {}  # tied ones have several
        for tensor, value in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self._names.setdefault(value, []).append(tensor)

    def _file(self, name: str) -> Path | None:
        """A file of the checkpoint, which is fetched where it is not here; None without one."""
        found = cached_file(
            self.name, name, revision=self.revision, _raise_exceptions_for_missing_entries=False
        )
        return None if found is None else Path(found)

    def _index(self) -> Mapping[str, str]:
        """The file that each tensor lies in."""
        if (index := self._file(SAFE_WEIGHTS_INDEX_NAME)) is not None:
            return load_json(index)["weight_map"]  # `check_folder` has looked at it
        if (whole := self._file(SAFE_WEIGHTS_NAME)) is not None:
            with safe_open(whole, "pt") as file:
                return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        raise UserError(
            "has no weights in safetensors, of which parts could be read", key=KEY,
            value=self.name, remedy=f"convert it, or {WHOLE}",
        )  # fmt: skip

    def fill(
        self, modules: Iterable[nn.Module], device: torch.device | str, whole: bool = True
    ) -> None:
        """Give these modules, without those inside them, their numbers in the dtype of the model;
        what is tied stays so. Unless the modules must be `whole`, tensors stay without numbers that
        the checkpoint has in another form, such as each expert by itself."""
        read: dict[torch.Tensor, nn.Parameter] = {}
        for module in modules:
            for key, value in module._parameters.items():
                if value is not None and value.is_meta and (whole or self._place(value)):
                    if value not in read:
                        read[value] = nn.Parameter(self._read(value, device), requires_grad=False)
                        read[value]._is_hf_initialized = True  # type: ignore[attr-defined]
                    module._parameters[key] = read[value]
            self._fill_buffers(module, device)

    def _fill_buffers(self, module: nn.Module, device: torch.device | str) -> None:
        computed = False
        for key, value in module._buffers.items():
            if value is None or not value.is_meta:
                continue
            if key in module._non_persistent_buffers_set:
                module._buffers[key], computed = torch.empty_like(value, device=device), True
            else:
                module._buffers[key] = self._read(value, device)
        if computed:  # such as the factor of Gemma's embedding: as `from_pretrained` makes it
            self.model._init_weights(module)  # leaves what was read

    @contextmanager
    def filled(self, layer: nn.Module, device: torch.device) -> Iterator[None]:
        """Inside the block, a layer has its numbers."""
        before = [(m, dict(m._parameters), dict(m._buffers)) for m in layer.modules()]
        self.fill(layer.modules(), device, whole=False)
        try:
            yield
        finally:
            for module, parameters, buffers in before:
                module._parameters, module._buffers = parameters, buffers

    def _place(self, value: torch.Tensor) -> str | None:
        """The name in the checkpoint of a tensor of the model."""
        names, prefix = self._names[value], f"{self.model.base_model_prefix}."
        known = [n for own in names for n in (own, own.removeprefix(prefix), prefix + own)]
        return next((one for one in known if one in self._files), None)

    def _read(self, value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """A tensor of the model, out of the file that the index names."""
        tensor = self._place(value)
        if tensor is None:
            name = self._names[value][0]
            self._refuse(f"its checkpoint has no tensor {name!r}, which is none of a layer")
        path = self._file(self._files[tensor])
        if path is None:
            self._refuse(f"the file {self._files[tensor]} with {tensor!r} is not there")
        with safe_open(path, "pt") as file:
            if tensor not in file.keys():  # noqa: SIM118 - it is no mapping
                self._refuse(f"{path.name} lacks {tensor!r}, which its index places there")
            found = file.get_tensor(tensor)
        if found.shape != value.shape:
            shapes = f"{list(found.shape)}, by config.json it has {list(value.shape)}"
            self._refuse(f"tensor {tensor!r} has shape {shapes}")
        if value.is_floating_point() and found.dtype not in FLOATS:
            self._refuse(f"tensor {tensor!r} is quantised ({found.dtype})")
        return found.to(device, value.dtype)  # where nothing changes, the mapped file

    def _refuse(self, said: str) -> NoReturn:
        raise UserError(said, key=KEY, value=self.name, remedy=f"download it again, or {WHOLE}")
