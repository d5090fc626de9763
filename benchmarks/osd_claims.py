"""OSD on the embedded toy: does a drafter that learns while it serves get better, and how soon.

    python -m benchmarks.osd_claims                  # all cells and seeds, resumable
    python -m benchmarks.osd_claims run 0 1 2 shift  # these seeds and cells
    python -m benchmarks.osd_claims report           # only the statistics of what is there
    python -m benchmarks.osd_claims sweep            # learning rates and more, on other prompts
    python -m benchmarks.osd_claims check            # every cell for a moment: does it run at all

Prequential acceptance is the mean overlap of drafter and target at temperature 1 on the answer to a
request, before it is trained on; the start ("static") and the drafter distilled offline on as many
requests read the same answers. It is kept in blocks of 24 requests, which the bootstrap resamples
together with the seeds. Finished drafters are compared on held-out prompts without decoding. A seed
changes the order of the stream, what is sampled in it and the order of the offline text; the
starting drafters are the same. Settings stand here before the run.

Streams: `stationary`, 1,968 prompts of all domains mixed, from the drafter that ships with the toy.
`shift`: math, then code, then prose, 984 each; `return`: math, code, math; both from a drafter that
was distilled on math alone, so that every switch hurts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.verdict import verdict
from data.batches import Batch, Batches
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import load_prompts
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.load import load_drafter
from drafters.round import Budget
from eval.metrics import PromptCounters, hierarchical_difference
from eval.offline import OfflineEvaluator
from recipes.base import Context, Start
from recipes.osd import Config, Recipe
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

SEEDS = (0, 1, 2, 3, 4)
INTERVAL, LR = 8, 5e-4  # requests an update; of the served drafter
OFFLINE_ROWS, OFFLINE_LR = 8, 2e-3
BLOCK = 24  # requests
REQUESTS, PART = 1968, 984  # both a whole number of blocks
NEW_TOKENS, NUM_EVAL, K = 64, 96, 5
RECOVER, WITHIN = 0.8, 500  # share of the loss, requests
DRAWS = 2000
WORK = Path("runs/benchmarks/osd")
# cell -> (stream, settings)
REJECTED, ALL = {"positions": "rejected"}, {"positions": "all"}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "stationary": ("stationary", REJECTED),
    "log": ("stationary", {"log": "log", **REJECTED}),  # the path is put in
    "all positions": ("stationary", ALL),
    "published code": ("stationary", {"positions": "published_code"}),
    "bank": ("stationary", {"bank": True, **REJECTED}),
    "shift": ("shift", REJECTED),
    "shift, all positions": ("shift", ALL),
    "return": ("return", REJECTED),
    "return, replay": ("return", {"replay_share": 0.25, **REJECTED}),
}
# what `sweep` tries: (learning rate, requests an update, settings). On the prompts of the stream
# itself, with one rate for both, 1e-4, 3e-4, 1e-3, 2e-3 gave 0.5695, 0.5748, 0.5747, 0.5561 online
TRIES: tuple[tuple[float, int, dict[str, Any]], ...] = (
    (5e-4, 8, REJECTED),
    (5e-4, 8, {"replay_share": 0.75, **REJECTED}),
    (5e-4, 2, REJECTED),
    (5e-4, 8, ALL),
)
PARTS = {"shift": ("math", "code", "prose"), "return": ("math", "code", "math")}


class Experiment:
    def __init__(self, requests: int = REQUESTS, part: int = PART) -> None:
        self.requests, self.part = requests, part
        self.accelerator = make_accelerator(TrainerConfig())
        self.target = Target.load("assets/toy/target", device=self.accelerator.device)
        self.start = load_drafter("assets/toy/draft", self.target)
        self.held_out = self._traces("toy", "eval", min(NUM_EVAL, requests), 99, 1.0, K)

    def _traces(
        self, source: str, split: str, count: int, seed: int, temperature: float, lookahead: int = 0
    ) -> list[Trace]:
        prompts = load_prompts(source, count=count, seed=seed, toy_split=split)
        plan = GenerationPlan(
            f"{source} {split}", tuple(prompts), (temperature,), max_new_tokens=NEW_TOKENS,
            seed=seed, lookahead=lookahead,
        )  # fmt: skip
        folder = traces_folder(plan, self.target, "runs/cache")
        rows = generate_traces(self.target, plan, folder, batch_size=32, rows_per_shard=256)
        return list(rows)

    def stream(self, name: str, seed: int) -> list[Trace]:
        """The requests in the order of their arrival; seed 100 has prompts of its own."""
        if name == "stationary":
            rows = self._traces("toy", "train", self.requests, seed // 100, 1.0)
            random.Random(seed).shuffle(rows)
        else:
            rows = []
            for place, domain in enumerate(PARTS[name]):
                half = self._traces(f"toy:{domain}", "train", 2 * self.part, 0, 1.0)
                half = half[self.part * (place == 2) :][: self.part]  # never a prompt twice
                random.Random(seed).shuffle(half)
                rows += half
        return [dataclasses.replace(trace, index=i) for i, trace in enumerate(rows)]

    def specialist(self) -> TrainedDrafter:
        """Distilled on math alone; the start of the streams that switch."""
        rows = self._traces("toy:math", "train", 2 * self.part, 0, 1.0)
        return self.fit("specialist", rows, self.start, 100, "offline", {}, {})[0]

    def fit(
        self,
        name: str,
        rows: list[Trace],
        start: TrainedDrafter,
        seed: int,
        stage: str,
        options: dict[str, Any],
        others: dict[str, TrainedDrafter],
        lr: float = OFFLINE_LR,
        interval: int = OFFLINE_ROWS,
    ) -> tuple[TrainedDrafter, list[dict[str, Any]]]:
        """The drafter after one pass over `rows`, and the series of its stage."""
        steps = len(rows) // interval
        settings = TrainerConfig(
            max_steps=steps, batch_size=interval, lr=lr, adam_beta2=0.95, log_every=steps,
            lr_schedule="constant" if stage == "online" else "cosine",
            eval_every=BLOCK // interval, save_every=steps,
        )  # fmt: skip
        recipe = Recipe(Config(K=K, **options), self.target)
        (found,) = [one for one in recipe.stages() if one.name == stage]
        objective, others = found.objective, {"before": start, **others}
        drafter = found.prepare(Start(copy.deepcopy(start), rows, others, steps, NEW_TOKENS))
        of = "-".join(f"{key}-{value}" for key, value in options.items() if key != "log")
        words = (name, seed, stage, f"{lr:g}", interval, len(rows), of)
        folder = WORK / "fits" / "-".join(map(str, words)).replace(" ", "-")

        def outputs(batch: Batch, step: int) -> TargetOutputs | None:
            if objective.target_request(batch, step) is None:
                return None
            return self.target.outputs(batch.input_ids, batch.position_ids)

        source = Source(Batches(rows, {"target": 1.0}, interval, seed=seed), outputs)
        source.refreshed = lambda step, batch, drafter: objective.refresh(
            step, Context(batch, drafter, _no_generation, lambda: None, seed, folder)
        )
        result = fit(Fit(
            objective=objective, drafter=drafter, source=source,
            evaluate=objective.evaluated(None, []), config=settings, folder=folder, seed=seed,
            accelerator=self.accelerator, tracker=Tracker(settings, folder, name, {}),
        ))  # fmt: skip
        return drafter.eval(), result.series

    def log_of(self, seed: int, rows: list[Trace]) -> Path:
        """Write the log of a server without any drafter: the same prompts in the same order,
        answered by the target alone."""
        path = WORK / f"log-{seed}-{len(rows)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            {"prompt_ids": t.prompt_ids, "response_ids": t.response_ids, "temperature": 1.0,
             "domain": t.domain} for t in rows
        ]  # fmt: skip
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def cell(self, name: str, seed: int) -> dict[str, object]:
        stream, options = CELLS[name]
        rows = self.stream(stream, seed)
        start = self.start if stream == "stationary" else self.specialist()
        if "log" in options:
            options = options | {"log": str(self.log_of(seed, rows))}
        began = time.monotonic()
        offline, _ = self.fit(stream, rows, start, seed, "offline", {}, {})
        online, series = self.fit(
            name, rows, start, seed, "online", options, {"offline": offline}, LR, INTERVAL
        )
        return {
            "seconds": time.monotonic() - began, "series": series,
            **{arm: self.measure(d) for arm, d in
               {"static": start, "offline": offline, "online": online}.items()},
        }  # fmt: skip

    def measure(self, drafter: TrainedDrafter) -> list[dict[str, object]]:
        evaluator = OfflineEvaluator(self.target, self.held_out, Sampling(1.0), Budget(K))
        return [dataclasses.asdict(c) for c in evaluator(drafter).counters]


def _no_generation(*arguments: object) -> list[list[int]]:
    raise AssertionError("OSD draws no text of the drafter's own")


def place(name: str, seed: int) -> Path:
    return WORK / "cells" / f"{name.replace(' ', '-').replace(',', '')}-{seed}.json"


def run(seeds: Sequence[int], cells: Sequence[str]) -> None:
    bench = Experiment()
    for seed in seeds:
        for name in cells:
            path = place(name, seed)
            if path.exists():
                continue
            found = bench.cell(name, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".part").write_text(json.dumps(found))
            path.with_suffix(".part").replace(path)
            last = mean(blocks(found["series"], "prequential")[-10:])
            print(f"{name} seed {seed}: {last:.4f}, {found['seconds']:.0f} s", flush=True)


def sweep() -> None:
    bench = Experiment()
    rows, dev = bench.stream("stationary", 100), bench._traces("toy", "train", 96, 2, 1.0, K)

    def alpha(drafter: TrainedDrafter) -> float:
        counters = OfflineEvaluator(bench.target, dev, Sampling(1.0), Budget(K))(drafter).counters
        return sum(c.overlap_sum for c in counters) / sum(c.overlap_count for c in counters)

    print(f"start: {alpha(bench.start):.4f}", flush=True)
    for lr in (1e-3, 2e-3, 4e-3):
        drafter, _ = bench.fit("sweep", rows, bench.start, 100, "offline", {}, {}, lr)
        print(f"offline, lr {lr:g}: {alpha(drafter):.4f}", flush=True)
    for lr, interval, options in TRIES:
        drafter, series = bench.fit(
            "sweep", rows, bench.start, 100, "online", options, {}, lr, interval
        )
        last = mean(blocks(series, "prequential")[-20:])
        print(
            f"online, lr {lr:g}, interval {interval}, {options}: {alpha(drafter):.4f}, the last 20 "
            f"blocks of the stream {last:.4f}",
            flush=True,
        )


def check() -> None:
    """A few blocks of everything, into a folder of its own."""
    global WORK
    WORK = WORK / "check"
    bench = Experiment(requests=72, part=24)
    for name in CELLS:
        found = bench.cell(name, 0)
        shown = [round(v, 3) for v in blocks(found["series"], "prequential")]
        print(f"{name}: {shown}, {found['seconds']:.0f} s", flush=True)


# --- statistics ----------------------------------------------------------------------------------


def blocks(series: Sequence[dict[str, Any]], arm: str) -> list[float]:
    """alpha of every block of 24 requests, in order."""
    return [row[f"alpha_{arm}"] for row in series if f"alpha_{arm}" in row]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def stored(name: str) -> list[dict[str, Any]]:
    found = [place(name, seed) for seed in SEEDS]
    return [json.loads(path.read_text()) for path in found if path.exists()]


def block_interval(differences: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean over seeds and blocks, and its 95 % interval: seeds and blocks are resampled."""
    rng = np.random.default_rng(0)
    table = [np.array(values) for values in differences]
    drawn = []
    for _ in range(DRAWS):
        seeds = rng.integers(len(table), size=len(table))
        drawn.append(np.mean([rng.choice(table[s], len(table[s])).mean() for s in seeds]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(np.mean([values.mean() for values in table])), float(low), float(high)


def recovery(series: Sequence[dict[str, Any]], first: int, count: int) -> dict[str, Any]:
    """Measure the part of `count` blocks from block `first`: requests until the mean of two blocks
    lies at RECOVER of the way from the first block (the drop) to the last eight (the plateau), for
    the served drafter; whether ten blocks of the static one are ever there after WITHIN
    requests."""
    size = BLOCK
    served = blocks(series, "prequential")[first : first + count]
    static = blocks(series, "static")[first : first + count]
    drop, plateau = served[0], mean(served[-8:])
    wanted = drop + RECOVER * (plateau - drop)
    pairs = [mean(served[i : i + 2]) for i in range(count - 1)]
    reached = next((i for i, value in enumerate(pairs) if value >= wanted), None)
    late = static[WITHIN // size :]
    windows = [mean(late[i : i + 10]) for i in range(len(late) - 9)]
    return {
        "requests": None if reached is None else (reached + 2) * size,
        "drop": drop, "plateau": plateau,
        "static_recovers": any(value >= wanted for value in windows),
    }  # fmt: skip


def held_out_difference(a: str, arm_a: str, b: str, arm_b: str) -> dict[str, Any] | None:
    """alpha of two drafters on held-out prompts, paired by seed."""
    seeds = [s for s in SEEDS if place(a, s).exists() and place(b, s).exists()]
    if not seeds:
        return None
    both = [(json.loads(place(a, s).read_text()), json.loads(place(b, s).read_text()))
            for s in seeds]  # fmt: skip
    pairs = [
        ([PromptCounters(**c) for c in x[arm_a]], [PromptCounters(**c) for c in y[arm_b]])
        for x, y in both
    ]
    return hierarchical_difference(pairs, "alpha")


def prequential_lines() -> list[str]:
    lines = [
        "| cell | seeds | static | offline | online, first quarter | last quarter | last quarter - "
        "static [95 %] | last quarter - offline [95 %] |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in CELLS:
        found = stored(name)
        if not found:
            continue
        rows: dict[str, list[list[float]]] = {}
        for arm in ("prequential", "static", "offline"):
            every = [blocks(one["series"], arm) for one in found]
            rows[arm] = [values[-(len(values) // 4) :] for values in every]
            rows[f"{arm}, first"] = [values[: len(values) // 4] for values in every]
        against = []
        for arm in ("static", "offline"):
            pairs = zip(rows["prequential"], rows[arm], strict=True)
            against.append(block_interval([np.subtract(a, b).tolist() for a, b in pairs]))
        shown = [mean([mean(v) for v in rows[k]]) for k in
                 ("static", "offline", "prequential, first", "prequential")]  # fmt: skip
        numbers = " | ".join(f"{value:.4f}" for value in shown)
        ends = " | ".join(f"{d:+.4f} [{low:+.4f}, {high:+.4f}]" for d, low, high in against)
        lines.append(f"| {name} | {len(found)} | {numbers} | {ends} |")
    return lines


def recovery_lines() -> list[str]:
    lines = [
        f"A switch is recovered from once {RECOVER:.0%} of the way from drop to plateau is done, "
        f"held to {WITHIN} requests.",
        "",
        "| stream | switch to | seeds | drop | plateau | requests, median [quartiles] | within "
        f"{WITHIN} | static ever |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    count = PART // BLOCK
    for name, (stream, _) in CELLS.items():
        found = stored(name)
        for part in (1, 2) if stream in PARTS and found else ():
            each = [recovery(one["series"], part * count, count) for one in found]
            times = [e["requests"] if e["requests"] is not None else PART for e in each]
            quartiles = np.percentile(times, [50, 25, 75])
            drop, plateau = (mean([e[key] for e in each]) for key in ("drop", "plateau"))
            lines.append(
                f"| {name} | {PARTS[stream][part]} | {len(found)} "
                f"| {drop:.4f} | {plateau:.4f} "
                f"| {quartiles[0]:.0f} [{quartiles[1]:.0f}, {quartiles[2]:.0f}] "
                f"| {sum(t <= WITHIN for t in times)} of {len(times)} "
                f"| {sum(e['static_recovers'] for e in each)} of {len(times)} |"
            )
    return lines


# claim -> (a, b, what the lower end of a - b must reach): (cell, arm) pairs
CLAIMS: dict[str, tuple[tuple[str, str], tuple[str, str], float]] = {
    "online > static": (("stationary", "online"), ("stationary", "static"), 0.0),
    "online within 0.02 of offline": (("stationary", "online"), ("stationary", "offline"), -0.02),
    "all positions within 0.02 of offline": (
        ("all positions", "online"), ("all positions", "offline"), -0.02,
    ),
    "log within 0.02 of serving": (("log", "online"), ("stationary", "online"), -0.02),
    "bank > one drafter + 0.02": (("bank", "online"), ("stationary", "online"), 0.02),
    "rejected within 0.02 of all": (
        ("stationary", "online"), ("all positions", "online"), -0.02,
    ),
    "rejected > published code": (("stationary", "online"), ("published code", "online"), 0.0),
    "replay > none, after a return": (("return, replay", "online"), ("return", "online"), 0.0),
}  # fmt: skip


def report() -> None:
    lines = [
        f"{REQUESTS} requests ({PART} a part), {NEW_TOKENS} new tokens, an update every {INTERVAL},"
        f" K={K}, lr {LR:g}, {NUM_EVAL} held-out prompts, T=1, torch {torch.__version__}, Python "
        f"{platform.python_version()}",
        "",
        "Prequential acceptance:",
        "",
        *prequential_lines(),
        "",
        *recovery_lines(),
        "",
        "Held-out prompts, finished drafters:",
        "",
        "| claim | seeds | difference in alpha | 95 % interval | holds |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for claim, ((a, arm_a), (b, arm_b), least) in CLAIMS.items():
        found = held_out_difference(a, arm_a, b, arm_b)
        if found is None:
            continue
        low, high = found["ci95"]
        lines.append(
            f"| {claim} | {found['seeds']} | {found['diff']:+.4f} | [{low:+.4f}, {high:+.4f}] "
            f"| {verdict(low > least, found['seeds'])} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    Path("benchmarks/results/osd_claims.md").write_text(text)


if __name__ == "__main__":
    action = sys.argv[1] if len(sys.argv) > 1 else "run"
    if action in ("report", "sweep", "check"):
        {"report": report, "sweep": sweep, "check": check}[action]()
    else:
        chosen = [int(word) for word in sys.argv[2:] if word.isdigit()] or SEEDS
        run(chosen, [word for word in sys.argv[2:] if not word.isdigit()] or list(CELLS))
        report()
