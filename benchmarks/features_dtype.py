"""Heads trained on states stored as fp8 beside the same trained on bf16: tokens per round.

    python -m benchmarks.features_dtype

EAGLE-3 on the embedded toy, as in `benchmarks.heads` but for half as many steps; three seeds, the
same texts in the same order. Chains on held-out prompts without decoding, paired by prompt and
bootstrapped over seeds and prompts. Goal: within 0.05. (`benchmarks.features` has the error of what
is read back, by layer.)
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from benchmarks.heads import NUM_EVAL, Experiment, K, tokens
from drafters.round import Budget
from eval.metrics import PromptCounters, hierarchical_difference
from eval.offline import OfflineEvaluator
from target.sampling import Sampling

SEEDS, STEPS, CELL, GOAL = (0, 1, 2), 120, "eagle-3", 0.05
DTYPES = ("bf16", "fp8")


def main() -> None:
    benches = {dtype: Experiment(dtype) for dtype in DTYPES}
    counters: dict[tuple[str, str], list[PromptCounters]] = {}
    for seed in SEEDS:
        for dtype, bench in benches.items():
            drafter = bench.fit(CELL, seed, steps=STEPS)
            for temperature, traces in bench.held_out.items():
                evaluate = OfflineEvaluator(
                    bench.target, traces, Sampling(temperature), Budget(K), engine_counters=False
                )
                key = dtype, f"{temperature:g}"
                counters.setdefault(key, []).append(evaluate(drafter).counters)
                shown = tokens(counters[key][-1])
                print(f"seed {seed}, {dtype}, T={temperature:g}: {shown:.3f}", flush=True)
    rows = {}
    for t in ("0", "1"):
        pairs = list(zip(counters["fp8", t], counters["bf16", t], strict=True))
        found = hierarchical_difference(pairs, "tokens_per_round")
        mean = {d: sum(tokens(c) for c in counters[d, t]) / len(SEEDS) for d in DTYPES}
        rows[f"T={t}"] = mean | {"difference": found["diff"], "ci95": found["ci95"]}
        low, high = found["ci95"]
        print(f"T={t}: fp8 - bf16 {found['diff']:+.4f} [{low:+.4f}, {high:+.4f}], goal +-{GOAL}")
    result = {
        "settings": {"cell": CELL, "steps": STEPS, "seeds": SEEDS, "prompts": NUM_EVAL, "K": K},
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "goal": GOAL, "tokens_per_round": rows,
    }  # fmt: skip
    Path("benchmarks/results/features_dtype.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
