"""The evaluation on held-out training prompts, which chooses the best checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from accelerate.utils import gather_object
from torch import nn

from data.trace_rows import chosen, column
from data.traces import Trace
from drafters.base import TrainedDrafter
from eval.counters import PromptCounters
from eval.metrics import per_domain
from eval.offline import OfflineEvaluator
from eval.policies.table import make_budget
from phases.run import Run
from recipes.base import Evaluate, Share, unwrapped
from target.model import Target
from target.sampling import Sampling
from trainer import zero

K = TypeVar("K")
V = TypeVar("V")

DEV_PROMPTS = 48
DEV_SHARE = 0.125


def split_dev(traces: Sequence[Trace], seed: int) -> tuple[Sequence[Trace], list[Trace]]:
    """Split traces into (train, dev) by conversation: the checkpoint is chosen on prompts that are
    neither trained on nor reported. dev is a list: its few rows are read many times."""
    conversations = column(traces, "conversation_id")
    ids = sorted(
        set(conversations),
        key=lambda name: hashlib.sha256(f"{seed}-{name}".encode()).hexdigest(),
    )
    count = min(DEV_PROMPTS, max(1, int(len(ids) * DEV_SHARE))) if len(ids) > 1 else 0
    held_out = set(ids[:count])
    in_dev = np.array([name in held_out for name in conversations], bool)
    train, dev = (chosen(traces, np.flatnonzero(rows)) for rows in (~in_dev, in_dev))
    return train, list(dev)


def shared_out(sizes: Sequence[int], num_processes: int) -> list[int]:
    """The process that computes each of some batches of these sizes, the same on all processes. The
    largest go first, each to the process with the least so far."""
    owners, loads = [0] * len(sizes), [0] * num_processes
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def sharing(run: Run) -> Share:
    """Return the `Share` that divides held-out texts among the processes.

    Processes then call drafter and target a different number of times each, which `Target.sync`
    makes up for. FSDP2 allows it, since its layers are gathered before an evaluation and stay so
    (`trainer.fsdp2`). Stage 3 of ZeRO compares what processes call, so that each of them computes
    everything there."""
    accelerator = run.accelerator
    sharers = 1 if zero.compares_calls(accelerator) else accelerator.num_processes
    rank = accelerator.process_index % sharers

    def share(sizes: Mapping[K, int], compute: Callable[[K], V]) -> dict[K, V]:
        owners = shared_out(list(sizes.values()), sharers)
        own = {key: compute(key) for key, owner in zip(sizes, owners, strict=True) if owner == rank}
        run.target.sync()
        found: dict[K, V] = {}
        for part in gather_object([own]):
            found |= part
        return {key: found[key] for key in sizes}

    return share


def dev_evaluation(
    run: Run, dev: list[Trace], drafter: TrainedDrafter, chooses: bool = True
) -> Evaluate | None:
    """Return an evaluation of acceptance on held-out training traces, without decoding; every
    sampling in them counts. None without a token that could be drafted. With `chooses=False` it
    does not choose the checkpoint: raw text need not resemble what the target writes, so acceptance
    on the target's text must not decide how long to train on it.

    Processes share these texts: whole batches, whose counters are added in the order of one
    process, so that the numbers do not depend on how many processes there are."""
    first = 1 if drafter.target_layers else 0  # a head's first draft is an answer's second token
    if not any(len(trace.response_ids) > first for trace in dev):
        return None
    depth = min(run.config.eval.K, drafter.max_depth or run.config.eval.K)
    return _DevEvaluation(run, dev, depth, chooses)


class _DevEvaluation:
    """The `Evaluate` that `dev_evaluation` returns."""

    def __init__(self, run: Run, dev: list[Trace], depth: int, chooses: bool):
        self.depth, self.chooses = depth, chooses
        self.groups: dict[Sampling, list[Trace]] = {}
        for trace in dev:
            sampling = Sampling(trace.temperature, trace.top_k, trace.top_p)
            self.groups.setdefault(sampling, []).append(trace)
        self.frozen = self._evaluators(run.target)
        self.share = sharing(run)
        self.sizes = {
            (number, index): len(group) * max(trace.num_tokens for trace in group)
            for number, evaluator in enumerate(self.frozen)
            for index, group in enumerate(evaluator.texts.groups)
        }

    def _evaluators(self, target: Target) -> list[OfflineEvaluator]:
        """One for each sampling."""
        budget = make_budget("fixed", self.depth)
        return [
            OfflineEvaluator(target, traces, sampling, budget, engine_counters=False)
            for sampling, traces in self.groups.items()
        ]

    def __call__(self, drafter: nn.Module, step: int) -> dict[str, object]:
        network = unwrapped(drafter)
        # a target that trains too is used with its present weights, on the text of the frozen one
        served = network.served_target()
        evaluators = self.frozen if served is None else self._evaluators(served)

        def counted(batch: tuple[int, int]) -> list[PromptCounters]:
            number, index = batch
            return evaluators[number](network, groups=[index]).counters

        counters = [one for found in self.share(self.sizes, counted).values() for one in found]
        alpha = sum(c.overlap_sum for c in counters) / sum(c.overlap_count for c in counters)
        # a drafter that reads the target's states has another distribution at each depth
        where = "_at_depth_1" if network.target_layers else ""
        domains = per_domain(counters)["domains"]
        rounds = sum(c.rounds for c in counters)
        tokens = sum(c.emitted for c in counters) / rounds if rounds else 1.0
        return {
            # a head that recycles its own states or sees none of the drafted tokens may be good at
            # depth 1 and useless further on, so tokens per round choose it
            "select": tokens if network.target_layers else alpha,
            f"alpha{where}": alpha,
            f"alpha{where}_by_domain": {name: row["alpha"] for name, row in domains.items()},
            f"greedy_match{where}": sum(c.greedy_sum for c in counters)
            / sum(c.greedy_count for c in counters),
            "tokens_per_round": tokens,
            **({} if self.chooses else {"select": None}),
        }
