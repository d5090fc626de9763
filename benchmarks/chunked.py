"""Memory and time of the loss behind a large head: all logits at once against chunks.

    python -m benchmarks.chunked          # 151,936 ids, 2,048 positions, width 1,024, float32
    python -m benchmarks.chunked --vocab 4000 --positions 256 --width 64 --runs 1 --out /dev/null

Plain: logits of drafter and target for all positions, `losses.divergence`, backward. Chunked:
`chunked_divergence`, which gives acceptance and matches as well. The target is a frozen head of its
own on states that are there. Every run is a process of its own, the two in turn; memory is its peak
(`ru_maxrss`) beyond that of a process with only states, heads and gradients. Goal: a quarter of the
memory, 1.4 of the time.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainer.chunked import chunked_divergence
from trainer.divergence import DIVERGENCES
from trainer.logits import OutputHead

NAMES = ("fkl", "tvd", "jsd", "lk_hybrid")
GOAL = {"memory": 0.25, "time": 1.4}


def measure(way: str, name: str, sizes: argparse.Namespace) -> dict[str, float]:
    """One loss with its backward in this process; `base` allocates what both ways need."""
    torch.manual_seed(0)
    states, target_states = torch.randn(2, sizes.positions, sizes.width)
    weight, target_weight = (  # in place, or `base` would hide as much memory
        torch.randn(sizes.vocab, sizes.width).mul_(scale * sizes.width**-0.5) for scale in (1, 2)
    )
    labels = torch.zeros(sizes.positions, dtype=torch.int64)
    states.requires_grad_()
    weight.requires_grad_()
    head = OutputHead(weight)
    total = torch.zeros(())
    began, began_cpu = time.perf_counter(), time.process_time()
    if way == "base":
        states.grad, weight.grad = torch.ones_like(states), torch.ones_like(weight)
    elif way == "plain":
        logits, target = head.logits(states), target_states @ target_weight.T
        total = DIVERGENCES[name]()(logits, target).sum() / sizes.positions
        total.backward()
    else:
        total = chunked_divergence(
            DIVERGENCES[name](), states, head,
            lambda span: target_states[span] @ target_weight.T, labels, chunk_positions=sizes.chunk,
        ).total / sizes.positions  # fmt: skip
        total.backward()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    assert weight.grad is not None
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts KiB
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,  # beside it, for a machine that is shared
        "peak_mib": peak_mib,
        "loss": total.item(),
        "gradient_norm": weight.grad.norm().item(),
    }


def in_own_process(way: str, name: str) -> dict[str, float]:
    """The parent must stay small: on Linux a child's peak starts at that of its parent."""
    command = [sys.executable, "-m", "benchmarks.chunked", *sys.argv[1:], "--one", way, name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def compare(name: str, base_mib: float, runs: int) -> dict[str, Any]:
    pairs = [(in_own_process("plain", name), in_own_process("chunked", name)) for _ in range(runs)]
    plain, chunked = zip(*pairs, strict=True)
    for key in ("loss", "gradient_norm"):
        a, b = plain[0][key], chunked[0][key]
        assert abs(a - b) <= 1e-4 * abs(a), f"{name}: {key} {a} and {b}"
    row: dict[str, Any] = {"divergence": name}
    for way, rows in (("plain", plain), ("chunked", chunked)):
        row[f"{way}_mib"] = statistics.median(r["peak_mib"] for r in rows) - base_mib
        row[f"{way}_s"] = statistics.median(r["wall_s"] for r in rows)
        row[f"{way}_cpu_s"] = statistics.median(r["cpu_s"] for r in rows)
        row[f"{way}_all_s"] = [round(r["wall_s"], 2) for r in rows]
    row["memory"] = row["chunked_mib"] / row["plain_mib"]
    row["time"] = row["chunked_s"] / row["plain_s"]
    row["cpu_time"] = row["chunked_cpu_s"] / row["plain_cpu_s"]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| divergence | plain MiB | chunked MiB | memory | plain s | chunked s | time | CPU time |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        memory = f"{r['plain_mib']:.0f} | {r['chunked_mib']:.0f} | {r['memory']:.2f}"
        seconds = f"{r['plain_s']:.1f} | {r['chunked_s']:.1f} | {r['time']:.2f}"
        lines.append(f"| {r['divergence']} | {memory} | {seconds} | {r['cpu_time']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunk", type=int, help="positions at a time; default: by vocabulary")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chunked.json"))
    parser.add_argument("--one", nargs=2, metavar=("WAY", "NAME"), help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    if sizes.one:
        print(json.dumps(measure(sizes.one[0], sizes.one[1], sizes)))
        return
    base_mib = in_own_process("base", "fkl")["peak_mib"]
    rows = [compare(name, base_mib, sizes.runs) for name in sizes.names]
    result = {
        "sizes": {key: getattr(sizes, key) for key in ("vocab", "positions", "width", "chunk")},
        "runs": sizes.runs,
        "base_mib": base_mib,
        "goal": GOAL,
        "machine": f"{platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        "rows": rows,
    }
    print(table(rows))
    sizes.out.parent.mkdir(exist_ok=True)
    sizes.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
