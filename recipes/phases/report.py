"""The last phases of a run: export the drafter, measure every row, write the reports."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from data.features import bytes_per_token
from data.prompts import Prompt
from data.sampling import Sampling
from data.target import Target
from data.traces import Trace
from drafters.base import TrainedDrafter, served_target
from drafters.causal_lm import CausalLMDrafter
from drafters.draft import acceptance_of
from drafters.lookup import PromptLookup
from drafters.tree import TreeShape, calibrated_nodes, calibrated_tree, parse_tree
from eval.measure import Bench, Measurement, cost_of, next_token_loss, read_per_round
from eval.metrics import paired_difference
from eval.policies import budget_for, tree_budget
from eval.replay import rank_accuracy
from eval.report import build_report, headline_numbers, plain_row, read_report, write_report
from eval.report_rows import STAGES
from recipes.phases.export import export_run
from recipes.phases.generate import evaluation_traces, tree_depth
from recipes.phases.policies import measure_policies
from recipes.phases.run import Run, read_facts
from recipes.phases.serve import check_engine, served_rows
from trainer.checkpoint import FitResult
from trainer.config import EvalConfig, RunFault, UserError, require
from trainer.files import write_atomic
from trainer.tracking import track_report

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
    with torch.random.fork_rng():
        torch.manual_seed(run.config.run.seed)
        untrained = drafter.fresh()
    return {
        "untrained": untrained,
        "prompt_lookup": PromptLookup(),
        "target": CausalLMDrafter.of_target(run.target),
    }


def check_drafter(drafter: Any, config: EvalConfig, trains_acceptance: bool = False) -> None:
    """What eval.* asks of it, before anything is paid for: a drafter with one head per depth drafts
    no deeper, an engine must be able to serve it, and an acceptance head must be there if it
    decides, or come with the training."""
    check_engine(drafter, config)
    if config.policy.startswith("head") and not trains_acceptance:
        acceptance_of(drafter)
    most = getattr(drafter, "max_depth", None)
    asked = max(config.K, tree_depth(config))
    context = drafter.shared.target.context if drafter.target_layers else asked + 1
    require(asked < context, "eval.K", f"be below the target's context {context}", asked)
    grown = calibrated_nodes(config.tree, config.K)
    if grown and not drafter.target_layers and drafter.rank_accuracy is None:
        raise UserError(
            f"eval.tree={config.tree}: the accuracies of ranks that it grows from are measured of "
            "heads that read the target's states, not of a language model: name another tree"
        )
    if most is not None and asked > most:
        raise UserError(
            f"eval.K={config.K}, eval.tree={config.tree}: this drafter has {most} heads, so it "
            f"drafts at most {most} tokens deep; lower them or train more heads"
        )


def tree_of(drafter: Any, config: EvalConfig) -> TreeShape | None:
    """eval.tree for this drafter; a calibrated tree grows from its own accuracies."""
    if config.tree is None or not isinstance(drafter, TrainedDrafter):
        return None
    nodes = calibrated_nodes(config.tree, config.K)
    if nodes is None:
        shape = parse_tree(config.tree)
    else:
        if drafter.rank_accuracy is None:
            raise UserError(
                f"eval.tree={config.tree}: the drafter holds no accuracies of its ranks; train it "
                "with this project, or name a tree"
            )
        shape = calibrated_tree(drafter.rank_accuracy[: config.K], nodes)
    require(
        shape.width <= drafter.draft_vocab_size,
        "eval.tree",
        f"have at most {drafter.draft_vocab_size} children under a node, the draft vocabulary",
        shape.width,
    )
    return shape


def calibrate(run: Run, drafter: Any, dev: list[Trace]) -> None:
    """How often each rank of each depth is the target's, on held-out training traces."""
    if dev and drafter.target_layers:
        depth = drafter.max_depth or max(run.config.eval.K, tree_depth(run.config.eval))
        target = served_target(drafter) or run.target
        drafter.rank_accuracy = rank_accuracy(target, dev, drafter, depth)


@dataclasses.dataclass
class Measured:
    rows: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    rounds: list[dict[str, Any]]  # lines of rounds.jsonl


def measure(run: Run, drafters: dict[str, Any], prompts: list[Prompt], decoded: str) -> Measured:
    """Every drafter at every temperature from the target's traces; `decoded` also by decoding, and
    compared in pairs with "before", "control" and "offline"."""
    config = run.config.eval
    for drafter in drafters.values():
        if isinstance(drafter, torch.nn.Module):
            drafter.eval()
    chains = {n: budget_for(d, config.policy, config.K) for n, d in drafters.items()}
    own = cost_of(drafters[decoded], run.target, chains[decoded])  # of all drafters of its shape
    costs = {
        n: cost_of(d, run.target, chains[n]) if n in BASELINES else own for n, d in drafters.items()
    }
    shape = tree_of(drafters[decoded], config)
    tree = None if shape is None else tree_budget(shape, config.tree_children)
    tree_cost = None if tree is None else cost_of(drafters[decoded], run.target, tree)
    out = Measured([], [], [])
    for temperature in config.temperatures:
        traces, plan = evaluation_traces(run, prompts, temperature)
        sampling = Sampling(temperature, config.top_k, config.top_p)
        name_and_hash = {"name": plan.source, "hash": plan.prompts_hash}
        frozen = Bench(run.target, traces, sampling, config, name_and_hash)
        benches = {n: bench_of(run, d, frozen, prompts) for n, d in drafters.items()}
        measured = {n: benches[n].replayed(n, d, costs[n]) for n, d in drafters.items()}
        bench = benches[decoded]
        real = bench.decoded(decoded, drafters[decoded], costs[decoded])
        mine = measured[decoded]
        _merge(mine, real, temperature, config)
        timed = {"plain_tokens_per_s": real.row["plain_tokens_per_s"]}
        out.rows += [plain_row(mine.row | timed), real.row, *(one.row for one in measured.values())]
        out.rounds += [{"temperature": temperature, **dataclasses.asdict(r)} for r in real.rounds]
        out.comparisons += _compare(decoded, measured, temperature, run)
        if config.engine != "own":
            out.rows += served_rows(bench, decoded, drafters[decoded], costs[decoded])
        if tree is None or tree_cost is None:
            continue
        real = bench.decoded(decoded, drafters[decoded], tree_cost, tree)
        out.rows.append(real.row)
        out.rounds += [
            {"temperature": temperature, "tree": shape.describe(), **dataclasses.asdict(r)}  # type: ignore[union-attr]
            for r in real.rounds
        ]
        # sampled children and lossy acceptance are known from decoding only
        sampled = temperature > 0 and (tree.sample_children or config.verifier == "typical")
        if not sampled:
            replayed = bench.replayed_tree(decoded, drafters[decoded], tree_cost, tree)
            _merge(replayed, real, temperature, config)
            out.rows.append(replayed.row)
            out.comparisons += _against(replayed, mine, temperature, run)
    return out


def bench_of(run: Run, drafter: Any, frozen: Bench, prompts: list[Prompt]) -> Bench:
    """Where the drafter brings a target of its own: that one, on the text that it writes itself.
    How far it went from the run's target shows on the text of the latter."""
    served = served_target(drafter)
    if served is None:
        return frozen
    traces, _ = evaluation_traces(run, prompts, frozen.sampling.temperature, served)
    before, now = (next_token_loss(target, frozen.traces) for target in (run.target, served))
    change = 100 * (now / before - 1)
    about = {
        "target_changed": True,
        "next_token_loss": {"original": before, "served": now, "change_percent": change},
        "note": "the target was trained too, and lossless means: equal to that one. Its next-token "
        f"loss on the original target's text is {now:.4f} nats/token, the original's {before:.4f} "
        f"({change:+.2f} %).",
    }
    return Bench(served, traces, frozen.sampling, frozen.config, frozen.prompts, about)


def _merge(offline: Measurement, real: Measurement, temperature: float, config: EvalConfig) -> None:
    """What only decoding knows goes to the row measured without it, if that is the same thing."""
    if offline.row["policy"] != real.row["policy"]:
        return
    offline.row |= {key: real.row[key] for key in FROM_DECODING if key in real.row}
    if temperature == 0 and config.policy == "fixed":
        offline.row["replay_differs_from_decoding"] = differing_prompts(offline, real)


def _against(
    tree: Measurement, chain: Measurement, temperature: float, run: Run
) -> list[dict[str, Any]]:
    config = run.config.eval
    diff = paired_difference(
        tree.counters, chain.counters, "tokens_per_round", draws=config.bootstrap_draws,
        seed=config.seed,
    )  # fmt: skip
    name = tree.row["drafter"]
    return [{"a": f"{name}, {tree.row['tree']}", "b": name, "temperature": temperature, **diff}]


def _compare(
    name: str, measured: dict[str, Measurement], temperature: float, run: Run
) -> list[dict[str, Any]]:
    config, rows = run.config.eval, []
    pairs = [(name, other) for other in ("before", "control", "offline") if other in measured]
    stages = [one for one in STAGES if one in measured]
    # each stage of several against the one before; the first starts from "before"
    pairs += [(b, a) for a, b in pairwise(["before", *stages, name] if stages else [])]
    for a, b in dict.fromkeys(pairs):
        for metric in ("alpha", "tokens_per_round"):
            if a != b:
                pair = measured[a].counters, measured[b].counters
                diff = paired_difference(
                    *pair, metric, draws=config.bootstrap_draws, seed=config.seed
                )
                rows.append({"a": a, "b": b, "temperature": temperature, **diff})
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


def written(folder: Path) -> dict[str, Any] | None:
    """The report of a run that is finished. One that is damaged counts as not written."""
    path = folder / "report.json"
    if not path.exists():
        return None
    try:
        return read_report(path)
    except UserError as error:
        print(f"{error}: it is written again")
        return None


def show(report: dict[str, Any], folder: Path) -> None:
    """The report on the terminal; its pages are made again where they are gone."""
    pages = folder / "report.md", folder / "report.html"
    if not all(page.exists() and page.stat().st_size for page in pages):
        write_report(report, folder)
    print(pages[0].read_text(encoding="utf-8"))
    print(f"report: {pages[1].resolve()}")


def finish(
    run: Run,
    base: Any,
    trained: dict[str, Any],
    results: dict[str, FitResult],
    prompts: list[Prompt],
    dev: list[Trace],
    about: dict[str, Any] | None = None,
) -> None:
    """Measure, save and export the drafter, write the three reports; report.json comes last.
    `about`: what the recipe says of the drafter."""
    after = trained["after"]
    if not all(bool(torch.isfinite(p).all()) for p in after.parameters()):
        raise RunFault("the trained drafter holds weights that are not finite: see metrics.jsonl")
    calibrate(run, after, dev)
    drafters = {"before": base, **trained, **baselines(run, base)}
    measured = measure(run, drafters, prompts, "after")
    policies = measure_policies(run, after, prompts, dev) if after.acceptance else None
    chosen_by = "best_dev_tokens_per_round" if after.target_layers else "best_dev_alpha"
    if policies is not None:
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
            **read_facts(run.folder),
        },
        target={"name": run.target.name, "fingerprint": run.target.fingerprint},
        drafter={
            "start": run.config.model.drafter or "built from the target's configuration",
            **facts(after, run.target),
            "stages": stages,
            **(about or {}),
        },
        results=measured.rows,
        comparisons=measured.comparisons,
        series=[{"name": name, **row} for name, r in results.items() for row in r.series],
    )
    if policies is not None and policies.points:
        report["policies"] = policies.points
    export_run(run, after, report)
    write_rounds(run.folder, measured.rounds)
    files = write_report(report, run.folder)
    track_report(
        run.config.trainer, run.folder, run.folder.name, run.config.to_dict(),
        headline_numbers(report), files,
    )  # fmt: skip


def facts(drafter: Any, target: Target) -> dict[str, Any]:
    """What the report says about a drafter: its size, and what it reads of the target."""
    found = {
        "kind": drafter.kind,
        "parameters": drafter.num_parameters,
        "trained_parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        "active_parameters": round(read_per_round(drafter, 1)[1]),  # of one draft step
    }
    if drafter.target_layers:
        layers = tuple(dict.fromkeys((*drafter.target_layers, "final_norm")))
        found["captures"] = list(drafter.target_layers)
        found["feature_bytes_per_token"] = bytes_per_token(layers, target.hidden_size, "bf16")
        found["draft_vocab_size"] = drafter.draft_vocab_size
    if drafter.provenance is not None:
        found["provenance"] = drafter.provenance
    return found


def write_rounds(folder: Path, rounds: list[dict[str, Any]]) -> None:
    write_atomic(folder / "rounds.jsonl", "".join(json.dumps(one) + "\n" for one in rounds))
