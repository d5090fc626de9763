"""LoRA on a target that stays as it is.

The adapter sits in a second tree of modules around the very weights of the target: no weight exists
twice, and the target never sees the adapter. Frozen teacher, other rows of a report and adapted
target live side by side, and nothing has to be switched on or off.
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
from typing import Any

import torch
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import nn
from transformers.pytorch_utils import Conv1D

from target.devices import decoder_of
from target.model import Target, decoder_layers
from trainer.chunked import OutputHead
from trainer.config import RunFault, UserError, require
from trainer.files import whole_folder

NAME = "default"  # peft's own, of an adapter that is alone


@dataclass
class LoraSettings:
    """Hu et al. 2021: W + alpha / rank * B A on every linear layer, dropout before A; B begins at
    zero. `lm_head`: also on the output matrix, which is read without dropout."""

    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    lm_head: bool = False

    def __post_init__(self) -> None:
        require(self.rank >= 1, "method.lora_rank", "be >= 1", self.rank)
        require(self.alpha > 0, "method.lora_alpha", "be > 0", self.alpha)
        require(0 <= self.dropout < 1, "method.lora_dropout", "lie in [0, 1)", self.dropout)


def check_lora(target: Target, settings: LoraSettings) -> None:
    model = target.model
    spread = target.sharded is not None or hasattr(model, "hf_device_map")
    if spread or getattr(model, "is_quantized", False):
        raise UserError(
            "recipe=medusa2 trains inside of the target, which must be whole on one device and not "
            "quantised: leave out model.device_map and model.quantization"
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if settings.lm_head and tied:
        raise UserError(
            "method.lora_lm_head must be false for this target: its embedding and its output "
            "matrix are one, and an adapter would part them"
        )


class AdaptedTarget:
    """`model`: the target's own class of model, adapter included. A deep copy has an adapter of its
    own around the same weights."""

    def __init__(self, target: Target, settings: LoraSettings):
        self.target, self.settings, self.checkpointing = target, settings, False
        check_lora(target, settings)
        head = target.model.get_output_embeddings()
        names = [
            name
            for name, module in target.model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and (settings.lm_head or module is not head)
        ]
        config = LoraConfig(
            task_type="CAUSAL_LM", r=settings.rank, lora_alpha=settings.alpha,  # type: ignore[arg-type]
            lora_dropout=settings.dropout, target_modules=names,
        )  # fmt: skip
        model = _copied(target.model, target.model, lambda tensor: tensor)
        with warnings.catch_warnings():  # of how peft asks transformers, and of GPT-2's layout
            warnings.simplefilter("ignore")
            try:
                self.peft: Any = get_peft_model(model, config).eval()
            except ValueError as error:
                reason = " ".join(str(error).split())
                what = f"peft adapts no {type(model).__name__} with these method.lora_* ({reason})"
                raise UserError(what) from error

    @property
    def model(self) -> Any:
        return self.peft.get_base_model()

    def modules(self) -> dict[str, nn.ModuleDict]:
        """All that trains, by the layer it adapts, and the dropout in between."""
        found = {}
        for name, module in self.model.named_modules():
            if hasattr(module, "lora_A"):
                parts = {
                    "A": module.lora_A[NAME],
                    "B": module.lora_B[NAME],
                    "dropout": module.lora_dropout[NAME],
                }
                found[name.replace(".", "/")] = nn.ModuleDict(parts)
        return found

    def states(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """[B, L] -> final-normed states [B, L, H], with gradient."""
        run = decoder_of(self.model)
        # a layer recomputes only where it takes itself for training; its own dropouts stay off
        recomputed = decoder_layers(self.model) if self.checkpointing else ()
        for layer in recomputed:
            layer.training = torch.is_grad_enabled()
        try:
            return run(input_ids=ids, position_ids=position_ids, use_cache=False).last_hidden_state
        finally:
            for layer in recomputed:
                layer.training = False

    def checkpoint(self) -> None:
        """Keep the layers' inputs only, and compute the rest again for the gradient."""
        self.checkpointing = True
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def head(self) -> OutputHead:
        """From those states to logits of the true vocabulary."""
        plain = self.target.head
        if not self.settings.lm_head:
            return plain
        layer = self.model.get_output_embeddings()
        change = layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight
        return dataclasses.replace(plain, weight=plain.weight + layer.scaling[NAME] * change)

    @property
    def changes(self) -> bool:
        """Whether the adapter does anything yet."""
        return any(bool(one["B"].weight.any()) for one in self.modules().values())  # type: ignore[operator, union-attr]

    def as_target(self) -> Target:
        """As it is now, for evaluation; text and states of it are never taken for the target's."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self.settings)).encode())
        for name, parts in self.modules().items():
            digest.update(name.encode())
            for tensor in parts.parameters():
                # a copy: a storage that numpy has seen can never be let go by FSDP2
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
        """Written to `folder` as an ordinary model, the adapter added into its weights; on the CPU,
        where it needs the memory of a second target while this runs. `ours`: see `whole_folder`."""
        copied = _copied(self.peft, self.peft, lambda tensor: tensor.detach().to("cpu", copy=True))
        model = copied.merge_and_unload()
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
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        found = load_peft_weights(str(folder), device=str(self.target.device))
        own = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        if found.keys() != own.keys():
            name = sorted(found.keys() ^ own.keys())[0]
            raise UserError(f"{folder} holds an adapter of another shape: {name!r} has no match")
        set_peft_model_state_dict(self.peft, found)

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptedTarget:
        made = memo[id(self)] = copy.copy(self)
        made.peft = _copied(self.peft, self.target.model, lambda tensor: tensor, memo)
        return made


def _copied(
    model: Any,
    weights: Any,
    place: Callable[[torch.Tensor], torch.Tensor],
    memo: dict[int, Any] | None = None,
) -> Any:
    """A copy of the tree of modules `model`; `place` says what stands for each of the parameters
    and buffers of `weights` in it. Tensors that are one stay one."""
    memo = {} if memo is None else memo
    for tensor in (*weights.parameters(), *weights.buffers()):
        kept = place(tensor)
        if kept is not tensor and isinstance(tensor, nn.Parameter):
            kept = nn.Parameter(kept, requires_grad=False)
        memo[id(tensor)] = kept
    return copy.deepcopy(model, memo)
