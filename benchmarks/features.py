"""The features store of the toy target's own text, beside plain memory-mapped numpy.

    python -m benchmarks.features

200 traces, four layers, batches of 8 rows. Reading: the same rows in the same shuffled order to
padded float32 [B, L, H], by `FeaturesStore.outputs` and by numpy from the very same files, in turn
(goal 0.8x); the first pass of a store also checks every row. Writing: `write_features` with the
target's forward pass and without, beside numpy writing the same tensors to memory maps and syncing.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.batches import Batch, collate
from data.features import FeaturesStore, write_features
from data.features_layout import FeaturesPlan, bytes_per_token, shards_of
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import load_prompts
from data.traces import Trace
from target.model import Target
from target.outputs import LayerId, TargetOutputs

RUNS, ROWS, BATCH = 51, 200, 8
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
NUMPY = {"F32": "<f4", "BF16": "<u2", "F8_E4M3": "u1", "U8": "u1"}
Place = tuple[int, int, int]  # of a row: shard, first token, end


@dataclass
class Remembering(Target):
    """Computes a batch once: the time of a second writing is the store's own."""

    known: dict[bytes, TargetOutputs] = field(default_factory=dict)

    def outputs(
        self, input_ids: torch.Tensor, *arguments: object, **options: object
    ) -> TargetOutputs:
        key = input_ids.numpy().tobytes()
        if key not in self.known:
            self.known[key] = super().outputs(input_ids, *arguments, **options)
        return self.known[key]


class HandWritten:
    """A reader as one would write it by hand: offsets from the headers, one memory map a tensor."""

    def __init__(self, folder: Path, plan: FeaturesPlan):
        self.plan = plan
        self.maps: list[dict[str, np.ndarray]] = []
        for path in sorted(folder.glob("shard-*")):
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            self.maps.append({})
            for name in sorted(header.keys() - {"__metadata__"}):
                kind, shape = NUMPY[header[name]["dtype"]], tuple(header[name]["shape"])
                offset = 8 + length + header[name]["data_offsets"][0]
                self.maps[-1][name] = np.memmap(path, kind, "r", offset, shape)

    def outputs(self, rows: list[Place]) -> dict[LayerId, np.ndarray]:
        hidden = {}
        for layer in self.plan.layers:
            states = self._padded(f"hidden.{layer}", rows)
            if self.plan.dtype == "bf16":
                states = (states.astype(np.uint32) << 16).view(np.float32)
            elif self.plan.dtype == "fp8":
                scale = self._padded(f"scale.{layer}", rows)
                states = E4M3.take(states) * scale
            hidden[layer] = states
        return hidden

    def _padded(self, name: str, rows: list[Place]) -> np.ndarray:
        values = [self.maps[shard][name][first:end] for shard, first, end in rows]
        out = np.zeros((len(rows), max(map(len, values)), *values[0].shape[1:]), values[0].dtype)
        for i, value in enumerate(values):
            out[i, : len(value)] = value
        return out

    def write(self, folder: str) -> None:
        for number, maps in enumerate(self.maps):
            for name, values in maps.items():
                path = Path(folder) / f"{number}.{name}"
                out = np.memmap(path, values.dtype, "w+", shape=values.shape)
                out[:] = values
                out.flush()


def clock(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def median_in_new_folders(call: Callable[[str], object], runs: int) -> float:
    spent = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            spent.append(clock(lambda folder=folder: call(folder)))
    return statistics.median(spent)


def groups_of(traces: Sequence[Trace], plan: FeaturesPlan) -> list[tuple[Batch, list[Place]]]:
    """Shuffled batches of all rows, and where numpy finds them."""
    rows: list[tuple[Trace, Place]] = []
    for number, shard in enumerate(shards_of(traces, plan.tokens_per_shard)):
        first = 0
        for trace, length in zip(shard.traces, shard.lengths, strict=True):
            end = first + length
            rows.append((trace, (number, first, end)))
            first = end
    random.Random(0).shuffle(rows)
    groups = []
    for i in range(0, len(rows), BATCH):
        group = rows[i : i + BATCH]
        texts = [t.prompt_ids for t, _ in group], [t.response_ids for t, _ in group]
        groups.append((collate(*texts, ["target"] * len(group)), [place for _, place in group]))
    return groups


def errors(
    target: Target, store: FeaturesStore, groups: list[tuple[Batch, list[Place]]]
) -> dict[str, dict[str, float]]:
    """Relative error |stored - live| / |live| of a token's state, per layer."""
    found: dict[str, list[torch.Tensor]] = {str(layer): [] for layer in store.layers}
    for batch, _ in groups:
        real = batch.document_ids >= 0
        live = target.outputs(batch.input_ids, layers=store.layers, logits=False).hidden
        outputs = store.outputs(batch)
        assert outputs is not None
        for layer, states in outputs.hidden.items():
            gap = (states - live[layer])[real].norm(dim=-1) / live[layer][real].norm(dim=-1)
            found[str(layer)].append(gap)
    joined = {layer: torch.cat(gaps) for layer, gaps in found.items()}
    return {k: {"mean": float(v.mean()), "max": float(v.max())} for k, v in joined.items()}


def measure(target: Target, traces: Sequence[Trace], dtype: str, folder: Path) -> dict[str, Any]:
    # two shards or more, so that a batch reads from several files
    plan = FeaturesPlan(
        (1, target.num_layers // 2 - 1, target.num_layers - 4, "final_norm"), dtype, 1 << 13
    )

    def write(by: Target, to: str | Path) -> FeaturesStore:
        return write_features(by, traces, plan, to, batch_size=BATCH)

    write(target, folder)
    store = FeaturesStore.open(
        folder, target_fingerprint=target.fingerprint, layers=plan.layers, traces=traces
    )
    plain, groups = HandWritten(folder, plan), groups_of(traces, plan)

    def ours() -> list[Any]:
        return [store.outputs(batch) for batch, _ in groups]

    def theirs() -> list[Any]:
        return [plain.outputs(rows) for _, rows in groups]

    first_s = clock(ours)
    for one, other in zip(ours(), theirs(), strict=True):
        for layer, states in one.hidden.items():
            assert np.array_equal(states.numpy(), other[layer])
    pairs = [(clock(ours), clock(theirs)) for _ in range(RUNS)]
    ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    fields = (target.model, target.tokenizer, target.name, target.fingerprint, target.eos_ids)
    remembering = Remembering(*fields)
    write_s = median_in_new_folders(lambda to: write(remembering, to), 1)
    store_s = median_in_new_folders(lambda to: write(remembering, to), 3)
    numpy_s = median_in_new_folders(plain.write, 3)
    size, tokens = sum(path.stat().st_size for path in folder.glob("shard-*")), store.num_tokens
    return {
        "rows": store.num_rows,
        "tokens": tokens,
        "shards": len(plain.maps),
        "bytes_per_token": size / tokens,
        "raw_bytes_per_token": bytes_per_token(plan.layers, target.hidden_size, dtype),
        "read_tokens_per_s": tokens / ours_s,
        "numpy_read_tokens_per_s": tokens / theirs_s,
        "read_ratio": theirs_s / ours_s,
        "read_ratio_spread": [min(b / a for a, b in pairs), max(b / a for a, b in pairs)],
        "first_read_tokens_per_s": tokens / first_s,
        "write_tokens_per_s": tokens / write_s,
        "store_share_of_writing": store_s / write_s,
        "store_write_mb_per_s": size / 1e6 / store_s,
        "numpy_write_mb_per_s": size / 1e6 / numpy_s,
        "relative_error": errors(target, store, groups),
    }


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"{result['machine']}, Python {result['python']}",
        "",
        "| dtype | bytes per token | raw | read tokens/s | numpy | ratio (goal 0.8) | first read |"
        " write tokens/s | store's share | store MB/s | numpy MB/s |",
        "| --- " + "| ---: " * 10 + "|",
    ]
    for dtype, r in result["dtypes"].items():
        lines.append(
            f"| {dtype} | {r['bytes_per_token']:.1f} | {r['raw_bytes_per_token']} "
            f"| {r['read_tokens_per_s']:,.0f} | {r['numpy_read_tokens_per_s']:,.0f} "
            f"| {r['read_ratio']:.2f} | {r['first_read_tokens_per_s']:,.0f} "
            f"| {r['write_tokens_per_s']:,.0f} | {r['store_share_of_writing']:.1%} "
            f"| {r['store_write_mb_per_s']:.0f} | {r['numpy_write_mb_per_s']:.0f} |"
        )
    layers = list(next(iter(result["dtypes"].values()))["relative_error"])
    lines += [
        "",
        "| relative error, mean (max) | " + " | ".join(f"layer {x}" for x in layers) + " |",
    ]
    lines.append("| --- " + "| ---: " * len(layers) + "|")
    for dtype, r in result["dtypes"].items():
        cells = [f"{e['mean']:.4f} ({e['max']:.4f})" for e in r["relative_error"].values()]
        lines.append(f"| {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    target = Target.load("assets/toy/target")
    prompts = load_prompts("toy", count=ROWS, seed=7, toy_split="eval")
    plan = GenerationPlan("toy", tuple(prompts), (1.0,), max_new_tokens=96)
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    result: dict[str, Any] = {"machine": machine, "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder:
        traces = generate_traces(
            target, plan, Path(folder) / "traces", batch_size=16, rows_per_shard=256
        )
        result["dtypes"] = {
            dtype: measure(target, traces, dtype, Path(folder) / dtype)
            for dtype in ("fp32", "bf16", "fp8")
        }
    print(markdown(result))
    Path("benchmarks/results").mkdir(exist_ok=True)
    Path("benchmarks/results/features.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
