"""Medusa-2: Medusa's heads on a target that was trained with them, through an adapter.

Cai et al. 2024, arXiv:2401.10774, Sec. 3.2. The drafter owns heads and adapter; the target it was
built for stays unchanged (`target.adapted`). The adapted target serves, and verification reproduces
its output: `served_target`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from drafters.base import S
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.stored import read_stored
from drafters.text import Text
from target.adapted import AdaptedTarget, LoraSettings
from target.model import Target
from target.outputs import TargetOutputs
from target.shared_text import TextGroup
from trainer.errors import UserError
from trainer.logits import OutputHead

ADAPTER = "adapter"  # the folder, and the beginning of its parameters' names


class Medusa2Drafter(MedusaDrafter):
    """Medusa heads and the adapter of the target that was trained with them."""

    kind = "medusa2"

    def __init__(
        self,
        settings: MedusaSettings,
        lora: LoraSettings,
        target: Target,
        kept: torch.Tensor | None = None,
    ):
        super().__init__(settings, target, kept)
        self.lora = lora
        self.adapted = AdaptedTarget(target, lora)
        self.adapter = nn.ModuleDict(self.adapted.modules())

    @classmethod
    def adapt(cls, heads: MedusaDrafter, lora: LoraSettings) -> Medusa2Drafter:
        """These heads with a fresh adapter, which leaves their target unchanged."""
        drafter = cls(heads.settings, lora, heads.shared.target, heads.kept)
        drafter.load_state_dict(drafter.state_dict() | heads.state_dict())
        return drafter

    def forward(
        self,
        text: Text,
        outputs: TargetOutputs | None,
        depth: int,
        score: Callable[[Iterator[torch.Tensor]], S],
    ) -> S:
        """Return `score` of what `states` yields; without `outputs`, of the adapted target's own
        states [B, L, H] before that, which score the next token and have a gradient."""
        if outputs is not None:
            return super().forward(text, outputs, depth, score)
        own = self.adapted.states(text.ids, text.position_ids, text.group)
        return score(chain([own], self.states(text, TargetOutputs({"final_norm": own}), depth)))

    def check_group(self, group: TextGroup) -> None:
        group.check(self.adapted.model, "the target")

    def gradient_checkpointing_enable(self) -> None:
        """Compute activations of the target again in the backward pass instead of storing them."""
        self.adapted.checkpoint()

    def output_head(self, depth: int = 1) -> OutputHead:
        return super().output_head(depth) if self.settings.own_head else self.adapted.head()

    def served_target(self) -> Target | None:
        return self.adapted.as_target() if self.adapted.changes else None

    def servable(self, folder: Path, ours: bool = False) -> tuple[MedusaDrafter, Target]:
        """The heads as plain Medusa heads, and the target with its adapter merged."""
        target = self.adapted.merged(folder, ours)
        drafter = MedusaDrafter(self.settings, target, self.kept)
        drafter.load_state_dict(self._heads())
        drafter.rank_accuracy = self.rank_accuracy
        return drafter.eval(), target

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> Mapping[str, object]:
        return {**super().about(), "lora": dataclasses.asdict(self.lora)}

    def save_weights(self, folder: Path) -> None:
        save_file(self._heads(), folder / "model.safetensors")
        self.adapted.save(folder / ADAPTER)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> Medusa2Drafter:
        folder = Path(folder)
        about, heads = read_stored(folder, target)
        settings, lora = MedusaSettings(**about["settings"]), LoraSettings(**about["lora"])
        drafter = cls(settings, lora, target, heads.get("kept"))
        if heads.keys() != drafter._heads().keys():
            raise UserError(f"{folder}: weights and drafter.json disagree")
        drafter.load_state_dict(drafter.state_dict() | heads)
        drafter.adapted.load(folder / ADAPTER)
        drafter.rank_accuracy = about.get("rank_accuracy")
        return drafter.eval()

    def _heads(self) -> dict[str, torch.Tensor]:
        """Copies of the heads' tensors: a tied module is written once per name."""
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.state_dict().items()
            if not name.startswith(f"{ADAPTER}.")
        }
