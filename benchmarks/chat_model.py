"""The chat model of benchmarks with three seeds, SmolLM2-135M-Instruct, and its texts.

They are those of `benchmarks.queue`'s cells, whose table names the commands that make them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from data.prompts import Prompt, load_prompts
from data.traces import Trace, TraceStore
from phases.dev import split_dev
from target.decode import Request
from target.model import Target
from target.outputs import LayerId
from target.sampling import Sampling, row_key

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


def requests(target: Target, sampling: Sampling, seed: int) -> list[Request]:
    """A request for each held-out prompt; its tag is the prompt's number."""
    chat = {"add_generation_prompt": True, "return_dict": False}
    rows = [target.tokenizer.apply_chat_template(p.messages, **chat) for p in held_out()]
    return [Request(ids, row_key(seed, ids, 0), sampling, str(i)) for i, ids in enumerate(rows)]
