"""One leaderboard over finished runs.

    python -m scripts.compare runs/*/report.json
    python -m scripts.compare runs/a/report.json runs/b/report.json script.out=runs/leaderboard
    python -m scripts.compare runs/*/report.json script.rows=after,target
    python -m scripts.compare runs/*/report.json script.csv=rows.csv

Markdown goes to the terminal, Markdown and HTML to `script.out` (default runs/leaderboard). Chains
and trees of any size share a table, which names their shape. Rows that were not measured alike
stand in separate tables: acceptance on other prompts, at another temperature, by another verifier
or of another target says nothing about the drafter. The target and training-free drafters, which
belong to no run, have one row in each table. `script.rows`: only drafters of these names.
`script.csv`: a file for every row of every report, with all columns of docs/rows.md.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eval.report.render import (
    Block,
    Bullets,
    Heading,
    Table,
    Text,
    to_markdown,
    with_interval,
)
from eval.report.rows import BASELINE, PLAIN, TARGET, Report, draft_shape, label, num_nodes
from eval.report.schema import read_report
from eval.report.tables import COST_HEADERS, count, modelled_cells, notes, percent, yes
from eval.report.web import to_html
from eval.row import Row
from trainer.checks import require_folder
from trainer.config import asks_for_help, suggest
from trainer.errors import RunFault, UserError
from trainer.files import write_atomic
from trainer.redaction import hide
from trainer.terminal import guard_terminal

Entry = tuple[str, Report, Row]  # name of the run, its report, row
KEYS = ["script.out", "script.rows", "script.csv"]
OF_NO_RUN = (BASELINE, TARGET)  # roles of rows that belong to no run


def main(arguments: list[str]) -> None:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return
    words = parse(arguments)
    out = words.out
    reports = [read_report(path) for path in words.paths]
    named = list(zip(run_names(words.paths), reports, strict=True))
    blocks = leaderboard(named, words.rows)
    if words.csv is not None:
        write_atomic(words.csv, as_csv(named, words.rows))
        print(f"written: {words.csv}", file=sys.stderr)
    markdown = to_markdown(blocks)
    write_atomic(out / "leaderboard.md", markdown)
    write_atomic(out / "leaderboard.html", to_html("Leaderboard", blocks))
    print(markdown)
    print(f"written: {out / 'leaderboard.md'} and {out / 'leaderboard.html'}", file=sys.stderr)


class Words(NamedTuple):
    """The words of a command line: paths of reports, and the values of script.*."""

    paths: list[Path]
    out: Path
    rows: list[str]
    csv: Path | None


def parse(arguments: list[str]) -> Words:
    """Parse the command line, in which a run's folder stands for its report."""
    paths: list[Path] = []
    rows: list[str] = []
    files: dict[str, Path] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if key in ("script.out", "script.csv") and equals:
            if not value:
                what = "folder" if key == "script.out" else "file"
                raise UserError(f"{key} must name a {what}, got nothing")
            if key in files:
                raise UserError(f"{key} is given twice")
            files[key] = Path(value)
        elif key == "script.rows" and equals:
            rows = [name.strip() for name in value.strip("[]").split(",")]
        elif equals and not Path(word).exists() and not word.endswith(".json"):
            raise UserError(f"unknown key {key!r}{suggest(key, KEYS)}")
        else:
            path = Path(word)
            path = path / "report.json" if os.path.isdir(path) else path
            if path not in paths:
                paths.append(path)
    if not paths:
        raise UserError("name at least one report: python -m scripts.compare runs/*/report.json")
    out, table = files.get("script.out", Path("runs/leaderboard")), files.get("script.csv")
    require_folder("script.out", out)
    if table is not None:
        require_folder("script.csv: the folder", table.absolute().parent)
        if table.is_dir():
            raise UserError("is a folder", key="script.csv", value=str(table), remedy="name a file")
    return Words(paths, out, rows, table)


def as_csv(reports: Sequence[tuple[str, Report]], rows: Sequence[str] = ()) -> str:
    """Every row of the reports as a line of CSV, behind the names of its run and target; lists and
    mappings as JSON, what is unknown empty. `rows`: the drafters to write, all if empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = [field.name for field in dataclasses.fields(Row)]
    writer.writerow(["run", "target", *columns])
    for run, report in reports:
        for row in report["results"]:
            if rows and row.drafter not in rows:
                continue
            values = [getattr(row, column) for column in columns]
            cells = [json.dumps(v) if isinstance(v, list | dict) else v for v in values]
            writer.writerow([run, report["target"].get("name"), *cells])
    return file.getvalue()


def run_names(paths: list[Path]) -> list[str]:
    """Name each report by its folder, by the whole path where two folders share a name."""
    names = [path.resolve().parent.name for path in paths]
    return [
        name if names.count(name) == 1 else str(path.parent)
        for name, path in zip(names, paths, strict=True)
    ]


def leaderboard(reports: Sequence[tuple[str, Report]], rows: Sequence[str] = ()) -> list[Block]:
    """Lay out the leaderboard: one table per way of measuring, most tokens per round first.
    `reports`: with the names of their runs; `rows`: the drafters to show, all if empty."""
    known = sorted({row.drafter for _, report in reports for row in report["results"]})
    for name in rows:
        if name not in known:
            raise UserError(f"script.rows: no report has a row {name!r}{suggest(name, known)}")
    groups: dict[str, list[Entry]] = {}
    conditions: dict[str, dict[str, str]] = {}
    for run, report in reports:
        for row in report["results"]:
            # plain decoding gives 1 token per forward by definition
            if row.role == PLAIN or (rows and row.drafter not in rows):
                continue
            condition = measured_how(run, row, report["target"])
            key = json.dumps(condition, sort_keys=True)
            conditions[key] = condition
            group = groups.setdefault(key, [])
            if row.role not in OF_NO_RUN:
                group.append((run, report, row))
            elif all(_title("", row) != _title("", other) for *_, other in group):
                group.append(("", report, row))
    names = list(next(iter(conditions.values()), {}))
    differing = [n for n in names if len({c[n] for c in conditions.values()}) > 1]
    blocks: list[Block] = [Heading("Leaderboard", 1)]
    if not groups:
        return [*blocks, Text("The reports hold no results.")]
    if differing:
        blocks.append(
            Text(
                f"Warning: {len(groups)} tables, because the rows differ in "
                f"{', '.join(differing)}. Compare rows within a table, never across tables."
            )
        )
    for key in sorted(groups, key=lambda k: list(conditions[k].values())):
        entries = sorted(groups[key], key=lambda entry: -(entry[2].tokens_per_round or 0.0))
        condition, (run, report, row) = conditions[key], entries[0]
        target = report["target"]
        shown = [name for name in differing if name != "target"] or ["temperature"]
        title = f"{target.get('name', 'unnamed target')}{trained_with(run, row)}"
        title += f", prompts {row.prompts['name']}"
        title += "".join(f", {name} {condition[name]}" for name in shown)
        blocks += [Heading(title, 2), table(entries)]
        shared = "; ".join(f"{name}: {condition[name]}" for name in names)
        remarks = [f"Measured with {shared}."]
        if condition["target"].startswith("unknown"):
            remarks.append("These reports name no target fingerprint: the targets may differ.")
        remarks += unequal_verification(entries)
        remarks += notes(
            [row for *_, row in entries], [_title(run, row) for run, _, row in entries]
        )
        blocks.append(Bullets(remarks))
    return blocks


def _title(run: str, row: Row) -> str:
    return f"{run}: {label(row)}" if run else label(row)


def table(entries: Sequence[Entry]) -> Table:
    """Lay out a table, a line per row."""
    lines = [
        [
            f"{run}: {row.drafter}" if run else row.drafter,
            draft_shape(row),
            count(num_nodes(row)),
            count(parameters(report, row)),
            with_interval(row.tokens_per_round, row.tokens_per_round_ci95),
            with_interval(row.alpha, row.alpha_ci95, 3),
            *modelled_cells(row),
            with_interval(row.speedup, row.speedup_ci95),
            percent(row.identical_to_plain),
            yes(row.lossless),
            row.role,
        ]
        for run, report, row in entries
    ]
    headers = ["run: drafter", "draft", "nodes", "parameters", "tokens per round", "alpha, depth 1",
               *COST_HEADERS, "speed-up", "identical", "lossless", "role"]  # fmt: skip
    return Table(headers, lines)


def parameters(report: Report, row: Row) -> int | None:
    """The number of parameters of the run's own network, trained or not; None for other rows."""
    other = row.role in OF_NO_RUN
    return None if other else report["drafter"].get("parameters")


def unequal_verification(entries: Sequence[Entry]) -> list[str]:
    """Warn where rows have the target verify different numbers of nodes."""
    nodes = sorted({num_nodes(row) or 0 for *_, row in entries})
    if len(nodes) == 1:
        return []
    return [
        f"Warning: these rows have the target verify different numbers of nodes a round "
        f"({', '.join(map(str, nodes))}). Verifying more costs more, above all in batches: more "
        "tokens per round alone do not make a row faster. The modelled columns charge drafting "
        "only; each report has a table of goodput by batch size."
    ]


def trained_with(run: str, row: Row) -> str:
    """What follows the target's name where the drafter brings a target of its own (Medusa-2)."""
    return f", trained with {row.drafter} of {run}" if row.target_changed else ""


def measured_how(run: str, row: Row, target: Mapping[str, object]) -> dict[str, str]:
    """List the conditions that two rows must share before their numbers may be compared."""
    fingerprint = target.get("fingerprint")
    if isinstance(fingerprint, dict):
        fingerprint = json.dumps(fingerprint, sort_keys=True)
    name = str(fingerprint or "") or f"unknown ({target.get('name')})"
    return {
        "target": name + trained_with(run, row),
        "prompts hash": str(row.prompts["hash"]),
        "number of prompts": str(row.num_prompts),
        "temperature": f"{row.temperature:g}",
        "top-k": str(row.top_k),
        "top-p": f"{row.top_p:g}",
        "counting": row.counting,
        "policy": str(row.policy),
        "verifier": str(row.verifier),
        "max new tokens": str(row.max_new_tokens),
        "measured by": str(row.measured_by),
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, RunFault, OSError) as error:
        print(f"error: {hide(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 3)
