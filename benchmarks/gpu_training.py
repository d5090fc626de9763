"""Training on a GPU: EAGLE-3 and DistillSpec on an 8B-size target, bfloat16, 2k to 32k tokens.

    python -m benchmarks.gpu_training              # needs a GPU with 80 GB
    python -m benchmarks.gpu_training budget=12    # begins no arm after 12 minutes
    python -m benchmarks.gpu_training tiny         # the same on any machine, to see that it runs

The arms that matter most come first, and the same command goes on with those that are left. An arm
is a stage that `phases.stage` trains as in a run, with the settings of the arm: tokens per second,
peak memory and model FLOP utilisation of its steps. Times are those of the second row of
metrics.jsonl; compilation and warm-up are in the first. Nothing is evaluated and no checkpoint is
written. `whole` texts fill their row and are all answer but for a short prompt; those of a `chat`
are ragged and half prompt, a text a row (padded to few lengths) or, `packed`, several.

Utilisation counts useful FLOPs alone: each product once, of real tokens, and of the answer's tokens
in the output heads; what is computed again, or for padding, does not count. Weights are random
(Qwen3 shapes). Goal: 45 %. An arm that needs more memory than there is says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import trainer.logits
from benchmarks.arms import (
    Result,
    chat_lengths,
    peak_memory_gib,
    reset_peak_memory,
    run_arms,
    sizes_of,
)
from benchmarks.gpu import SHAPES, random_target
from data.batches import Batch
from data.traces import Trace
from drafters.base import TrainedDrafter
from phases.run import Run
from phases.source import RunText
from phases.stage import StageRun
from phases.train import build
from recipes import base
from recipes.base import Needs, Start
from recipes.common.config import compose
from target.model import Target, decoder_layers
from trainer.objective import BatchSource
from trainer.setup import make_accelerator

GOAL = 0.45
STEPS = 8  # that are timed, after as many to warm up
LENGTHS = {"full": (2048, 8192, 32768), "tiny": (32, 64, 128)}
TOKENS = {"full": 8192, "tiny": 128}  # of a batch, one row at least
BACKEND = {"full": "inductor", "tiny": "eager"}  # of torch.compile
# dense bfloat16, by a word of the device's name
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {
        "eagle3": {"draft_vocab_size": 32000, "steps": 7},
        "distillspec": {"draft_layers": 28, "draft_hidden_size": 1024},
    },
    "tiny": {
        "eagle3": {"layers": [0, 1, 2], "steps": 3},
        "distillspec": {"draft_layers": 1, "draft_hidden_size": 32},
    },
}
RESULT = Path("benchmarks/results/gpu_training.json")


@dataclass(frozen=True)
class Arm:
    """`length`: tokens of the longest text; `texts`: whole, chat or packed; `settings`: of a run,
    where they are not those of `settings_of`; `at_once`: the loss of all positions at once."""

    recipe: str
    length: int
    texts: str = "whole"
    settings: Mapping[str, object] = field(default_factory=dict)
    at_once: bool = False

    @property
    def name(self) -> str:
        parts = [self.recipe, f"{self.length} tokens", self.texts]
        parts += [f"{key}={value}" for key, value in self.settings.items()]
        return ", ".join([*parts, *["loss at once"] * self.at_once])


def arms(size: str) -> list[Arm]:
    """The most important first. States are live and layers compiled, unless an arm says otherwise;
    no store holds the whole distribution that DistillSpec learns."""
    short, middle, long = LENGTHS[size]
    main = [
        arm
        for recipe in ("eagle3", "distillspec")
        for arm in (
            Arm(recipe, short),
            Arm(recipe, middle),
            Arm(recipe, long, settings={"trainer.gradient_checkpointing": "true"}),
        )
    ]
    of_each = [
        arm
        for recipe in ("eagle3", "distillspec")
        for arm in (
            Arm(recipe, short, "packed"),
            Arm(recipe, short, "chat"),
            Arm(recipe, short, settings={"trainer.compile": "null"}),
            Arm(recipe, short, at_once=True),
        )
    ]
    stored = Arm("eagle3", short, settings={"data.features": "cached"})
    return [*main, stored, *of_each, Arm("eagle3", long)]


def settings_of(arm: Arm, size: str, folder: str) -> dict[str, object]:
    """The configuration of a run, by key."""
    rows = max(1, TOKENS[size] // arm.length)
    return {
        "model.drafter": "null", "data.features": "live", "data.cache_dir": folder,
        # texts of a chat are a quarter as long
        "trainer.batch_size": {"whole": rows, "chat": 4 * rows, "packed": 1}[arm.texts],
        "trainer.pack_tokens": TOKENS[size] if arm.texts == "packed" else 0,
        "trainer.compile": BACKEND[size], "trainer.lr": 5e-5,
        # no step is the last one, after which a checkpoint would be written
        "trainer.max_steps": 2 * STEPS + 2, "trainer.save_every": 100 * STEPS,
        "trainer.log_every": STEPS,
        **{f"method.{key}": value for key, value in METHODS[size][arm.recipe].items()},
        **arm.settings,
    }  # fmt: skip


def make_traces(arm: Arm, size: str, vocabulary: int) -> list[Trace]:
    """Texts of random tokens for `STEPS` steps, the same in every run."""
    rows = max(1, TOKENS[size] // arm.length) * STEPS
    whole = arm.texts == "whole"
    lengths = [arm.length] * rows if whole else chat_lengths(4 * rows, arm.length)
    draw, found = torch.Generator().manual_seed(0), []
    for index, length in enumerate(lengths):
        ids = torch.randint(2, vocabulary, (length,), generator=draw).tolist()
        split = max(1, int(length * (0.01 if whole else 0.5)))
        facts = ("target", "random", str(index), 0, 0, 1.0, 0, 1.0, 0, "length", "", "")
        found.append(Trace(ids[:split], ids[split:], *facts, index=index))
    return found


class Ended(Exception):
    """The steps that are timed are done."""


@dataclass
class Timed:
    """The batches of a stage until its second row is logged."""

    batches: BatchSource[Batch]

    def at(self, index: int) -> Batch:
        if index == STEPS:
            reset_peak_memory()
        if index > 2 * STEPS:  # of stored states, the batch of the next step is asked for already
            raise Ended
        return self.batches.at(index)


class TimedStage(StageRun):
    """A stage that ends after the steps that are timed."""

    def batches(self) -> tuple[Needs, BatchSource[Batch]]:
        data, batches = super().batches()
        # without a mix: logits of so few texts might be held in memory
        return dataclasses.replace(data, mix={}), Timed(batches)

    def timed(self) -> list[Batch]:
        """The batches of the steps that are timed."""
        _, batches = super().batches()
        return [batches.at(index) for index in range(STEPS, 2 * STEPS)]


@contextlib.contextmanager
def loss_at_once(wanted: bool) -> Iterator[None]:
    usual = trainer.logits.CHUNK_ELEMENTS
    trainer.logits.CHUNK_ELEMENTS = 2**62 if wanted else usual
    try:
        yield
    finally:
        trainer.logits.CHUNK_ELEMENTS = usual


def useful_flops(
    target: Target, drafter: TrainedDrafter, batch: Batch, depth: int, stored: bool
) -> float:
    """FLOPs of a step that no implementation can leave out, all products once."""
    config = target.model.config.get_text_config()
    lengths = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    prompts = [len(p) for p in batch.prompts]
    tokens, answers = sum(lengths), float(batch.num_supervised)
    pairs = sum(n * n / 2 for n in lengths)  # of a token and one that it sees
    of_answers = pairs - sum(n * n / 2 for n in prompts)
    attended = 4 * config.num_attention_heads * config.head_dim  # a pair: scores, weighted sum
    layers = sum(p.numel() for p in decoder_layers(target.model).parameters() if p.ndim > 1)
    teacher = 0.0 if stored else 2 * layers * tokens + attended * config.num_hidden_layers * pairs
    head = drafter.output_head(1).weight
    # a store has what the loss needs of the tokens that are not drafted
    teacher += 2 * config.hidden_size * (len(head) if stored else target.vocab_size) * answers
    if drafter.target_layers:  # a head: a layer on all tokens, then on the answers alone
        eagle: Any = drafter
        body, pair = (
            sum(p.numel() for p in parts if p.ndim > 1)
            for parts in (
                eagle.layer.parameters(),
                [eagle.layer.k_proj.weight, eagle.layer.v_proj.weight],
            )
        )
        read = tokens - len(lengths)  # the last token of a text has no next one
        # what is read by `fc` has no gradient: one product less
        own = 2 * pair * read + 4 / 3 * eagle.fc.weight.numel() * read
        for step in range(1, depth + 1):
            count = float(batch.supervised(step).sum())
            own += 2 * (body - (pair if step == 1 else 0) + head.numel()) * count
            own += attended * of_answers
    else:
        small: Any = drafter
        shape = small.model.config
        body = sum(p.numel() for p in decoder_layers(small.model).parameters() if p.ndim > 1)
        width = shape.num_attention_heads * (
            getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        )
        own = 2 * body * tokens + 4 * width * shape.num_hidden_layers * pairs
        own += 2 * head.numel() * answers
    return teacher + 3 * own  # a backward pass is two products for each


def measure(target: Target, size: str, arm: Arm) -> Result:
    torch.compiler.reset()  # what other arms compiled counts towards a limit
    with tempfile.TemporaryDirectory() as folder:
        module, files = base.load(arm.recipe)
        words = [f"{key}={value}" for key, value in settings_of(arm, size, folder).items()]
        config = compose(arm.recipe, module.Config, files, words)
        accelerator = make_accelerator(config.trainer, cpu=target.device.type == "cpu")
        run = Run(config, accelerator, target, Path(folder))
        traces = make_traces(arm, size, target.vocab_size)
        try:
            recipe = module.Recipe(config.method, target)
            text = RunText(traces, traces, [], {})
            stage, fresh = recipe.stages()[-1], build(run, recipe, text)
            start = Start(fresh, traces, {"before": fresh}, config.trainer.max_steps, 1)
            drafter = stage.prepare(start)
            training = TimedStage(run, stage, 0, drafter, text)
            with loss_at_once(arm.at_once), contextlib.suppress(Ended):
                training.fit()
        finally:
            accelerator.free_memory()
        _, row = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    batches, stored = training.timed(), config.data.features == "cached"
    spent = sum(batch.num_supervised for batch in batches) / row["tokens_per_s"]
    tokens = sum(len(text) for batch in batches for text in [*batch.prompts, *batch.responses])
    depth = METHODS[size][arm.recipe].get("steps", 1)
    useful = sum(useful_flops(target, drafter, batch, depth, stored) for batch in batches)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    return {
        "step_s": spent / STEPS,
        "tokens_per_s": tokens / spent,
        "supervised_tokens_per_s": row["tokens_per_s"],
        "filled_share": tokens / sum(batch.input_ids.numel() for batch in batches),
        "useful_flops_per_step": useful / STEPS,
        "utilisation": peak and useful / spent / peak,
        "peak_memory_gib": peak_memory_gib(),
        "loss": row["loss"],
    }


def main(arguments: list[str], path: Path | None = None) -> None:
    size, minutes = sizes_of("benchmarks.gpu_training", arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = random_target(SHAPES[size], size, device, dtype)
    each = {arm.name: functools.partial(measure, target, size, arm) for arm in arms(size)}
    run_arms(each, path or (RESULT if size == "full" else None), minutes, goal=GOAL)


if __name__ == "__main__":
    main(sys.argv[1:])
