"""The last phases of a run: export the drafter, measure every row, write the reports."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from data.features_layout import bytes_per_token
from data.prompts import Prompt
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.export.card import Serving
from drafters.export.gguf import FILE
from drafters.kinds import KINDS
from drafters.served_dtype import in_served_dtype
from drafters.training_free.base import TrainingFree
from eval.costs import read_per_round
from eval.report.render import with_interval
from eval.report.rows import GREEDY_DRAFTS, Report
from eval.report.schema import (
    build_report,
    headline_numbers,
    read_report,
    without_readings,
    write_report,
)
from eval.report.terminal import summary
from eval.serving_defaults import unmeasured_defaults
from phases.check import check_drafter
from phases.commands import without_places
from phases.export import check_export, complete_card, export_run, save_drafter
from phases.measure import ReportDrafter, baselines, calibrate, measure
from phases.policies import measure_policies
from phases.run import Run, read_facts
from target.gguf import target_gguf
from target.layout import laid_out
from target.model import Target
from trainer.errors import RunFault, UserError
from trainer.files import write_atomic
from trainer.progress import working
from trainer.store import FitResult
from trainer.tracking import track_report


def check_start(run: Run, drafter: TrainedDrafter, trains_acceptance: bool) -> None:
    """Refuse a drafter of train.py that its report or its export would refuse in the end."""
    check_drafter(drafter, run.target, run.config.eval, trains_acceptance)
    if run.config.run.stage is None:
        of_gguf = target_gguf(run.config.model) is not None
        check_export(drafter, run.accelerator.is_main_process, of_gguf)


def target_facts(run: Run) -> dict[str, object]:
    """Name, fingerprint and, where there are some, the defaults of servers that the report does not
    measure."""
    facts: dict[str, object] = {"name": run.target.name, "fingerprint": run.target.fingerprint}
    left_out = unmeasured_defaults(run.target.model.generation_config, run.config.eval)
    return facts | {"serving_defaults_not_measured": left_out} if left_out else facts


def written(folder: Path) -> Report | None:
    """Read the report of a finished run; None where there is none, or a damaged one."""
    path = folder / "report.json"
    if not path.exists():
        return None
    try:
        return read_report(path)
    except UserError as error:
        print(f"{error}: the report is written again")
        return None


def show(report: Report, folder: Path, gguf: Path | None = None) -> None:
    """Print the report's main numbers, where its pages are, and with the target's file `gguf` how
    llama.cpp serves a drafter that was written for it; write the pages again where they are
    missing."""
    pages = folder / "report.md", folder / "report.html"
    if not all(page.exists() and page.stat().st_size for page in pages):
        write_report(report, folder)
    print(f"\n{summary(report)}\n\nreport: {pages[1].resolve()}")
    drafter = folder / "export" / "llamacpp" / FILE
    if gguf is not None and drafter.exists():
        print(llamacpp_lines(report, str(gguf), str(drafter)))


def llamacpp_lines(report: Report, target: str, drafter: str) -> str:
    """The two commands of llama.cpp, without the drafter and with it, and the speed of each where
    it was measured."""
    rows = report["results"]
    method = KINDS[report["drafter"]["kind"]].method
    K = next(row.K for row in rows if row.drafter == "after" and row.tree is None)
    assert method is not None, "it was written for an engine"
    assert K is not None, "a chain has a length"
    served = Serving(target, method, K).llamacpp(drafter)
    commands = f"llama-server -m {shlex.quote(target)}\n{served}"
    lines = ["\nin llama.cpp, without the drafter and with it:", textwrap.indent(commands, " " * 4)]
    alone = ("after", f"after{GREEDY_DRAFTS}")
    found = [row for row in rows if row.measured_by == "llamacpp" and row.drafter in alone]
    timed = [row for row in found if row.speedup is not None]
    if timed:
        lines.append(f"timed with {timed[0].cost_source}:")
    else:
        lines.append("not timed here: eval.engine=llamacpp measures both")
    for row in timed:
        plain, drafted = row.plain_tokens_per_s or 0.0, row.speculative_tokens_per_s or 0.0
        lines.append(
            f"    T={row.temperature:g}: {plain:.3g} and {drafted:.3g} tokens/s, "
            f"{with_interval(row.speedup, row.speedup_ci95)} times as fast"
        )
    return "\n".join(lines)


@working("report")
def finish(
    run: Run,
    base: TrainedDrafter,
    trained: Mapping[str, TrainedDrafter],
    results: Mapping[str, FitResult],
    prompts: list[Prompt],
    dev: list[Trace],
    about: Mapping[str, object] | None = None,
    unread: Mapping[str, object] | None = None,
) -> None:
    """Measure, save and export the drafter, write the three reports; report.json comes last.
    `base`: the drafter that the run started with; `trained`: the drafters of the stages by row;
    `about`: the recipe's own facts about the drafter; `unread`: the rows of prompts that could not
    be read, by key."""
    after = trained["after"]
    if not all(bool(torch.isfinite(p).all()) for p in after.parameters()):
        raise RunFault("the trained drafter holds weights that are not finite: see metrics.jsonl")
    calibrate(run, after, dev)
    # before anything is measured: nothing may stand between it and its user
    save_drafter(run, after)
    exported = export_run(run, after)
    drafters = {"before": base, **trained, **baselines(run, base)}
    with in_served_dtype(drafters.values(), run.target), laid_out(*drafters.values()):
        measured = measure(run, drafters, prompts, "after")
        policies = measure_policies(run, after, prompts, dev) if after.acceptance else None
    chosen_by = "best_dev_tokens_per_round" if after.target_layers else "best_dev_alpha"
    if policies is not None:
        save_drafter(run, after)  # its acceptance head was tuned meanwhile
        exported = export_run(run, after)
        chosen_by = "best_dev_select"
        measured.rows += policies.rows
        measured.comparisons += policies.comparisons
        measured.rounds += policies.rounds
    stages = {
        name: {"steps": r.steps, "best_step": r.best_step, chosen_by: r.best_metric}
        for name, r in results.items()
    }
    report = build_report(
        run={
            "recipe": run.config.recipe,
            "folder": str(run.folder),
            **without_places(read_facts(run.folder)),
            **({"unread_rows": unread} if unread else {}),
        },
        target=target_facts(run),
        drafter={
            "start": run.config.model.drafter or "built from the target's configuration",
            **facts(after, run.target),
            "stages": stages,
            "export": exported,
            **(about or {}),
        },
        results=measured.rows,
        comparisons=measured.comparisons,
        series=[{"name": name, **row} for name, r in results.items() for row in r.series],
        readings=measured.readings,
        load=measured.load,
    )
    if policies is not None and policies.points:
        report["policies"] = policies.points
    complete_card(run, after, exported, report)
    write_rounds(run.folder, measured.rounds)
    write_report(report, run.folder)
    if run.config.trainer.wandb != "off":
        with TemporaryDirectory() as scratch:
            files, settings = write_report(without_readings(report), scratch), run.config.to_dict()
            numbers = headline_numbers(report)
            track_report(run.config.trainer, run.folder, run.folder.name, settings, numbers, files)


def facts(drafter: ReportDrafter, target: Target) -> dict[str, object]:
    """List what the report says about a drafter: its size, and what it reads of the target."""
    if isinstance(drafter, TrainingFree):
        return {"kind": drafter.name, "parameters": 0}
    found: dict[str, object] = {
        "kind": drafter.kind,
        "parameters": drafter.num_parameters,
        "trained_parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        "active_parameters": round(read_per_round(drafter, 1)[1]),  # of one draft step
    }
    if drafter.target_layers:
        layers = tuple(dict.fromkeys((*drafter.target_layers, "final_norm")))
        found["captures"] = list(drafter.target_layers)
        reduced = drafter.draft_vocab_size < target.vocab_size
        found["feature_bytes_per_token"] = bytes_per_token(
            layers, target.hidden_size, "bf16", summary=reduced
        )
        found["draft_vocab_size"] = drafter.draft_vocab_size
    if drafter.provenance is not None:
        found["provenance"] = drafter.provenance
    return found


def write_rounds(folder: Path, rounds: list[dict[str, object]]) -> None:
    """Write rounds.jsonl, a line for each round of decoding."""
    write_atomic(folder / "rounds.jsonl", "".join(json.dumps(one) + "\n" for one in rounds))
