"""A head on a frozen drafter that predicts whether the target will accept a drafted token.

Huang, Guo and Wang 2024 (SpecDec++, arXiv:2405.19715), Sec. 3.2: residual blocks and two logits on
the drafter's state at the drafted token itself, after the drafter has consumed it. Departure: the
blocks are independent; the published code repeats one object, `shared_blocks`. The state is the one
that the drafter's own output head reads, final-normed in Llama-like models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from drafters.base import TrainedDrafter
from drafters.medusa import ResidualLayers
from trainer.config import UserError

SETTINGS, WEIGHTS = "acceptance_head.json", "acceptance_head.safetensors"
ACCEPT = 1  # the index of the logit; 0: reject


@dataclass
class AcceptanceSettings:
    """`reject_weight`: of the loss it was trained on, which its probabilities depend on;
    `temperature`, `top_k`, `top_p`: of the target and the drafter in its labels; `K_min`, `K_max`:
    tokens of a round whose length it decides; `draft`: hash of the drafter's weights; `tuned`:
    settings chosen on held-out text, by temperature."""

    width: int
    num_layers: int = 3
    shared_blocks: bool = False
    reject_weight: float = 6.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    K_min: int = 2
    K_max: int = 20
    draft: str = ""
    tuned: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


class AcceptanceHead(nn.Module):
    """In float32 whatever the drafter's dtype is."""

    def __init__(self, settings: AcceptanceSettings):
        super().__init__()
        self.settings = settings
        self.blocks = ResidualLayers(
            settings.width, settings.num_layers, tie=settings.shared_blocks
        )
        self.out = nn.Linear(settings.width, 2)

    @classmethod
    def build(cls, drafter: TrainedDrafter, **settings: Any) -> AcceptanceHead:
        """A fresh one for this drafter, in its shape."""
        check_exposed(drafter)
        return cls(
            AcceptanceSettings(width_of(drafter), draft=weights_hash(drafter), **settings)
        ).to(next(drafter.parameters()).device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., width] -> logits [..., 2] float32 of rejection and acceptance"""
        return self.out(self.blocks(hidden.float())).float()

    def probability(self, hidden: torch.Tensor, calibrated: bool = False) -> torch.Tensor:
        """hidden [..., width] -> [...] float32, that the token is accepted. As trained it is too
        low on purpose where `reject_weight` > 1; `calibrated` inverts that."""
        f = self(hidden).softmax(-1)[..., ACCEPT]
        return calibrate(f, self.settings.reject_weight) if calibrated else f

    def save(self, folder: Path) -> None:
        # copies: a shared block is written once per name
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS)
        (folder / SETTINGS).write_text(json.dumps(dataclasses.asdict(self.settings), indent=1))

    @classmethod
    def from_pretrained(cls, folder: Path) -> AcceptanceHead:
        head = cls(AcceptanceSettings(**json.loads((folder / SETTINGS).read_text())))
        head.load_state_dict(load_file(folder / WEIGHTS))
        return head.eval()


def calibrate(f: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """The optimum of the weighted loss at a true acceptance a is f = a / (a + w (1 - a)); back:
    a = w f / (1 - f + w f)."""
    return reject_weight * f / (1 - f + reject_weight * f)


def width_of(drafter: TrainedDrafter) -> int:
    """Of its states."""
    return drafter.output_head(1).weight.shape[1]


def check_exposed(drafter: Any) -> None:
    if not getattr(drafter, "exposes_hidden", False):
        kind = getattr(drafter, "kind", type(drafter).__name__)
        raise UserError(
            f"CapabilityError: a drafter of kind {kind!r} exposes no state at what it drafts, so "
            "no acceptance head can judge them: name a causal LM or an EAGLE head"
        )


def weights_hash(drafter: TrainedDrafter) -> str:
    """Of what drafts: a head trained on other weights reads states it has never seen."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.draft_weights().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().double().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def attach(drafter: TrainedDrafter, folder: Path, key: str) -> None:
    """The head that lies beside the drafter in `folder`, if there is one. `key`: how errors call
    the setting that named the folder."""
    if not (folder / SETTINGS).exists():
        return
    check_exposed(drafter)
    try:
        head = AcceptanceHead.from_pretrained(folder)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{key}: the acceptance head in {folder} is damaged ({reason})") from error
    width, own = width_of(drafter), head.settings
    if own.width != width:
        raise UserError(
            f"CompatibilityError: {key}: the acceptance head in {folder} reads states {own.width} "
            f"wide, the drafter's are {width}"
        )
    found = weights_hash(drafter)
    if own.draft != found:
        raise UserError(
            f"CompatibilityError: {key}: the acceptance head in {folder} was trained for another "
            f"drafter (weights {own.draft}, these are {found}): train it again with "
            f"recipe=specdecpp, or remove {SETTINGS}"
        )
    drafter.acceptance = head.to(next(drafter.parameters()).device)


def adaptive(head: AcceptanceHead | None, K: int) -> dict[str, Any]:
    """How an engine that knows a confidence threshold alone is told to draft: as many tokens as the
    head may, up to the threshold that verifies as often as the head does, at the lowest temperature
    it was tuned at. Without a tuned head: K tokens."""
    if head is None or not head.settings.tuned:
        return {"num_assistant_tokens": K, "acceptance": head}
    tuned = head.settings.tuned
    lowest = tuned[min(tuned, key=float)]
    return {
        "num_assistant_tokens": lowest["head"][1],
        "confidence_threshold": lowest["matching_confidence"],
        "acceptance": head,
    }


def adaptive_note(head: AcceptanceHead | None) -> str:
    """The same in words, for the model card."""
    how = adaptive(head, 0)
    if "confidence_threshold" not in how:
        return ""
    return (
        f"Under transformers (generation_config.json) it is up to {how['num_assistant_tokens']} "
        f"tokens, fewer after one less likely than {how['confidence_threshold']:g}: that verifies "
        f"as often as its acceptance head ({WEIGHTS}), which only draftsmith reads."
    )
