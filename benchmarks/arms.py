"""Arms of a benchmark for a GPU that may be at hand for minutes only.

The result of each arm is saved at once, and the same command goes on with the arms that are left.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phases.run import provenance
from trainer.files import write_json

Result = dict[str, Any]
SAME = ("machine", "torch", "transformers")  # or all arms are measured again


def sizes_of(command: str, arguments: list[str]) -> tuple[str, float]:
    """`full`, which needs a GPU, or `tiny`, and the minutes of `budget=`."""
    size, minutes = "full", math.inf
    for word in arguments:
        key, _, value = word.partition("=")
        if word == "tiny":
            size = word
        elif key == "budget":
            minutes = float(value)
        else:
            sys.exit(f"error: arguments are tiny and budget=<minutes>, got {word!r}")
    if size == "full" and not torch.cuda.is_available():
        sys.exit(f"error: no GPU here; `python -m {command} tiny` runs the same code small")
    return size, minutes


def run_arms(
    arms: Mapping[str, Callable[[], Result]], path: Path | None, minutes: float, **facts: object
) -> None:
    """Measure in turn the arms that have no result in `path` yet, and begin none after so many
    minutes. None: a file that is removed afterwards. An arm that needs more memory than there is
    says so; one that fails is measured again by the next start, and makes this one exit with 1."""
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            return run_arms(arms, Path(folder) / "results.json", minutes, **facts)
    began, failed, now = time.monotonic(), False, provenance(sys.argv)
    results: dict[str, Result] = {}
    if path.exists():
        before = json.loads(path.read_text())
        if all(before[key] == now[key] for key in SAME):
            results = before["results"]
    left = [name for name in arms if "failed" in results.get(name, {"failed": "not yet"})]
    for number, name in enumerate(left):
        if time.monotonic() - began > 60 * minutes:
            print(f"{len(left) - number} arms are left: start the same command again")
            break
        try:
            found = arms[name]()
        except torch.OutOfMemoryError as error:
            found = {"out of memory": str(error).splitlines()[0][:200]}
        except Exception as error:
            traceback.print_exc()
            found, failed = {"failed": f"{type(error).__name__}: {error}"[:200]}, True
        results[name] = {**found, "date": now["date"], "commit": now["commit"]}
        write_json(path, {**now, **facts, "results": results})
        shown = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 3))
        print(f"{name}: {json.dumps(shown)}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if failed:
        sys.exit(1)
    return None


def chat_lengths(count: int, longest: int) -> list[int]:
    """Tokens of texts that differ as those of a chat do, the same in every run: log-normal, a
    quarter of the longest on average."""
    drawn = np.random.default_rng(0).lognormal(math.log(0.18 * longest), 0.8, count)
    return [int(n) for n in drawn.clip(8, longest)]


def peak_memory_gib() -> float | None:
    """The most memory of the GPU since `reset_peak_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
