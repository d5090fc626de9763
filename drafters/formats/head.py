"""A published head as its files hold it, before a drafter of this project is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig

from drafters.formats.files import Tensors
from target.outputs import LayerId
from trainer.errors import UserError


@dataclass
class PublishedHead:
    """A head as read from a folder, under names of this reader.

    Tensors of EAGLE: those of the flat layout, `layer.` before the layer's. Of Medusa:
    `block.<head>.<layer>.weight|bias` and `rows.<head>`, or `rows` for a shared matrix. Those of
    Hydra and block drafters have the published names. `captures`: ids as in `target.model`, in the
    order in which an engine joins the states.
    """

    kind: str  # "medusa" | "hydra" | "eagle" | "eagle3" | "dflash" | "dspark"
    tensors: Tensors
    captures: list[LayerId]
    vocab_size: int  # 0: the file does not say
    layer: LlamaConfig | None = None  # of EAGLE and block drafters
    num_heads: int = 0  # of Medusa and Hydra, as the next
    num_layers: int = 0
    flags: dict[str, bool] = field(default_factory=dict)  # of EAGLE-3, Hydra and block drafters
    block_size: int = 0  # of block drafters, as the next two
    mask_token: int = 0
    correction: str = "none"
    folder: Path = Path()

    @property
    def has_rows(self) -> bool:
        """Whether it has an output matrix of its own; else an engine projects by the target's."""
        blocks = self.kind in ("dflash", "dspark")
        return self.kind != "eagle" and (not blocks or "lm_head.weight" in self.tensors)

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Target ids of a reduced draft vocabulary, [Vd] int64; None for the whole vocabulary."""
        d2t = self.tensors.get("d2t")
        return None if d2t is None else d2t + torch.arange(len(d2t))


def check_vocabulary(folder: Path, head: PublishedHead) -> None:
    """Raise UserError where the maps of a reduced vocabulary contradict each other."""
    ids, t2d = head.target_ids, head.tensors.get("t2d")
    if ids is None:
        return
    inside = int(ids.min()) >= 0 and int(ids.max()) < head.vocab_size
    if not inside or len(ids.unique()) < len(ids):
        raise UserError(
            f"{folder}: tensor 'd2t' must lead from the rows' numbers to distinct ids below "
            f"{head.vocab_size}"
        )
    said = torch.zeros(head.vocab_size, dtype=torch.bool)
    said[ids] = True
    if t2d is not None and not torch.equal(said, t2d):
        raise UserError(f"{folder}: tensors 't2d' and 'd2t' name different ids")
