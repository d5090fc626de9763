"""The gain of each stage of FastDraft (Zafrir et al. 2024, arXiv:2411.11055) on the embedded toy.

    python -m benchmarks.fastdraft_claims          # all cells and seeds, resumable
    python -m benchmarks.fastdraft_claims 0 1      # these seeds
    python -m benchmarks.fastdraft_claims report   # only the statistics of what is there
    python -m benchmarks.fastdraft_claims tiny     # seed 0 with a few steps: does it run?

One fresh drafter per seed is pre-trained on prose, continued on code and prose (2 : 1) and aligned:
on the target's generations, on the data set's own responses to the same prompts, and by forward KL
to the target's full distribution. `scratch` takes the same fresh weights and is aligned on the
target's generations until it has seen as many supervised tokens as pre-training, continuation and
alignment together; the target's text comes round more often for that, and its best weights are
kept. The arm on own responses takes as many supervised tokens as the one on generations. Alignments
keep their best weights by acceptance on held-out training prompts.

Acceptance on the target's text of held-out prompts at gamma = 3 without decoding, at T=0.6 (the
paper's, on which the claims are judged) and T=1. Differences are paired by prompt, bootstrapped
over seeds and prompts, 95 % intervals, Holm over the claims. Settings were committed before any
run; learning rates are the recipe's, not tuned.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.verdict import verdict
from data.batches import Batch, Batches
from data.cached_logits import CachedLogits
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.packing import PackedBatches
from data.prompts import Prompt, load_prompts
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.round import Budget
from eval.metrics import PromptCounters, hierarchical_difference, holm, summarise
from eval.offline import OfflineEvaluator
from phases.dev import split_dev
from recipes.base import Objective, Stage
from recipes.fastdraft import Config, Recipe
from target.model import Target
from target.outputs import TargetOutputs
from target.sampling import Sampling
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

SEEDS = (0, 1, 2, 3, 4)
K, TEMPERATURES = 3, (0.6, 1.0)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of a run: steps of the stages, rows per step, prompts."""

    pretrain: int = 800
    continued: int = 400
    align: int = 240
    rows: int = 24
    prompts: int = 2600
    held_out: int = 240
    new_tokens: int = 64
    evaluations: int = 6  # of an alignment, to choose its weights
    work: str = "runs/benchmarks/fastdraft"


TINY = Scale(3, 3, 3, 4, 24, 9, 16, 1, "runs/benchmarks/fastdraft-tiny")
# cell -> (stage, the cell it starts from, text, divergence)
CELLS: dict[str, tuple[str, str | None, str, str]] = {
    "pretrained": ("pretrain", None, "raw", "ce_hard"),
    "continued": ("continue", "pretrained", "raw", "ce_hard"),
    "aligned": ("align", "continued", "target", "ce_hard"),
    "aligned, own responses": ("align", "continued", "fixed", "ce_hard"),
    "aligned, fkl": ("align", "continued", "target", "fkl"),
    "scratch": ("align", None, "target", "ce_hard"),
}
# claim -> (cell, the other, domain, least difference in alpha); the interval must lie above 0, or
# above a margin below 0
CLAIMS: dict[str, tuple[str, str, str | None, float]] = {
    "F1 continuing lifts code by 0.15": ("continued", "pretrained", "code", 0.15),
    "F1 and costs prose at most 0.02": ("continued", "pretrained", "prose", -0.02),
    "F2 generations > own responses": ("aligned", "aligned, own responses", None, 0.0),
    "F3 aligned > continued": ("aligned", "continued", None, 0.0),
    "pre-trained > scratch, equal tokens": ("aligned", "scratch", None, 0.0),
}
FINDINGS = {"F6 token-level - sequence-level": ("aligned, fkl", "aligned", None, 0.0)}


class Experiment:
    name, result = "assets/toy/target", "fastdraft_claims"
    cells, claims, findings = CELLS, CLAIMS, FINDINGS
    domains, judged = ("code", "math", "prose"), ("0.6",)
    options = MappingProxyType[str, Any]({"pretrain_lr": 3e-3, "continue_lr": 1.5e-3})

    def __init__(self, scale: Scale):
        self.scale, self.work = scale, Path(scale.work)
        self.accelerator = make_accelerator(TrainerConfig())
        self.target = Target.load(self.name, device=self.accelerator.device)
        self.train, dev = self.texts()
        self.dev = [t for t in dev if t.temperature == 1]
        self.held_out = {t: self.answers(t) for t in TEMPERATURES}
        self.kept = self.stored()
        self.tokens: dict[str, float] = {  # supervised ones per step of an alignment
            source: scale.rows * sum(len(getattr(t, field)) for t in self.train) / len(self.train)
            for source, field in (("target", "response_ids"), ("fixed", "fixed_ids"))
        }

    def texts(self) -> tuple[Sequence[Trace], list[Trace]]:
        prompts = load_prompts("toy", count=self.scale.prompts, seed=0, toy_split="train")
        traces = self._traces("toy train", prompts, (0.0, 0.6, 0.8, 1.0), 0)
        return split_dev([t for t in traces if t.fixed_ids], 0)

    def answers(self, temperature: float) -> Sequence[Trace]:
        prompts = load_prompts("toy", count=self.scale.held_out, seed=99, toy_split="eval")
        return self._traces("toy eval", prompts, (temperature,), 99)

    def stored(self) -> Callable[[Batch], TargetOutputs | None]:
        return CachedLogits(self.target, self.train, ["target"]).outputs

    def _traces(
        self, source: str, prompts: Sequence[Prompt], temperatures: tuple[float, ...], seed: int
    ) -> Sequence[Trace]:
        plan = GenerationPlan(
            source, tuple(prompts), temperatures, max_new_tokens=self.scale.new_tokens, seed=seed,
            lookahead=8,
        )  # fmt: skip
        folder = traces_folder(plan, self.target, "runs/cache")
        return generate_traces(self.target, plan, folder, batch_size=32, rows_per_shard=256)

    def recipe(self, cell: str) -> tuple[Recipe, Stage]:
        name, _, _, divergence = self.cells[cell]
        scale = self.scale
        config = Config(
            pretrain_steps=scale.pretrain, continue_steps=scale.continued, divergence=divergence,
            **self.options,
        )  # fmt: skip
        recipe = Recipe(config, self.target)
        return recipe, next(stage for stage in recipe.stages() if stage.name == name)

    def steps(self, cell: str) -> int:
        """The steps of an alignment: as many as give the supervised tokens of its cell."""
        scale, (stage, start, text, _) = self.scale, self.cells[cell]
        assert stage == "align"
        wanted = scale.align * self.tokens["target"]
        if start is None:
            for before in ("pretrained", "continued"):
                steps = self.recipe(before)[1].overrides["max_steps"]
                wanted += steps * self.raw_tokens(before)
        return max(1, round(wanted / self.tokens[text]))

    def raw_tokens(self, cell: str) -> float:
        """Supervised ones per step."""
        recipe, stage = self.recipe(cell)
        batches = self.raw(stage, recipe, 0, stage.overrides["max_steps"])
        return sum(batches.at(i).num_supervised for i in range(8)) / 8

    def overrides(self, cell: str) -> dict[str, Any]:
        """Settings of a cell on raw text that its stage does not have."""
        return {}

    def raw(self, stage: Stage, recipe: Recipe, seed: int, steps: int) -> PackedBatches:
        assert stage.data.text is not None
        rows = steps * self.scale.rows
        files = stage.data.text.load(self.target, rows * recipe.config.context, "runs/cache")
        return PackedBatches(files, stage.data.text, self.scale.rows, seed)

    def fit(self, cell: str, seed: int) -> TrainedDrafter:
        """The trained drafter of a cell; those it starts from are trained or found trained."""
        _, start, text, _ = self.cells[cell]
        recipe, stage = self.recipe(cell)
        torch.manual_seed(seed)
        drafter = recipe.build([]) if start is None else copy.deepcopy(self.fit(start, seed))
        if text == "raw":
            options: dict[str, Any] = {**stage.overrides, **self.overrides(cell)}
            steps = options["max_steps"]
            batches: Batches | PackedBatches = self.raw(stage, recipe, seed, steps)
            evaluate = None
        else:
            batches = Batches(self.train, {text: 1.0}, self.scale.rows, seed=seed)
            steps = self.steps(cell)
            options = {"max_steps": steps, "lr_warmup_steps": min(20, steps // 3)}
            evaluate = self._select
        every = max(1, steps // self.scale.evaluations)
        settings = TrainerConfig(
            **options, batch_size=self.scale.rows, adam_beta2=0.95, log_every=steps,
            save_every=steps, eval_every=every,
        )  # fmt: skip
        folder = self.work / "stages" / f"{slug(cell)}-{seed}"
        source = Source(batches, partial(self._outputs, stage.objective))
        fit(Fit(
            objective=stage.objective, drafter=drafter, source=source, evaluate=evaluate,
            config=settings, folder=folder, seed=seed, accelerator=self.accelerator,
            tracker=Tracker(settings, folder, folder.name, {}),
        ))  # fmt: skip
        return drafter.eval()

    def _outputs(self, objective: Objective, batch: Batch, step: int) -> TargetOutputs | None:
        request = objective.target_request(batch, step)
        return None if request is None else self.kept(batch)

    def _select(self, drafter: TrainedDrafter, step: int) -> dict[str, object]:
        sampling = Sampling(1.0)
        found = OfflineEvaluator(self.target, self.dev, sampling, Budget(K), engine_counters=False)(
            drafter
        )
        return {"select": alpha(found.counters)}

    def measure(self, drafter: TrainedDrafter) -> dict[str, list[dict[str, object]]]:
        """temperature -> counters by prompt."""
        return {
            f"{temperature:g}": [
                dataclasses.asdict(c)
                for c in OfflineEvaluator(self.target, traces, Sampling(temperature), Budget(K))(
                    drafter
                ).counters
            ]
            for temperature, traces in self.held_out.items()
        }


def slug(cell: str) -> str:
    return cell.replace(",", "").replace(" ", "-")


def place(scale: Scale, cell: str, seed: int) -> Path:
    return Path(scale.work) / "counters" / f"{slug(cell)}-{seed}.json"


def alpha(counters: list[PromptCounters]) -> float:
    return sum(c.overlap_sum for c in counters) / sum(c.overlap_count for c in counters)


def run(kind: type[Experiment], scale: Scale, seeds: tuple[int, ...]) -> None:
    bench = kind(scale)
    for seed in seeds:
        for cell in bench.cells:
            path = place(scale, cell, seed)
            if path.exists():
                continue
            began = time.monotonic()
            drafter = bench.fit(cell, seed)
            trained = time.monotonic() - began
            content = {"seconds": trained, "parameters": drafter.num_parameters,
                       "counters": bench.measure(drafter)}  # fmt: skip
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".part").write_text(json.dumps(content))
            path.with_suffix(".part").replace(path)
            shown = [round(alpha(load(scale, cell, seed, f"{t:g}")), 4) for t in TEMPERATURES]
            print(f"{cell} seed {seed}: alpha {shown}, {trained:.0f} s of training", flush=True)


def load(
    scale: Scale, cell: str, seed: int, temperature: str, domain: str | None = None
) -> list[PromptCounters]:
    stored = json.loads(place(scale, cell, seed).read_text())["counters"][temperature]
    return [PromptCounters(**row) for row in stored if domain in (None, row["domain"])]


def difference(
    scale: Scale, pair: tuple[str, str, str | None, float], temperature: str
) -> dict[str, Any] | None:
    a, b, domain, _ = pair
    seeds = [s for s in SEEDS if place(scale, a, s).exists() and place(scale, b, s).exists()]
    if not seeds:
        return None
    pairs = [
        (load(scale, a, s, temperature, domain), load(scale, b, s, temperature, domain))
        for s in seeds
    ]
    return hierarchical_difference(pairs, "alpha")


def report(kind: type[Experiment], scale: Scale) -> str:
    lines = [
        f"{scale.pretrain} + {scale.continued} + {scale.align} steps of {scale.rows} rows, "
        f"{scale.prompts} prompts, {scale.held_out} held out, gamma = {K}, torch "
        f"{torch.__version__}, Python {platform.python_version()}",
        "",
        "| cell | T | seeds | " + " | ".join(f"AR {d} / alpha" for d in (*kind.domains, "all"))
        + " | tokens per round |",
        "| --- | ---: | ---: |" + " ---: |" * (len(kind.domains) + 2),
    ]  # fmt: skip
    for cell in kind.cells:
        seeds = [seed for seed in SEEDS if place(scale, cell, seed).exists()]
        for temperature in map("{:g}".format, TEMPERATURES) if seeds else ():
            cells = []
            for domain in (*kind.domains, None):
                one = [c for s in seeds for c in load(scale, cell, s, temperature, domain)]
                found = summarise(one, draws=0)
                cells.append(f"{found.draft_acceptance_rate:.3f} / {found.alpha:.3f}")
            cells.append(f"{found.tokens_per_round:.3f}")
            lines.append(f"| {cell} | {temperature} | {len(seeds)} | {' | '.join(cells)} |")
    lines += [
        "",
        "| claim | T | seeds | difference in alpha | 95 % interval | at least | p (Holm) | holds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for t in kind.judged:
        known = {claim: difference(scale, pair, t) for claim, pair in kind.claims.items()}
        judged = {claim: row for claim, row in known.items() if row is not None}
        adjusted = holm([row["p"] for row in judged.values()])
        for (claim, row), p in zip(judged.items(), adjusted, strict=True):
            margin, (low, high) = kind.claims[claim][3], row["ci95"]
            clear = p < 0.05 or margin < 0  # p is of "no difference", not of "little lost"
            holds = row["diff"] >= margin and low > min(0.0, margin) and clear
            lines.append(
                f"| {claim} | {t} | {row['seeds']} | {row['diff']:+.4f} | [{low:+.4f}, "
                f"{high:+.4f}] | {margin:+.3f} | {p:.4f} | {verdict(holds, row['seeds'])} |"
            )
        for name, pair in kind.findings.items():
            if row := difference(scale, pair, t):
                low, high = row["ci95"]
                lines.append(
                    f"| {name} | {t} | {row['seeds']} | {row['diff']:+.4f} | [{low:+.4f}, "
                    f"{high:+.4f}] | | | finding |"
                )
    return "\n".join(lines) + "\n"


def main(kind: type[Experiment], scale: Scale, words: list[str]) -> None:
    if words != ["report"]:
        run(kind, scale, tuple(map(int, words)) or SEEDS)
    text = report(kind, scale)
    print(text)
    if scale is not TINY:
        Path(f"benchmarks/results/{kind.result}.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["tiny"]:
        main(Experiment, TINY, ["0"])
    else:
        main(Experiment, Scale(), sys.argv[1:])
