"""Acceptance without decoding: exact counters from cached target traces.

The output of lossless speculative decoding is a sample of the target, and target traces are at
hand. Given the output x, a token drafted at depth j is accepted with probability w = min(1, q(x) /
p(x)) (P(output v and accepted) = min(p, q) and P(output v) = p), and the text that follows does not
depend on the coin. So the starts of rounds are a Markov chain along the trace, and one parallel
pass of each model gives the expected counters: at T=0 (w is 0 or 1) exactly those of greedy
decoding, at T>0 their conditional expectation given the output. Engines count past the end of the
output; traces carry look-ahead tokens so that those counters can be replayed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget, StopRule
from drafters.text import Text
from drafters.training_free.base import TrainingFree
from eval.calibration import Calibration, calibration
from eval.counters import NUM_RANGES, PromptCounters, range_of
from eval.draft_vocabulary import DraftVocabulary, Outside, VocabularyCost
from eval.scored import Found, Scored, score
from eval.stops import SignalsByDepth, lengths_by_start
from eval.texts import Texts
from eval.walk import replay
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling, warp
from trainer.errors import UserError
from trainer.logits import chunk_rows
from trainer.shift import response_mask


def check_sampling(traces: Sequence[Trace], sampling: Sampling) -> None:
    """Raise UserError for text of another sampling, which tells nothing about rounds of this
    one."""
    for trace in traces:
        own = Sampling(trace.temperature, trace.top_k, trace.top_p)
        if own != sampling:
            raise UserError(
                f"traces were sampled with {own}, the evaluation needs {sampling}: "
                "generate traces with that sampling"
            )


@dataclass
class OfflineResult:
    """What replay gives: counters of each trace, and the drafter's probabilities."""

    counters: list[PromptCounters]
    calibration: Calibration
    alpha_by_depth: list[float | None]  # mean overlap at each depth; [] without probabilities
    visits: list[np.ndarray]  # [response] each: expected rounds that start at each token
    draft_vocabulary: DraftVocabulary | None  # None: the drafter has the target's


class OfflineEvaluator:
    """Replays traces of one sampling against any drafter.

    The target reads each trace once for all drafters, as far as `Texts` hold its states;
    distributions are computed from states for a chunk of positions at a time. Without
    `engine_counters` the traces need no look-ahead, and those counters are zero.
    Raises UserError where the traces do not fit the sampling or K.
    """

    def __init__(
        self,
        target: Target,
        traces: Sequence[Trace],
        sampling: Sampling,
        budget: Budget,
        batch_size: int = 16,
        engine_counters: bool = True,
    ):
        if not traces:
            raise UserError("acceptance without decoding needs at least one target trace")
        K = budget.max_tokens
        check_sampling(traces, sampling)
        for trace in traces:
            if engine_counters and len(trace.lookahead_ids) < K - 1:
                raise UserError(
                    f"traces carry {len(trace.lookahead_ids)} look-ahead tokens, eval.K={K} "
                    f"needs {K}: "
                    "generate them again with the larger K"
                )
        self.target, self.sampling, self.budget, self.K = target, sampling, budget, K
        self.engine_counters = engine_counters
        self.texts = Texts(target, traces, K, batch_size)
        self.head = target.head  # refused here where it cannot be used, before anything is measured

    @torch.inference_mode()
    def __call__(
        self,
        drafter: TrainedDrafter | TrainingFree,
        draft_sampling: Sampling | None = None,
        budget: Budget | None = None,
        on_tokens: Callable[[int], None] = lambda _: None,
        groups: Sequence[int] | None = None,
    ) -> OfflineResult:
        """Counters of each trace.

        `budget`: another stop rule than the evaluator's own; `on_tokens` is called after each batch
        with its number of response tokens; `groups`: numbers of the batches of `texts` to replay,
        None for all. Raises UserError for a rule that cannot be replayed.
        """
        draft_sampling = draft_sampling or self.sampling
        rule = (budget or self.budget).stop
        if rule is not None and not rule.replayable:
            raise UserError(
                f"eval.policy={rule.policy}: its rounds depend on those before, which acceptance "
                "without decoding does not follow"
            )
        counters: list[PromptCounters] = []
        visits: list[np.ndarray] = []
        confidence: list[np.ndarray] = []
        agreement: list[np.ndarray] = []
        depth_sums = np.zeros((2, self.K))  # overlap and positions at each depth
        lost = VocabularyCost()
        for index in range(len(self.texts.groups)) if groups is None else groups:
            group = self.texts.groups[index]
            accept, drafted, known = self._starts(drafter, draft_sampling, rule, index)
            lengths = np.array([len(trace.response_ids) for trace in group])
            sums = replay(accept, drafted, lengths, self.K)
            if known is not None:
                confidence.append(known.confidence[known.real])
                agreement.append(known.overlaps[0][known.real])
                depth_sums += known.depth_sums
                if known.outside is not None:
                    lost.add(known.outside, known.real, accept, drafted, lengths, sums)
            starts, emitted = sums.pop("visits"), sums.pop("emitted_from")
            ranges = np.array([range_of(t) for t in range(accept.shape[1])])
            for row, trace in enumerate(group):
                visits.append(starts[row, : lengths[row]])
                one = self._counters(trace, {name: values[row] for name, values in sums.items()})
                one.rounds_from, one.emitted_from = (
                    np.bincount(ranges, weights=own[row], minlength=NUM_RANGES).tolist()
                    for own in (starts, emitted)
                )
                if rule is not None:
                    # what a stop rule drafts after a rejection is not in the trace
                    one.submitted = one.engine_drafted = 0.0
                if known is not None:
                    known.count(row, one)
                counters.append(one)
            on_tokens(int(lengths.sum()))
        by_depth = [float(a / n) if n else None for a, n in depth_sums.T] if confidence else []
        return OfflineResult(
            counters, calibration(confidence, agreement), by_depth, visits, lost.found()
        )

    def _starts(
        self,
        drafter: TrainedDrafter | TrainingFree,
        draft_sampling: Sampling,
        rule: StopRule | None,
        index: int,
    ) -> tuple[np.ndarray, np.ndarray, _Known | None]:
        """Of a round that starts at each response token of a batch: the probability of each draft
        to be accepted [B, N, K], how many are drafted [B, N], and what a drafter with probabilities
        says beside."""
        group = self.texts.groups[index]
        lengths = np.array([len(trace.response_ids) for trace in group])
        width = int(lengths.max())
        accept = np.zeros((len(group), width, self.K))
        drafted = np.full((len(group), width), self.K)
        if isinstance(drafter, TrainingFree):
            self._by_start(drafter, group, accept, drafted)
            return accept, drafted, None
        drafter.routed([trace.prompt_ids for trace in group])
        signals = None if rule is None else SignalsByDepth(rule.uses_head)
        overlaps, greedy, sure, outside = self._parallel(
            drafter, draft_sampling, signals, index, group, accept
        )
        if rule is not None and signals is not None:
            drafted[:] = lengths_by_start(rule, *signals.by_start(width, self.K))
        begins = np.array([len(trace.prompt_ids) for trace in group])[:, None]
        begins = begins + np.arange(width)  # tokens before a round
        drafted = drafted * drafter.fits(begins, self.K)
        inside = np.arange(width) < lengths[:, None]
        # a head's first draft of an answer is its second token: the first is the prefill's
        real = inside & (np.arange(width) >= (1 if drafter.target_layers else 0))
        real &= drafter.fits(begins, self.K)
        sums = np.zeros((2, self.K))
        for j, common in enumerate(overlaps):
            later = inside & (np.arange(width) >= j + 1)
            visited = (later if drafter.target_layers else real) & drafter.fits(begins - j, self.K)
            sums[:, j] = common[visited].sum(), visited.sum()
        return accept, drafted, _Known(overlaps, greedy, sure, real, sums, outside)

    def _counters(self, trace: Trace, sums: Mapping[str, np.ndarray]) -> PromptCounters:
        """The counters of a trace from what its replay has summed up."""
        one = PromptCounters(trace.prompt_hash, trace.domain, self.K)
        for name, value in sums.items():
            setattr(one, name, value.tolist() if value.ndim else float(value))
        if not self.engine_counters:
            one.engine_drafts = one.engine_drafted = one.engine_accepted = 0.0
            one.engine_accepted_per_position = [0.0] * self.K
        return one

    @torch.inference_mode()
    def along(
        self, drafter: TrainedDrafter, draft_sampling: Sampling, uses_head: bool
    ) -> Iterator[Along]:
        """Yield what decides about the rounds that start at each token, group by group."""
        for index, group in enumerate(self.texts.groups):
            drafter.routed([trace.prompt_ids for trace in group])
            width = max(len(trace.response_ids) for trace in group)
            accept, signals = np.zeros((len(group), width, self.K)), SignalsByDepth(uses_head)
            self._parallel(drafter, draft_sampling, signals, index, group, accept)
            yield Along(group, accept, *signals.by_start(width, self.K))

    def _rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids and indices of a batch.

        These are ids [B, L] of prompt, response and look-ahead, right-padded; the logit index
        [B, N+K] that scores each response index; and the ids [B, N+K] there.
        """
        group, ids = self.texts.groups[index], self.texts.ids(index)
        width = max(len(t.response_ids) for t in group) + self.K
        starts = torch.tensor([len(t.prompt_ids) for t in group]).unsqueeze(1)
        where = (starts + torch.arange(width)).clamp(max=ids.shape[1] - 1).to(ids.device)
        return ids, where - 1, ids.gather(1, where)

    def _parallel(
        self,
        drafter: TrainedDrafter,
        draft_sampling: Sampling,
        signals: SignalsByDepth | None,
        index: int,
        group: Sequence[Trace],
        accept: np.ndarray,
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, Outside | None]:
        """Fill `accept` and `signals` from one pass of each model.

        Returns the overlap at each depth, and at the first depth the greedy match and the drafter's
        confidence, each [B, N]; and what lies outside of a reduced draft vocabulary.
        """
        ids, where, tokens = self._rows(index)
        batch = torch.arange(len(group), device=ids.device).unsqueeze(1)
        final, outputs = self._states(index, drafter, batch, where)
        # other drafters compute all columns: of some alone their states round otherwise
        columns = columns_of(group, ids) if drafter.one_pass else None
        drafts = list(drafter.states(Text(ids, columns=columns), outputs, self.K))
        found = Found(tokens.shape, len(drafts), tokens.device)
        kept = drafter.output_head(1).kept if drafter.target_layers else None  # else all of them
        outside = None if kept is None else Outside.of(kept, tokens, self.target.vocab_size)
        step = max(1, chunk_rows(ids.device, self.target.vocab_size) // len(group))
        for at in range(0, tokens.shape[1], step):
            span = slice(at, at + step)
            p = None
            if final is not None:
                p = warp(self.head.logits(final[:, span]), self.sampling)
                if outside is not None:
                    outside.add_mass(span, p)
            scored: Scored | None = None
            for j, states in enumerate(drafts):
                if scored is None or states is not drafts[j - 1]:  # else as at the depth before
                    logits = drafter.own_logits(states[batch, where[:, span]], j + 1).float()
                    scored = score(logits, kept, tokens[:, span], p, draft_sampling)
                found.add(j, span, scored)
        width = accept.shape[1]
        positions = np.arange(width)
        weights = found.weight.cpu().numpy()
        for j in range(len(drafts)):
            accept[:, :, j] = weights[j][:, positions + j]
            if signals is not None:
                judged = None
                if signals.uses_head and j:
                    judged = drafter.judged(drafts, j, batch, where)
                signals.add((found.confidence[j], found.own[j]), judged)
        overlaps = [one[:, :width].cpu().numpy() for one in found.overlap]
        greedy = found.match[:, :width].double().cpu().numpy()
        return overlaps, greedy, found.confidence[0, :, :width].double().cpu().numpy(), outside

    def _states(
        self, index: int, drafter: TrainedDrafter, batch: torch.Tensor, where: torch.Tensor
    ) -> tuple[torch.Tensor | None, TargetOutputs | None]:
        """The target's final states [B, N+K, H] at the scored positions of a group, None at T=0;
        and what the drafter reads of it."""
        drawn = self.sampling.temperature > 0
        layers = dict.fromkeys((*drafter.target_layers, *["final_norm"] * drawn))
        hidden = self.texts.states(index, tuple(layers))
        final = hidden["final_norm"][batch, where] if drawn else None
        return final, TargetOutputs(hidden) if drafter.target_layers else None

    def _by_start(
        self,
        drafter: TrainingFree,
        group: Sequence[Trace],
        accept: np.ndarray,
        drafted: np.ndarray,
    ) -> None:
        """Fill `accept`, with 0 or 1, and `drafted` from the copy at every start."""
        for row, trace in enumerate(group):
            text = np.array(trace.prompt_ids + trace.response_ids + trace.lookahead_ids)
            begin = len(trace.prompt_ids)
            for t in range(1, len(trace.response_ids)):
                proposed = drafter.continuation(text[: begin + t], self.K)
                drafted[row, t] = len(proposed)
                follows = text[begin + t : begin + t + len(proposed)]
                known = len(follows)  # without look-ahead the text ends before the copy
                accept[row, t, :known] = np.array(proposed)[:known] == follows


def columns_of(group: Sequence[Trace], ids: torch.Tensor) -> torch.Tensor:
    """The columns [B, L] bool of the texts `ids` [B, L] from which the rounds of a response begin:
    the first token that is drafted, which is one of the response, stands two columns further."""
    starts = [len(trace.prompt_ids) for trace in group]
    ends = [start + len(trace.response_ids) for start, trace in zip(starts, group, strict=True)]
    mask = response_mask(starts, ends, ids.shape[1])
    return torch.nn.functional.pad(mask[:, 2:], (0, 2)).to(ids.device)


@dataclass(frozen=True)
class _Known:
    """What the distributions of a drafter give at the response tokens of a batch."""

    overlaps: list[np.ndarray]  # by depth, [B, N] each
    greedy: np.ndarray  # [B, N], whether the two likeliest tokens agree
    confidence: np.ndarray  # [B, N], of the likeliest token
    real: np.ndarray  # [B, N] bool, where a first token is drafted
    depth_sums: np.ndarray  # [2, K], overlap and positions at each depth
    outside: Outside | None  # of a reduced draft vocabulary

    def count(self, row: int, one: PromptCounters) -> None:
        """Add what is of one trace to its counters."""
        real = self.real[row]
        n = float(real.sum())
        one.overlap_sum, one.overlap_count = float(self.overlaps[0][row, real].sum()), n
        one.greedy_sum, one.greedy_count = float(self.greedy[row, real].sum()), n


@dataclass(frozen=True)
class Along:
    """A group of traces, with what decides about the rounds that start at each response index.

    `accept` [B, N, K] float64: as `eval.walk.replay` takes it; `confidence`, `probability`, `score`
    [B, N, K]: `Signals` of the drafted tokens as long as they are the text's own.
    """

    traces: Sequence[Trace]
    accept: np.ndarray
    confidence: torch.Tensor
    probability: torch.Tensor
    score: torch.Tensor
