"""SpecDec++: what no acceptance head can exceed on the toy, and what its rule leaves on the table.

    python -m benchmarks.specdecpp_bounds [seed ...]   # seeds 0, 1, 2 by default; resumable

Heads as in `benchmarks.specdecpp_claims`, and with more of the target's text mixed in, 0.7 to 0.95.
All policies cut the same rollouts of held-out prompts at T=1, started evenly along the text, so
that a bound and a head differ in nothing but what they know; thresholds are chosen on held-out
training text for each cost c of a drafted token, fixed K on the prompts themselves.

- exact head: the running product of the true probabilities of acceptance instead of the head's,
  the limit of every head under SpecDec++'s rule;
- exact head, newest too: the newest token judged as well, without the forward pass that costs;
- knows the coins: drafts the tokens that will be accepted and not one more: the limit of every
  policy;
- head x newest: the head's product times the newest token's own probability under the drafter.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.specdecpp_claims import (
    COSTS,
    DRAWS,
    K_MAX,
    LONGEST,
    ONE,
    STARTS,
    TABLE,
    WORK,
    Experiment,
)
from drafters.base import TrainedDrafter
from drafters.round import Budget, Signals
from eval.counters import PromptCounters
from eval.metrics import hierarchical_difference
from eval.policies import rollouts
from eval.policies.base import Threshold
from eval.policies.head import HeadPolicy
from eval.policies.product import Product
from eval.policies.table import make_budget
from phases.run import provenance
from target.sampling import Sampling
from trainer.files import write_json

SEEDS = (0, 1, 2)
CELLS: dict[str, dict[str, Any]] = {
    "mix 0.15": ONE,
    **{f"mix {mix:g}": ONE | {"mix": mix} for mix in (0.7, 0.85, 0.95)},
}
RESULT = Path("benchmarks/results/specdecpp_bounds.json")
FIXED, EXACT, NEWEST, COINS = "fixed", "exact head", "exact head, newest too", "knows the coins"
BOUNDS = (EXACT, NEWEST, COINS)


@dataclass
class HeadTimesNewest(HeadPolicy):
    """The head's product over the tokens before, times the newest token's own probability."""

    name: ClassVar[str] = "head x newest"

    def stops(self, signals: Signals, depth: int) -> torch.Tensor:
        one = torch.ones_like(signals.confidence)
        known = signals.score if depth > 1 else None
        product = self.times(one if known is None else known.to(one), depth)
        return 1 - product * signals.probability > self.threshold


def grid(rule: type[Threshold]) -> list[Budget]:
    """Thresholds between those of the rule's own grid, and on towards 1."""
    longer = [1 - 10.0**-zeros for zeros in LONGEST]
    return [rule(h).budget(K_MAX) for h in (*rule.THRESHOLDS, *longer)]


def sums(bank: rollouts.Rollouts, budget: Budget) -> list[list[float]]:
    return [[float(getattr(one, key)) for key in TABLE] for one in bank.counters(budget)]


def measured(bank: rollouts.Rollouts) -> dict[str, list[list[list[float]]]]:
    """family -> setting -> prompt -> its sums."""
    bank = dataclasses.replace(bank, own=None)
    exact = dataclasses.replace(bank, score=bank.ratio)
    # a token that is judged as soon as it is drafted: its probability stands in its own place
    newest = dataclasses.replace(exact, probability=bank.ratio)
    longest = bank.counters(Budget(K_MAX))
    accepted = torch.stack([bank.accepted(turn) for turn in range(STARTS)], 1).clamp(min=1)
    drafted = (accepted * bank.weights(Budget(K_MAX))).sum(1).tolist()
    return {
        FIXED: [sums(bank, make_budget("fixed", K)) for K in range(1, K_MAX + 1)],
        "product": [sums(bank, budget) for budget in grid(Product)],
        "head": [sums(bank, budget) for budget in grid(HeadPolicy)],
        "head x newest": [sums(bank, budget) for budget in grid(HeadTimesNewest)],
        EXACT: [sums(exact, budget) for budget in grid(HeadPolicy)],
        NEWEST: [sums(newest, budget) for budget in grid(HeadTimesNewest)],
        COINS: [[
            [float(one.rounds), float(one.emitted), own, float(one.accepted), 0.0]
            for one, own in zip(longest, drafted, strict=True)
        ]],
    }  # fmt: skip


def run(seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {cell: [] for cell in CELLS}
    bench: Experiment | None = None
    for seed in seeds:
        for cell, options in CELLS.items():
            place = WORK / "bounds" / f"{cell.replace(' ', '-')}-{seed}.json"
            if not place.exists():
                bench = bench or Experiment()
                drafter, quality = bench.fit(options, None, seed)
                place.parent.mkdir(parents=True, exist_ok=True)
                write_json(place, {"quality": quality, **banks(bench, drafter)})
                print(f"{cell}, seed {seed}: {quality}", flush=True)
            found[cell].append(json.loads(place.read_text()))
    return found


def banks(bench: Experiment, drafter: TrainedDrafter) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for split, traces in (("dev", bench.dev), ("test", bench.test)):
        bank = rollouts.draw(
            bench.target, drafter, traces, Sampling(1.0), K_MAX, starts=STARTS, seed=7
        )
        prompts = [[t.prompt_hash, t.domain] for t in bank.traces]
        out[split] = {"prompts": prompts, "families": measured(bank)}
    return out


def counters(found: dict[str, Any], split: str, family: str, index: int) -> list[PromptCounters]:
    own = found[split]
    return [
        PromptCounters(name, domain, K_MAX, **dict(zip(TABLE, values, strict=True)))
        for (name, domain), values in zip(
            own["prompts"], own["families"][family][index], strict=True
        )
    ]


def best(found: dict[str, Any], family: str, cost: float) -> int:
    split = "test" if family == FIXED else "dev"
    number = len(found[split]["families"][family])
    return max(range(number), key=lambda i: rollouts.speed(counters(found, split, family, i), cost))


def report(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """cell -> family -> cost -> modelled speed-up over that of the best fixed K."""
    out: dict[str, Any] = {}
    for cell, runs in found.items():
        for family in runs[0]["test"]["families"]:
            if family == FIXED or (family in BOUNDS and cell != next(iter(found))):
                continue
            for cost in COSTS:
                pairs, speeds = [], [0.0, 0.0]
                for one in runs:
                    both = [
                        counters(one, "test", name, best(one, name, cost))
                        for name in (family, FIXED)
                    ]
                    speeds = [
                        s + rollouts.speed(b, cost) for s, b in zip(speeds, both, strict=True)
                    ]
                    pairs.append(tuple(rollouts.at_cost(b, cost) for b in both))
                test = hierarchical_difference(pairs, "tokens_per_round", draws=DRAWS // 10)
                out.setdefault(cell, {}).setdefault(family, {})[f"{cost:g}"] = {
                    "ratio": speeds[0] / speeds[1], "difference": test["diff"], "ci95": test["ci95"]
                }  # fmt: skip
    return out


if __name__ == "__main__":
    seeds = [int(word) for word in sys.argv[1:]] or list(SEEDS)
    results = run(seeds)
    table = report(results)
    quality = {cell: [one["quality"] for one in runs] for cell, runs in results.items()}
    write_json(RESULT, {
        **provenance(["benchmarks.specdecpp_bounds", *sys.argv[1:]]), "seeds": seeds,
        "quality": quality, "over the best fixed K": table,
    })  # fmt: skip
    for cell, families in table.items():
        for family, costs in families.items():
            print(f"{cell}, {family}: " + ", ".join(
                f"c {cost}: {one['ratio']:.3f}" for cost, one in costs.items()
            ))  # fmt: skip
