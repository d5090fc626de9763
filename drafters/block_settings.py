"""The network of a block drafter."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.block_heads import CORRECTIONS
from target.outputs import LayerId
from trainer.errors import require

CAPTURES = 5  # of the published drafters


@dataclass
class BlockSettings:
    """Settings of a block drafter.

    `captures`: the target's layers that it reads, ids as in `target.model`; `block_size`: slots of
    a block, the anchor's included; `mask_token`: the id that stands for a token to predict;
    `causal`, `from_anchor`: see `drafters.block`; `own_head`: an output matrix of its own, else the
    target's; `correction`, of rank `correction_rank`, with a GRU of width `correction_width`, and
    `confidence`: see `drafters.block_heads`.
    """

    captures: list[LayerId]
    mask_token: int
    block_size: int = 8
    causal: bool = False
    from_anchor: bool = False
    own_head: bool = False
    correction: str = "none"
    correction_rank: int = 256
    correction_width: int = 1024
    confidence: bool = False

    def __post_init__(self) -> None:
        require(self.block_size >= 2, "method.block_size", "be >= 2", self.block_size)
        rule = f"be one of {', '.join(CORRECTIONS)}"
        require(self.correction in CORRECTIONS, "method.correction", rule, self.correction)
        for name in ("correction_rank", "correction_width"):
            require(getattr(self, name) >= 1, f"method.{name}", "be >= 1", getattr(self, name))

    @property
    def max_depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - 1 + self.from_anchor


def default_captures(num_layers: int) -> list[LayerId]:
    """Five layers from the second to the third from the end, at equal distances; all but the last
    where the target has fewer than eight."""
    if num_layers < CAPTURES + 3:
        return list(range(max(1, num_layers - 1)))
    return [round(1 + i * (num_layers - 4) / (CAPTURES - 1)) for i in range(CAPTURES)]
