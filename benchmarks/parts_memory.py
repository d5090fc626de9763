"""Memory of the processes that train a head on a large target without its layers, before the first
step: embedding, final norm and output matrix of the target in bfloat16, and the head of `eagle3`
over 32,000 of its tokens in float32.

    OMP_NUM_THREADS=1 python -m benchmarks.parts_memory [OUT.json]

The checkpoints have the shapes of Qwen3-8B and Qwen3-32B; the file of what is no layer holds zeros
that take no room on the disk, that of the layers is missing. Most memory that a process had, beyond
what one with the same libraries has; of one process, and of four at a time.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from target.parts import load_parts

VOCABULARY, DRAFTED = 151_936, 32_000
NEEDED = 7e9  # bytes of a process with the head of the largest; where all do not fit, none is built
SHAPES = {"8B": (4096, 36, 12_288, 32), "32B": (5120, 64, 25_600, 64)}
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def config_of(name: str) -> Qwen3Config:
    width, layers, inner, heads = SHAPES[name]
    return Qwen3Config(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=inner,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=VOCABULARY,
        dtype=torch.bfloat16, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
        eos_token_id=0,
    )  # fmt: skip


def checkpoint(name: str, folder: Path) -> Path:
    """A folder with the parts of a target of this size that are no layers."""
    config = config_of(name)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained("assets/toy/target").save_pretrained(folder)
    matrix = [VOCABULARY, config.hidden_size]
    shapes = {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix,
              "model.norm.weight": [config.hidden_size]}  # fmt: skip
    header: dict[str, object] = {}
    end = 0
    for tensor, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(header).encode()
    with (folder / FILES[0]).open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        file.truncate(8 + len(packed) + end)
    places = dict.fromkeys(shapes, FILES[0]) | {"model.layers.0.mlp.up_proj.weight": FILES[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def most() -> float:
    """Most memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measured(folder: str, gate: Any, answers: Any, builds: bool) -> None:  # noqa: ANN401 - of spawn
    """Load the parts, and build the head, while the other processes do so too."""
    before, head = most(), None
    target = load_parts(folder, dtype="bfloat16")
    loaded = most() - before
    layers = target.num_layers
    if builds:
        settings = Eagle3Settings([1, layers // 2 - 1, layers - 4], target.hidden_size)
        kept = torch.arange(DRAFTED)
        head = Eagle3Drafter.build(target, settings, kept=kept, layer_from_target=False)
    gate.wait()
    answers.put((round(loaded, 2), None if head is None else round(most() - before, 2)))


def main(out: str | None) -> None:
    found = {}
    context = multiprocessing.get_context("spawn")
    for name in SHAPES:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(name))
        whole = sum(p.numel() for p in model.parameters()) * 2 / 1e9
        with tempfile.TemporaryDirectory() as scratch:
            folder = str(checkpoint(name, Path(scratch)))
            for count in (1, 4):
                gate, answers = context.Barrier(count), context.Queue()
                builds = psutil.virtual_memory().available > count * NEEDED
                given = folder, gate, answers, builds
                some = [context.Process(target=measured, args=given) for _ in range(count)]
                for process in some:
                    process.start()
                each = [answers.get() for _ in some]
                for process in some:
                    process.join()
                found[f"{name}, {count} processes"] = {
                    "parts_gb": max(one[0] for one in each),
                    "with_head_gb": max(one[1] for one in each) if builds else None,
                    "target_whole_gb": round(whole, 1),
                }
                print(name, count, found[f"{name}, {count} processes"], flush=True)
    if out is not None:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
