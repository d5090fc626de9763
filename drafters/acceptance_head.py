"""A head on a frozen drafter that predicts whether the target will accept a drafted token.

Huang, Guo and Wang 2024 (SpecDec++, arXiv:2405.19715), Sec. 3.2: residual blocks and two logits on
the drafter's state at the drafted token itself, after the drafter has read it. Departure: the
blocks are independent and start at zero; the published code repeats one object, `shared_blocks`,
that starts at random. The state is the one that the drafter's own output head reads, final-normed
in Llama-like models.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafters.output_head import ResidualLayers
from trainer.files import load_json

SETTINGS, WEIGHTS = "acceptance_head.json", "acceptance_head.safetensors"
ACCEPT = 1  # the index of the logit; 0: reject


@dataclass
class AcceptanceSettings:
    """Settings of an acceptance head, stored as acceptance_head.json.

    `reject_weight`: weight of rejections in its loss, on which its probabilities depend;
    `temperature`, `top_k`, `top_p`: sampling of target and drafter in its labels; `K_min`, `K_max`:
    smallest and largest number of tokens in a round whose length it decides; `draft`: hash of the
    drafter's weights; `tuned`: what was chosen on held-out text, by temperature: [policy, K] of
    each family of policies, and `matching_confidence`.
    """

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
    """Residual blocks and two logits, in float32 whatever the dtype of the drafter is."""

    def __init__(self, settings: AcceptanceSettings):
        super().__init__()
        self.settings = settings
        self.blocks = ResidualLayers(
            settings.width, settings.num_layers, tie=settings.shared_blocks
        )
        self.out = nn.Linear(settings.width, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score hidden [..., width]: logits [..., 2] float32 of rejection and acceptance."""
        return self.out(self.blocks(hidden.float())).float()

    def probability(self, hidden: torch.Tensor, calibrated: bool = False) -> torch.Tensor:
        """Probability [...] float32 that the token of hidden [..., width] is accepted.

        Where `reject_weight` > 1 it is too low on purpose; `calibrated` corrects that.
        """
        f = self(hidden).softmax(-1)[..., ACCEPT]
        return calibrate(f, self.settings.reject_weight) if calibrated else f

    def save(self, folder: Path) -> None:
        """Write weights and settings to `folder`."""
        # copies: a shared block is written once per name
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS)
        (folder / SETTINGS).write_text(json.dumps(dataclasses.asdict(self.settings), indent=1))

    @classmethod
    def from_pretrained(cls, folder: Path) -> AcceptanceHead:
        """Read what `save` wrote."""
        head = cls(AcceptanceSettings(**load_json(folder / SETTINGS)))
        head.load_state_dict(load_file(folder / WEIGHTS))
        return head.eval()


def calibrate(f: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """The probability of acceptance a behind a head's output f, elementwise.

    The optimum of the weighted loss is f = a / (a + w (1 - a)), so that a = w f / (1 - f + w f).
    """
    return reject_weight * f / (1 - f + reject_weight * f)


@dataclass(frozen=True)
class DraftLength:
    """Draft length for an engine that knows no rule but a confidence threshold (None: no rule)."""

    num_assistant_tokens: int
    confidence_threshold: float | None = None


def draft_length(head: AcceptanceHead | None, K: int) -> DraftLength:
    """The draft length that imitates the head at the lowest temperature it was tuned at.

    That is the largest number of tokens that the head drafts, and the threshold that verifies as
    often as the head does. Without a tuned head: K tokens.
    """
    if head is None or not head.settings.tuned:
        return DraftLength(K)
    tuned = head.settings.tuned
    lowest = tuned[min(tuned, key=float)]
    return DraftLength(lowest["head"][1], lowest["matching_confidence"])


def adaptive_note(head: AcceptanceHead | None) -> str:
    """The sentence of the model card about `draft_length`, "" without a tuned head."""
    how = draft_length(head, 0)
    if how.confidence_threshold is None:
        return ""
    return (
        f"Under transformers (generation_config.json) it is up to {how.num_assistant_tokens} "
        f"tokens, fewer after one less likely than {how.confidence_threshold:g}: that verifies "
        f"as often as its acceptance head ({WEIGHTS}), which only draftsmith reads."
    )
