"""Divergences between target p and draft q, per position; compressed teachers; reductions.

One function per divergence on logits [N, V], returning [N] values. `trainer.divergence` names them,
applies temperatures, and raises where the numbers are broken. Log-softmax and sums are float32
(float64 stays float64), whatever the dtype of the logits. The teacher is always detached. A logit
of -inf excludes a token: its probability is zero, in either model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import require


@dataclass(frozen=True)
class Term:
    """A term of a loss: weight * total / count. The loop sums the counts of a step, over all ranks
    and micro-steps, before it divides."""

    total: Tensor  # [] float, with a gradient
    count: Tensor | float
    weight: float = 1.0

    def times(self, factor: float) -> Term:
        """The term with `factor` times its weight."""
        return Term(self.total, self.count, factor * self.weight)


@dataclass
class LossOutput:
    """The result of an objective's loss: sums and counts only, the loop divides over all ranks."""

    terms: dict[str, Term]  # by the names that `Objective.denominators` announced
    metrics: dict[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)  # (sum, count)


def log_probs(logits: Tensor) -> Tensor:
    """Log-softmax in at least float32: in bfloat16 it is off by 0.08 nats at |logit| = 20."""
    return wide(logits).log_softmax(-1)


def wide(logits: Tensor) -> Tensor:
    """Cast to float32; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def warm(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, in float32 or float64."""
    return wide(logits) if temperature == 1 else wide(logits) / temperature  # 1: save a copy


def both_log_probs(draft_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """log q with gradient and log p without, each of the shape of its logits."""
    return log_probs(draft_logits), log_probs(teacher_logits.detach())


def _dot(weight: Tensor, x: Tensor) -> Tensor:
    """sum_v weight * x with 0 * inf = 0, in the value and in the gradient."""
    return (weight * torch.where(weight == 0, 0.0, x)).sum(-1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return _dot(log_a.exp(), log_a - log_b)


def fkl(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Forward KL(p || q) = sum p log(p/q), [N]; gradient q - p (Hinton et al. 2015)."""
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    return _kl(log_p, log_q)


def ce_soft(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy -sum p log q = fkl + H(p), [N]; gradient q - p, as fkl."""
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    return -_dot(log_p.exp(), log_q)


def ce_top(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """-sum p log q over the ten best tokens of p, [N] (Zhang et al. 2024, HASS, Sec. 3.1)."""
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    best = log_p.topk(min(10, log_p.shape[-1]), dim=-1)
    return -_dot(best.values.exp(), log_q.gather(-1, best.indices))


def ce_hard(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(y), [N], labels: [N] int64. Gradient q - onehot(y): unbiased for fkl iff y ~ p."""
    return F.cross_entropy(wide(draft_logits), labels, reduction="none")


def rkl(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Reverse KL(q || p) = sum q log(q/p), [N]; gradient q (s - E_q s), s = log(q/p).

    Infinite where p excludes a token (top-k, top-p) that q does not (Gu et al. 2023, MiniLLM).
    """
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    return _kl(log_q, log_p)


def jsd(draft_logits: Tensor, teacher_logits: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || M) + (1 - beta) KL(q || M), M = beta p + (1 - beta) q, [N].

    Gradient q (s - E_q s), s = (1 - beta) log(q/M). The value vanishes as beta -> 0 or 1, so these
    ends stand for fkl and rkl by convention (Agarwal et al. 2023, GKD).
    """
    if beta == 0:
        return fkl(draft_logits, teacher_logits)
    if beta == 1:
        return rkl(draft_logits, teacher_logits)
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    # Detached: the gradient through M is -sum_v dM = 0, and logaddexp(-inf, -inf) has a NaN one.
    log_m = torch.logaddexp(log_p + math.log(beta), log_q.detach() + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def tvd(draft_logits: Tensor, teacher_logits: Tensor, log_mass: Tensor | None = None) -> Tensor:
    """Total variation 1/2 sum |p - q| = 1 - acceptance rate, [N] (Leviathan et al. 2023, Sec. 3).

    Gradient q (s - E_q s), s = 1/2 sign(q - p), 0 at ties. It shrinks with the overlap: from a cold
    start use fkl, nla or lk_hybrid first (Zhou et al. 2023, DistillSpec).
    log_mass: [N] float, log of what p has of its mass on the V tokens that q is over, whose logits
    these are; None: all of it. What it has on others is never accepted.
    """
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    return _tvd(log_q, log_p, log_mass)


def _tvd(log_q: Tensor, log_p: Tensor, log_mass: Tensor | None) -> Tensor:
    if log_mass is None:
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    own = (log_p + log_mass[:, None]).exp()
    return 0.5 * ((own - log_q.exp()).abs().sum(-1) - log_mass.expm1())


def nla(draft_logits: Tensor, teacher_logits: Tensor, log_mass: Tensor | None = None) -> Tensor:
    """Negative log acceptance -log sum min(p, q), [N]; gradient that of tvd / overlap (LK losses).

    Summed in log space: finite down to overlaps that float32 cannot hold. log_mass: see `tvd`.
    """
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    if log_mass is not None:
        log_p = log_p + log_mass[:, None]
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def lk_hybrid(
    draft_logits: Tensor, teacher_logits: Tensor, eta: float = 3.0, log_mass: Tensor | None = None
) -> Tensor:
    """w fkl + (1 - w) tvd, w = exp(-eta * overlap) without gradient, [N] (LK losses).

    fkl while the overlap is small and tvd gives no signal, tvd once it is large. log_mass: see
    `tvd`; fkl goes without.
    """
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    variation = _tvd(log_q, log_p, log_mass)
    weight = torch.exp(-eta * (1 - variation.detach()))
    return weight * _kl(log_p, log_q) + (1 - weight) * variation


def tvd_pp(
    draft_logits: Tensor, teacher_logits: Tensor, mean_reward: Tensor | None = None
) -> Tensor:
    """TVD++ in its exact form: -sum_v q(v) A(v), [N]; a surrogate, its value is no divergence.

    Reward r = 1{p > q}, advantage A = (r - mean) / (std + 1e-6) without gradient; mean and std of r
    under q over all N positions of this call, so an optimiser step must be one call. Summed over V
    instead of sampling y ~ q, so the mean drops out of the gradient, which is that of tvd / std
    (Goel et al. 2024).
    mean_reward: [] float, the mean over all positions, for a call that sees only some of them.
    """
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    q, p = log_q.exp(), log_p.exp()
    with torch.no_grad():
        reward = torch.where(p.isnan(), p, (p > q).to(p))  # a comparison would hide a broken target
        mean = (q * reward).sum(-1).mean() if mean_reward is None else mean_reward
        advantage = (reward - mean) / ((mean * (1 - mean)).clamp_min(0).sqrt() + 1e-6)
    return -(q * advantage).sum(-1)


def kl_mix(draft_logits: Tensor, teacher_logits: Tensor, mix: float = 0.9) -> Tensor:
    """mix * fkl + (1 - mix) * rkl, [N]; what some code calls "jsd" (Liu et al. 2023, OSD)."""
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    if mix == 1:
        return _kl(log_p, log_q)
    return mix * _kl(log_p, log_q) + (1 - mix) * _kl(log_q, log_p)


@torch.no_grad()
def overlap(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Acceptance probability sum min(p, q), [N] in [0, 1], no gradient (Leviathan et al. 2023)."""
    log_q, log_p = both_log_probs(draft_logits, teacher_logits)
    return torch.minimum(log_p, log_q).exp().sum(-1)


FORMULAS = (fkl, ce_soft, ce_top, ce_hard, rkl, jsd, tvd, nla, lk_hybrid, tvd_pp, kl_mix)


# --- compressed teachers ------------------------------------------------------------------------


@dataclass
class CompressedTeacher:
    """Part of p: an exact head and i.i.d. samples of the tail. Log-probs are those of p itself."""

    ids: Tensor  # [N, k] int64, the k most likely tokens; k may be 0
    logp: Tensor  # [N, k] float
    log_tail: Tensor  # [N] float, log of the mass outside ids; -inf if there is none
    tail_ids: Tensor | None = None  # [N, m] int64, drawn from p restricted to the tail
    tail_logp: Tensor | None = None  # [N, m] float

    def each(self, change: Callable[[Tensor], Tensor]) -> CompressedTeacher:
        """A copy with `change` of each tensor."""
        parts = {name: change(part) for name, part in vars(self).items() if part is not None}
        return CompressedTeacher(**parts)


@torch.no_grad()
def compress(
    teacher_logits: Tensor,
    k: int,
    m: int,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
) -> CompressedTeacher:
    """Store the top k of p exactly, and m draws of the tail (Anshumann et al. 2025).

    teacher_logits: [N, V] float. With k = 0 the draws are m i.i.d. ones from p. `uniforms`: [N, m]
    in [0, 1), for draws that must not depend on batching. Needs float64 [N, V] while it samples.
    """
    require(0 <= k <= teacher_logits.shape[-1], "k", "lie in [0, V]", k)
    require(m >= 0 and k + m > 0, "m", "be >= 0, and positive if k is 0", m)
    log_p = log_probs(teacher_logits)
    logp, ids = log_p.topk(k, dim=-1)
    tail = log_p.scatter(-1, ids, -math.inf)
    out = CompressedTeacher(ids, logp, tail.logsumexp(-1))
    if m:
        cdf = tail.double().exp().cumsum(-1)
        if uniforms is None:
            uniforms = cdf.new_empty(cdf.shape[0], m).uniform_(generator=generator)
        # Strictly below the last entry, so that the token found always has mass of its own.
        point = uniforms.double().clamp_max(1 - 1e-12) * cdf[:, -1:]
        found = torch.searchsorted(cdf, point, right=True)
        out.tail_ids = found.clamp_max(log_p.shape[-1] - 1)  # empty tail: any id, its weight is 0
        out.tail_logp = log_p.gather(-1, out.tail_ids)
    return out


def bucket(draft_logits: Tensor, teacher: CompressedTeacher) -> tuple[Tensor, Tensor]:
    """Draft and teacher log-probs [N, k+1]: the head, and all other tokens as one."""
    logits = wide(draft_logits)
    rest = logits.scatter(-1, teacher.ids, -math.inf).logsumexp(-1, keepdim=True)
    draft = torch.cat([logits.gather(-1, teacher.ids), rest], -1)
    draft = draft - logits.logsumexp(-1, keepdim=True)
    return draft, torch.cat([teacher.logp, teacher.log_tail[:, None]], -1).to(draft)


def sums_to_one(teacher: CompressedTeacher) -> Tensor:
    """Whether head and tail sum to one in every row, [] bool, with room for float16 storage."""
    total = teacher.logp.float().exp().sum(-1) + teacher.log_tail.float().exp()
    return ((total - 1).abs() < 1e-2).all()


def compressed_ce(draft_logits: Tensor, teacher: CompressedTeacher) -> Tensor:
    """-sum_head p log q - tail_mass/m sum_samples log q, [N]: ce_soft and its gradient, unbiased.

    Without samples the head is renormalised, which `Divergence` allows at mass >= 0.999 only.
    """
    logits = wide(draft_logits)
    log_z = logits.logsumexp(-1, keepdim=True)  # gathered, so that no [N, V] log-probs are kept
    weight = teacher.logp.to(logits).exp()
    if teacher.tail_ids is None:
        weight = weight / weight.sum(-1, keepdim=True)
        return -_dot(weight, logits.gather(-1, teacher.ids) - log_z)
    num_samples = teacher.tail_ids.shape[-1]
    tail = (teacher.log_tail.to(logits).exp() / num_samples)[:, None].expand(-1, num_samples)
    ids = torch.cat([teacher.ids, teacher.tail_ids], -1)
    return -_dot(torch.cat([weight, tail], -1), logits.gather(-1, ids) - log_z)


# --- entry point --------------------------------------------------------------------------------


def position_weights(rows: Tensor, num_rows: int, kind: str = "token") -> tuple[Tensor, Tensor]:
    """Weight of each of N positions, [N] float32, and their denominator, [] float32, which the
    caller sums over ranks and accumulation steps.

    token: every position counts once. sequence: the mean of every sequence counts once, and a
    sequence without a trained position does not count. rows: [N] int64 in 0..num_rows-1.
    """
    ones = torch.ones(len(rows), device=rows.device)
    if kind == "token":
        return ones, ones.new_full((), len(rows))
    require(kind == "sequence", "reduction", "be token or sequence", kind)
    counts = ones.new_zeros(num_rows).index_add(0, rows, ones)
    return 1 / counts[rows], (counts > 0).sum().to(ones.dtype)


def reduce(
    values: Tensor, rows: Tensor, num_rows: int, kind: str = "token"
) -> tuple[Tensor, Tensor]:
    """Weighted sum of values [N] and its denominator, each [], by `position_weights`."""
    weights, count = position_weights(rows, num_rows, kind)
    return (values * weights.to(values)).sum(), count
