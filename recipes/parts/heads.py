"""What the recipes of all heads on the target share: how far they look ahead, and their loss.

A head drafts the token at depth j of a round from what the target has computed before the round.
For every depth the loss is a divergence between the target's law and the head's, at exactly the
positions that decoding visits, in chunks that never hold all logits; optionally a regression of
the head's states on the target's. The target's law is recomputed from its final-normed state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from data.batches import Batch
from data.target import LayerId, Target, TargetOutputs
from data.traces import Trace
from recipes.base import Needs, Stage, TargetRequest, check_kind
from trainer.chunked import OutputHead, chunked_divergence
from trainer.config import UserError, require
from trainer.losses import LossOutput, check_options, position_weights

Term = tuple[torch.Tensor, torch.Tensor | float, float]  # of LossOutput

LOW_COVERAGE = 0.98
KEEP_TEACHER_BYTES = 1 << 28


@dataclass
class HeadConfig:
    """Settings of every head. The weight of depth j (from 1) is depth_decay ** (j - 1)."""

    divergence: str = "fkl"
    beta: float = 0.5  # of jsd
    eta: float = 3.0  # of lk_hybrid
    mix: float = 0.9  # of kl_mix
    depth_decay: float = 0.8
    divergence_weight: float = 1.0
    feature_weight: float = 0.0  # of SmoothL1 between the head's states and the target's
    top_weight: float = 0.0  # of cross-entropy on the target's ten best tokens
    feature_noise: float = 0.0  # half width of uniform noise on the target's states, at 512 tokens
    reduction: str = "token"  # or sequence

    def __post_init__(self) -> None:
        check_options(self.divergence, beta=self.beta, eta=self.eta, mix=self.mix)
        for name in ("depth_decay", "divergence_weight"):
            require(getattr(self, name) > 0, f"method.{name}", "be > 0", getattr(self, name))
        for name in ("feature_weight", "top_weight", "feature_noise"):
            require(getattr(self, name) >= 0, f"method.{name}", "be >= 0", getattr(self, name))
        require(
            self.reduction in ("token", "sequence"),
            "method.reduction",
            "be token or sequence",
            self.reduction,
        )


class HeadRecipe:
    target_access = "outputs"
    packs = True
    kind: str  # of the drafters it trains

    def __init__(self, config: Any, target: Target):
        self.config, self.target = config, target
        self.drafter: Any = None  # set by the loop

    @property
    def depth(self) -> int:
        """How many depths are trained."""
        raise NotImplementedError

    @property
    def captures(self) -> tuple[LayerId, ...]:
        return ("final_norm",)

    def stages(self) -> list[Stage]:
        return [Stage("train", Needs({"target": 1.0}), start="base", row="after")]

    def accept(self, drafter: Any) -> None:
        """A head to go on from must be of this kind and reach as deep as is trained."""
        name = type(self).__module__.rpartition(".")[2]
        check_kind(drafter, self.kind, name)
        if drafter.max_depth is not None and drafter.max_depth != self.depth:
            raise UserError(
                f"model.drafter has {drafter.max_depth} heads, method.num_heads={self.depth}: set "
                f"method.num_heads={drafter.max_depth}"
            )

    def begin(self, stage: Stage, max_new_tokens: int) -> None: ...

    # --- loss ------------------------------------------------------------------------------------

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        return TargetRequest(tuple(dict.fromkeys((*self.captures, "final_norm"))), logits=False)

    def denominators(self, batch: Batch, step: int) -> list[float]:
        """One per term: the divergence of each depth, then its further terms."""
        out = []
        for depth in range(1, self.depth + 1):
            count = batch.count(batch.supervised(depth), self.config.reduction)
            out += [count] * (1 + self._further)
        return out

    @property
    def _further(self) -> int:
        return (self.config.feature_weight > 0) + (self.config.top_weight > 0)

    def loss(self, batch: Batch, target_outputs: TargetOutputs | None, step: int) -> LossOutput:
        assert target_outputs is not None
        metrics: dict[str, Any] = {}
        score = self._scorer(batch, target_outputs.hidden["final_norm"], self.target.head, metrics)
        hidden = {k: self._noisy(v, batch) for k, v in target_outputs.hidden.items()}
        outputs = TargetOutputs(hidden)
        return LossOutput(self._scored(batch, outputs, score), metrics)

    def _scored(
        self, batch: Batch, outputs: TargetOutputs | None, score: Callable[..., list[Term]]
    ) -> list[Term]:
        scored = self.drafter(
            batch.input_ids,
            outputs,
            self.depth,
            score,
            batch.position_ids,
            batch.supervised(1)[:, 1:],  # logit index t + 1 is column t
            **({} if batch.documents is None else {"documents": batch.documents}),
        )
        return [term for terms in scored for term in terms]

    def _scorer(
        self, batch: Batch, final: torch.Tensor, head: OutputHead, metrics: dict[str, Any]
    ) -> Callable[[int, torch.Tensor], list[Term]]:
        """(depth, states) -> the terms of that depth, against what `head` says of the target's
        states `final` [B, L, d]. Acceptance is added to `metrics`."""
        teacher = self._teacher(batch, final, head)

        def score(depth: int, states: torch.Tensor) -> list[Term]:
            rows, index = batch.supervised(depth).nonzero(as_tuple=True)
            picked, wanted = states[rows, index], final[rows, index]
            labels = batch.input_ids[rows, index + 1]
            texts = batch.texts_of(rows, index)
            weights, count = position_weights(texts, len(batch.prompts), self.config.reduction)
            own = self._unwrapped().output_head(depth)
            scale = self.config.depth_decay ** (depth - 1)
            law = teacher(rows, index)
            value = self._divergence(self.config.divergence, picked, own, law, labels, weights)
            terms: list[Term] = [(value.total, count, scale * self.config.divergence_weight)]
            if self.config.feature_weight:
                error = F.smooth_l1_loss(picked.float(), wanted.float(), reduction="none").mean(-1)
                total = (error * weights).sum()
                terms.append((total, count, scale * self.config.feature_weight))
            if self.config.top_weight:
                best = self._divergence("ce_top", picked, own, law, labels, weights)
                terms.append((best.total, count, scale * self.config.top_weight))
            number = float(len(rows))
            metrics[f"alpha_{depth}"] = (value.overlap.sum(), number)
            metrics[f"match_{depth}"] = (value.match.float().sum(), number)
            return terms

        return score

    def _unwrapped(self) -> Any:
        return getattr(self.drafter, "module", self.drafter)

    def _divergence(
        self,
        name: str,
        states: torch.Tensor,
        head: OutputHead,
        teacher: Callable[[slice], torch.Tensor],
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> Any:
        config = self.config
        return chunked_divergence(
            name, states, head, teacher, labels, weights, beta=config.beta, eta=config.eta,
            mix=config.mix,
        )  # fmt: skip

    def _teacher(
        self, batch: Batch, final: torch.Tensor, head: OutputHead
    ) -> Callable[[torch.Tensor, torch.Tensor], Callable[[slice], torch.Tensor]]:
        """(rows, logit indices) -> the target's logits of a span of them. Every depth asks for some
        of the first one's positions, so where all of those fit they are computed once."""
        where = batch.supervised(1)
        rows, index = where.nonzero(as_tuple=True)
        size = len(rows) * self.target.vocab_size * final.element_size()
        if self.depth == 1 or size > KEEP_TEACHER_BYTES:
            return lambda rows, index: lambda span: head.logits(final[rows[span], index[span]])
        with torch.no_grad():
            logits = head.logits(final[rows, index])
        place = torch.zeros(where.shape, dtype=torch.long, device=where.device)
        place[rows, index] = torch.arange(len(rows), device=where.device)
        return lambda rows, index: lambda span: logits[place[rows[span], index[span]]]

    def _noisy(self, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Li et al. 2024, EAGLE: uniform noise on the features, scaled by 512 / the tokens of the
        longest text."""
        if not self.config.feature_noise:
            return states
        texts = zip(batch.prompts, batch.responses, strict=True)
        width = self.config.feature_noise * 512 / max(len(p) + len(r) for p, r in texts)
        return states + (2 * torch.rand_like(states) - 1) * width


def frequent_tokens(
    traces: Sequence[Trace], size: int | None, target: Target
) -> tuple[torch.Tensor | None, float]:
    """Ids [size] of the most frequent response tokens, ascending, and the share of all response
    tokens they cover: what no drafter over them can exceed at T=1. None and 1 without a size."""
    if size is None:
        return None, 1.0
    require(
        1 <= size <= target.vocab_size,
        "method.draft_vocab_size",
        f"lie in 1..{target.vocab_size}, the target's vocabulary",
        size,
    )
    counts = Counter(token for trace in traces for token in trace.response_ids)
    ranked = sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))[:size]
    total = sum(counts.values())
    if not total:
        raise UserError("method.draft_vocab_size: the traces hold no response token to count")
    covered = sum(counts[token] for token in ranked) / total
    return torch.tensor(sorted(ranked)), covered


def say_coverage(size: int | None, covered: float) -> None:
    if size is None:
        return
    print(
        f"draft vocabulary: {size} tokens, {covered:.2%} of the training text: "
        f"alpha <= {covered:.4f}"
    )
    if covered < LOW_COVERAGE:
        print(f"warning: below {LOW_COVERAGE:.0%}; raise method.draft_vocab_size")
