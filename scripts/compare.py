"""One leaderboard over finished runs.

    python -m scripts.compare runs/*/report.json
    python -m scripts.compare runs/a/report.json runs/b/report.json script.out=runs/leaderboard
    python -m scripts.compare runs/*/report.json script.rows=after,target
    python -m scripts.compare runs/*/report.json script.csv=rows.csv

Markdown goes to the terminal, Markdown and HTML to `script.out` (default runs/leaderboard). A table
has a row for each drafter and columns for each temperature; chains and trees of any size share it.
A run is called by its recipe and by what its command has that others of the recipe have not; runs
that differ in their seed alone are one row, the mean with its range. What was replayed and decoded
is one row. Rows that were not measured alike stand in separate tables: acceptance on other prompts,
by a lossy verifier or of another target says nothing about the drafter. The target and
training-free drafters, which belong to no run, have one row in each table. `script.rows`: only
drafters of these names. `script.csv`: a file for every row of every report, with all columns of
docs/rows.md.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eval.report.render import (
    Block,
    Bullets,
    Heading,
    Table,
    Text,
    number,
    to_markdown,
    with_interval,
)
from eval.report.rows import (
    BASELINE,
    ENGINES,
    PLAIN,
    TARGET,
    USUAL,
    Report,
    draft_shape,
    num_nodes,
    once,
)
from eval.report.schema import read_report
from eval.report.tables import MIDDLE_COST, count, notes, yes
from eval.report.web import to_html
from eval.row import Row
from trainer.checks import require_folder
from trainer.config import asks_for_help, suggest
from trainer.errors import RunFault, UserError
from trainer.files import write_atomic
from trainer.redaction import hide
from trainer.terminal import guard_terminal

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
    tables: dict[str, dict[tuple[str, ...], Line]] = {}
    conditions: dict[str, dict[str, str]] = {}
    for (run, report), trained in zip(reports, labels(reports), strict=True):
        for row in once(report["results"]):
            # plain decoding gives 1 token per forward by definition
            if row.role == PLAIN or (rows and row.drafter not in rows):
                continue
            condition = measured_how(run, row, report["target"])
            table = json.dumps(condition, sort_keys=True)
            conditions[table] = condition
            found = Line("" if row.role in OF_NO_RUN else trained, report, row)
            line = tables.setdefault(table, {}).setdefault(found.key, found)
            own = line.measured.setdefault(row.temperature, [])
            if line.label or not own:  # what belongs to no run is the same in each
                own.append(row)
    names = list(next(iter(conditions.values()), {}))
    differing = [n for n in names if len({c[n] for c in conditions.values()}) > 1]
    blocks: list[Block] = [Heading("Leaderboard", 1)]
    if not tables:
        return [*blocks, Text("The reports hold no results.")]
    if differing:
        blocks.append(
            Text(
                f"Warning: {len(tables)} tables, because the rows differ in "
                f"{', '.join(differing)}. Compare rows within a table, never across tables."
            )
        )
    for table in sorted(tables, key=lambda k: list(conditions[k].values())):
        condition, lines = conditions[table], [*tables[table].values()]
        temperatures = sorted({t for line in lines for t in line.measured})
        lines.sort(key=lambda line: [-line.mean(t, "tokens_per_round") for t in temperatures])
        first = lines[0]
        title = f"{first.report['target'].get('name', 'unnamed target')}"
        title += f"{trained_with(first.label, first.row)}, prompts {first.row.prompts['name']}"
        shown = [name for name in differing if name != "target"]
        title += "".join(f", {name} {condition[name]}" for name in shown)
        blocks += [Heading(title, 2), layout(lines, temperatures)]
        shared = "; ".join(f"{name}: {condition[name]}" for name in names)
        remarks = [f"Measured with {shared}."]
        if any(len(own) > 1 for line in lines for own in line.measured.values()):
            remarks.append("Of several seeds: their mean, in brackets its range and their number.")
        if condition["target"].startswith("unknown"):
            remarks.append("These reports name no target fingerprint: the targets may differ.")
        remarks += unequal_verification(lines)
        every = [
            (f"{line.name} ({draft_shape(row)}), T={row.temperature:g}", row)
            for line in lines for own in line.measured.values() for row in own
        ]  # fmt: skip
        remarks += dict.fromkeys(notes([row for _, row in every], [name for name, _ in every]))
        blocks.append(Bullets(remarks))
    return blocks


def labels(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """What each run is called: its recipe, with the words of its command that other runs of the
    recipe do not have. Runs that differ in their seed alone have one name; those that differ in
    nothing, or were not made by a recipe, the name of their folder."""
    found = []
    settings = [settings_of(report) for _, report in reports]
    for (run, report), own in zip(reports, settings, strict=True):
        recipe = report["run"].get("recipe")
        if own is None or settings.count(own) > 1:
            found.append(run)
            continue
        others = [one for one in settings if one is not None and one.recipe == recipe]
        shared = set.intersection(*(set(one.words) for one in others))
        found.append(" ".join([str(recipe), *(word for word in own.words if word not in shared)]))
    return found


class Settings(NamedTuple):
    """What makes a run: its recipe, the words of its command, and its seed."""

    recipe: str
    words: tuple[str, ...]
    seed: str


def settings_of(report: Report) -> Settings | None:
    """None for a report that was not made by the command of a recipe. Where a run lies says nothing
    about it."""
    recipe, command = report["run"].get("recipe"), report["run"].get("command")
    if not recipe or not isinstance(command, str):
        return None
    words = {word.partition("=")[0]: word for word in shlex.split(command) if "=" in word}
    seed = words.pop("run.seed", "")
    of_place = ("recipe", "run.dir", "run.name", "data.cache_dir")
    return Settings(str(recipe), tuple(v for k, v in words.items() if k not in of_place), seed)


@dataclass
class Line:
    """A drafter in a table. `label`: of its run, "" for one of no run; `row`: the first one;
    `measured`: the rows of its seeds by temperature."""

    label: str
    report: Report
    row: Row
    measured: dict[float, list[Row]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.label}: {self.row.drafter}" if self.label else self.row.drafter

    @property
    def key(self) -> tuple[str, ...]:
        return self.name, draft_shape(self.row), str(num_nodes(self.row)), str(self.row.verifier)

    def mean(self, temperature: float, metric: str) -> float:
        """The mean over seeds, 0 where nothing was measured."""
        found = [getattr(row, metric) for row in self.measured.get(temperature, [])]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else 0.0

    def cell(self, temperature: float, metric: str, digits: int = 2) -> str:
        """The value with its interval; the mean of several seeds with range and number."""
        rows = self.measured.get(temperature, [])
        known = [row for row in rows if getattr(row, metric) is not None]
        if len(known) < 2:
            row = known[0] if known else None
            return with_interval(
                row and getattr(row, metric), row and getattr(row, f"{metric}_ci95", None), digits
            )
        values = [getattr(row, metric) for row in known]
        ends = f"{number(min(values), digits)} to {number(max(values), digits)}"
        return f"{number(self.mean(temperature, metric), digits)} [{ends}, n = {len(values)}]"

    def modelled(self, temperature: float) -> str:
        """The modelled speed-up at the middle one of the assumed costs, a mean over seeds."""
        rows = self.measured.get(temperature, [])
        found = [(row.modelled_speedup_at or {}).get(str(MIDDLE_COST)) for row in rows]
        known = [value for value in found if value is not None]
        return number(sum(known) / len(known) if known else None)


def layout(lines: Sequence[Line], temperatures: Sequence[float]) -> Table:
    """Lay out a table: a row for each drafter, columns for each temperature."""
    columns = ["tokens per round", "speed-up", f"modelled, c = {MIDDLE_COST:g}", "alpha, depth 1"]
    headers = ["run: drafter"]
    headers += [f"T={t:g}: {column}" for t in temperatures for column in columns]
    headers += ["draft", "nodes", "parameters", "lossless", "role"]
    cells = []
    for line in lines:
        row, cell = line.row, [line.name]
        for t in temperatures:
            cell += [line.cell(t, "tokens_per_round"), line.cell(t, "speedup"), line.modelled(t)]
            cell.append(line.cell(t, "alpha", 3))
        own = None if row.role in OF_NO_RUN else line.report["drafter"].get("parameters")
        cell += [draft_shape(row), count(num_nodes(row)), count(own), yes(row.lossless), row.role]
        cells.append(cell)
    return Table(headers, cells)


def unequal_verification(lines: Sequence[Line]) -> list[str]:
    """Warn where rows have the target verify different numbers of nodes."""
    nodes = sorted({num_nodes(line.row) or 0 for line in lines})
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
        "top-k": str(row.top_k),
        "top-p": f"{row.top_p:g}",
        "counting": row.counting,
        "verifier": "a lossless one" if row.verifier in USUAL else str(row.verifier),
        "max new tokens": str(row.max_new_tokens),
        "measured by": ENGINES.get(row.measured_by, "replay or decoding"),
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, RunFault, OSError) as error:
        print(f"error: {hide(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 3)
