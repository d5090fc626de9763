"""The measurements of a report: every drafter's rows, calibration, and what may be measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from data.imported import continuation_of, open_imported
from data.prompts import Prompt
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.round import Budget, Drafter, Shape
from drafters.training_free.base import TrainingFree
from drafters.training_free.lookup import PromptLookup
from drafters.training_free.table import parse_training_free
from drafters.trees.calibrated import accuracy_at, accuracy_name
from drafters.trees.tree import WITHOUT_REPLACEMENT
from engines.distribution_check import measured as tokens_unlike
from eval.config import EvalConfig, tree_depth, trees_of
from eval.costs import Cost, cost_of
from eval.measure import NOT_DECODED, Bench, Measurement
from eval.plain import NEAR_TIE, next_token_loss
from eval.policies.table import budget_for
from eval.replay import follows_the_text, measure_accuracies
from eval.report.rows import BASELINE, draft_shape
from eval.report.schema import (
    plain_row,
)
from eval.row import Json, Row
from phases.check import check_context, check_width
from phases.cut_answers import answer_format, measured_on
from phases.generate import evaluation_traces, traces_of_store
from phases.pairs import against, compare, merge
from phases.readings import ReadingCollector
from phases.run import Run
from phases.serve import loads, served_rows
from target.gguf import target_gguf
from target.model import Target
from target.sampling import Sampling
from trainer.errors import UserError, require
from trainer.progress import TokenProgress

ReportDrafter = TrainedDrafter | TrainingFree  # of a row of the report
# alpha of the target as its own drafter at temperature 0, on text that it wrote: below the least it
# did not; engines that round otherwise than transformers come to less than 1
LEAST_MATCH, USUAL_MATCH = 0.9, 0.98


def baselines(run: Run, drafter: ReportDrafter) -> dict[str, ReportDrafter]:
    """Make the drafters that every report compares with, by row: the same shape untrained, those of
    eval.baselines, the target as its own drafter."""
    found: dict[str, ReportDrafter] = {}
    if isinstance(drafter, TrainedDrafter):
        with torch.random.fork_rng():
            torch.manual_seed(run.config.run.seed)
            found["untrained"] = drafter.fresh()
    for text in run.config.eval.baselines:
        one = parse_training_free(text, "eval.baselines")
        if one != drafter:
            found[baseline_name(one, text)] = one
    if run.target.has_layers:
        found["target"] = CausalLMDrafter.of_target(run.target)
    return found


def baseline_name(drafter: TrainingFree, text: str) -> str:
    """The name of a baseline's rows: its spec `text`. The usual prompt lookup has the name that all
    reports give it."""
    return "prompt_lookup" if drafter == PromptLookup() else text


def shapes_of(drafter: ReportDrafter, config: EvalConfig, temperature: float) -> list[Shape]:
    """Build the trees of eval.tree for this drafter, equal ones once; a calibrated tree is built
    from the drafter's accuracies at the nearest temperature. A drafter that cannot draft trees has
    an empty list."""
    if not isinstance(drafter, TrainedDrafter):
        return []
    found = dict[str, Shape]()
    for text, tree in trees_of(config):
        drawn = tree.siblings == WITHOUT_REPLACEMENT and temperature > 0
        drafted = config.draft_sampling(Sampling(temperature)).temperature
        wanted = accuracy_name(temperature, drafted if drawn else None)
        accuracy, measured = accuracy_at(drafter.rank_accuracy, wanted)
        if tree.needs_accuracy and measured != wanted:
            print(
                f"eval.tree={text}: the drafter has no accuracies at T={wanted}, so the tree is "
                f"built from those at T={measured}"
            )
        try:
            shape = tree.shape(accuracy, config.K)
        except UserError as error:
            raise UserError(f"eval.tree={text}: {error}") from error
        check_width(drafter, shape)
        # where none are drawn, trees that differ in how children are drawn are one
        found.setdefault(shape.describe() + ", drawn" * drawn, shape)
    return [*found.values()]


def calibrate(run: Run, drafter: TrainedDrafter, dev: list[Trace]) -> None:
    """Measure how often each rank of each depth is the target's token at each of the report's
    temperatures, and each draw the accepted one, on held-out training traces, of that temperature
    where there are some, and set the drafter's `rank_accuracy`."""
    if dev and drafter.target_layers:
        depth = drafter.max_depth or max(run.config.eval.K, tree_depth(run.config.eval))
        target = drafter.served_target() or run.target
        progress = TokenProgress("calibration")
        config, found = run.config.eval, dict[str, list[list[float]]]()
        for temperature in config.temperatures:
            sampling = Sampling(temperature, config.top_k, config.top_p)
            own = [trace for trace in dev if trace.temperature == temperature] or dev
            total = sum(len(trace.response_ids) for trace in own)
            progress.part(f"T={temperature:g}", total=total)
            drafted = config.draft_sampling(sampling)
            ranks, draws = measure_accuracies(
                target, own, drafter, depth, sampling, drafted, on_tokens=progress.advance
            )
            found[accuracy_name(temperature, None)] = ranks
            if temperature > 0:
                found[accuracy_name(temperature, drafted.temperature)] = draws
        drafter.rank_accuracy = found
        progress.close()


@dataclasses.dataclass
class Measured:
    """The measurements of a report."""

    rows: list[Row]
    comparisons: list[Json]
    rounds: list[dict[str, object]]  # lines of rounds.jsonl
    readings: list[Json]
    load: list[Json] = dataclasses.field(default_factory=list)  # the report's part of that name

    def decode(
        self,
        bench: Bench,
        name: str,
        drafter: Drafter,
        cost: Cost,
        tree: Budget | None,
        shown: Collection[str],
        readings: ReadingCollector,
    ) -> Measurement:
        """Measure a drafter by decoding, and note its row, its rounds and the answers that are
        shown."""
        real = bench.decoded(name, drafter, cost, tree, shown)
        readings.add(real)
        self.rows.append(real.row)
        about: dict[str, object] = {"temperature": bench.sampling.temperature}
        about |= {} if tree is None else {"tree": draft_shape(real.row)}
        self.rounds += [{**about, **r.line()} for r in real.rounds]
        return real


@dataclasses.dataclass(frozen=True)
class ReportText:
    """Text of the target that drafters are replayed on, of one sampling. `prompts`: what its rows
    say of them; `by`: what wrote it."""

    sampling: Sampling
    traces: list[Trace]
    prompts: Mapping[str, object]
    by: str


def texts_of_report(run: Run, prompts: list[Prompt]) -> list[ReportText]:
    """The target's answers to the report's prompts, at each of its temperatures."""
    config, found = run.config.eval, []
    for temperature in config.temperatures:
        traces, plan = evaluation_traces(run, prompts, temperature, alone=True)
        sampling = Sampling(temperature, config.top_k, config.top_p)
        on = measured_on(plan, traces, answer_format(run.target, run.config.data))
        found.append(ReportText(sampling, traces, on, str(plan.served or "hf")))
    return found


def texts_of_log(run: Run, folder: str, drafter: ReportDrafter) -> list[ReportText]:
    """Answers of the imported log in `folder` to replay `drafter` on, for each sampling of it at
    most eval.num_prompts, evenly spread. The last tokens of each stand for those behind its end,
    which a log does not have: so many are left out of what is replayed, and answers that have no
    more. UserError where the log is not of the target that the drafter serves."""
    store = open_imported(folder)
    if store is None:
        raise UserError(
            "must be the store of an imported log", key="eval.traces", value=folder,
            remedy="python -m scripts.import_traces makes one",
        )  # fmt: skip
    rule = "be null for a drafter that was trained with its target, which did not write this log"
    require(drafter.served_target() is None, "eval.traces", rule, folder)
    config, name = run.config.eval, f"{store.folder.name}, imported from {store.identity['log']}"
    ahead = max(config.K, tree_depth(config))
    groups: dict[Sampling, list[Trace]] = {}
    for one in traces_of_store(run, store):
        if len(one.response_ids) > ahead + 1:
            sampling = Sampling(one.temperature, one.top_k, one.top_p)
            groups.setdefault(sampling, []).append(one)
    rule = f"hold an answer of more than {ahead + 1} tokens"
    require(bool(groups), "eval.traces", rule, config.traces)
    found = []
    for sampling, rows in sorted(groups.items(), key=lambda group: group[0].temperature):
        rows = rows[:: max(1, len(rows) // config.num_prompts)][: config.num_prompts]
        cut = [
            dataclasses.replace(
                one, response_ids=one.response_ids[:-ahead], lookahead_ids=one.response_ids[-ahead:]
            )
            for one in rows
        ]
        digest = hashlib.sha256(json.dumps([one.key for one in rows]).encode()).hexdigest()
        on = {"name": name, "hash": digest[:16], "answers": len(rows), "cut": 0}
        found.append(ReportText(sampling, cut, on, "log"))
    return found


def measure(
    run: Run,
    drafters: Mapping[str, ReportDrafter],
    prompts: list[Prompt],
    decoded: str,
    logged: Sequence[ReportText] | None = None,
) -> Measured:
    """Measure every drafter on the target's text, that of the report or `logged`; measure the one
    of row `decoded` by decoding as well, and compare it in pairs with "before", "control" and
    "offline". On a log nothing is decoded.
    """
    config, progress = run.config.eval, TokenProgress("report")
    for drafter in drafters.values():
        if isinstance(drafter, torch.nn.Module):
            drafter.eval()
    subject: Any = drafters[decoded]  # with weights or without
    chains = {n: budget_for(d, config.policy, config.K) for n, d in drafters.items()}
    own = cost_of(subject, run.target, chains[decoded])  # for all drafters of this shape
    free = [n for n, d in drafters.items() if isinstance(d, TrainingFree) and n != decoded]
    others = {*free, "target"}
    costs = {
        n: cost_of(d, run.target, chains[n]) if n in others else own for n, d in drafters.items()
    }
    texts = texts_of_report(run, prompts) if logged is None else logged
    shapes = {t: shapes_of(subject, config, t) for t in (x.sampling.temperature for x in texts)}
    tree_costs = {  # equal shapes are timed once
        shape: cost_of(subject, run.target, Budget.of(shape))
        for shape in dict.fromkeys(chain(*shapes.values()))
    }
    out = Measured([], [], [], [])
    if not run.target.has_layers:
        print(f"{NOT_DECODED}, so the report has replayed rows, and those of eval.engine, alone")
    readings = ReadingCollector(prompts, run.target.tokenizer)
    for text in texts:
        traces, sampling = text.traces, text.sampling
        temperature = sampling.temperature
        check_context(subject, traces, config)
        by = {"text_by": text.by}
        frozen = Bench(run.target, traces, sampling, config, text.prompts, by, progress)
        shown = readings.choose(traces) if logged is None else []
        benches = {n: bench_of(run, d, frozen, prompts) for n, d in drafters.items()}
        measured = {n: benches[n].replayed(n, d, costs[n]) for n, d in drafters.items()}
        if temperature == 0 and "target" in measured:
            check_own_text(measured["target"].row, run.target, traces)
        for n in free:
            measured[n].row.role = BASELINE
        bench, mine, first = benches[decoded], measured[decoded], len(out.rows)
        decodes = logged is None and run.target.has_layers
        speed = None
        if decodes:
            real = out.decode(bench, decoded, subject, costs[decoded], None, shown, readings)
            merge(mine, real, temperature, config)
            speed = real.row.plain_tokens_per_s
        plain = plain_row(dataclasses.replace(mine.row, plain_tokens_per_s=speed))
        out.rows.insert(first, plain)
        out.rows += [one.row for one in measured.values()]
        out.comparisons += compare(decoded, measured, temperature, config)
        if config.engine != "own":
            gguf = target_gguf(run.config.model)
            out.rows += served_rows(bench, decoded, subject, costs[decoded], gguf)
            out.load += loads(bench, subject)
        for shape in shapes[temperature]:
            tree, tree_cost = Budget.of(shape), tree_costs[shape]
            best = real = None
            if decodes:
                best = real = out.decode(bench, decoded, subject, tree_cost, tree, shown, readings)
            if bench.verifier(tree).replayable(sampling) and follows_the_text(tree, sampling):
                best = bench.replayed_tree(decoded, subject, tree_cost, tree)
                if real is not None:
                    merge(best, real, temperature, config)
                out.rows.append(best.row)
            if best is None:
                print(f"nothing is decoded here: no row of {shape.describe()} at T={temperature:g}")
            elif best.row.lossless:
                out.comparisons += against(best, mine, temperature, config)
    progress.close()
    out.readings = readings.all()
    return out


def check_own_text(row: Row, target: Target, traces: Sequence[Trace]) -> None:
    """Refuse answers that the target did not write, which a store may hold that somebody else
    brought. `row`: that of the target as its own drafter at temperature 0, where it drafts what it
    wrote, but for tokens that are as likely as another one. What transformers wrote in float32 has
    no others, and is warned of otherwise."""
    match = row.alpha
    if match is None or match == 1:
        return
    said = (
        f"the target agrees with {match:.1%} of the tokens of its own stored answers at "
        "temperature 0"
    )
    remedy = "delete their store (python -m scripts.cache), so that they are generated again"
    if match < LEAST_MATCH:
        raise UserError(f"{said}: another model wrote them; {remedy}")
    if match < USUAL_MATCH:
        print(f"warning: {said}, usual are over {USUAL_MATCH:.0%}; {remedy}")
    elif row.text_by == "hf" and target.model.dtype == torch.float32:
        answers = [continuation_of(trace) for trace in traces]
        evidence = tokens_unlike(target, answers, tie=NEAR_TIE)
        if count := sum(int(one.total) for one in evidence):
            print(
                f"warning: {count} tokens of the target's own stored answers at temperature 0 are "
                f"not its likeliest, by more than rounding explains; {remedy}"
            )


def bench_of(run: Run, drafter: ReportDrafter, frozen: Bench, prompts: list[Prompt]) -> Bench:
    """The bench to measure this drafter on: `frozen`, unless the drafter was trained with its
    target. Then the trained target verifies, on text that it writes itself; its distance from the
    run's target is measured on the text of the latter."""
    served = drafter.served_target()
    if served is None:
        return frozen
    at = frozen.sampling.temperature
    traces, plan = evaluation_traces(run, prompts, at, served, alone=True)
    before, now = (next_token_loss(target, frozen.traces) for target in (run.target, served))
    change = 100 * (now / before - 1)
    about = {
        "text_by": plan.served or "hf",
        "target_changed": True,
        "next_token_loss": {"original": before, "served": now, "change_percent": change},
        "note": "the target was trained too, and lossless means: equal to that one. Its next-token "
        f"loss on the original target's text is {now:.4f} nats/token, the original's {before:.4f} "
        f"({change:+.2f} %).",
    }
    return Bench(
        served, traces, frozen.sampling, frozen.config, frozen.prompts, about, frozen.progress
    )
