"""The last phases of a run: export the drafter, measure every row, write the reports."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data.prompts import Prompt
from data.sampling import Sampling
from drafters.causal_lm import CausalLMDrafter
from drafters.export.hf import export, model_card
from drafters.lookup import PromptLookup
from eval.measure import Bench, Measurement, cost_of
from eval.metrics import paired_difference
from eval.report import build_report, markdown_table, plain_row, write_report
from recipes.phases.generate import evaluation_traces
from recipes.phases.run import Run
from trainer.checkpoint import FitResult
from trainer.config import RunFault

BASELINES = ("prompt_lookup", "target")
FROM_DECODING = (
    "plain_tokens_per_s",
    "speculative_tokens_per_s",
    "speedup",
    "speedup_ci95",
    "identical_to_plain",
    "num_compared",
    "differing_prompts",
    "lossless",
)


def baselines(run: Run, drafter: Any) -> dict[str, Any]:
    """Rows every table has: the same shape untrained, prompt lookup, the target as its own
    drafter."""
    return {
        "untrained": untrained(drafter, run.config.run.seed),
        "prompt_lookup": PromptLookup(),
        "target": CausalLMDrafter.of_target(run.target),
    }


def untrained(drafter: CausalLMDrafter, seed: int) -> CausalLMDrafter:
    """A drafter of the same shape with fresh weights: the lower bound of the table."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(drafter.model.config)).float()
    device = next(drafter.model.parameters()).device
    return CausalLMDrafter(
        model.to(device).eval(), drafter.tokenizer, drafter.vocab_size, drafter.fingerprint
    )


@dataclasses.dataclass
class Measured:
    rows: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    rounds: list[dict[str, Any]]  # lines of rounds.jsonl


def measure(run: Run, drafters: dict[str, Any], prompts: list[Prompt], decoded: str) -> Measured:
    """Every drafter at every temperature from the target's traces; `decoded` also by decoding, and
    compared in pairs with "before" and "control"."""
    config = run.config.eval
    for drafter in drafters.values():
        if isinstance(drafter, torch.nn.Module):
            drafter.eval()
    own = cost_of(drafters[decoded], run.target, config.K)  # of all drafters of its shape
    costs = {
        n: cost_of(d, run.target, config.K) if n in BASELINES else own for n, d in drafters.items()
    }
    out = Measured([], [], [])
    for temperature in config.temperatures:
        traces, plan = evaluation_traces(run, prompts, temperature)
        sampling = Sampling(temperature, config.top_k, config.top_p)
        name_and_hash = {"name": plan.source, "hash": plan.prompts_hash}
        bench = Bench(run.target, traces, sampling, config, name_and_hash)
        measured = {n: bench.replayed(n, d, costs[n]) for n, d in drafters.items()}
        real = bench.decoded(decoded, drafters[decoded], costs[decoded])
        mine = measured[decoded]
        mine.row |= {key: real.row[key] for key in FROM_DECODING if key in real.row}
        if temperature == 0 and config.policy == "fixed":
            mine.row["replay_differs_from_decoding"] = differing_prompts(mine, real)
        out.rows += [plain_row(mine.row), real.row, *(one.row for one in measured.values())]
        out.rounds += [{"temperature": temperature, **dataclasses.asdict(r)} for r in real.rounds]
        out.comparisons += _compare(decoded, measured, temperature, run)
    return out


def _compare(
    name: str, measured: dict[str, Measurement], temperature: float, run: Run
) -> list[dict[str, Any]]:
    config, rows = run.config.eval, []
    for other in ("before", "control"):
        for metric in ("alpha", "tokens_per_round"):
            if other in measured and name != other:
                pair = measured[name].counters, measured[other].counters
                diff = paired_difference(
                    *pair, metric, draws=config.bootstrap_draws, seed=config.seed
                )
                rows.append({"a": name, "b": other, "temperature": temperature, **diff})
    return rows


def differing_prompts(offline: Measurement, real: Measurement) -> int:
    """At T=0 the replay must give the very counters of decoding, prompt by prompt; a difference
    means near-ties (float32) and is said aloud."""
    fields = (
        "rounds",
        "emitted",
        "accepted",
        "engine_drafts",
        "engine_accepted",
        "engine_accepted_per_position",
    )
    decoded = {c.prompt_hash: c for c in real.counters}
    differing = [
        c.prompt_hash
        for c in offline.counters
        if any(getattr(c, field) != getattr(decoded[c.prompt_hash], field) for field in fields)
    ]
    if differing:
        print(
            f"{len(differing)} prompts decode differently from their traces (near-ties), "
            f"first {differing[0][:12]}"
        )
    return len(differing)


def finish(
    run: Run,
    base: Any,
    trained: dict[str, Any],
    results: dict[str, FitResult],
    prompts: list[Prompt],
) -> None:
    """Measure, save and export the drafter, write the three reports; report.json comes last."""
    after = trained["after"]
    if not all(bool(torch.isfinite(p).all()) for p in after.parameters()):
        raise RunFault("the trained drafter holds weights that are not finite: see metrics.jsonl")
    drafters = {"before": base, **trained, **baselines(run, base)}
    measured = measure(run, drafters, prompts, "after")
    stages = {
        name: {"steps": r.steps, "best_step": r.best_step, "best_dev_alpha": r.best_metric}
        for name, r in results.items()
    }
    report = build_report(
        run={
            "recipe": run.config.recipe,
            "folder": str(run.folder),
            **json.loads((run.folder / "run.json").read_text()),
        },
        target={"name": run.target.name, "fingerprint": run.target.fingerprint},
        drafter={
            "start": run.config.model.drafter or "built from the target's configuration",
            "parameters": after.num_parameters,
            "stages": stages,
        },
        results=measured.rows,
        comparisons=measured.comparisons,
        series=[{"name": name, **row} for name, r in results.items() for row in r.series],
    )
    after.save_pretrained(run.folder / "drafter")
    K = run.config.eval.K
    card = model_card(
        report,
        target=run.target.name,
        recipe=run.config.recipe,
        num_assistant_tokens=K,
        table=markdown_table(report["results"]),
    )
    export(
        after.model,
        run.target.tokenizer,
        run.target.fingerprint["vocab_size"],
        run.folder / "export" / "transformers",
        num_assistant_tokens=K,
        card=card,
        eos_ids=run.target.eos_ids,
    )
    write_rounds(run.folder, measured.rounds)
    write_report(report, run.folder)


def write_rounds(folder: Path, rounds: list[dict[str, Any]]) -> None:
    partial = folder / "rounds.jsonl.part"
    with partial.open("w") as log:
        log.writelines(json.dumps(one) + "\n" for one in rounds)
    os.replace(partial, folder / "rounds.jsonl")
