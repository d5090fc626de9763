"""Medusa-2: Medusa's heads on a target that was trained with them, through an adapter.

Cai et al. 2024, arXiv:2401.10774, Sec. 3.2. The drafter owns heads and adapter; the target it was
built for is left alone (`target.adapted`). What serves, and what its output equals, is the adapted
target: `served_target`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafters.medusa import MedusaDrafter, MedusaSettings, read_about
from target.adapted import AdaptedTarget, LoraSettings
from target.model import Target, TargetOutputs
from trainer.chunked import OutputHead
from trainer.config import UserError

ADAPTER = "adapter"  # the folder, and the beginning of its parameters' names


class Medusa2Drafter(MedusaDrafter):
    kind = "medusa2"

    def __init__(self, settings: MedusaSettings, lora: LoraSettings, target: Target):
        super().__init__(settings, target)
        self.lora = lora
        self.adapted = AdaptedTarget(target, lora)
        self.adapter = nn.ModuleDict(self.adapted.modules())

    @classmethod
    def adapt(cls, heads: MedusaDrafter, lora: LoraSettings) -> Medusa2Drafter:
        """These heads, on a target that is still the one they were made for."""
        drafter = cls(heads.settings, lora, heads.shared.target)
        drafter.load_state_dict(drafter.state_dict() | heads.state_dict())
        return drafter

    def forward(
        self,
        ids: torch.Tensor,
        outputs: TargetOutputs | None,
        depth: int,
        score: Callable[[int, torch.Tensor], Any],
        position_ids: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> list[Any]:
        """Without `outputs` the adapted target makes them, with gradient; its own states, whose law
        is that of the next token, are scored first, as depth 0."""
        if outputs is not None:
            return super().forward(ids, outputs, depth, score, position_ids, columns)
        states = self.adapted.states(ids, position_ids)
        made = TargetOutputs({"final_norm": states})
        own = score(0, states)
        return [own, *super().forward(ids, made, depth, score, position_ids, columns)]

    def gradient_checkpointing_enable(self) -> None:
        self.adapted.checkpoint()

    def output_head(self, depth: int = 1) -> OutputHead:
        return super().output_head(depth) if self.settings.own_head else self.adapted.head()

    def served_target(self) -> Target | None:
        return self.adapted.as_target() if self.adapted.changes else None

    def drafting_parameters(self) -> Iterable[nn.Parameter]:
        own = self.named_parameters()
        return [p for name, p in own if not name.startswith(f"{ADAPTER}.")]

    def servable(self, folder: Path, ours: bool = False) -> tuple[MedusaDrafter, Target]:
        """The heads as plain Medusa's, on the merged target."""
        target = self.adapted.merged(folder, ours)
        drafter = MedusaDrafter(self.settings, target)
        drafter.load_state_dict(self._heads())
        drafter.rank_accuracy = self.rank_accuracy
        return drafter.eval(), target

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        return super().about() | {"lora": dataclasses.asdict(self.lora)}

    def save_weights(self, folder: Path) -> None:
        save_file(self._heads(), folder / "model.safetensors")
        self.adapted.save(folder / ADAPTER)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> Medusa2Drafter:
        folder = Path(folder)
        about = read_about(folder, target)
        drafter = cls(MedusaSettings(**about["settings"]), LoraSettings(**about["lora"]), target)
        heads = load_file(folder / "model.safetensors")
        if heads.keys() != drafter._heads().keys():
            raise UserError(f"{folder}: weights and drafter.json disagree")
        drafter.load_state_dict(drafter.state_dict() | heads)
        drafter.adapted.load(folder / ADAPTER)
        drafter.rank_accuracy = about.get("rank_accuracy")
        return drafter.eval()

    def _heads(self) -> dict[str, torch.Tensor]:
        """Copies: a tied module is written once per name."""
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.state_dict().items()
            if not name.startswith(f"{ADAPTER}.")
        }
