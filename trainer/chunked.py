"""Output head and divergence in chunks of positions: the full logits are never materialised.

Logits [N, V] and the other tensors of a softmax take most of the memory of distillation. Here each
chunk is differentiated at once, added to the gradients of states and head, and freed. Values and
gradients are those of the divergence on all positions together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn import functional as F

from trainer.config import require
from trainer.divergence import Divergence, complain
from trainer.losses import both_log_probs, ce_hard, warm, wide

# Size of one [chunk, V] tensor, 64 MiB in float32. A divergence holds up to a dozen of them.
CHUNK_ELEMENTS = 2**24


@dataclass
class OutputHead:
    """Maps states to logits: transform(states @ weight.T + bias), over the token ids `kept`.

    Computed in the dtype of the weight, or in that of autocast. `transform` works elementwise, is
    differentiable and has no parameters that train: soft-capping, a logit scale.
    """

    weight: Tensor  # [W, d] float
    bias: Tensor | None = None  # [W] float
    kept: Tensor | None = None  # [W] int64 ascending, the target ids of a reduced draft vocabulary
    transform: Callable[[Tensor], Tensor] | None = None
    vocab_size: int | None = None  # true vocabulary of a padded head; not together with `kept`
    blocked: Tensor | None = None  # `weight` again, see `blocked_linear`; for logits without grad

    def __post_init__(self) -> None:
        width = self.weight.shape[0]
        if self.vocab_size is not None:
            good = self.kept is None and 0 < self.vocab_size <= width
            rule = f"lie in 1..{width} and stand without a reduced vocabulary"
            require(good, "vocab_size", rule, self.vocab_size)
        if self.blocked is not None:
            good = self.kept is None and self.blocked.shape == self.weight.shape
            rule = f"have the shape of the weight, {tuple(self.weight.shape)}"
            require(good, "blocked", rule, tuple(self.blocked.shape))
        if self.kept is not None:
            good = self.kept.shape == (width,) and bool((self.kept.diff() > 0).all())
            rule = f"be {width} ascending ids, one for each row of the head"
            require(good, "kept", rule, tuple(self.kept.shape))

    def logits(self, states: Tensor) -> Tensor:
        """states: [..., d] float -> [..., W or vocab_size], all at once and through autograd."""
        if self.blocked is not None and not torch.is_grad_enabled():
            logits = blocked_linear(states.to(self.weight.dtype), self.blocked, self.bias)
            logits = logits[..., : self.vocab_size]
        else:
            bias = None if self.bias is None else self.bias[: self.vocab_size]
            logits = F.linear(states.to(self.weight.dtype), self.weight[: self.vocab_size], bias)
        return logits if self.transform is None else self.transform(logits)


def blocked_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """states [..., d] times a weight [W, d] in oneDNN's blocked layout -> [..., W], float32 on a
    CPU and without gradient."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


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
        return cls(logits.index_select(-1, kept), wide(logits).logsumexp(-1), logits.argmax(-1))

    @classmethod
    def joined(cls, parts: Sequence[ReducedLogits]) -> ReducedLogits:
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def __getitem__(self, at: Tensor) -> ReducedLogits:
        return ReducedLogits(self.logits[at], self.log_z[at], self.first[at])


TeacherLogits = Tensor | ReducedLogits  # the former over all of V


@dataclass
class ChunkedLoss:
    """What `chunked_divergence` returns; all but the total is detached."""

    total: Tensor  # [] float, carries the gradient: sum_n weights[n] * values[n]
    values: Tensor  # [N] float32 (float64 stays), 0 where not counted
    overlap: Tensor  # [N] float, sum_v min(p, q) at temperature 1, p over the whole vocabulary
    match: Tensor  # [N] bool, the drafter's first choice is the target's (without one: the label)
    counted: Tensor  # [N] bool, False where a reduced vocabulary lacks the token to learn


def chunked_divergence(
    divergence: Divergence,
    states: Tensor,
    head: OutputHead,
    teacher: Callable[[slice], TeacherLogits] | None,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    chunk_positions: int | None = None,
) -> ChunkedLoss:
    """`divergence` of head.logits(states), chunk by chunk, with the same errors.

    states: [N, d] float; labels: [N] int64 target ids; weights: [N] float, no gradient, default 1.
    teacher(span) gives the target's logits [n, V] of states[span], or what head.kept needs of them;
    it is called without gradient, once a chunk, for tvd_pp twice (its moments are those of all
    positions). Only ce_hard needs no teacher; all of p is then on the label.

    With head.kept, p is restricted to these ids and renormalised for the divergence. A position
    whose first choice of p (ce_hard: whose label) is not among them has value and gradient 0.

    The gradients are complete when this returns; backward only scales them, in place, so it can run
    once. Costs a few host syncs a chunk.
    """
    name = divergence.name
    require(teacher is not None or name == "ce_hard", "teacher", f"be given for {name}", teacher)
    # Casts once, for all chunks, the weights that autocast would cast in each.
    dtype, device = head.weight.dtype, head.weight.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    weight = head.weight.detach()[: head.vocab_size].to(dtype)
    bias = None if head.bias is None else head.bias.detach()[: head.vocab_size].to(dtype)
    plain = replace(head, weight=weight, bias=bias, vocab_size=None)
    if chunk_positions is None:
        widest = len(weight) if head.kept is None else int(head.kept[-1]) + 1  # the target's
        chunk_positions = max(1, CHUNK_ELEMENTS // widest)
    require(chunk_positions >= 1, "chunk_positions", "be >= 1", chunk_positions)
    starts = range(0, len(labels), chunk_positions)
    spans = [slice(i, min(i + chunk_positions, len(labels))) for i in starts]
    weights = torch.ones_like(labels) if weights is None else weights.detach()
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    job = _Job(divergence, plain, teacher, labels, weights, spans)
    outputs = _Chunked.apply(states, head.weight, head.bias, job, torch.is_grad_enabled())
    return ChunkedLoss(*outputs)


@dataclass
class _Job:
    divergence: Divergence
    head: OutputHead  # as computed with: detached, cast, without padding rows
    teacher: Callable[[slice], TeacherLogits] | None
    labels: Tensor
    weights: Tensor
    spans: list[slice]

    def read(self, states: Tensor, span: slice) -> tuple[Tensor, Tensor, TeacherLogits | None]:
        """Draft logits [n, W] before and after `transform`, target logits [n, V] or reduced."""
        rows = states[span].to(self.head.weight.dtype)
        leaf = F.linear(rows, self.head.weight, self.head.bias)
        with torch.no_grad():
            target = None if self.teacher is None else self.teacher(span)
            if self.head.kept is not None and isinstance(target, Tensor):
                target = ReducedLogits.of(target, self.head.kept)
        if target is not None:
            shape = (target if isinstance(target, Tensor) else target.logits).shape
            rule = f"have the shape of the draft's, {tuple(leaf.shape)}"
            require(shape == leaf.shape, "logits of the target", rule, tuple(shape))
        leaf.requires_grad_(torch.is_grad_enabled())
        return leaf, leaf if self.head.transform is None else self.head.transform(leaf), target

    def select(
        self, draft: Tensor, target: TeacherLogits | None, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The positions that count, [n] bool, and of these: draft, target [m, W], labels [m]."""
        kept = self.head.kept
        if kept is None:
            assert not isinstance(target, ReducedLogits)
            return torch.ones_like(labels, dtype=torch.bool), draft, target, labels
        assert not isinstance(target, Tensor)
        target = None if self.divergence.name == "ce_hard" else target
        wanted = labels if target is None else target.first
        place = torch.searchsorted(kept, wanted).clamp_max(len(kept) - 1)
        counted = kept[place] == wanted
        index = counted.nonzero()[:, 0]
        own = None if target is None else target.logits.index_select(0, index)
        return counted, draft.index_select(0, index), own, place[index]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: BackwardCFunction,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        job: _Job,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        gradients = [
            torch.zeros_like(x) if with_grad and x is not None and x.requires_grad else None
            for x in (states, weight, bias)
        ]
        values, shared = torch.zeros_like(job.weights), torch.zeros_like(job.weights)
        match, counted = (torch.zeros_like(job.labels, dtype=torch.bool) for _ in range(2))
        mean_reward = _mean_reward(job, states) if job.divergence.name == "tvd_pp" else None
        for span in job.spans:
            with torch.set_grad_enabled(any(g is not None for g in gradients)):
                by_logits, *found = _one_chunk(job, states, span, mean_reward)
            values[span], shared[span], match[span], counted[span] = found
            if by_logits is not None:
                _fold(job, by_logits, states, span, *gradients)
            del by_logits  # before the next chunk needs the room
        ctx.save_for_backward(*gradients)  # type: ignore[arg-type] - None is allowed
        ctx.mark_non_differentiable(values, shared, match, counted)
        return (values * job.weights).sum(), values, shared, match, counted

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override] - once_differentiable hides the name of ctx
        ctx: BackwardCFunction, factor: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        # In place, or a second [W, d] would live beside the first. autograd notices a second call.
        return *(None if g is None else g.mul_(factor) for g in ctx.saved_tensors), None, None


def _mean_reward(job: _Job, states: Tensor) -> Tensor:
    """E_q[1{p > q}] over all counted positions, [] float; the first of the two passes of tvd_pp."""
    total = count = torch.zeros_like(job.weights).sum()
    for span in job.spans:
        counted, draft, target, _ = job.select(*job.read(states, span)[1:], job.labels[span])
        assert target is not None
        scaled = warm(draft, job.divergence.draft_temperature)
        log_q, log_p = both_log_probs(scaled, warm(target, job.divergence.teacher_temperature))
        q = log_q.exp()
        total, count = total + torch.where(log_p.exp() > q, q, 0).sum(), count + counted.sum()
    return total / count


def _one_chunk(
    job: _Job, states: Tensor, span: slice, mean_reward: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Gradient by the logits before `transform` [n, W]; values, overlap, match, counted, [n]."""
    leaf, draft, target = job.read(states, span)
    labels, kept = job.labels[span], job.head.kept
    counted, q, p, places = job.select(draft, target, labels)
    first = draft.argmax(-1) if kept is None else kept[draft.argmax(-1)]
    if target is None:
        match, shared = first == labels, _spread((-ce_hard(q.detach(), places)).exp(), counted)
    else:
        wanted = target.argmax(-1) if isinstance(target, Tensor) else target.first
        match, shared = first == wanted, _overlap(draft, target)
    values = job.divergence(q, p, places, mean_reward=mean_reward)
    scale = job.weights[span][counted].to(values)
    (by_logits,) = torch.autograd.grad(values, leaf, scale) if leaf.requires_grad else (None,)
    return by_logits, _spread(values, counted), shared, match, counted


def _spread(values: Tensor, counted: Tensor) -> Tensor:
    """values [m] at the positions that count, zero at the others: [n]."""
    return values.new_zeros(len(counted)).masked_scatter(counted, values.detach())


@torch.no_grad()
def _overlap(draft: Tensor, target: TeacherLogits) -> Tensor:
    """sum_v min(p, q), [n]; q is zero outside of the ids kept, p is not renormalised."""
    if isinstance(target, Tensor):
        target = ReducedLogits(target, wide(target).logsumexp(-1), target)
    log_z = wide(draft).logsumexp(-1)
    if not bool((log_z + target.log_z).isfinite().all()):  # also where nothing counts
        every = torch.cat([target.logits, target.log_z[:, None]], -1)  # also of ids not kept
        complain("overlap", draft, every, log_z)
    log_p = target.logits - target.log_z[:, None]
    return torch.minimum(log_p, draft - log_z[:, None]).exp_().sum(-1)


def _fold(job: _Job, by_logits: Tensor, states: Tensor, span: slice, *into: Tensor | None) -> None:
    """Add the gradients of one chunk to those by states, weight and bias, in place."""
    rows, width = states[span].to(by_logits.dtype), by_logits.shape[1]  # without padding rows
    by_states, by_weight, by_bias = into
    if by_states is not None:
        by_states[span] = by_logits @ job.head.weight
    if by_bias is not None:
        by_bias[:width] += by_logits.sum(0, dtype=by_bias.dtype)
    if by_weight is not None and by_weight.dtype == by_logits.dtype:
        by_weight[:width].addmm_(by_logits.T, rows)
    elif by_weight is not None:  # autocast: the product has another dtype, so take it in pieces
        block = max(1, CHUNK_ELEMENTS // rows.shape[1])
        for i in range(0, width, block):
            by_weight[i : min(i + block, width)] += by_logits[:, i : i + block].T @ rows
