"""Medusa, Hydra, Hydra++, EAGLE and EAGLE-3 on the embedded toy: who drafts better, by how much.

    python -m benchmarks.heads                          # all cells and seeds, resumable
    python -m benchmarks.heads run 0 1 2 eagle eagle-3  # these seeds and cells; only printed
    python -m benchmarks.heads report                   # the statistics of what is there
    python -m benchmarks.heads sweep      # learning rates, chosen on held-out training prompts
    python -m benchmarks.heads run 0 1 2 heads_networks  # why EAGLE-3 stays behind here
    python -m benchmarks.heads run 0 1 2 heads_hass      # each setting of HASS
    python -m benchmarks.heads run 0 1 2 heads_muon      # Muon for the hidden matrices
    python -m benchmarks.heads run 0 1 2 heads_chat      # networks, and HASS, on a chat model
    python -m benchmarks.heads run 0 1 2 heads_long      # EAGLE and EAGLE-3, ten times the steps
    python -m benchmarks.heads run 0 1 2 heads_rates     # both at the sweep's best rates
    python -m benchmarks.heads run 0 1 2 heads_blocks    # block drafters, beside EAGLE-3

Every cell trains on the same texts of the target in the same order, the same number of rows and
steps; HASS goes on from the head of cell eagle, as does its control. Each is measured on held-out
prompts without decoding, at T=0 and T=1: as a chain of K=4, and with trees of 25 nodes: calibrated
on held-out training prompts, EAGLE's static one, EAGLE-2's dynamic one. Differences are paired by
prompt, bootstrapped over seeds and prompts. Settings were committed before the run; the learning
rates come from `sweep` (seed 100, development prompts).

The chat model is SmolLM2-135M-Instruct, with the texts and held-out prompts of `benchmarks.queue`'s
cells (their table names the commands that make them); its heads are measured as chains alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import chat_model
from benchmarks.heads_cells import (
    ALL,
    BLOCK_K,
    BLOCK_NODES,
    BLOCK_TREES,
    BLOCKS,
    CAPTURES,
    CELLS,
    CHAT,
    CHAT_ROWS,
    CHAT_STEPS,
    CLAIMS,
    GROUPS,
    LONG,
    LONG_PROMPTS,
    LONG_STEPS,
    MUON,
    NEW_TOKENS,
    NODES,
    NORMED,
    NUM_EVAL,
    NUM_PROMPTS,
    ROWS,
    SEEDS,
    SMALL,
    STARTS,
    STEPS,
    TREES,
    K,
)
from benchmarks.verdict import verdict
from data.batches import Batches
from data.features import write_features
from data.features_layout import FeaturesPlan, features_folder
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import Prompt, load_prompts
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.eagle import Index
from drafters.eagle1 import Eagle1Drafter
from drafters.round import Budget, Shape
from drafters.trees.best_first import BestFirstTree
from drafters.trees.calibrated import calibrated_tree
from drafters.trees.table import parse_shape
from eval.metrics import PromptCounters, hierarchical_difference
from eval.offline import OfflineEvaluator
from eval.replay import TreeReplay, measure_accuracies
from eval.speed_model import COST_RATIOS, modelled_speedup
from phases.dev import split_dev
from target.model import Target
from target.outputs import LayerId
from target.sampling import Sampling
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

WORK = Path("runs/benchmarks/heads")
LAYERS: tuple[LayerId, ...] = (1, 3, 4, 5, 7, "final_norm")


class ReadingNormed(Eagle1Drafter):
    """EAGLE-1's network, which has no norm before its attention, on states of mean square 1."""

    def fuse(self, hidden: Mapping[LayerId, torch.Tensor], *index: Index) -> torch.Tensor:
        states = super().fuse(hidden, *index)
        return F.rms_norm(states, states.shape[-1:])


class Experiment:
    name, layers, new_tokens = "assets/toy/target", LAYERS, NEW_TOKENS
    steps, rows, num_prompts, K = STEPS, ROWS, NUM_PROMPTS, K
    trees: Collection[str] = ALL  # the cells that are measured with trees
    about = (
        f"{STEPS} steps of {ROWS} rows, {NUM_PROMPTS} prompts ({SMALL} where said), {NUM_EVAL} "
        f"held-out prompts, {NODES} nodes"
    )

    def __init__(self, features_dtype: str = "bf16") -> None:
        self.work = WORK if features_dtype == "bf16" else WORK / features_dtype
        self.accelerator = make_accelerator(TrainerConfig())
        self.target = Target.load(self.name, device=self.accelerator.device)
        self.train, self.dev = self.texts()
        self.held_out = {t: self.answers(t) for t in (0.0, 1.0)}
        plan = FeaturesPlan(self.layers, features_dtype)
        folder = features_folder(self.target, self.train, plan, "runs/cache")
        self.store = write_features(self.target, self.train, plan, folder, batch_size=32)

    def texts(self) -> tuple[Sequence[Trace], list[Trace]]:
        prompts = load_prompts("toy", count=self.num_prompts, seed=0, toy_split="train")
        return split_dev(self._traces("toy train", prompts, 1.0, 0), 0)

    def answers(self, temperature: float) -> Sequence[Trace]:
        prompts = load_prompts("toy", count=NUM_EVAL, seed=99, toy_split="eval")
        return self._traces("toy eval", prompts, temperature, 99)

    def _traces(
        self, source: str, prompts: Sequence[Prompt], temperature: float, seed: int
    ) -> Sequence[Trace]:
        plan = GenerationPlan(
            source, tuple(prompts), (temperature,), max_new_tokens=self.new_tokens, seed=seed,
            lookahead=8,
        )  # fmt: skip
        folder = traces_folder(plan, self.target, "runs/cache")
        return generate_traces(self.target, plan, folder, batch_size=32, rows_per_shard=256)

    def fit(
        self, name: str, seed: int, lr: float | None = None, steps: int | None = None
    ) -> TrainedDrafter:
        """`lr`: of Muon in cells that it trains, else of AdamW."""
        recipe_name, options, own_lr, prompts = ALL[name]
        start = STARTS.get(name)
        steps = steps or (self.steps if start is None else self.steps // 4)
        module = importlib.import_module(f"recipes.{recipe_name}")
        kind = module.Recipe
        if name in CAPTURES:
            kind = type("Reading", (kind,), {"captures": CAPTURES[name]})
        settings = TrainerConfig(
            max_steps=steps, batch_size=self.rows, lr=lr or own_lr,
            lr_warmup_steps=min(20, steps // 3),
            adam_beta2=0.95, log_every=steps, save_every=steps, eval_every=steps,
        )  # fmt: skip
        rate = settings.lr
        if name in MUON:
            rate = lr or MUON[name]
            settings = dataclasses.replace(settings, optimizer="muon", lr=own_lr, muon_lr=rate)
        traces = self.train[:prompts]
        given = None if start is None else self.fit(start, seed)
        recipe = kind(module.Config(**options), self.target, given)
        torch.manual_seed(seed)
        drafter = given or recipe.build(traces)
        if name in NORMED:
            drafter.__class__ = ReadingNormed
        (stage,) = recipe.stages()
        folder = self.work / f"{_slug(name)}-{seed}-{rate:g}-{steps}"
        source = Source(
            Batches(traces, {"target": 1.0}, self.rows, seed=seed),
            lambda batch, step: self.store.outputs(batch, self.target.device),
        )
        fit(Fit(
            objective=stage.objective, drafter=drafter, source=source, evaluate=None,
            config=settings, folder=folder, seed=seed, accelerator=self.accelerator,
            tracker=Tracker(settings, folder, folder.name, {}),
        ))  # fmt: skip
        return drafter.eval()

    def shapes(self, drafter: TrainedDrafter) -> dict[str, Shape]:
        accuracy = measure_accuracies(self.target, self.dev, drafter, self.K, Sampling(1.0)).ranks
        shapes: dict[str, Shape] = {"calibrated": calibrated_tree(accuracy, NODES)}
        if drafter.max_depth is None:
            shapes |= {name: parse_shape(text) for name, text in TREES.items()}
        return shapes

    def measure(self, name: str, drafter: TrainedDrafter) -> dict[str, dict[str, object]]:
        """shape -> temperature -> counters, and alpha by depth of the chain."""
        shapes = self.shapes(drafter) if name in self.trees else {}
        found: dict[str, dict[str, object]] = {"chain": {}, "alpha": {}, **{s: {} for s in shapes}}
        for temperature, traces in self.held_out.items():
            sampling, key = Sampling(temperature), f"{temperature:g}"
            result = OfflineEvaluator(self.target, traces, sampling, Budget(self.K))(drafter)
            found["chain"][key] = [dataclasses.asdict(c) for c in result.counters]
            found["alpha"][key] = result.alpha_by_depth
            for name, shape in shapes.items():
                counters = TreeReplay(self.target, traces, sampling, Budget.of(shape))(drafter)
                found[name][key] = [dataclasses.asdict(c) for c in counters]
        return found


class BlockFamily(Experiment):
    layers, K, trees = (1, 2, 3, 4, 5, "final_norm"), BLOCK_K, BLOCK_TREES
    about = (
        f"{STEPS} steps of {ROWS} rows, {NUM_PROMPTS} prompts, {NUM_EVAL} held-out prompts, "
        f"blocks behind 32 tokens of a text"
    )

    def shapes(self, drafter: TrainedDrafter) -> dict[str, Shape]:
        accuracy = measure_accuracies(self.target, self.dev, drafter, self.K, Sampling(1.0)).ranks
        shapes: dict[str, Shape] = {}
        for nodes in BLOCK_NODES:
            shapes[f"calibrated {nodes}"] = calibrated_tree(accuracy, nodes)
            shapes[f"dynamic {nodes}"] = parse_shape(f"dynamic:{nodes}:{self.K}:8")
            if drafter.has_slots:
                shapes[f"best_first {nodes}"] = BestFirstTree(nodes).shape(None, self.K)
        return shapes


class LongBudget(Experiment):
    steps, num_prompts, layers = LONG_STEPS, LONG_PROMPTS, (1, 3, 4, "final_norm")
    about = (
        f"{LONG_STEPS} steps of {ROWS} rows, {LONG_PROMPTS} prompts, {NUM_EVAL} held-out prompts, "
        f"{NODES} nodes"
    )


class ChatModel(Experiment):
    name, layers = chat_model.TARGET, chat_model.LAYERS
    new_tokens = chat_model.NEW_TOKENS
    steps, rows, trees = CHAT_STEPS, CHAT_ROWS, ()
    about = f"{CHAT_STEPS} steps of {CHAT_ROWS} rows, {chat_model.NUM_TEXTS} answers"

    def texts(self) -> tuple[Sequence[Trace], list[Trace]]:
        return chat_model.texts()

    def answers(self, temperature: float) -> Sequence[Trace]:
        return self._traces("held-out prompts", chat_model.held_out(), temperature, 0)


def place(name: str, seed: int) -> Path:
    return WORK / "counters" / f"{_slug(name)}-{seed}.json"


def _where(cells: Sequence[str]) -> type[Experiment]:
    own = {LongBudget: LONG, ChatModel: CHAT, BlockFamily: BLOCKS}
    return next((kind for kind, of in own.items() if set(cells) <= set(of)), Experiment)


def _slug(name: str) -> str:
    return name.replace(":", "").replace(" ", "-")


def run(seeds: Sequence[int], cells: Sequence[str]) -> None:
    bench = _where(cells)()
    for seed in seeds:
        for name in cells:
            path = place(name, seed)
            if path.exists():
                continue
            began = time.monotonic()
            drafter = bench.fit(name, seed)
            trained = time.monotonic() - began
            found = bench.measure(name, drafter)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"seconds": trained, "parameters": drafter.num_parameters, **found}
            path.with_suffix(".part").write_text(json.dumps(content))
            path.with_suffix(".part").replace(path)
            shown = {
                shape: [round(tokens(load(name, seed, shape, t)), 3) for t in ("0", "1")]
                for shape in found
                if shape != "alpha"
            }
            print(f"{name} seed {seed}: {shown}, {trained:.0f} s of training", flush=True)


def sweep() -> None:
    names = sys.argv[2:] or [*CELLS]
    bench = _where(names)()
    for name in names:
        rates = (0.02, 0.05, 0.1, 0.2) if name in MUON else (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
        for lr in rates:
            drafter = bench.fit(name, 100, lr, 100)
            dev = OfflineEvaluator(
                bench.target, bench.dev, Sampling(1.0), Budget(bench.K), engine_counters=False
            )(drafter)
            print(f"{name} lr {lr:g}: {tokens(dev.counters):.3f} tokens per round", flush=True)


def load(name: str, seed: int, shape: str, temperature: str) -> list[PromptCounters]:
    stored = json.loads(place(name, seed).read_text())
    return [PromptCounters(**row) for row in stored[shape][temperature]]


def tokens(counters: list[PromptCounters]) -> float:
    return sum(c.emitted for c in counters) / sum(c.rounds for c in counters)


def report(chosen: Sequence[int], cells: Sequence[str], result: str | None) -> None:
    lines = [
        f"{_where(cells).about}, K={_where(cells).K}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "",
        "| cell | shape | seeds | tokens per round T=0 | T=1 | modelled at c = "
        + " / ".join(map(str, COST_RATIOS))
        + " (T=1) | alpha by depth T=1 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in cells:
        seeds = [seed for seed in chosen if place(name, seed).exists()]
        if not seeds:
            continue
        stored = [json.loads(place(name, seed).read_text()) for seed in seeds]
        shapes = [key for key in stored[0] if key not in ("alpha", "seconds", "parameters")]
        for shape in shapes:
            mean = {
                t: sum(tokens(load(name, seed, shape, t)) for seed in seeds) / len(seeds)
                for t in ("0", "1")
            }
            depth = stored[0][shape]["1"][0]["K"]
            speed = " / ".join(f"{modelled_speedup(mean['1'], depth, c):.2f}" for c in COST_RATIOS)
            alphas = [one["alpha"]["1"] for one in stored]
            by_depth = ", ".join(f"{sum(a) / len(a):.3f}" for a in zip(*alphas, strict=True))
            shown = by_depth if shape == "chain" else ""
            lines.append(
                f"| {name} | {shape} | {len(seeds)} | {mean['0']:.3f} | {mean['1']:.3f} | {speed} "
                f"| {shown} |"
            )
    lines += [
        "",
        "| claim | T | seeds | difference in tokens per round | 95 % interval | ratio | holds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for claim, ((a, shape_a), (b, shape_b), factor) in CLAIMS.items():
        if a not in cells or b not in cells:
            continue
        seeds = [s for s in chosen if place(a, s).exists() and place(b, s).exists()]
        for t in ("0", "1") if seeds else ():
            pairs = [(load(a, s, shape_a, t), load(b, s, shape_b, t)) for s in seeds]
            found = hierarchical_difference(pairs, "tokens_per_round")
            ratio = sum(tokens(x) for x, _ in pairs) / sum(tokens(y) for _, y in pairs)
            assert found["ci95"] is not None
            low, high = found["ci95"]
            holds = ratio >= factor and low > 0
            lines.append(
                f"| {claim} | {t} | {len(seeds)} | {found['diff']:+.3f} | [{low:+.3f}, {high:+.3f}]"
                f" | {ratio:.3f} | {verdict(holds, len(seeds))} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if result is not None:
        (Path("benchmarks/results") / f"{result}.md").write_text(text)


if __name__ == "__main__":
    action = sys.argv[1] if len(sys.argv) > 1 else "run"
    if action == "sweep":
        sweep()
    else:
        seeds = [int(word) for word in sys.argv[2:] if word.isdigit()] or SEEDS
        words = [word for word in sys.argv[2:] if not word.isdigit()] or ["heads"]
        cells = [cell for word in words for cell in GROUPS.get(word, [word])]
        if action != "report":
            run(seeds, cells)
        report(seeds, cells, words[0] if words[0] in GROUPS else None)
