"""Seconds of the target's forward on a few tokens: its weights as transformers loads them, and laid
out as by `target.layout`, in one process, alternating.

    python -m benchmarks.layout [target [file]]

`target`: a folder or Hub id, by default that of get_smollm2; `file`: for the result, by default
benchmarks/results/layout.json. It holds medians of 15 forwards behind a context of 200 tokens,
batch 1, on a CPU; `greedy_identical` counts prompts whose 64 greedy tokens are the same in both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from phases.run import provenance
from scripts.get_smollm2 import FOLDER
from target import model as loading
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target
from target.sampling import Sampling, row_key
from trainer.files import write_json

COUNTS = (1, 2, 3, 4, 5, 8, 10, 16, 26, 61)
RESULT = "benchmarks/results/layout.json"
CONTEXT, RUNS, GROUPED = 200, 15, "TRANSFORMERS_SDPA_FORCE_GQA"
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the largest of three numbers.",
    "A baker makes 12 loaves an hour. How many does he make in 7 hours?",
    "Explain in two sentences why the sky is blue.",
)


def as_loaded(name: str, device: str = "cpu") -> Target:
    """The target with its weights as transformers lays them out."""
    kept, loading.lay_out = loading.lay_out, lambda model: None
    try:
        return Target.load(name, device=device)
    finally:
        loading.lay_out = kept


def seconds(models: dict[str, CachedModel], count: int) -> dict[str, float]:
    """Median seconds of a forward on `count` tokens, of each model in turn."""
    positions = torch.arange(CONTEXT + count).unsqueeze(0)
    first, last = positions[:, :CONTEXT], positions[:, CONTEXT:]
    spent: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model.begin(1, CONTEXT + count)
        model.forward(torch.ones_like(first), first, used=CONTEXT, first=0, logits_to_keep=1)
    for _ in range(RUNS + 2):
        for name, model in models.items():
            os.environ[GROUPED] = "1" if name == "ours" else "0"
            began = time.perf_counter()
            model.forward(torch.ones_like(last), last, used=CONTEXT + count, first=CONTEXT)
            spent[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[2:]) for name, values in spent.items()}


def greedy(model: CachedModel, target: Target, grouped: bool) -> list[list[int]]:
    os.environ[GROUPED] = str(int(grouped))
    out = []
    for text in PROMPTS:
        ids = list(
            target.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        request = Request(ids, row_key(0, ids, 0), Sampling(0.0))
        rows = decode(model, [request], max_new_tokens=64, eos_ids=target.eos_ids, batch_size=1)
        out += [row.response_ids for row in rows]
    return out


def main(arguments: list[str]) -> None:
    name, out = [*arguments, *(str(FOLDER), RESULT)[len(arguments) :]]
    targets = {"transformers": as_loaded(name), "ours": Target.load(name)}
    models = {key: CachedModel(target.model) for key, target in targets.items()}
    table = {}
    with torch.inference_mode():
        for count in COUNTS:
            found = seconds(models, count)
            table[count] = {key: round(1000 * value, 2) for key, value in found.items()}
            print(f"{count} tokens: {table[count]} ms", flush=True)
    texts = [greedy(models[key], targets[key], key == "ours") for key in targets]
    result = {
        **provenance(["benchmarks.layout", *arguments]),
        "threads": torch.get_num_threads(),
        "target": targets["ours"].fingerprint["weights"],
        "milliseconds": table,
        "verify_5": {key: round(table[5][key] / table[1][key], 3) for key in targets},
        "greedy_identical": sum(a == b for a, b in zip(*texts, strict=True)),
        "prompts": len(PROMPTS),
    }
    print(json.dumps(result))
    write_json(Path(out), result)


if __name__ == "__main__":
    main(sys.argv[1:])
