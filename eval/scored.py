"""What a drafter's distributions say of text that the target has written: whether a verifier would
accept its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from target.sampling import Sampling, warp
from trainer.logits import places


@dataclass(frozen=True)
class Scored:
    """What a drafter's distributions at some positions give, [B, n] each."""

    weight: torch.Tensor  # float64, probability that the trace's token is accepted
    overlap: torch.Tensor  # float64, sum_v min(p_v, q_v)
    confidence: torch.Tensor  # of the likeliest token
    own: torch.Tensor  # probability of the trace's token
    match: torch.Tensor  # bool, the likeliest token is the target's


class Found:
    """`Scored` of all positions [B, N+K] at each depth; `match` of the first one."""

    def __init__(self, shape: torch.Size, depths: int, device: torch.device):
        self.weight, self.overlap = torch.zeros(
            2, depths, *shape, dtype=torch.double, device=device
        )
        self.confidence, self.own = torch.zeros(2, depths, *shape, device=device)
        self.match = torch.zeros(shape, dtype=torch.bool, device=device)

    def add(self, j: int, span: slice, scored: Scored) -> None:
        for name in ("weight", "overlap", "confidence", "own"):
            getattr(self, name)[j, :, span] = getattr(scored, name)
        if j == 0:
            self.match[:, span] = scored.match


def score(
    logits: torch.Tensor,
    kept: torch.Tensor | None,
    tokens: torch.Tensor,
    p: torch.Tensor | None,
    sampling: Sampling,
) -> Scored:
    """Acceptance of the trace's tokens [B, n] under draft logits [B, n, W] of the ids `kept` [W],
    None: of all.

    `p`: the target's distributions [B, n, V], None at T=0, where they are the traces' own tokens.
    """
    best, place, known = logits.argmax(-1), tokens, None
    if kept is not None:
        best, (place, known) = kept[best], places(kept, tokens)

    def of_token(q: torch.Tensor) -> torch.Tensor:
        own = q.gather(-1, place.unsqueeze(-1))[..., 0]
        return own if known is None else own * known

    match = best == (tokens if p is None else p.argmax(-1))
    if sampling.temperature == 0:
        plain = logits.softmax(-1)
        q = None if p is None else warp(logits, sampling)
    else:
        plain = q = warp(logits, sampling)
    if p is None:
        weight = match if q is None else of_token(q)
        common = weight
    else:
        assert q is not None
        p_drawn = p.gather(-1, tokens.unsqueeze(-1))[..., 0].double()
        # 0/0 only where the row holds no text of the target (padding)
        weight = (of_token(q).double() / p_drawn).clamp(max=1.0).nan_to_num(0.0)
        common = torch.minimum(p[..., : q.shape[-1]] if kept is None else p[..., kept], q).sum(-1)
    return Scored(weight.double(), common.double(), plain.amax(-1), of_token(plain), match)
