"""A published head as its files hold it, before a drafter of this project is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig

from drafters.formats.files import Tensors
from target.outputs import LayerId


@dataclass
class PublishedHead:
    """A head as read from a folder, under names of this reader.

    Tensors of EAGLE: those of the flat layout, `layer.` before the layer's. Of Medusa:
    `block.<head>.<layer>.weight|bias` and `rows.<head>`, or `rows` for a shared matrix. Those of
    Hydra and DFlash have the published names. `captures`: ids as in `target.model`, in the order in
    which an engine joins the states.
    """

    kind: str  # "medusa" | "hydra" | "eagle" | "eagle3" | "dflash"
    tensors: Tensors
    captures: list[LayerId]
    vocab_size: int
    layer: LlamaConfig | None = None  # of EAGLE and DFlash
    num_heads: int = 0  # of Medusa and Hydra, as the next
    num_layers: int = 0
    flags: dict[str, bool] = field(default_factory=dict)  # of EAGLE-3, Hydra and DFlash
    block_size: int = 0  # of DFlash, as the next
    mask_token: int = 0
    folder: Path = Path()

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Target ids of a reduced draft vocabulary, [Vd] int64; None for the whole vocabulary."""
        d2t = self.tensors.get("d2t")
        return None if d2t is None else d2t + torch.arange(len(d2t))
