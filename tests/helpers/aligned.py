"""The supervised positions of a batch, gathered by another way than the losses take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.errors import UserError, require
from trainer.shift import supervised


@dataclass
class Aligned:
    """The supervised positions of a batch; N may be 0."""

    draft: Tensor  # [N, V] float, carries the gradient
    teacher: Tensor | None  # [N, V] float, detached
    labels: Tensor  # [N] int64, the token that the logits score
    rows: Tensor  # [N] int64 in 0..B-1, the sequence each position belongs to


def align(
    input_ids: Tensor,
    loss_mask: Tensor,
    draft_logits: Tensor,
    teacher_logits: Tensor | None,
    vocab_size: int | None = None,
) -> Aligned:
    """Gather the supervised positions, so that only these are computed.

    input_ids: [B, L] int64; loss_mask: [B, L] bool over tokens; draft_logits: [B, L, V'] and
    teacher_logits: [B, L, V''] float. Heads padded beyond `vocab_size` are cut to it before any
    softmax, so pad rows hold no probability. Selecting by mask costs one host synchronisation.
    """
    widths = [t.shape[-1] for t in (draft_logits, teacher_logits) if t is not None]
    if vocab_size is None:
        vocab_size = widths[0]
        if widths[-1] != vocab_size:
            raise UserError(
                f"the draft's logits have width {widths[0]}, the target's {widths[-1]}: "
                "pass the true vocab_size if one is padded, else the vocabularies differ"
            )
    require(
        0 < vocab_size <= min(widths),
        "vocab_size",
        f"lie in 1..{min(widths)}, the narrower head",
        vocab_size,
    )
    rows, index = supervised(loss_mask).nonzero(as_tuple=True)
    return Aligned(
        draft=draft_logits[rows, index, :vocab_size],
        teacher=None
        if teacher_logits is None
        else teacher_logits.detach()[rows, index, :vocab_size],
        labels=input_ids[rows, index + 1],
        rows=rows,
    )
