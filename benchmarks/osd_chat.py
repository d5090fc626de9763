"""OSD on a chat model: how soon does a drafter that serves recover from a switch of domain?

    python -m benchmarks.osd_chat          # seeds 0, 1 and 2, resumable
    python -m benchmarks.osd_chat 0 1      # these seeds
    python -m benchmarks.osd_chat report   # only the statistics of what is there

SmolLM2-135M-Instruct answers questions of school mathematics, which the drafter knows, then
instructions, which it does not: it is the one that `benchmarks.fastdraft_chat` has aligned by
forward KL on mathematics, code and a little dialogue. It learns from the log of the answers
(`method.log`) and not while decoding, which would take three times as long. A seed changes the
drafter and the order of the requests. Beside it stands the drafter as it was ("static"), on the
same answers. The prompts of the instructions: `benchmarks.real_prompts`, use=training. Settings
were committed before the run.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import chat_model, fastdraft_chat, osd_claims
from benchmarks.osd_claims import BLOCK, RECOVER, block_interval, blocks, mean, recovery
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import load_prompts
from data.traces import Trace
from phases.run import provenance
from trainer.files import write_json

SEEDS = (0, 1, 2)
FIRST, SECOND = 216, 480  # requests of mathematics, of instructions; whole numbers of blocks
TOO_LONG = 80  # so many more instructions are asked, since some are dropped
LR = 1e-3  # of recipe osd's preset laptop for a stage of the same drafter
WORK = Path("runs/benchmarks/osd-chat")
RESULT = Path("benchmarks/results/osd_chat.json")


class ChatModel(osd_claims.Experiment):
    def __init__(self) -> None:
        self.drafters = fastdraft_chat.ChatModel(fastdraft_chat.SCALE)
        self.accelerator, self.target = self.drafters.accelerator, self.drafters.target
        seen = {t.index for texts in chat_model.texts() for t in texts}
        self.mathematics = [
            t for t in chat_model.answers()
            if t.index not in seen and t.domain == "math" and t.temperature == 1
        ][:FIRST]  # fmt: skip
        prompts = load_prompts("runs/real/training.jsonl", count=10**6, seed=0)
        asked = [one for one in prompts if one.domain == "instructions"][: SECOND + TOO_LONG]
        plan = GenerationPlan(
            "instructions", tuple(asked), (1.0,), max_new_tokens=chat_model.NEW_TOKENS, seed=0,
            max_prompt_tokens=512, long_prompts="drop",
        )  # fmt: skip
        folder = traces_folder(plan, self.target, "runs/cache")
        self.instructions = list(
            generate_traces(self.target, plan, folder, batch_size=32, rows_per_shard=128)
        )[:SECOND]
        assert (len(self.mathematics), len(self.instructions)) == (FIRST, SECOND)

    def stream(self, name: str, seed: int) -> list[Trace]:
        rows = []
        for part in (self.mathematics, self.instructions):
            rows += random.Random(seed).sample(part, len(part))
        return [dataclasses.replace(trace, index=i) for i, trace in enumerate(rows)]

    def series(self, seed: int) -> list[dict[str, Any]]:
        rows, start = self.stream("shift", seed), self.drafters.fit("aligned, fkl", seed)
        options = {"log": str(self.log_of(seed, rows)), "positions": "rejected"}
        return self.fit("shift", rows, start, seed, "online", options, {}, LR)[1]


def place(seed: int) -> Path:
    return WORK / f"series-{seed}.json"


def run(seeds: Sequence[int]) -> None:
    osd_claims.WORK = WORK  # where its logs and weights lie
    bench = ChatModel()
    for seed in seeds:
        if not place(seed).exists():
            series = bench.series(seed)
            write_json(place(seed), {"series": series})
            served = blocks(series, "prequential")
            print(f"seed {seed}: {[round(v, 3) for v in served]}", flush=True)


def report() -> dict[str, Any]:
    seeds = [seed for seed in SEEDS if place(seed).exists()]
    known = (
        "requests",
        "drop",
        "plateau",
    )  # the stream is too short for what the static one ends at
    found = [json.loads(place(seed).read_text())["series"] for seed in seeds]
    first, count = FIRST // BLOCK, SECOND // BLOCK
    gains = []
    for series in found:
        served, static = (blocks(series, arm)[-8:] for arm in ("prequential", "static"))
        gains.append(np.subtract(served, static).tolist())
    difference, low, high = block_interval(gains)
    return {
        "settings": {"first": FIRST, "second": SECOND, "block": BLOCK, "lr": LR, "share": RECOVER},
        "seeds": seeds,
        "recovery": [{key: recovery(s, first, count)[key] for key in known} for s in found],
        "before the switch": [mean(blocks(series, "prequential")[:first][-4:]) for series in found],
        "static, before the switch": [mean(blocks(s, "static")[:first][-4:]) for s in found],
        "last 8 blocks - static": {"diff": difference, "ci95": [low, high]},
        "blocks": {
            arm: [[round(v, 4) for v in blocks(series, arm)] for series in found]
            for arm in ("prequential", "static")
        },
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["report"]:
        run([int(word) for word in sys.argv[1:]] or SEEDS)
    result = {**provenance(["benchmarks.osd_chat", *sys.argv[1:]]), **report()}
    result["torch"] = torch.__version__
    write_json(RESULT, result)
    print(json.dumps(result, indent=1))
