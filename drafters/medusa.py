"""Medusa: independent heads on the target's last state; head j drafts the token at depth j.

Head j of the state at position t predicts token t + 1 + j (Cai et al. 2024, arXiv:2401.10774). The
target itself predicts token t + 1, which is committed before the heads draft. No head reads what
another one drafted, so all are computed once a round and there is nothing to cache. Departures from
the published code: biases start at zero, so that a fresh head is exactly the target's next-token
predictor; the layers of a head are distinct modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from drafters.base import TrainedDrafter
from drafters.layers import Shared
from drafters.output_head import ResidualLayers, copy_head, head_of, own_heads
from drafters.round import Budget, DraftState
from drafters.stored import read_stored, restore, save_tensors, without
from drafters.text import Text
from target.model import Target
from target.outputs import TargetOutputs
from trainer.errors import UserError, require
from trainer.logits import OutputHead
from trainer.shift import at_index


@dataclass
class MedusaSettings:
    """Settings of Medusa heads.

    `own_head`: every head has an output matrix of its own, which starts as the target's and is
    trained; without it they share the target's, frozen. `tie_layers`: one module for all layers of
    a head, like a slip in the published code.
    """

    num_heads: int = 5
    num_layers: int = 1
    own_head: bool = True
    tie_layers: bool = False

    def __post_init__(self) -> None:
        require(self.num_heads >= 1, "method.num_heads", "be >= 1", self.num_heads)
        require(self.num_layers >= 0, "method.num_layers", "be >= 0", self.num_layers)
        if self.num_layers == 0 and not self.own_head:
            raise UserError(
                "method.num_layers must be >= 1 where method.own_head is false, got 0: nothing "
                "would be left to train"
            )


class MedusaDrafter(TrainedDrafter):
    """A set of Medusa heads."""

    kind = "medusa"
    one_pass = True
    target_layers = ("final_norm",)

    def __init__(self, settings: MedusaSettings, target: Target, kept: torch.Tensor | None = None):
        """`kept` [Vd] int64: target ids that the own matrices score, ascending; None: all."""
        super().__init__()
        self.settings, self.max_depth = settings, settings.num_heads
        self.vocab_size, self.fingerprint = target.vocab_size, target.fingerprint
        self.tokenizer = target.tokenizer
        self.shared = Shared(target)
        shape = (target.hidden_size, settings.num_layers, settings.tie_layers)
        self.blocks = nn.ModuleList(ResidualLayers(*shape) for _ in range(settings.num_heads))
        if settings.own_head:
            biased = target.head.bias is not None
            self.lm_heads = own_heads(target, settings.num_heads, biased, kept)
        self.register_buffer("kept", kept)
        self.kept: torch.Tensor | None
        self.to(target.device)

    @classmethod
    def build(
        cls, target: Target, settings: MedusaSettings, kept: torch.Tensor | None = None
    ) -> MedusaDrafter:
        """Fresh heads: every head is the target's predictor of the next token."""
        drafter = cls(settings, target, kept)
        if settings.own_head:
            copy_head(target, drafter.lm_heads, kept)
        return drafter

    def fresh(self) -> MedusaDrafter:
        return MedusaDrafter.build(self.shared.target, self.settings, self.kept).eval()

    # --- the network -----------------------------------------------------------------------------

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        assert outputs is not None
        hidden, length = outputs.hidden["final_norm"], text.ids.shape[1]
        for number in range(1, depth + 1):
            made = self.blocks[number - 1](hidden[:, : max(length - number, 0)])
            if text.columns is not None:
                made = torch.where(text.columns[:, : made.shape[1], None], made, 0.0)
            yield at_index(made, number, length)

    def drafting_parameters(self, depth: int | None = None) -> list[nn.Parameter]:
        heads = [self.blocks, *([self.lm_heads] if self.settings.own_head else [])]
        return [p for modules in heads for p in modules[:depth].parameters()]

    def network(self) -> dict[str, object]:
        own = dataclasses.asdict(self.settings)
        return own if self.settings.num_layers > 1 else without(own, "tie_layers")

    def output_layers(self) -> list[nn.Linear]:
        return list(self.lm_heads) if self.settings.own_head else []  # type: ignore[arg-type]

    def output_head(self, depth: int = 1) -> OutputHead:
        heads = self.lm_heads if self.settings.own_head else None
        return head_of(self.shared.target, heads, depth, self.kept)

    # --- proposing -------------------------------------------------------------------------------

    @property
    def has_slots(self) -> bool:
        return True

    def slot_logits(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Compute all heads of this round on the last position whose target state is known, logits
        [B, K, vocab_size]."""
        assert state.outputs is not None
        rows = torch.arange(len(state.lengths), device=state.ids.device)
        last = state.outputs.hidden["final_norm"][rows, state.lengths - 2]
        states = [block(last) for block in self.blocks[: budget.max_tokens]]
        if self.settings.own_head:
            return torch.stack([self.project(one, depth) for depth, one in enumerate(states, 1)], 1)
        return self.project(torch.stack(states, 1), 1)  # one pass over the shared matrix

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        self._logits = self.slot_logits(state, budget)
        return self._logits[:, 0]

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        return self._logits[:, depth].unsqueeze(1).expand(-1, tokens.shape[1], -1)

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> Mapping[str, object]:
        return {"settings": dataclasses.asdict(self.settings)}

    def save_weights(self, folder: Path) -> None:
        save_tensors(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> MedusaDrafter:
        """Load a folder of this project; UserError where the heads do not fit the target."""
        about, tensors = read_stored(Path(folder), target)
        drafter = cls(MedusaSettings(**about["settings"]), target, tensors.get("kept"))
        restore(drafter, Path(folder), about, tensors)
        return drafter.eval()
