"""GTO against the same head trained on by its own token loss: tokens per round of its trees.

    python -m benchmarks.gto_claims               # base and the claimed arms, all seeds, resumable
    python -m benchmarks.gto_claims ablate        # debiasing, group size, aggregation
    python -m benchmarks.gto_claims report        # only the statistics of what is there
    python -m benchmarks.gto_claims sweep         # learning rates, on held-out training prompts
    python -m benchmarks.gto_claims rewards       # what each aggregation rewards, on the same

For each seed an EAGLE-3 head is trained on all prompts, and every arm starts from it: GTO, the
token loss alone for as many steps on the same batches, and the token loss alone for as much
processor time. No arm chooses a checkpoint. Settings: the toy's default tree on all its prompts,
and a smaller budget of nodes on the prompts of its domain with the highest entropy, both from a
base trained for long; and the first from a base that still learns.
Measured on held-out prompts without decoding, with the tree of the setting, at T=0 (claimed) and
T=1; differences are paired by prompt and bootstrapped over seeds and prompts. Settings were
committed before the run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.verdict import verdict
from data.batches import Batch, Batches
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import load_prompts
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget
from drafters.trees.table import parse_shape
from eval.metrics import PromptCounters, hierarchical_difference
from eval.replay import TreeReplay
from eval.tree_reward import AGGREGATIONS
from phases.dev import split_dev
from recipes.base import Start
from recipes.common.tree_loss import advantages
from recipes.gto import Config, Recipe
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

SEEDS = (0, 1, 2, 3, 4)
BASE_PROMPTS = "toy"  # of all settings: one base for each seed and length
BASE_ROWS, BASE_LR = 16, 4e-3  # the rate of EAGLE-3 in benchmarks.heads
STEPS, ROWS = 150, 8
# what `sweep` tries on the default tree, from the long base: (arm, learning rate, steps, settings)
TRIES: tuple[tuple[str, float, int, dict[str, Any]], ...] = (
    *(("as many steps", lr, STEPS, {}) for lr in (1e-4, 4e-4, 1e-3)),
    *(("gto", lr, STEPS, {}) for lr in (1e-4, 4e-4)),
    ("gto", 4e-4, STEPS, {"omega": 4.0}),
    ("as many steps", 1e-4, 6 * STEPS, {}),
    ("gto", 1e-4, 6 * STEPS, {"epsilon": 0.5, "omega": 2.0}),
    ("gto", 1e-4, 6 * STEPS, {}),
)
NUM_EVAL, NEW_TOKENS = 300, 64
TREES_PER_TEXT = 16


class Base(NamedTuple):
    """The head that every arm starts from. `lr`: of the arms, the best of `sweep`."""

    steps: int
    num_prompts: int
    lr: dict[str, float]


class Setting(NamedTuple):
    prompts: str
    num_prompts: int
    tree: str
    base: Base


LONG = Base(2400, 6000, {"gto": 1e-4, "token": 1e-4})
SHORT = Base(600, 1600, {"gto": 4e-4, "token": 1e-3})
SETTINGS = {
    "default tree": Setting("toy", 6000, "dynamic:25:5:8", LONG),
    "small budget": Setting("toy:prose", 2000, "dynamic:12:5:4", LONG),
    "default tree, short base": Setting("toy", 1600, "dynamic:25:5:8", SHORT),
}
# arm -> its settings of GTO; None: the token loss alone
CLAIMED: dict[str, dict[str, Any] | None] = {"gto": {}, "as many steps": None, "as much time": None}
ABLATIONS: dict[str, dict[str, Any] | None] = {
    "lse": {"aggregation": "lse"},  # the reward as the paper prints it
    "no debiasing": {"debias": False},
    "rewards as they are": {"debias": False, "standardize": False},
    "trees alone": {"token_weight": 0.0},
    "m = 1, not standardised": {"group_size": 1, "standardize": False},
    "m = 4": {"group_size": 4},
    "m = 16": {"group_size": 16},
    "max": {"aggregation": "max"},
    "mean": {"aggregation": "mean"},
    "lse_mean": {"aggregation": "lse_mean"},
}
ARMS = CLAIMED | ABLATIONS
# arm, the one it must beat, factor in tokens per round at T=0
CLAIMS = (
    ("gto", "as many steps", 1.03),
    ("lse", "as many steps", 1.03),
    ("gto", "as much time", 1.03),
    ("gto", "no debiasing", 1.0),
    ("gto", "m = 1, not standardised", 1.0),
)
LOGGED = ("step", "reward", "node_sum", "greedy_pruned", "clipped", "flat_groups")
WORK = Path("runs/benchmarks/gto")


class Experiment:
    def __init__(self, name: str):
        self.name, self.setting = name, SETTINGS[name]
        self.accelerator = make_accelerator(TrainerConfig())
        self.target = Target.load("assets/toy/target", device=self.accelerator.device)
        self.shape = parse_shape(self.setting.tree)
        source, count = self.setting.prompts, self.setting.num_prompts
        self.train, self.dev = split_dev(self._traces(source, "train", count, 1.0, 0), 0)
        self.held_out = {t: self._traces(source, "eval", NUM_EVAL, t, 99) for t in (0.0, 1.0)}

    def _traces(
        self, source: str, split: str, count: int, temperature: float, seed: int
    ) -> Sequence[Trace]:
        prompts = load_prompts(source, count=count, seed=seed, toy_split=split)
        plan = GenerationPlan(
            f"{source} {split}", tuple(prompts), (temperature,), max_new_tokens=NEW_TOKENS,
            seed=seed, lookahead=8,
        )  # fmt: skip
        folder = traces_folder(plan, self.target, "runs/cache")
        return generate_traces(self.target, plan, folder, batch_size=32, rows_per_shard=256)

    def recipe(self, options: dict[str, Any] | None) -> Recipe:
        given = {"tree": self.setting.tree, "aggregation": "lse", **(options or {})}  # published
        size = given.setdefault("group_size", Config.group_size)
        given.setdefault("num_groups", TREES_PER_TEXT // size)
        return Recipe(Config(**given), self.target)

    def fit(
        self, drafter: TrainedDrafter, stage: str, texts: Sequence[Trace], seed: int, steps: int,
        rows: int, lr: float, folder: Path, options: dict[str, Any] | None = None,
    ) -> tuple[TrainedDrafter, float]:  # fmt: skip
        """The drafter after `steps`, and seconds of processor time per step."""
        recipe = self.recipe(options)
        (now,) = [one for one in recipe.stages() if one.name == stage]
        drafter = now.prepare(Start(copy.deepcopy(drafter), texts, {}, steps, NEW_TOKENS))
        settings = TrainerConfig(
            max_steps=steps, batch_size=rows, lr=lr, lr_warmup_steps=20, adam_beta2=0.95,
            max_grad_norm=0.5, log_every=50, save_every=steps, eval_every=steps,
        )  # fmt: skip
        device = self.accelerator.device

        def outputs(batch: Batch, step: int) -> TargetOutputs:
            request = now.objective.target_request(batch, step)
            assert request is not None
            return self.target.outputs(
                batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits
            )

        batches = Batches(texts, {"target": 1.0}, rows, seed=seed)
        began = _seconds(device)
        fit(Fit(
            objective=now.objective, drafter=drafter, source=Source(batches, outputs),
            evaluate=None, config=settings, folder=folder, seed=seed,
            accelerator=self.accelerator, tracker=Tracker(settings, folder, folder.name, {}),
        ))  # fmt: skip
        return drafter.eval(), (_seconds(device) - began) / steps

    def base(self, seed: int) -> TrainedDrafter:
        torch.manual_seed(seed)
        steps, count, _ = self.setting.base
        texts, _ = split_dev(self._traces(BASE_PROMPTS, "train", count, 1.0, 0), 0)
        drafter = self.recipe(None).build(texts)
        folder = WORK / f"base-{steps}-{seed}"
        return self.fit(drafter, "base", texts, seed, steps, BASE_ROWS, BASE_LR, folder)[0]

    def arm(
        self, base: TrainedDrafter, arm: str, seed: int, lr: float | None = None,
        further: dict[str, Any] | None = None, steps: int = STEPS,
    ) -> tuple[TrainedDrafter, float]:  # fmt: skip
        options, kind = ARMS[arm], "token" if ARMS[arm] is None else "gto"
        if options is not None:
            options = options | (further or {})
        if arm == "as much time":
            costs = [
                json.loads(place(self.name, other, seed).read_text())["seconds_per_step"]
                for other in ("gto", "as many steps")
            ]
            steps = round(STEPS * costs[0] / costs[1])
        folder = WORK / _slug(self.name) / f"{_slug(arm)}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)  # begun again whole, or its time is not known
        stage = "base" if kind == "token" else "gto"
        lr = lr or self.setting.base.lr[kind]
        found = self.fit(base, stage, self.train, seed, steps, ROWS, lr, folder, options)
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        self.logged = [{k: row[k] for k in LOGGED if k in row} for row in rows if "loss" in row]
        shutil.rmtree(folder)
        return found

    def measure(self, drafter: TrainedDrafter) -> dict[str, object]:
        budget = Budget.of(self.shape)
        counters = {
            f"{t:g}": TreeReplay(self.target, traces, Sampling(t), budget)(drafter)
            for t, traces in self.held_out.items()
        }
        return {t: [dataclasses.asdict(c) for c in found] for t, found in counters.items()} | {
            "expected": self.expected(drafter)
        }

    def expected(self, drafter: TrainedDrafter) -> float:
        """Expected tokens of a round at fixed positions of held-out training texts."""
        return self.recipe({}).objective.dev_metrics(drafter, self.dev)["select"]


def _seconds(device: torch.device) -> float:
    """Seconds of this process's work, which others on the same cores do not disturb; a GPU is
    synced."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.monotonic()
    return time.process_time()


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def place(setting: str, arm: str, seed: int) -> Path:
    return WORK / "counters" / f"{_slug(setting)}-{_slug(arm)}-{seed}.json"


def run(arms: tuple[str, ...], seeds: tuple[int, ...] = SEEDS) -> None:
    for setting in SETTINGS:
        bench = Experiment(setting)
        for seed in seeds:
            missing = [a for a in ("base", *arms) if not place(setting, a, seed).exists()]
            if not missing:
                continue
            base = bench.base(seed)
            for arm in missing:
                trained, seconds = (base, 0.0) if arm == "base" else bench.arm(base, arm, seed)
                logged = {} if arm == "base" else {"logged": bench.logged}
                content = {"seconds_per_step": seconds, **logged, **bench.measure(trained)}
                path = place(setting, arm, seed)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_suffix(".part").write_text(json.dumps(content))
                path.with_suffix(".part").replace(path)
                shown = [round(tokens(load(setting, arm, seed, t)), 3) for t in ("0", "1")]
                print(f"{setting}, {arm}, seed {seed}: {shown}, {seconds:.2f} s a step", flush=True)


def sweep() -> None:
    bench = Experiment("default tree")
    base = bench.base(0)
    print(f"base: {bench.expected(base):.4f} expected tokens a round", flush=True)
    for arm, lr, steps, options in TRIES:
        trained, seconds = bench.arm(base, arm, 100, lr, options, steps)
        value, name = bench.expected(trained), f"{arm}, lr {lr:g}, {steps} steps, {options}"
        print(f"{name}: {value:.4f}, {seconds:.2f} s a step", flush=True)


def rewards() -> None:
    """Advantages of a base that was trained on for STEPS, against the base: how those of every
    aggregation go with the expected tokens' and with the number of leaves'."""
    bench = Experiment("default tree")
    base = bench.base(0)
    trained, _ = bench.arm(base, "as many steps", 100)
    objective = bench.recipe({}).objective
    found: dict[str, list[torch.Tensor]] = {}
    for trace in bench.dev:
        ids = trace.prompt_ids + trace.response_ids
        if starts := objective.groups(ids, len(trace.prompt_ids)):
            both = objective.tree_scorer(ids, objective.lengths(starts), [trained, base])
            values = {name: [one.reward(name) for one in both] for name in AGGREGATIONS}
            values["log leaves"] = [one.leaves.sum(-1).float().log() for one in both]
            for name, (own, other) in values.items():
                groups = (own - other).view(-1, objective.config.group_size)
                found.setdefault(name, []).append(advantages(groups, 1e-6)[0].flatten())
    names = list(found)
    table = torch.corrcoef(torch.stack([torch.cat(found[name]) for name in names]))
    print(f"correlation of advantages, {len(torch.cat(found['lse']))} positions")
    for name, row in zip(names, table, strict=True):
        pair = (float(row[names.index(other)]) for other in ("node_sum", "log leaves"))
        print("{}: {:+.2f} with node_sum, {:+.2f} with log leaves".format(name, *pair), flush=True)


def load(setting: str, arm: str, seed: int, temperature: str) -> list[PromptCounters]:
    stored = json.loads(place(setting, arm, seed).read_text())
    return [PromptCounters(**row) for row in stored[temperature]]


def tokens(counters: list[PromptCounters]) -> float:
    return sum(c.emitted for c in counters) / sum(c.rounds for c in counters)


def _arm_rows(setting: str) -> list[str]:
    rows = []
    for arm in ("base", *ARMS):  # of the seeds that all claimed arms have
        needed = ("base", *CLAIMED, arm)
        seeds = [s for s in SEEDS if all(place(setting, one, s).exists() for one in needed)]
        if not seeds:
            continue
        stored = [json.loads(place(setting, arm, seed).read_text()) for seed in seeds]
        mean = [
            sum(tokens(load(setting, arm, seed, t)) for seed in seeds) / len(seeds)
            for t in ("0", "1")
        ]
        expected, cost = (
            sum(one[name] for one in stored) / len(stored)
            for name in ("expected", "seconds_per_step")
        )
        rows.append(
            f"| {setting} | {arm} | {len(seeds)} | {mean[0]:.3f} | {mean[1]:.3f} | {expected:.3f} "
            f"| {cost:.2f} |"
        )
    return rows


def _claim_rows(setting: str) -> list[str]:
    rows = []
    for a, b, factor in CLAIMS:
        seeds = [s for s in SEEDS if all(place(setting, x, s).exists() for x in (a, b))]
        for t in ("0", "1") if seeds else ():
            pairs = [(load(setting, a, s, t), load(setting, b, s, t)) for s in seeds]
            found = hierarchical_difference(pairs, "tokens_per_round")
            ratio = sum(tokens(x) for x, _ in pairs) / sum(tokens(y) for _, y in pairs)
            low, high = found["ci95"]
            holds = ratio >= factor and low > 0
            rows.append(
                f"| {setting} | {a} > {factor:g} {b} | {t} | {len(seeds)} | {found['diff']:+.3f} "
                f"| [{low:+.3f}, {high:+.3f}] | {ratio:.3f} | {verdict(holds, len(seeds))} |"
            )
    return rows


def report() -> None:
    trees = ", ".join(
        f"{name}: {s.tree} on {s.prompts}, base of {s.base.steps} steps, lr {s.base.lr}"
        for name, s in SETTINGS.items()
    )
    lines = [
        f"Base: {BASE_ROWS} rows a step of {BASE_PROMPTS}. Arms: {STEPS} steps of {ROWS} rows, "
        f"{TREES_PER_TEXT} trees a text. {NUM_EVAL} prompts held out; "
        f"{trees}; torch {torch.__version__}, Python {platform.python_version()}",
        "",
        "| setting | arm | seeds | tokens per round T=0 | T=1 | expected, dev | s per step |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *(row for setting in SETTINGS for row in _arm_rows(setting)),
        "",
        "| setting | claim | T | seeds | difference in tokens per round | 95 % interval | ratio "
        "| holds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *(row for setting in SETTINGS for row in _claim_rows(setting)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    Path("benchmarks/results/gto_claims.md").write_text(text)


if __name__ == "__main__":
    action = sys.argv[1] if len(sys.argv) > 1 else "run"
    if action in ("sweep", "rewards"):
        {"sweep": sweep, "rewards": rewards}[action]()
    elif action == "report":
        report()
    else:
        given = tuple(map(int, sys.argv[2:])) or SEEDS
        run(tuple(ABLATIONS if action == "ablate" else CLAIMED), given)
        report()
