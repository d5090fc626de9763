"""Training on a GPU: EAGLE-3 and DistillSpec on an 8B-size target, bfloat16, 2k to 32k tokens.

    python -m benchmarks.gpu_training         # needs a GPU with 80 GB; goes on where it was stopped
    python -m benchmarks.gpu_training tiny    # the same code on any machine, to see that it runs

Per recipe, length and kind of text: tokens per second, peak memory and model FLOP utilisation of a
step as the loop makes it (target's forward, loss, backward, AdamW), compiled or not; at the
shortest length also with the loss at once and with the target's states stored. `whole` texts fill
their row and are all answer but for a short prompt; `chat` is ragged, and half of it is prompt.

Utilisation counts useful FLOPs alone: each product once, of real tokens, and of the answer's tokens
in the output heads; what is computed again, or for padding, does not count. The share of these in
all FLOPs that torch counts is given beside it, but not for a head on a GPU, whose attention is a
compiled kernel that torch cannot count. Weights are random (Qwen3 shapes). Goal: 45 %.
An arm that needs more memory than there is says so.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import trainer.logits
from benchmarks.gpu import SHAPES, random_target, seconds
from data.batches import Batch, collate
from drafters.base import TrainedDrafter
from recipes import distillspec, eagle3
from target.attention import Capability
from target.model import Target, decoder_layers
from target.outputs import TargetOutputs
from trainer.compiled import compiled
from trainer.files import write_json
from trainer.logits import LogitsSummary

GOAL = 0.45
STEPS, WARM_UP = 10, 3
LENGTHS = {"full": (2048, 8192, 32768), "tiny": (64, 128)}
TOKENS = {"full": 8192, "tiny": 128}  # of a batch, one row at least
# kind of text -> share of the prompt, and of the row that the texts of a batch fill, in turn
TEXTS = {"whole": (0.01, (1.0,)), "chat": (0.5, (1.0, 0.7, 0.45, 0.3))}
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
# name -> (compiled, loss in chunks, states stored)
ARMS = {
    "as it ships": (False, True, False),
    "compiled": (True, True, False),
    "loss at once": (False, False, False),
    "stored states": (False, True, True),
    "stored states, compiled": (True, True, True),
}
EVERYWHERE = ("as it ships", "compiled")  # the others at the shortest length alone
RESULT = Path("benchmarks/results/gpu_training.json")


def make_batch(kind: str, rows: int, length: int, vocabulary: int) -> Batch:
    """Texts of random tokens; the lengths of `chat` are the same in every run."""
    share, fill = TEXTS[kind]
    draw = torch.Generator().manual_seed(length)
    prompts, responses = [], []
    for row in range(rows):
        size = max(8, int(length * fill[row % len(fill)]))
        ids = torch.randint(2, vocabulary, (size,), generator=draw).tolist()
        split = max(1, int(size * share))
        prompts.append(ids[:split])
        responses.append(ids[split:])
    return collate(prompts, responses, ["target"] * rows)


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


def measure(
    target: Target, name: str, options: dict[str, Any], batch: Batch, arm: str
) -> dict[str, Any]:
    compiles, chunks, stored = ARMS[arm]
    module: Any = {"eagle3": eagle3, "distillspec": distillspec}[name]
    recipe = module.Recipe(module.Config(**options), target)
    objective = recipe.stages()[-1].objective
    torch.manual_seed(0)
    traces: Any = [
        SimpleNamespace(response_ids=ids, conversation_id=str(row))
        for row, ids in enumerate(batch.responses)
    ]
    drafter = recipe.build(traces).train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-5)
    request, kind = objective.target_request(batch, 0), target.device.type

    def outputs() -> TargetOutputs:
        return target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
            project_later=True,
        )  # fmt: skip

    kept = outputs() if stored else None
    if kept is not None and request.summary:
        kept.summary = LogitsSummary.of(target.head, kept.hidden["final_norm"])

    def step() -> None:
        given = kept or outputs()
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            terms = objective.loss(drafter, batch, given, 0).terms
        loss: Any = sum(weight * total / float(count) for total, count, weight in terms)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    counter, width = FlopCounterMode(display=False), target.model.config.head_dim
    flex = Capability.here(target.device, torch.bfloat16, width).flex
    uncounted = flex and bool(drafter.target_layers)
    with contextlib.nullcontext() if uncounted else counter:
        step()
    usual = trainer.logits.CHUNK_ELEMENTS
    if not chunks:
        trainer.logits.CHUNK_ELEMENTS = 2**62
    backend = "inductor" if compiles else None
    try:
        with compiled(backend, drafter), compiled(backend, target.model):
            for _ in range(WARM_UP):
                step()
            if kind == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent, _ = seconds(lambda: [step() for _ in range(STEPS)])
    finally:
        trainer.logits.CHUNK_ELEMENTS = usual
    useful = useful_flops(target, drafter, batch, options.get("steps", 1), stored)
    rate = useful * STEPS / spent
    peak = next((v for k, v in PEAK_FLOPS.items() if k in device_name()), None)
    tokens = sum(map(len, batch.prompts)) + sum(map(len, batch.responses))
    return {
        "tokens_per_s": STEPS * tokens / spent,
        "supervised_tokens_per_s": STEPS * batch.num_supervised / spent,
        "useful_tflops_per_s": rate / 1e12, "utilisation": peak and rate / peak,
        "useful_share": None if uncounted else useful / counter.get_total_flops(),
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
    shapes = {**SHAPES[size], "common": dict(SHAPES[size]["common"])}
    shapes["common"]["max_position_embeddings"] = max(LENGTHS[size])
    target = random_target(shapes, size, device, dtype)
    content: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "device": device_name(),
        "torch": torch.__version__, "python": platform.python_version(), "goal": GOAL,
        "results": {},
    }  # fmt: skip
    if size == "full" and RESULT.exists():
        before = json.loads(RESULT.read_text())
        if before["device"] == content["device"] and before["torch"] == content["torch"]:
            content["results"] = before["results"]
    for name, options in METHODS[size].items():
        for length in LENGTHS[size]:
            for kind in TEXTS:
                for arm, (_, _, stored) in ARMS.items():
                    if arm not in EVERYWHERE and length > min(LENGTHS[size]):
                        continue
                    if stored and name == "distillspec":  # no store holds the whole distribution
                        continue
                    key = f"{name}, {length} tokens, {kind}, {arm}"
                    if key in content["results"]:
                        continue
                    rows = max(1, TOKENS[size] // length)
                    batch = make_batch(kind, rows, length, target.vocab_size).to(device)
                    try:
                        found = measure(target, name, options, batch, arm)
                    except torch.cuda.OutOfMemoryError as error:
                        found = {"out of memory": str(error).splitlines()[0][:200]}
                    content["results"][key] = found
                    shown = {
                        k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()
                    }
                    print(f"{key}: {json.dumps(shown)}", flush=True)
                    if size == "full":  # each arm at once: a machine may be taken back
                        write_json(RESULT, content)
                    gc.collect()
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
