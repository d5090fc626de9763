"""Training on a GPU: EAGLE-3 and DistillSpec on an 8B-size target, bfloat16, texts of 2,048 tokens.

    python -m benchmarks.gpu_training         # needs a GPU with 80 GB
    python -m benchmarks.gpu_training tiny    # the same code on any machine, to see that it runs

Per recipe, tokens per second, peak memory and model FLOP utilisation of a step as the loop makes it
(target's forward, loss, backward, AdamW), with torch.compile and without, with the loss in chunks
and at once, and for EAGLE-3 with the target's states stored. FLOPs are counted by torch as the step
makes them, the target's forward pass among them; what is recomputed counts too. Weights are random
(Qwen3 shapes). Goal: 45 % utilisation.
"""

from __future__ import annotations

import datetime
import gc
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import trainer.chunked
from benchmarks.gpu import SHAPES, random_target, seconds
from data.batches import Batch, collate
from recipes import distillspec, eagle3
from target.model import Target, TargetOutputs
from trainer.compiled import compiled

GOAL = 0.45
PROMPT, STEPS, WARM_UP = 16, 10, 3
SIZES = {"full": (4, 2048), "tiny": (2, 64)}  # rows, tokens
# dense bfloat16, by a word of the device's name
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"eagle3": {}, "distillspec": {"draft_layers": 28, "draft_hidden_size": 1024}},
    "tiny": {
        "eagle3": {"layers": [0, 1, 2]},
        "distillspec": {"draft_layers": 1, "draft_hidden_size": 32},
    },
}
# name -> (compiled, loss in chunks, states stored)
ARMS = {
    "as it ships": (False, True, False),
    "compiled": (True, True, False),
    "loss at once": (False, False, False),
    "stored states": (False, True, True),
    "stored states, compiled": (True, True, True),
}


def measure(
    target: Target, name: str, options: dict[str, Any], batch: Batch, arm: str
) -> dict[str, Any]:
    compiles, chunks, stored = ARMS[arm]
    module: Any = {"eagle3": eagle3, "distillspec": distillspec}[name]
    recipe = module.Recipe(module.Config(**options), target)
    objective = recipe.stages()[-1].objective
    torch.manual_seed(0)
    drafter = recipe.build([]).train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-5)
    request, kind = objective.target_request(batch, 0), target.device.type

    def outputs() -> TargetOutputs:
        return target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
            project_later=True,
        )  # fmt: skip

    kept = outputs() if stored else None

    def step() -> None:
        given = kept or outputs()
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            terms = objective.loss(drafter, batch, given, 0).terms
        loss: Any = sum(weight * total / float(count) for total, count, weight in terms)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    usual = trainer.chunked.CHUNK_ELEMENTS
    if not chunks:
        trainer.chunked.CHUNK_ELEMENTS = 2**62
    backend = "inductor" if compiles else None
    try:
        with compiled(backend, drafter), compiled(backend, target.model):
            for _ in range(WARM_UP):
                step()
            if kind == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent, _ = seconds(lambda: [step() for _ in range(STEPS)])
    finally:
        trainer.chunked.CHUNK_ELEMENTS = usual
    rate = counter.get_total_flops() * STEPS / spent
    peak = next((v for k, v in PEAK_FLOPS.items() if k in device_name()), None)
    return {
        "recipe": name, "arm": arm, "tokens_per_s": STEPS * batch.input_ids.numel() / spent,
        "supervised_tokens_per_s": STEPS * batch.num_supervised / spent,
        "tflops_per_s": rate / 1e12, "utilisation": peak and rate / peak,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else None,
    }  # fmt: skip


def device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def main(arguments: list[str]) -> None:
    size = "tiny" if arguments[:1] == ["tiny"] else "full"
    if size == "full" and not torch.cuda.is_available():
        sys.exit("error: no GPU here; `python -m benchmarks.gpu_training tiny` runs the same small")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = random_target(SHAPES[size], size, device, dtype)
    rows, length = SIZES[size]
    texts = torch.randint(2, SHAPES[size]["common"]["vocab_size"], (rows, length)).tolist()
    prompts, responses = [t[:PROMPT] for t in texts], [t[PROMPT:] for t in texts]
    batch = collate(prompts, responses, ["target"] * rows).to(device)
    results = []
    for name, options in METHODS[size].items():
        for arm, (_, _, stored) in ARMS.items():
            if (
                stored and name == "distillspec"
            ):  # reads the distribution, which no store holds whole
                continue
            found = measure(target, name, options, batch, arm)
            results.append(found)
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
            print(json.dumps(shown), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    content = {
        "date": datetime.date.today().isoformat(), "device": device_name(),
        "torch": torch.__version__, "python": platform.python_version(), "goal": GOAL,
        "rows": rows, "tokens_a_row": length, "results": results,
    }  # fmt: skip
    if size == "full":
        Path("benchmarks/results/gpu_training.json").write_text(
            json.dumps(content, indent=1) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
