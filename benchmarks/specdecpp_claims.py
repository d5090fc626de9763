"""SpecDec++ on the embedded toy: does an acceptance head choose draft lengths better than K alone?

    python -m benchmarks.specdecpp_claims            # all cells and seeds, resumable
    python -m benchmarks.specdecpp_claims more       # P2 with more text and steps, as well
    python -m benchmarks.specdecpp_claims report     # only the statistics of what is there
    python -m benchmarks.specdecpp_claims sweep      # blocks, weight, mix on held-out training text
    python -m benchmarks.specdecpp_claims remedies   # more text, and the newest token judged too

Every cell trains a head for the supervised drafter that ships with the toy, at T=1, on the same
texts in the same order. Policies cut the same rollouts (`eval.policies.rollouts`) of held-out
prompts, drawn alike for all cells and seeds; thresholds and K are chosen on held-out training text,
for each cost c of a drafted token. Throughput is modelled, so that the machine plays no role.
Differences are paired by prompt and bootstrapped over seeds and prompts. Settings were committed
before the run.

P1: for every fixed K between the ends, fewer discarded drafts at its own verification rate,
interpolated on the head's curve. P2: at least 3 % above the best fixed K at c = 0.05 and 0.1. P3:
the threshold chosen without a domain is within 2 % of that domain's own best. P4: weight 6 and
mixing above weight 1 without. P5: the head against the best confidence threshold, whichever wins.
P7: binary KL at least 20 % below a constant's.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.batches import Batches
from data.cached_logits import CachedLogits
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import load_prompts
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.load import load_drafter
from drafters.round import Budget
from eval.metrics import PromptCounters, hierarchical_difference
from eval.offline import OfflineEvaluator
from eval.policies import rollouts
from eval.policies.table import POLICIES, make_budget
from phases.dev import split_dev
from recipes.base import Context, Start
from recipes.specdecpp import Config, Recipe
from target.model import Target
from target.sampling import Sampling
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

SEEDS = (0, 1, 2, 3, 4)
STEPS, ROWS, LR = 250, 64, 1e-3
NUM_PROMPTS, NUM_EVAL, NEW_TOKENS = 1600, 240, 96
K_MAX, STARTS, DRAWS = 14, 16, 10_000
COSTS = (0.02, 0.05, 0.1, 0.2)
UNSEEN = "math"
LONGEST = (5, 6, 8, 10, 12)  # 1 - h = 10 to the minus these: the head's curve as far as K_MAX
FAMILIES = ("fixed", "confidence", "product", "heuristic", "head")
# cell -> (settings of the recipe, domain left out of its training)
ONE = {"num_layers": 1}
CELLS: dict[str, tuple[dict[str, Any], str | None]] = {
    "head": (ONE, None),
    "weight 1, no mixing": (ONE | {"reject_weight": 1.0, "mix": 0.0}, None),
    f"without {UNSEEN}": (ONE, UNSEEN),
}
MORE, MORE_PROMPTS, MORE_STEPS = "more text", 12000, 8 * STEPS  # chosen by `remedies`
SWEEP = {
    "num_layers": (0, 1, 3),
    "reject_weight": (1.0, 3.0, 6.0, 12.0),
    "mix": (0.0, 0.15, 0.5),
    "shared_blocks": (False, True),
}
WORK = Path("runs/benchmarks/specdecpp")
TABLE = ("rounds", "emitted", "submitted", "accepted", "judging")
CHECKED = ("fixed", "confidence", "product", "head")  # bank against exact replay


class Experiment:
    def __init__(self, num_prompts: int = NUM_PROMPTS) -> None:
        self.accelerator = make_accelerator(TrainerConfig())
        self.target = Target.load("assets/toy/target", device=self.accelerator.device)
        traces = self._traces("train", num_prompts, 0)
        self.train, self.dev = split_dev(traces, 0)
        self.test = self._traces("eval", NUM_EVAL, 99)

    def _traces(self, split: str, count: int, seed: int) -> Sequence[Trace]:
        prompts = load_prompts("toy", count=count, seed=seed, toy_split=split)
        plan = GenerationPlan(
            f"toy {split}", tuple(prompts), (1.0,), max_new_tokens=NEW_TOKENS, seed=seed
        )
        folder = traces_folder(plan, self.target, "runs/cache")
        return generate_traces(self.target, plan, folder, batch_size=32, rows_per_shard=256)

    def fit(
        self, options: dict[str, Any], left_out: str | None, seed: int, steps: int = STEPS
    ) -> tuple[TrainedDrafter, dict[str, float]]:
        """A drafter with its head, and what the head is worth on held-out training text."""
        drafter = load_drafter("assets/toy/draft", self.target)
        recipe = Recipe(Config(**options), self.target, drafter)
        (stage,) = recipe.stages()
        torch.manual_seed(seed)
        drafter = stage.prepare(Start(drafter, self.train, {}, steps, NEW_TOKENS))
        texts, dev = ([t for t in own if t.domain != left_out] for own in (self.train, self.dev))
        kept, device = CachedLogits(self.target, texts, ["target"]), self.target.device
        settings = TrainerConfig(
            max_steps=steps, batch_size=ROWS, lr=LR, log_every=steps, save_every=steps,
            eval_every=25,
        )  # fmt: skip
        name = f"{json.dumps(options, sort_keys=True)}-{left_out}-{seed}-{steps}"
        folder = WORK / "heads" / "".join(c if c.isalnum() else "_" for c in name)
        evaluate = stage.objective.evaluated(None, dev)
        assert evaluate is not None
        batches = Batches(texts, {"target": 1.0}, ROWS, seed=seed)
        source = Source(batches, lambda batch, step: None)
        source.refreshed = lambda step, batch, drafter: stage.objective.refresh(
            step,
            Context(batch, drafter, lambda *_: [], lambda: kept.outputs(batch.to(device))),
        )
        fit(Fit(
            objective=stage.objective, drafter=drafter, source=source, evaluate=evaluate,
            config=settings, folder=folder, seed=seed, accelerator=self.accelerator,
            tracker=Tracker(settings, folder, folder.name, {}),
        ))  # fmt: skip
        drafter.eval()
        return drafter, evaluate(drafter, steps)

    def measure(self, drafter: TrainedDrafter) -> dict[str, object]:
        """split -> policy -> its sums by prompt; the prompts' hashes and domains."""
        found: dict[str, Any] = {}
        for split, traces in (("dev", self.dev), ("test", self.test)):
            bank = rollouts.draw(
                self.target, drafter, traces, Sampling(1.0), K_MAX, starts=STARTS, seed=7
            )
            if split == "test":
                found["tau"] = self.checked(found, bank, drafter)
            found[split] = {
                "prompts": [[t.prompt_hash, t.domain] for t in bank.traces],
                "policies": {
                    name: [[getattr(one, key) for key in TABLE] for one in bank.counters(budget)]
                    for name, budget in budgets().items()
                },
            }
        return found

    def checked(
        self, found: dict[str, Any], bank: rollouts.Rollouts, drafter: TrainedDrafter
    ) -> dict[str, list[float]]:
        """Policy -> tokens per round from the bank and, for the same texts, from exact replay; of
        each family the best at c = 0.05."""
        tau = {}
        for family in CHECKED:
            policy = best(found, family, 0.05)
            budget = budgets()[policy]
            offline = OfflineEvaluator(
                self.target, self.test, Sampling(1.0), budget, engine_counters=False
            )
            counted = bank.counters(budget), offline(drafter).counters
            tau[policy] = [rollouts.rates(one)["tokens_per_round"] for one in counted]
        return tau


def budgets() -> dict[str, Budget]:
    found = {f"fixed:{k}": make_budget("fixed", k) for k in range(1, K_MAX + 1)}
    for family in FAMILIES[1:]:
        found |= {one.policy: one for one in POLICIES[family].grid(K_MAX, Config.K_min)}
    for zeros in LONGEST:
        policy = f"head:{1 - 10.0**-zeros:.12g}"
        found[policy] = make_budget(policy, K_MAX, Config.K_min)
    return found


def place(cell: str, seed: int) -> Path:
    return WORK / "counters" / f"{cell.replace(' ', '-').replace(',', '')}-{seed}.json"


def run(seeds: Sequence[int] = SEEDS, more: bool = False) -> None:
    bench = Experiment(MORE_PROMPTS if more else NUM_PROMPTS)
    cells = {MORE: (ONE, None)} if more else CELLS
    for seed in seeds:
        for cell, (options, left_out) in cells.items():
            path = place(cell, seed)
            if path.exists():
                continue
            began = time.monotonic()
            drafter, quality = bench.fit(options, left_out, seed, MORE_STEPS if more else STEPS)
            trained = time.monotonic() - began
            content = {"seconds": trained, "quality": quality, **bench.measure(drafter)}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".part").write_text(json.dumps(content))
            path.with_suffix(".part").replace(path)
            print(f"{cell} seed {seed}: {quality}, {trained:.0f} s of training", flush=True)


def sweep() -> None:
    """One setting at a time, seed 100, held-out training text: KL, and speed at the best h."""
    bench = Experiment()
    for name, values in SWEEP.items():
        for value in values:
            layers = {"num_layers": 3} if name == "shared_blocks" else {"num_layers": 1}
            _try(bench, f"{name}={value}", layers | {name: value}, 100, STEPS)


def remedies() -> None:
    """Run the arms as `sweep` does, both judged on the same texts."""
    bench = Experiment(MORE_PROMPTS)
    every = bench.train
    for name, texts, steps in (("as it is", NUM_PROMPTS, STEPS), (MORE, MORE_PROMPTS, MORE_STEPS)):
        bench.train = every[:texts]
        _try(bench, name, ONE, 200, steps)


def _try(bench: Experiment, name: str, options: dict[str, Any], seed: int, steps: int) -> None:
    drafter, quality = bench.fit(options, None, seed, steps)
    bank = rollouts.draw(
        bench.target, drafter, bench.dev, Sampling(1.0), K_MAX, starts=STARTS, seed=7
    )
    last = POLICIES["head_last"].grid(K_MAX, Config.K_min)
    own = budgets() | {one.policy: one for one in last}
    speeds = {}
    for family in ("head", "head_last", "product", "fixed"):
        found = [bank.counters(own[p]) for p in own if p.startswith(f"{family}:")]
        best = (max(rollouts.speed(counted, cost) for counted in found) for cost in COSTS)
        speeds[family] = " / ".join(f"{one:.3f}" for one in best)
    print(f"{name}: KL {quality['binary_kl']:.4f}, area {quality['auc']:.3f}, {speeds}", flush=True)


# --- statistics -----------------------------------------------------------------------------------


def stored(cell: str, seed: int) -> dict[str, Any]:
    return json.loads(place(cell, seed).read_text())


def counters(
    found: dict[str, Any], split: str, policy: str, keep: Callable[[str], bool] = lambda _: True
) -> list[PromptCounters]:
    own = found[split]
    return [
        PromptCounters(name, domain, K_MAX, **dict(zip(TABLE, sums, strict=True)))
        for (name, domain), sums in zip(own["prompts"], own["policies"][policy], strict=True)
        if keep(domain)
    ]


def best(
    found: dict[str, Any],
    family: str,
    cost: float,
    split: str = "dev",
    keep: Callable[[str], bool] = lambda _: True,
) -> str:
    own = [policy for policy in found[split]["policies"] if policy.partition(":")[0] == family]
    return max(own, key=lambda p: rollouts.speed(counters(found, split, p, keep), cost))


def compared(a: list[tuple[dict[str, Any], str]], b: list[tuple[dict[str, Any], str]], cost: float):
    """(ratio of modelled speed-ups, interval of the difference) of two lists of one policy a
    seed."""
    pairs = [
        tuple(rollouts.at_cost(counters(found, "test", policy), cost) for found, policy in pair)
        for pair in zip(a, b, strict=True)
    ]
    result = hierarchical_difference(pairs, "tokens_per_round", draws=DRAWS)  # type: ignore[arg-type]
    speeds = [
        sum(rollouts.speed(counters(found, "test", policy), cost) for found, policy in side)
        for side in (a, b)
    ]
    return speeds[0] / speeds[1], result["diff"], result["ci95"]


def discards_at_matched_rate(runs: list[dict[str, Any]], K: int) -> tuple[float, list[float]]:
    """Discarded drafts per token of the head less those of fixed K, at the verification rate of
    fixed K: its mean over seeds and 95 % interval over seeds and prompts."""
    heads = [p for p in runs[0]["test"]["policies"] if p.startswith("head:")]
    tables = np.array([
        [one["test"]["policies"][policy] for policy in (f"fixed:{K}", *heads)] for one in runs
    ])  # [seeds, policies, prompts, sums]  # fmt: skip
    rng = np.random.default_rng(0)

    def difference(weights: np.ndarray) -> np.ndarray:
        """weights [prompts] -> [seeds]"""
        rounds, emitted, submitted, accepted, _ = np.moveaxis(
            np.einsum("p,sqpk->sqk", weights, tables), -1, 0
        )
        rate, discards = rounds / emitted, (submitted - accepted) / emitted
        out = []
        for x, y in zip(rate, discards, strict=True):
            order = np.argsort(x[1:])
            matched = np.interp(x[0], x[1:][order], y[1:][order], left=np.nan, right=np.nan)
            out.append(matched - y[0])
        return np.array(out)

    num_seeds, num_prompts = tables.shape[0], tables.shape[2]
    drawn = []
    for _ in range(DRAWS // 10):
        weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts))
        own = difference(weights.astype(float))
        drawn.append(own[rng.integers(0, num_seeds, num_seeds)].mean())
    # NaN: the head's curve does not reach that verification rate
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(difference(np.ones(num_prompts)).mean()), [float(low), float(high)]


def report() -> None:
    seeds = [s for s in SEEDS if all(place(cell, s).exists() for cell in CELLS)]
    if not seeds:
        print("nothing measured yet")
        return
    runs = {cell: [stored(cell, seed) for seed in seeds] for cell in CELLS}
    num = len(runs["head"][0]["test"]["prompts"])
    lines = [
        f"{STEPS} steps of {ROWS} rows, {num} held-out prompts, {STARTS} rollouts of {K_MAX} "
        f"tokens each, T=1, {len(seeds)} seeds, torch {torch.__version__}, Python "
        f"{platform.python_version()}",
        "",
        "| claim | c | difference in modelled speed-up | 95 % interval | ratio | holds |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    head = runs["head"]
    more = [stored(MORE, seed) for seed in SEEDS if place(MORE, seed).exists()]
    for c in COSTS:
        own = [(one, best(one, "head", c)) for one in head]
        # the strongest fixed K: chosen on the very prompts it is measured on
        sides = {"P2 head > best fixed K": [(one, best(one, "fixed", c, "test")) for one in head]}
        for family in ("confidence", "product", "heuristic"):
            sides[f"P5 head - best {family}"] = [(one, best(one, family, c)) for one in head]
        plain = runs["weight 1, no mixing"]
        sides["P4 head > weight 1, no mixing"] = [(one, best(one, "head", c)) for one in plain]
        compare = {claim: (own, other) for claim, other in sides.items()}
        if more:
            learned = [(one, best(one, "head", c)) for one in more]
            fixed = [(one, best(one, "fixed", c, "test")) for one in more]
            product = [(one, best(one, "product", c)) for one in more]
            compare[f"P2 with {MORE}, {len(more)} seeds"] = (learned, fixed)
            compare[f"P5 with {MORE} - best product"] = (learned, product)
        for claim, (ours, other) in compare.items():
            ratio, diff, (low, high) = compared(ours, other, c)
            least = 1.03 if claim.startswith("P2") else 1.0
            holds = _yes(ratio >= least and low > 0)
            lines.append(
                f"| {claim} | {c:g} | {diff:+.4f} | [{low:+.4f}, {high:+.4f}] | {ratio:.3f} | "
                f"{holds} |"
            )
        lines.append(_transfer(runs[f"without {UNSEEN}"], c))
    lines += ["", "| P1: fixed K | discards per token, head - fixed | 95 % interval | holds |",
              "| ---: | ---: | ---: | --- |"]  # fmt: skip
    for K in range(Config.K_min + 1, K_MAX):
        diff, (low, high) = discards_at_matched_rate(head, K)
        lines.append(f"| {K} | {diff:+.4f} | [{low:+.4f}, {high:+.4f}] | {_yes(high < 0)} |")
    lines += [
        "",
        "| policy | tokens per round, bank | replayed | gap |",
        "| --- | ---: | ---: | ---: |",
    ]
    for policy, (banked, exact) in head[0]["tau"].items():
        lines.append(f"| {policy} | {banked:.3f} | {exact:.3f} | {banked / exact - 1:+.1%} |")
    lines.append("")
    for name, cell in (("P7", head), (f"P7 with {MORE}", more)):
        if not cell:
            continue
        kl, constant, auc = (
            sum(one["quality"][key] for one in cell) / len(cell)
            for key in ("binary_kl", "binary_kl_constant", "auc")
        )
        known = (
            f"binary KL {kl:.4f}, of a constant {constant:.4f}, area under the ROC curve {auc:.3f}"
        )
        lines.append(f"{name}: {known}: {_yes(kl <= 0.8 * constant)}")
    text = "\n".join(lines) + "\n"
    print(text)
    Path("benchmarks/results/specdecpp_claims.md").write_text(text)


def _transfer(runs: list[dict[str, Any]], cost: float) -> str:
    """P3: speed on the unseen domain with the threshold of the others over that with its own."""

    def unseen(domain: str) -> bool:
        return domain == UNSEEN

    ratios = []
    for found in runs:
        given = best(found, "head", cost, "dev", lambda domain: domain != UNSEEN)
        own = best(found, "head", cost, "test", unseen)
        speeds = [
            rollouts.speed(counters(found, "test", policy, unseen), cost) for policy in (given, own)
        ]
        ratios.append(speeds[0] / speeds[1])
    ratio = sum(ratios) / len(ratios)
    return f"| P3 threshold on {UNSEEN} | {cost:g} | | | {ratio:.3f} | {_yes(ratio >= 0.98)} |"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


if __name__ == "__main__":
    action = sys.argv[1] if len(sys.argv) > 1 else "run"
    if action in ("sweep", "remedies"):
        {"sweep": sweep, "remedies": remedies}[action]()
    elif action == "report":
        report()
    else:
        run(tuple(map(int, sys.argv[2:])) or SEEDS, more=action == "more")
        report()
