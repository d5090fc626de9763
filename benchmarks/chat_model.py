"""The chat model of benchmarks with three seeds, SmolLM2-135M-Instruct, and its texts.

They are those of `benchmarks.queue`'s cells, whose table names the commands that make them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from data.prompts import Prompt, load_prompts
from data.traces import Trace, TraceStore
from phases.dev import split_dev
from target.outputs import LayerId

TARGET = "runs/smollm2"
LAYERS: tuple[LayerId, ...] = (26, "final_norm")  # whose states are stored
NUM_TEXTS, NEW_TOKENS = 740, 96  # answers to train on, 104,000 tokens; of a held-out answer


def answers() -> Sequence[Trace]:
    return TraceStore.open("runs/real/traces", None, create=False).load()


def texts() -> tuple[Sequence[Trace], list[Trace]]:
    """NUM_TEXTS answers to train on, drawn as they are in order of their domain, and those held out
    of training."""
    train, dev = split_dev(answers(), 0)
    return random.Random(0).sample(train, NUM_TEXTS), dev


def held_out() -> list[Prompt]:
    return load_prompts("runs/real/prompts.jsonl", count=NUM_TEXTS, seed=0)
