"""Output heads, and what of their logits a loss reads; how many positions are computed at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.device import free_bytes
from trainer.errors import require
from trainer.fused import fused
from trainer.losses import wide

# Size of one [chunk, V] tensor, 64 MiB in float32. A divergence holds up to a dozen of them.
CHUNK_ELEMENTS = 2**24
# On a GPU a chunk reads and writes the gradient of the whole head once, so that few rows a chunk
# are bound by memory; 3,533 rows of 151,936 tokens are not.
MOST_ELEMENTS = 2**29


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """The number of positions whose distributions are computed at once, at least one.

    A dozen tensors [rows, vocab_size] in float32 take at most three quarters of the free memory.
    Their size is a power of two, so that a little more or less memory leaves the order of sums
    alone.
    """
    elements, free = CHUNK_ELEMENTS, free_bytes(device)
    if free is not None:
        fits = 1 << (free // 64).bit_length() - 1
        elements = max(elements, min(fits, MOST_ELEMENTS))
    return max(1, elements // vocab_size)


@dataclass
class OutputHead:
    """Maps states to logits: transform(states @ weight.T + bias), over the token ids `kept`.

    Computed in the dtype of the weight, or in that of autocast. `transform` works elementwise, is
    differentiable and has no parameters that train: soft-capping, a logit scale.

    With `extra` states are d + r wide, and their last r columns times extra.T are added before
    `transform`: a correction of low rank, such as one by the token before.
    """

    weight: Tensor  # [W, d] float
    bias: Tensor | None = None  # [W] float
    kept: Tensor | None = None  # [W] int64 ascending, the target ids of a reduced draft vocabulary
    transform: Callable[[Tensor], Tensor] | None = None
    vocab_size: int | None = None  # true vocabulary of a padded head; not together with `kept`
    blocked: Tensor | None = None  # `weight` again, see `blocked_linear`; for logits without grad
    extra: Tensor | None = None  # [W or vocab_size, r] float
    target_width: int = field(init=False)  # target ids that logits in chunks go over, at least

    def __post_init__(self) -> None:
        width = self.weight.shape[0]
        self.target_width = self.vocab_size or width
        if self.vocab_size is not None:
            good = self.kept is None and 0 < self.vocab_size <= width
            rule = f"lie in 1..{width} and stand without a reduced vocabulary"
            require(good, "vocab_size", rule, self.vocab_size)
        if self.blocked is not None:
            good = self.blocked.shape == self.weight.shape
            rule = f"have the shape of the weight, {tuple(self.weight.shape)}"
            require(good, "blocked", rule, tuple(self.blocked.shape))
        if self.extra is not None:
            good = self.extra.ndim == 2 and len(self.extra) == self.target_width
            require(good, "extra", f"have {self.target_width} rows", tuple(self.extra.shape))
        if self.kept is not None:
            good = self.kept.shape == (width,) and bool((self.kept.diff() > 0).all())
            rule = f"be {width} ascending ids, one for each row of the head"
            require(good, "kept", rule, tuple(self.kept.shape))
            self.target_width = int(self.kept[-1]) + 1

    def logits(self, states: Tensor) -> Tensor:
        """states: [..., d or d + r] float -> [..., W or vocab_size], all at once and through
        autograd."""
        rows, more = self.parted(states)
        return self.finished(self.base(rows), more)

    def parted(self, states: Tensor) -> Sequence[Tensor]:
        """The columns of states [..., d + r] that the weight reads, and those that `extra` does."""
        rank = 0 if self.extra is None else self.extra.shape[1]
        return states.split([self.weight.shape[1], rank], -1)

    def base(self, states: Tensor) -> Tensor:
        """states: [..., d] float -> [..., W or vocab_size] before `extra` and `transform`."""
        if self.blocked is not None and not torch.is_grad_enabled():
            logits = blocked_linear(states.to(self.weight.dtype), self.blocked, self.bias)
            return logits[..., : self.vocab_size]
        bias = None if self.bias is None else self.bias[: self.vocab_size]
        return F.linear(states.to(self.weight.dtype), self.weight[: self.vocab_size], bias)

    def finished(self, base: Tensor, more: Tensor | None = None) -> Tensor:
        """The logits [..., W or vocab_size] of `base`, and with `extra` of the further columns
        `more` [..., r] of the states."""
        if self.extra is not None:
            assert more is not None, "states have columns for `extra`"
            base = base + F.linear(more.to(self.extra.dtype), self.extra)
        return base if self.transform is None else self.transform(base)

    def plain(self) -> OutputHead:
        """The head without `extra`."""
        out = copy.copy(self)
        out.extra = None
        return out

    def teacher_logits(self, states: Tensor) -> Tensor:
        """`logits` in the dtype of the weight, as the target serves them, under autocast too."""
        with torch.autocast(states.device.type, enabled=False):
            return self.logits(states)

    def rows(self, kept: Tensor) -> OutputHead:
        """A copy of the rows of the ids `kept` [W] int64, ascending: the head of a vocabulary
        reduced to them."""
        out = copy.copy(self)  # `replace` would check `kept`, for which the host waits
        out.weight = self.weight.index_select(0, kept)
        out.bias = None if self.bias is None else self.bias.index_select(0, kept)
        out.extra = None if self.extra is None else self.extra.index_select(0, kept)
        out.kept, out.vocab_size, out.blocked = kept, None, None
        return out


def blocked_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """states [..., d] times a weight [W, d] in oneDNN's blocked layout -> [..., W], float32 on a
    CPU and without gradient."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


@dataclass
class LogitsSummary:
    """Of the target's logits [..., V], what a divergence over a reduced vocabulary needs beside the
    logits of the ids that it keeps."""

    log_z: Tensor  # [...] float32 (float64 stays), log-sum-exp over V
    first: Tensor  # [...] int64, the likeliest id of all

    @classmethod
    @torch.no_grad()
    def of(cls, head: OutputHead, states: Tensor) -> LogitsSummary:
        """states: [..., d] float -> [...], in chunks."""
        shape, step = states.shape[:-1], chunk_rows(states.device, head.target_width)
        chunks = states.reshape(-1, states.shape[-1]).split(step)
        parts = zip(*(_summarise(head.logits(rows)) for rows in chunks), strict=True)
        return cls(*(torch.cat(part).view(shape) for part in parts))


@dataclass
class ReducedLogits:
    """The target's logits [n, V] as a divergence over a reduced vocabulary reads them: several
    depths that read the same position go through V once."""

    logits: Tensor  # [n, W] of the ids kept
    log_z: Tensor  # [n] float32 (float64 stays), log-sum-exp over V
    first: Tensor  # [n] int64, the likeliest id of all

    @classmethod
    def of(cls, logits: Tensor, kept: Tensor) -> ReducedLogits:
        """logits: [n, V] float; kept: [W] int64."""
        return cls(*fused(_reduce, logits.shape[-1])(logits, kept))

    @classmethod
    def joined(cls, parts: Sequence[ReducedLogits]) -> ReducedLogits:
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def __getitem__(self, at: Tensor) -> ReducedLogits:
        return ReducedLogits(self.logits[at], self.log_z[at], self.first[at])


def _reduce(logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return logits.index_select(-1, kept), *_summarise(logits)


def _summarise(logits: Tensor) -> tuple[Tensor, Tensor]:
    return wide(logits).logsumexp(-1), logits.argmax(-1)


TeacherLogits = Tensor | ReducedLogits  # the former over all of V


def places(kept: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the ids [...] stand among those kept [W] ascending, and whether they do."""
    place = torch.searchsorted(kept, ids.contiguous()).clamp_max(len(kept) - 1)
    return place, kept[place] == ids
