"""From drafters to report rows: acceptance without decoding, real decoding, timings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget, Drafter
from drafters.training_free.base import TrainingFree
from drafters.trees.tree import CHAIN, TOP
from eval.config import EvalConfig
from eval.costs import Cost
from eval.counters import PromptCounters, check_invariants, counters_from_rounds
from eval.engine import Speculated, SpeculativeDecoder
from eval.metrics import per_domain, per_position, summarise
from eval.offline import OfflineEvaluator
from eval.plain import Parting, difference, next_token_loss, plain_generate, timed
from eval.policies.table import budget_for
from eval.replay import TreeReplay
from eval.report.rows import role_of
from eval.rounds import Round
from eval.row import COUNTING, Row
from eval.speed_model import COST_RATIOS, expected_tokens_iid, mbsu, modelled_speedup
from eval.verifiers.base import Verifier
from eval.verifiers.table import exact_verifier, parse_verifier
from target.cache import CachedModel
from target.decode import Request
from target.model import Target
from target.sampling import Sampling, row_key
from trainer.progress import TokenProgress
from trainer.specs import spelled


class DifferingPrompt(Parting):
    """A prompt whose greedy answer differs from that of plain decoding."""

    prompt_hash: str


@dataclass
class Measurement:
    """A row of the report and the counters that it was computed from."""

    row: Row
    counters: list[PromptCounters]
    rounds: list[Round] = field(default_factory=list)
    shown: list[Speculated] = field(default_factory=list)  # the answers that the report shows


GATHERED = (
    "tokens/s, speed-ups, the measured costs of drafting and verifying and what is modelled from "
    "them are of a target whose layers are gathered from all processes for every pass, which no "
    "server does. Acceptance, mbsu and what is modelled at given costs do not depend on it."
)


NOT_DECODED = "model.parts=head decodes nothing: the target's layers are not loaded"


class Bench:
    """Measures drafters on one set of held-out traces at one temperature."""

    def __init__(
        self,
        target: Target,
        traces: Sequence[Trace],
        sampling: Sampling,
        config: EvalConfig,
        prompts: Mapping[str, object],
        about: Mapping[str, Any] | None = None,
        progress: TokenProgress | None = None,
    ):
        """`prompts`: their name and hash; `about`: further fields of all rows."""
        self.progress = progress or TokenProgress("", enabled=False)
        self.target, self.traces = target, list(traces)
        self.sampling, self.config = sampling, config
        self.draft_sampling = config.draft_sampling(sampling)
        self.prompts = dict(prompts)
        self.about = dict(about or {})
        if self.draft_sampling != sampling:
            self.about["draft_temperature"] = self.draft_sampling.temperature
        if target.sharded is not None:
            self.about["note"] = GATHERED
        self.offline = OfflineEvaluator(target, traces, sampling, Budget(config.K))

    def replayed(
        self, name: str, drafter: TrainedDrafter | TrainingFree, cost: Cost
    ) -> Measurement:
        """Acceptance of chains without decoding.

        Chains have a fixed length where the policy's rounds depend on those before.
        """
        budget = budget_for(drafter, self.config.policy, self.config.K)
        if budget.stop is not None and not budget.stop.replayable:
            budget = Budget(budget.max_tokens)
        self._replays(name)
        result = self.offline(
            drafter, self.draft_sampling, budget=budget, on_tokens=self.progress.advance
        )
        row = self.row(name, result.counters, cost, "offline", budget)
        row.calibration = result.calibration or None
        row.alpha_by_depth = result.alpha_by_depth or None
        row.draft_vocabulary = result.draft_vocabulary
        row.beyond_context = beyond_context(drafter, row)
        return Measurement(row, result.counters)

    def replayed_tree(self, name: str, drafter: Drafter, cost: Cost, budget: Budget) -> Measurement:
        """Acceptance of deterministic trees without decoding."""
        self._replays(f"{name}, tree")
        replay = TreeReplay(
            self.target, self.traces, self.sampling, budget, self.offline.texts,
            on_tokens=self.progress.advance,
        )  # fmt: skip
        counters = replay(drafter)
        row = self.row(name, counters, cost, "offline", budget)
        row.beyond_context = beyond_context(drafter, row)
        return Measurement(row, counters)

    def _replays(self, name: str) -> None:
        total = sum(len(trace.response_ids) for trace in self.traces)
        self.progress.part(f"T={self.sampling.temperature:g}, {name}, replayed", total=total)

    def decoded(
        self,
        name: str,
        drafter: Drafter,
        cost: Cost,
        budget: Budget | None = None,
        shown: Collection[str] = (),
    ) -> Measurement:
        """Speculative decoding of every prompt.

        A few prompts are also decoded one by one and compared with transformers' own generate, for
        tokens/s and, at T=0, for equality. The answers to the prompts with the hashes `shown` are
        returned with their token ids.
        """
        budget = budget or budget_for(drafter, self.config.policy, self.config.K)
        cached = CachedModel(self.target.model)
        decoder = self._decoder(
            cached, drafter, self.config.batch_size, budget, shown=shown,
            on_tokens=self.progress.advance,
        )  # fmt: skip
        label = f"T={self.sampling.temperature:g}, {name}{', tree' * (budget.tree is not None)}"
        longest = self.config.max_new_tokens
        self.progress.part(f"{label}, decoded", rows=len(self.traces), longest=longest)
        finished = dict[str, Speculated]()
        for one in decoder.run(self.requests()):
            finished[one.request.tag] = one
            self.progress.finish_row()
        counters, rounds = [], []
        for trace in self.traces:
            one = finished[trace.prompt_hash]
            check_invariants(one.rounds, len(one.response_ids))
            counters.append(
                counters_from_rounds(
                    one.rounds,
                    trace.prompt_hash,
                    trace.domain,
                    budget.max_tokens,
                    judges_last=budget.stop is not None and budget.stop.judges_last,
                )
            )
            rounds += one.rounds
        differing = self._time(cached, drafter, counters, budget, label)
        for one in counters:  # alpha is a mean over all response positions, not over tested ones
            one.overlap_sum = one.overlap_count = 0.0
        row = self.row(name, counters, cost, "decoding", budget)
        row.beyond_context = beyond_context(drafter, row)
        seconds = [
            sum(getattr(r, part) for r in rounds) for part in ("t_draft", "t_verify", "t_other")
        ]
        row.draft_time_share = seconds[0] / sum(seconds) if sum(seconds) else None
        if self.sampling.temperature == 0:
            row.num_compared = sum(one.identical is not None for one in counters)
            row.differing_prompts = differing
            row.lossless = row.lossless and all(one["near_tie"] for one in differing)
        if not self.verifier(budget).lossless(self.sampling):
            row.quality, row.quality_metric = self._quality(finished)
        return Measurement(row, counters, rounds, [finished[tag] for tag in shown])

    def _quality(self, finished: Mapping[str, Speculated]) -> tuple[float, str]:
        """The quality of answers that a lossy rule let through, and its unit."""
        texts = [
            dataclasses.replace(trace, response_ids=finished[trace.prompt_hash].response_ids)
            for trace in self.traces
        ]
        own = next_token_loss(self.target, self.traces)
        metric = f"nats per token under the target, whose own text has {own:.3f}"
        return next_token_loss(self.target, texts), metric

    def requests(self) -> list[Request]:
        """A request for each trace; its tag is the prompt's hash."""
        return [
            Request(
                t.prompt_ids,
                row_key(self.config.seed, t.prompt_ids, t.sample_index),
                self.sampling,
                t.prompt_hash,
            )
            for t in self.traces
        ]

    def _decoder(
        self,
        cached: CachedModel,
        drafter: Drafter,
        batch_size: int,
        budget: Budget,
        timed: bool = True,
        shown: Collection[str] = (),
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            cached,
            drafter,
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            budget=budget,
            eos_ids=self.target.eos_ids,
            max_new_tokens=self.config.max_new_tokens,
            batch_size=batch_size,
            vocab_size=self.target.vocab_size,
            timed=timed,
            verifier=self.verifier(budget),
            shown=shown,
            on_tokens=on_tokens,
        )

    def verifier(self, budget: Budget, measured_by: str = "decoding") -> Verifier:
        """eval.verifier where it can judge these drafts, else the exact rule for them.

        The latter also holds for what an engine serves, and for replay where eval.verifier does not
        support it.
        """
        asked = parse_verifier(self.config.verifier)
        replayed = measured_by == "offline" and asked.replayable(self.sampling)
        own = budget.form in asked.judges and (measured_by == "decoding" or replayed)
        return asked if own else exact_verifier(budget.form, self.sampling)

    def timed_prompts(self) -> list[int]:
        """Indices of the prompts that are also decoded one by one, for their times."""
        return spread([t.domain for t in self.traces], self.config.timing_prompts)

    def _time(
        self,
        cached: CachedModel,
        drafter: Drafter,
        counters: list[PromptCounters],
        budget: Budget,
        label: str,
    ) -> list[DifferingPrompt]:
        """Alternate plain and speculative decoding prompt by prompt, after one warm-up of each."""
        chosen = self.timed_prompts()
        decoder = self._decoder(cached, drafter, 1, budget, timed=False)
        requests = self.requests()
        differing: list[DifferingPrompt] = []
        turns = [chosen[0], *chosen] if chosen else []
        longest = self.config.max_new_tokens
        self.progress.part(f"{label}, timed", rows=2 * len(turns), longest=longest)
        for turn, index in enumerate(turns):
            prompt_ids = self.traces[index].prompt_ids
            plainly = partial(plain_generate, self.target, prompt_ids, self.sampling, longest)
            plain, plain_s = timed(plainly, self.target)
            ours, ours_s = timed(partial(_answer, decoder, requests[index]), self.target)
            self.progress.advance(len(plain) + len(ours.response_ids))
            self.progress.finish_row()
            self.progress.finish_row()
            if turn == 0:
                continue
            one = counters[index]
            one.plain_s, one.plain_tokens = plain_s, len(plain)
            one.speculative_s, one.speculative_tokens = ours_s, len(ours.response_ids)
            if self.sampling.temperature == 0:
                gap = difference(self.target, prompt_ids, plain, ours)
                one.identical = gap is None
                if gap is not None:
                    differing.append({**gap, "prompt_hash": one.prompt_hash})
        return differing

    def row(
        self,
        name: str,
        counters: list[PromptCounters],
        cost: Cost,
        measured_by: str,
        budget: Budget,
    ) -> Row:
        """A row of the report: these counters, how they were measured and what they cost."""
        config = self.config
        summary = summarise(counters, draws=config.bootstrap_draws, seed=config.seed)
        tokens, rounds = summary.tokens_per_round, summary.num_rounds
        K, tree = budget.max_tokens, budget.tree
        # drafted per round: K, unless a stop rule or a copy ends earlier
        drafted = sum(one.submitted + one.judging for one in counters) / rounds if rounds else 0.0
        # a stop rule that is replayed, or cannot save anything: of a round of full length
        whole = budget.stop is not None and (drafted == 0 or cost.one_pass)
        share = 1.0 if whole else drafted / (K if tree is None else budget.max_nodes)
        copies = tree is not None and tree.siblings == CHAIN
        # replay does not know how far a stop rule drafts past a rejection, and so not its cost; how
        # many rounds copy and draft nothing depends on the text
        paid = None if copies or (budget.stop is not None and drafted == 0) else tokens
        verifier = self.verifier(budget, measured_by)
        row = Row(
            **vars(summary),
            drafter=name,
            role=role_of(name),
            prompts=self.prompts,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            verifier=spelled(verifier),
            policy=budget.policy,
            K=K,
            nodes=budget.max_nodes,
            counting=COUNTING,
            bonus_counted=True,
            lossless=verifier.lossless(self.sampling),
            measured_by=measured_by,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            seed=config.seed,
            cost_ratio=cost.round_time / K,
            verify_cost=cost.verify,
            cost_source=cost.source,
            modelled_speedup=None,
            mbsu=None,
            **self.about,
        )
        row.by_domain = per_domain(counters, draws=config.bootstrap_draws, seed=config.seed)
        row.by_position = per_position(counters, draws=config.bootstrap_draws, seed=config.seed)
        if tree is not None:
            row.tree = tree.describe()
            sampled = tree.siblings != TOP and self.sampling.temperature > 0
            row.tree_children = None if copies else "sampled" if sampled else "top"
        elif summary.alpha_hat is not None:
            row.tokens_per_round_iid = expected_tokens_iid(summary.alpha_hat, K)
        if paid is not None:
            row.modelled_speedup = modelled_speedup(paid, share, cost.round_time, cost.verify)
            # memory-bound: a drafting step costs this ratio, verification one forward
            row.modelled_speedup_at = {
                str(ratio): modelled_speedup(paid, share * K, ratio) for ratio in COST_RATIOS
            }
            row.mbsu = mbsu(paid, share, cost.round_bytes)
            row.mbsu_params = mbsu(paid, share, cost.round_parameters)
        return row


def _answer(decoder: SpeculativeDecoder, request: Request) -> Speculated:
    """Decode one request by itself."""
    return next(iter(decoder.run([request])))


def beyond_context(drafter: object, row: Row) -> dict[str, float] | None:
    """What a row says of the rounds that its drafter's context leaves without drafts; None where
    there are none."""
    context = drafter.context if isinstance(drafter, TrainedDrafter) else None
    drafts = row.engine_drafts
    if context is None or drafts is None or drafts == row.num_rounds:
        return None
    return {"context": context, "share": 1 - drafts / row.num_rounds}


def spread(domains: Sequence[str], count: int) -> list[int]:
    """Indices of `count` prompts, from every domain in turn: prompts often come sorted by
    domain."""
    seen = Counter[str]()
    turns = list[tuple[int, int]]()
    for place, domain in enumerate(domains):
        turns.append((seen[domain], place))
        seen[domain] += 1
    return sorted(place for _, place in sorted(turns)[:count])
