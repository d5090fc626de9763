"""The gain of several texts in a row, and of torch.compile, in training on the toy.

    OMP_NUM_THREADS=1 python -m benchmarks.packing

Supervised tokens per second of processor time of whole steps (target's forward, loss, backward,
AdamW) of EAGLE-3 and DistillSpec: a text a row, packed into rows of 512 and of 1,024 tokens with as
many tokens a step, and a text a row compiled by inductor. The arms take turns, each after warm-up
steps of its own; ratios are of medians over the turns, to a text a row.
"""

from __future__ import annotations

import importlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from data.batches import Batches
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.packing import PackedTraces
from data.prompts import load_prompts
from data.traces import Trace
from target.model import Target
from trainer.compiled import compiled

TARGET = "assets/toy/target"
PROMPTS, NEW_TOKENS, ROWS = 1600, 64, 32
TURNS, STEPS, WARM_UP = 5, 6, 3
RECIPES = {"eagle3": {}, "distillspec": {"draft_layers": 1}}
# name -> (tokens a row, 0 for a text a row; backend of torch.compile)
ARMS = {
    "a text a row": (0, None),
    "rows of 512": (512, None),
    "rows of 1,024": (1024, None),
    "compiled": (0, "inductor"),
}


class Arm:
    """With models of its own: what is compiled stays so."""

    def __init__(self, name: str, recipe_name: str, traces: Sequence[Trace], stack: ExitStack):
        width, backend = ARMS[name]
        tokens = ROWS * statistics.mean(t.num_tokens for t in traces)
        self.batches: Batches | PackedTraces = Batches(traces, {"target": 1.0}, ROWS, seed=0)
        if width:
            self.batches = PackedTraces(traces, "target", width, round(tokens / width), 0)
        self.target = Target.load(TARGET)
        module = importlib.import_module(f"recipes.{recipe_name}")
        recipe = module.Recipe(module.Config(**RECIPES[recipe_name]), self.target)
        self.objective = recipe.stages()[-1].objective
        torch.manual_seed(0)
        self.drafter = drafter = recipe.build(traces).train()
        self.optimizer = torch.optim.AdamW(
            [p for p in drafter.parameters() if p.requires_grad], lr=1e-4
        )
        for model in (drafter, self.target.model):
            stack.enter_context(compiled(backend, model))
        self.steps, self.tokens_per_s = itertools.count(), list[float]()
        self.turn(WARM_UP)
        self.tokens_per_s.clear()

    def turn(self, count: int = STEPS) -> None:
        objective, tokens, began = self.objective, 0, time.process_time()
        for index in itertools.islice(self.steps, count):
            batch = self.batches.at(index)
            request = objective.target_request(batch, index)
            outputs = self.target.outputs(
                batch.input_ids, batch.position_ids, layers=request.layers,
                logits=request.logits, project_later=True,
            )  # fmt: skip
            terms = objective.loss(self.drafter, batch, outputs, index).terms
            sum(one.weight * one.total / (one.count or 1) for one in terms.values()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            tokens += batch.num_supervised
        self.tokens_per_s.append(tokens / (time.process_time() - began))


def main() -> None:
    target = Target.load(TARGET)
    prompts = load_prompts("toy", count=PROMPTS, seed=0, toy_split="train")
    plan = GenerationPlan("toy train", tuple(prompts), (1.0,), max_new_tokens=NEW_TOKENS)
    folder = traces_folder(plan, target, "runs/cache")
    traces = generate_traces(target, plan, folder, batch_size=32, rows_per_shard=256)
    lengths = [t.num_tokens for t in traces]
    found: dict[str, Any] = {
        "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "tokens_of_a_text": [min(lengths), max(lengths)],
    }  # fmt: skip
    for name in RECIPES:
        with ExitStack() as stack:
            arms = {arm: Arm(arm, name, traces, stack) for arm in ARMS}
            for _ in range(TURNS):
                for arm in arms.values():
                    arm.turn()
        speeds = {name: statistics.median(arm.tokens_per_s) for name, arm in arms.items()}
        plain = speeds["a text a row"]
        found[name] = {
            arm: {"tokens_per_s": round(speed), "ratio": round(speed / plain, 3)}
            for arm, speed in speeds.items()
        }
        print(name, found[name], flush=True)
    Path("benchmarks/results/packing.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
