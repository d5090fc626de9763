"""LoRA on a target that itself does not change.

The adapter lies in a second tree of modules around the same weights: no weight exists twice, and
the target does not contain the adapter. Frozen teacher, other rows of a report and adapted target
exist at the same time, and nothing has to be switched on or off.

peft is imported where it is used: beside bitsandbytes that takes a second and a half, which every
command would pay.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from target.devices import decoder_of
from target.model import Target, decoder_layers
from target.shared_text import TextGroup
from trainer.errors import RunFault, UserError, require
from trainer.files import whole_folder
from trainer.logits import OutputHead

ALPHA = 16  # scale of an adapter, divided by its rank; published
DROPOUT = 0.05  # before A, in training
NAME = "default"  # peft's own name of a single adapter

M = TypeVar("M", bound=nn.Module)


@dataclass
class LoraSettings:
    """Hu et al. 2021: W + ALPHA / rank * B A on every linear layer, DROPOUT before A; B begins at
    zero. `lm_head`: also on the output matrix, which is read without dropout."""

    rank: int = 32
    lm_head: bool = False

    def __post_init__(self) -> None:
        require(self.rank >= 1, "method.lora_rank", "be >= 1", self.rank)


def check_lora(target: Target, settings: LoraSettings) -> None:
    """UserError where this target cannot carry an adapter."""
    model = target.model
    spread = target.sharded is not None or hasattr(model, "hf_device_map")
    if spread or getattr(model, "is_quantized", False):
        raise UserError(
            "recipe=medusa2 trains inside the target, which must be whole on one device and not "
            "quantised: leave out model.device_map and model.quantization"
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if settings.lm_head and tied:
        raise UserError(
            "method.lora_lm_head must be false for this target: its embedding and its output "
            "matrix are tied, and an adapter would untie them"
        )


class AdaptedTarget:
    """A target with an adapter. `model`: of the target's own class, adapter included. A deep copy
    has an adapter of its own around the same weights."""

    def __init__(self, target: Target, settings: LoraSettings):
        from peft import LoraConfig, PeftModel, get_peft_model

        self.target, self.settings, self.checkpointing = target, settings, False
        check_lora(target, settings)
        head = target.model.get_output_embeddings()
        names = [
            name
            for name, module in target.model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and (settings.lm_head or module is not head)
        ]
        config = LoraConfig(
            task_type="CAUSAL_LM", r=settings.rank, lora_alpha=ALPHA,
            lora_dropout=DROPOUT, target_modules=names,
        )  # fmt: skip
        model = _copied(target.model, target.model, lambda tensor: tensor)
        with warnings.catch_warnings():  # of how peft asks transformers, and of GPT-2's layout
            warnings.simplefilter("ignore")
            try:
                adapted = get_peft_model(model, config).eval()
            except ValueError as error:
                reason = " ".join(str(error).split())
                what = (
                    f"peft cannot adapt {type(model).__name__} with these method.lora_* ({reason})"
                )
                raise UserError(what) from error
        assert isinstance(adapted, PeftModel)
        self.peft = adapted

    @property
    def model(self) -> PreTrainedModel:
        model = self.peft.get_base_model()
        assert isinstance(model, PreTrainedModel)
        return model

    def modules(self) -> dict[str, nn.ModuleDict]:
        """The trained matrices A and B and their dropout, by the name of the adapted layer."""
        from peft.tuners.lora import LoraLayer

        found = {}
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                parts = {
                    "A": module.lora_A[NAME],
                    "B": module.lora_B[NAME],
                    "dropout": module.lora_dropout[NAME],
                }
                found[name.replace(".", "/")] = nn.ModuleDict(parts)
        return found

    def states(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        group: TextGroup | None = None,
    ) -> torch.Tensor:
        """ids, position_ids: [B, L] int64 -> final-normed states [B, L, H], with gradient. `group`:
        processes that read these rows together."""
        run = decoder_of(self.model)
        # a layer recomputes only if it is in training mode; its own dropouts stay off
        recomputed = decoder_layers(self.model) if self.checkpointing else ()
        for layer in recomputed:
            layer.training = torch.is_grad_enabled()
        try:
            if group is not None:
                return group.reading(ids, position_ids).states(self.model)
            return run(input_ids=ids, position_ids=position_ids, use_cache=False).last_hidden_state
        finally:
            for layer in recomputed:
                layer.training = False

    def checkpoint(self) -> None:
        """Store only the layers' inputs and compute the rest again in the backward pass."""
        self.checkpointing = True
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def head(self) -> OutputHead:
        """The output head from final-normed states to logits of the true vocabulary."""
        from peft.tuners.lora import LoraLayer

        plain = self.target.head
        if not self.settings.lm_head:
            return plain
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, LoraLayer)
        change = layer.lora_B[NAME].get_parameter("weight") @ layer.lora_A[NAME].get_parameter(
            "weight"
        )
        changed = plain.weight + layer.scaling[NAME] * change
        return dataclasses.replace(plain, weight=changed, blocked=None)

    @property
    def changes(self) -> bool:
        """Whether the adapter changes any output yet: whether any B is not zero."""
        return any(bool(one["B"].get_parameter("weight").any()) for one in self.modules().values())

    def as_target(self) -> Target:
        """The adapted model as a target, for evaluation; it has a fingerprint of its own."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self.settings)).encode())
        for name, parts in self.modules().items():
            digest.update(name.encode())
            for tensor in parts.parameters():
                # a copy: FSDP2 cannot free a storage that numpy refers to
                plain = tensor.detach().to("cpu", torch.float32, copy=True)
                digest.update(plain.contiguous().numpy().tobytes())
        weights = f"{self.target.fingerprint['weights']}+{digest.hexdigest()[:16]}"
        return dataclasses.replace(
            self.target,
            model=self.model,
            name=f"{self.target.name} with adapter",
            fingerprint=self.target.fingerprint | {"weights": weights},
        )

    def merged(self, folder: Path, ours: bool = False) -> Target:
        """Write an ordinary model with the adapter merged into its weights to `folder`.

        It is made on the CPU, which needs memory for a second target meanwhile. `ours`: see
        `whole_folder`. Raises RunFault where the folder cannot be written."""
        from peft import LoraModel

        copied = _copied(self.peft, self.peft, _on_cpu)
        tuner = copied.base_model
        assert isinstance(tuner, LoraModel)
        model = tuner.merge_and_unload()
        assert isinstance(model, PreTrainedModel)
        try:
            with whole_folder(folder, ours) as partial:
                model.save_pretrained(partial)
                self.target.tokenizer.save_pretrained(partial)
        except OSError as error:
            raise RunFault(f"cannot write the merged target to {folder}: {error}") from error
        weights = f"{self.as_target().fingerprint['weights']} merged"
        return dataclasses.replace(
            self.target,
            model=model,
            name=str(folder),
            fingerprint=self.target.fingerprint | {"weights": weights},
        )

    # --- peft's own format -----------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the adapter in peft's format."""
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        """Restore the adapter that `save` wrote. UserError where its shape differs."""
        from peft import (
            get_peft_model_state_dict,
            load_peft_weights,
            set_peft_model_state_dict,
        )

        found = load_peft_weights(str(folder), device=str(self.target.device))
        own = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        if found.keys() != own.keys():
            name = sorted(found.keys() ^ own.keys())[0]
            raise UserError(f"{folder} holds an adapter of another shape: {name!r} has no match")
        set_peft_model_state_dict(self.peft, found)

    def __deepcopy__(self, memo: dict[int, object]) -> AdaptedTarget:
        made = memo[id(self)] = copy.copy(self)
        made.peft = _copied(self.peft, self.target.model, lambda tensor: tensor, memo)
        return made


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the usual layout, which a weight of `target.layout` has not."""
    return tensor.detach().to_dense().to("cpu", copy=True)


def _copied(
    model: M,
    weights: nn.Module,
    place: Callable[[torch.Tensor], torch.Tensor],
    memo: dict[int, object] | None = None,
) -> M:
    """A copy of the tree of modules `model`, in which `place(tensor)` replaces each parameter and
    buffer of `weights`. Tied tensors stay tied."""
    memo = {} if memo is None else memo
    for tensor in (*weights.parameters(), *weights.buffers()):
        placed = place(tensor)
        if placed is not tensor and isinstance(tensor, nn.Parameter):
            placed = nn.Parameter(placed, requires_grad=False)
        memo[id(tensor)] = placed
    return copy.deepcopy(model, memo)
