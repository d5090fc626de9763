"""Output head and divergence in chunks of positions: the full logits are never materialised.

Logits [N, V] and the other tensors of a softmax take most of the memory of distillation. Here each
chunk is differentiated at once, added to the gradients of states and head, and freed. Values and
gradients are those of the divergence on all positions together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn import functional as F

from trainer.device import adds_products_in_float32, shows_numbers_at_once
from trainer.divergence import Divergence, complain
from trainer.errors import require
from trainer.fused import fused
from trainer.logits import (
    OutputHead,
    ReducedLogits,
    TeacherLogits,
    chunk_rows,
    places,
)
from trainer.losses import both_log_probs, ce_hard, warm, wide

_Gradients: TypeAlias = list[Tensor | None]  # by weight, bias and extra of an output head


@dataclass
class ChunkedLoss:
    """What `chunked_divergence` returns; all but the total is detached."""

    total: Tensor  # [] float, carries the gradient: sum_n weights[n] * values[n]
    values: Tensor  # [N] float32 (float64 stays), 0 where not counted
    overlap: Tensor  # [N] float, sum_v min(p, q) at temperature 1, p over the whole vocabulary
    match: Tensor  # [N] bool, the drafter's first choice is the target's (without one: the label)
    counted: Tensor  # [N] bool, False where a reduced vocabulary lacks the token to learn


class JointGradients:
    """One gradient by each output head for all terms of a loss that go through it. At a vocabulary
    of 151,936 and a width of 4,096 it takes 2.5 GB, which every term would hold until backward.

    The loss must be the sum over its terms of c * factor * total, where every call gives its own
    `factor`, and c, the same number for all of them, may be known later."""

    def __init__(self) -> None:
        # with the parameter, or its id may become another's
        self._of: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def of(self, head: OutputHead) -> tuple[_Gradients, _Gradients]:
        """Return the gradients by the parameters of `head`, None where there is none, and those of
        them that no earlier term has asked for, which this one's backward pass returns."""
        found: _Gradients = []
        first: _Gradients = []
        for parameter in (head.weight, head.bias, head.extra):
            is_first = id(parameter) not in self._of
            if is_first:
                self._of[id(parameter)] = parameter, _sum_for(parameter)
            found.append(self._of[id(parameter)][1])
            first.append(found[-1] if is_first else None)
        return found, first


def _sum_for(parameter: Tensor | None) -> Tensor | None:
    """Zeros to add a gradient to, None where there will be none."""
    if parameter is None or not parameter.requires_grad or not torch.is_grad_enabled():
        return None
    return torch.zeros_like(parameter)


def chunked_divergence(
    divergence: Divergence,
    states: Tensor,
    head: OutputHead,
    teacher: Callable[[slice], TeacherLogits] | None,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    chunk_positions: int | None = None,
    joint: JointGradients | None = None,
    factor: float = 1.0,
) -> ChunkedLoss:
    """`divergence` of head.logits(states), chunk by chunk, with the same errors on a CPU. On a
    device that the host would have to wait for, what is not sound is NaN instead.

    states: [N, d] float, with head.extra [N, d + r]; labels: [N] int64 target ids; weights: [N]
    float, no gradient, default 1.
    teacher(span) gives the target's logits [n, V] of states[span], or what head.kept needs of them;
    it is called without gradient, once a chunk, for tvd_pp twice (its moments are those of all
    positions). Only ce_hard needs no teacher; all of p is then on the label.

    With head.kept, p is restricted to these ids and renormalised for the divergence. A position
    whose first choice of p (ce_hard: whose label) is not among them has value and gradient 0. A
    divergence with `whole_mass`, which measures acceptance, takes p as it is and every position.

    The gradients are complete when this returns; backward only scales them, in place, so it can run
    once. With `joint`, the gradient by the head is complete once all terms are computed; `factor`,
    which must not be 0, is defined there.
    """
    name = divergence.name
    require(teacher is not None or name == "ce_hard", "teacher", f"be given for {name}", teacher)
    if head.kept is not None:
        divergence.check_reduced()
    # Casts once, for all chunks, the weights that autocast would cast in each.
    dtype, device = head.weight.dtype, head.weight.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    weight = head.weight.detach()[: head.vocab_size].to(dtype)
    bias = None if head.bias is None else head.bias.detach()[: head.vocab_size].to(dtype)
    plain = copy.copy(head)  # `replace` would check `kept` again, for which the host waits
    plain.weight, plain.bias, plain.vocab_size, plain.blocked = weight, bias, None, None
    plain.extra = None if head.extra is None else head.extra.detach().to(dtype)
    if chunk_positions is None:
        chunk_positions = chunk_rows(states.device, head.target_width)
    require(chunk_positions >= 1, "chunk_positions", "be >= 1", chunk_positions)
    starts = range(0, len(labels), chunk_positions)
    spans = [slice(i, min(i + chunk_positions, len(labels))) for i in starts]
    weights = torch.ones_like(labels) if weights is None else weights.detach()
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    by_head, first = (joint or JointGradients()).of(head)
    job = _Job(divergence, plain, teacher, labels, weights, spans, factor, by_head, first)
    own = head.weight, head.bias, head.extra
    outputs = _Chunked.apply(states, *own, job, torch.is_grad_enabled())
    return ChunkedLoss(*outputs)


@dataclass
class _Job:
    divergence: Divergence
    head: OutputHead  # as computed with: detached, cast, without padding rows
    teacher: Callable[[slice], TeacherLogits] | None
    labels: Tensor
    weights: Tensor
    spans: list[slice]
    factor: float  # that the gradients have before backward
    by_head: _Gradients
    returned: _Gradients

    def read(self, states: Tensor, span: slice) -> _Chunk:
        head, labels = self.head, self.labels[span]
        rows, more = head.parted(states[span].to(head.weight.dtype))
        draft = F.linear(rows, head.weight, head.bias)
        if head.extra is not None:
            draft += F.linear(more, head.extra)
        target = None if self.teacher is None else self.teacher(span)
        if head.kept is not None:
            return self._reduced(draft, target, labels, head.kept)
        assert not isinstance(target, ReducedLogits)
        return _Chunk(draft, target, labels, torch.ones_like(labels, dtype=torch.bool))

    def _reduced(
        self, draft: Tensor, target: TeacherLogits | None, labels: Tensor, kept: Tensor
    ) -> _Chunk:
        place, known = places(kept, labels)
        if target is None:
            return _Chunk(draft, None, place, known)
        if isinstance(target, Tensor):
            target = ReducedLogits.of(target, kept)
        best, best_known = places(kept, target.first)
        if self.divergence.whole_mass:
            known = torch.ones_like(known)
        elif self.divergence.name != "ce_hard":
            place, known = best, best_known
        best = torch.where(best_known, best, -1)
        return _Chunk(draft, target.logits, place, known, target.log_z, best)


@dataclass
class _Chunk:
    """What the passes over the vocabulary of a chunk read. Over a reduced vocabulary, token ids are
    places in it, and a position whose `counted` is False has value and gradient 0."""

    draft: Tensor  # [n, W] logits before the head's `transform`
    target: Tensor | None  # [n, W] logits
    labels: Tensor  # [n] int64
    counted: Tensor  # [n] bool
    log_z: Tensor | None = None  # [n] of the target over its whole vocabulary; None: that is W
    # [n] int64, the target's likeliest token, -1 where it is not kept; None where log_z is
    best: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.draft.shape if self.target is None else self.target.shape)
        rule = f"have the shape of the draft's, {tuple(self.draft.shape)}"
        require(shape == self.draft.shape, "logits of the target", rule, shape)

    @property
    def log_mass(self) -> Tensor | None:
        """Log of what the target has of its mass on the W tokens, [n]; None: all of it."""
        if self.target is None or self.log_z is None:
            return None
        return wide(self.target).logsumexp(-1) - self.log_z


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: BackwardCFunction,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        extra: Tensor | None,
        job: _Job,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        by_states = torch.zeros_like(states) if with_grad and states.requires_grad else None
        # `data`: later terms add to what is saved here, which autograd would take for a mistake
        gradients = by_states, *(None if g is None else g.data for g in job.by_head)
        differentiate = any(g is not None for g in gradients)
        values, shared = torch.zeros_like(job.weights), torch.zeros_like(job.weights)
        match, counted, good = (torch.zeros_like(job.labels, dtype=torch.bool) for _ in range(3))
        score = fused(_score, len(job.head.weight))  # over the draft's vocabulary
        mean_reward = _mean_reward(job, states) if job.divergence.name == "tvd_pp" else None
        for span in job.spans:
            chunk = job.read(states, span)
            with torch.set_grad_enabled(differentiate):
                chunk.draft.requires_grad_(differentiate)
                found, *others = score(job.divergence, job.head.transform, chunk, mean_reward)
            values[span] = found.detach()
            shared[span], match[span], good[span], counted[span] = others
            if differentiate:
                slope = (job.factor * job.weights[span]).to(found)
                by_logits = torch.autograd.grad(found, chunk.draft, slope)[0]
                if job.head.kept is not None:  # 0 * inf is not 0
                    by_logits.masked_fill_(~counted[span, None], 0)
                _fold(job, by_logits, states, span, *gradients)
                del by_logits
            del chunk, found, others  # before the next chunk needs the room
        if not shows_numbers_at_once(good.device):
            values.masked_fill_(~good, math.nan)
            shared.masked_fill_(~good, math.nan)
        elif not bool(good.all()):
            _complain(job, states, good, mean_reward)
        ctx.save_for_backward(by_states, *job.returned)  # type: ignore[arg-type] - None is allowed
        ctx.factor = job.factor  # type: ignore[attr-defined] - as custom functions keep numbers
        ctx.mark_non_differentiable(values, shared, match, counted)
        return (values * job.weights).sum(), values, shared, match, counted

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override] - once_differentiable hides the name of ctx
        ctx: BackwardCFunction, factor: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        factor = factor / ctx.factor  # type: ignore[attr-defined]
        # In place, or a second [W, d] would live beside the first. autograd notices a second call.
        return *(None if g is None else g.mul_(factor) for g in ctx.saved_tensors), None, None


def _mean_reward(job: _Job, states: Tensor) -> Tensor:
    """E_q[1{p > q}] over all counted positions, [] float; the first of the two passes of tvd_pp."""
    total = count = torch.zeros_like(job.weights).sum()
    rewards = fused(_rewards, len(job.head.weight))
    for span in job.spans:
        chunk = job.read(states, span)
        found = rewards(job.divergence, job.head.transform, chunk)
        total = total + torch.where(chunk.counted, found, 0).sum()
        count = count + chunk.counted.sum()
    return total / count


def _rewards(
    divergence: Divergence, transform: Callable[[Tensor], Tensor] | None, chunk: _Chunk
) -> Tensor:
    """E_q[1{p > q}] of each position, [n]."""
    assert chunk.target is not None
    draft = chunk.draft if transform is None else transform(chunk.draft)
    log_q, log_p = both_log_probs(
        warm(draft, divergence.draft_temperature),
        warm(chunk.target, divergence.teacher_temperature),
    )
    q = log_q.exp()
    return torch.where(log_p.exp() > q, q, 0).sum(-1)


def _score(
    divergence: Divergence,
    transform: Callable[[Tensor], Tensor] | None,
    chunk: _Chunk,
    mean_reward: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All passes over the vocabulary of a chunk but those of the gradient, which a compiler makes
    few of.

    Values [n], differentiable in the logits; overlap [n]; whether the drafter's first choice is the
    target's, whether all this is sound, and whether the position counts, [n] bool."""
    draft = chunk.draft if transform is None else transform(chunk.draft)
    values, good = divergence.unchecked(
        draft, chunk.target, chunk.labels, mean_reward=mean_reward, log_mass=chunk.log_mass
    )
    values, good = torch.where(chunk.counted, values, 0), good | ~chunk.counted
    draft = draft.detach()
    first = draft.argmax(-1)
    if chunk.target is None:  # all of p is on the label, which the drafter may lack
        shared = torch.where(chunk.counted, (-ce_hard(draft, chunk.labels)).exp(), 0)
        return values, shared, (first == chunk.labels) & chunk.counted, good, chunk.counted
    log_z = wide(draft).logsumexp(-1)
    whole = wide(chunk.target).logsumexp(-1) if chunk.log_z is None else chunk.log_z
    # sum_v min(p, q): q is zero outside of the ids kept, p is not renormalised
    shared = torch.minimum(chunk.target - whole[:, None], draft - log_z[:, None]).exp().sum(-1)
    match = first == (chunk.target.argmax(-1) if chunk.best is None else chunk.best)
    return values, shared, match, good & (log_z + whole).isfinite(), chunk.counted


@torch.no_grad()
def _complain(job: _Job, states: Tensor, good: Tensor, mean_reward: Tensor | None) -> None:
    """Raise for the first chunk with a position that is not sound."""
    span = next(span for span in job.spans if not bool(good[span].all()))
    chunk, transform = job.read(states, span), job.head.transform
    draft = chunk.draft if transform is None else transform(chunk.draft)
    if chunk.target is not None:  # also of ids not kept, and where nothing counts
        whole = wide(chunk.target).logsumexp(-1) if chunk.log_z is None else chunk.log_z
        log_z = wide(draft).logsumexp(-1)
        if not bool((log_z + whole).isfinite().all()):
            complain("overlap", draft, torch.cat([chunk.target, whole[:, None]], -1), log_z)
    values, _ = job.divergence.unchecked(
        draft, chunk.target, chunk.labels, mean_reward=mean_reward, log_mass=chunk.log_mass
    )
    own = None if chunk.target is None else chunk.target[chunk.counted]
    job.divergence.complain(draft[chunk.counted], own, values[chunk.counted])


def _fold(job: _Job, by_logits: Tensor, states: Tensor, span: slice, *into: Tensor | None) -> None:
    """Add the gradients of one chunk to those by states, weight, bias and extra, in place."""
    head, width = job.head, by_logits.shape[1]  # without padding rows
    rows, more = head.parted(states[span].to(by_logits.dtype))
    by_states, by_weight, by_bias, by_extra = into
    if by_states is not None:
        by_rows, by_more = head.parted(by_states[span])
        by_rows.copy_(by_logits @ head.weight)
        if head.extra is not None:
            by_more.copy_(by_logits @ head.extra)
    if by_bias is not None:
        by_bias[:width] += by_logits.sum(0, dtype=by_bias.dtype)
    if by_weight is not None:
        _add_product(by_weight[:width], by_logits, rows)
    if by_extra is not None:
        _add_product(by_extra, by_logits, more)


def _add_product(into: Tensor, by_logits: Tensor, rows: Tensor) -> None:
    """Add by_logits.T @ rows, of [n, W] and [n, d], to `into` [W, d]."""
    if into.dtype == by_logits.dtype:
        into.addmm_(by_logits.T, rows)
    elif adds_products_in_float32(into.device):  # autocast
        torch.addmm(into, by_logits.T, rows, out_dtype=torch.float32, out=into)
    else:  # the product has another dtype, so take it in pieces
        block = chunk_rows(rows.device, rows.shape[1])
        for i in range(0, len(into), block):
            into[i : i + block] += by_logits[:, i : i + block].T @ rows
