"""One leaderboard over finished runs.

    python -m scripts.compare runs/*/report.json
    python -m scripts.compare runs/a/report.json runs/b/report.json script.out=runs/leaderboard

Markdown goes to the terminal, Markdown and HTML to `script.out` (default runs/leaderboard). Rows
that were not measured alike stand in separate tables: acceptance on other prompts, at another
temperature or draft length, or of another target says nothing about the drafter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eval.render import Block, Bullets, Heading, Text, to_html, to_markdown, write_atomic
from eval.report import read_report
from eval.report_page import main_table, notes
from trainer.config import UserError, suggest

Entry = tuple[str, dict[str, Any], dict[str, Any]]  # run, target, row


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    paths, out = parse(arguments)
    reports = [read_report(path) for path in paths]
    blocks = leaderboard(list(zip(run_names(paths), reports, strict=True)))
    markdown = to_markdown(blocks)
    write_atomic(out / "leaderboard.md", markdown)
    write_atomic(out / "leaderboard.html", to_html("Leaderboard", blocks))
    print(markdown)
    print(f"written: {out / 'leaderboard.md'} and {out / 'leaderboard.html'}", file=sys.stderr)


def parse(arguments: list[str]) -> tuple[list[Path], Path]:
    """Report paths (or run folders) and `script.out`."""
    paths: list[Path] = []
    out = Path("runs/leaderboard")
    for word in arguments:
        key, equals, value = word.partition("=")
        if key == "script.out" and equals:
            if not value:
                raise UserError("script.out must name a folder, got nothing")
            out = Path(value)
        elif equals and not Path(word).exists() and not word.endswith(".json"):
            raise UserError(f"unknown key {key!r}{suggest(key, ['script.out'])}")
        else:
            path = Path(word)
            path = path / "report.json" if path.is_dir() else path
            if path not in paths:
                paths.append(path)
    if not paths:
        raise UserError("name at least one report: python -m scripts.compare runs/*/report.json")
    return paths, out


def run_names(paths: list[Path]) -> list[str]:
    """The folder of each report; the whole path where two folders share a name."""
    names = [path.resolve().parent.name for path in paths]
    return [
        name if names.count(name) == 1 else str(path.parent)
        for name, path in zip(names, paths, strict=True)
    ]


def leaderboard(reports: list[tuple[str, dict[str, Any]]]) -> list[Block]:
    """One table per way of measuring, best tokens per round first."""
    groups: dict[str, list[Entry]] = {}
    conditions: dict[str, dict[str, str]] = {}
    for run, report in reports:
        for row in report["results"]:
            if row["drafter"] == "plain":  # 1 token per forward by definition
                continue
            condition = measured_how(row, report["target"])
            key = json.dumps(condition, sort_keys=True)
            conditions[key] = condition
            groups.setdefault(key, []).append((run, report["target"], row))
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
        entries = sorted(groups[key], key=lambda entry: -(entry[2]["tokens_per_round"] or 0.0))
        condition, row, target = conditions[key], entries[0][2], entries[0][1]
        shown = [f"{name} {condition[name]}" for name in differing if name != "target"]
        title = f"{target.get('name', 'unnamed target')}, prompts {row['prompts']['name']}"
        title += "".join(f", {text}" for text in shown) if shown else f", K {condition['K']}"
        blocks.append(Heading(title, 2))
        rows = [entry[2] for entry in entries]
        labels = [f"{run}: {row['drafter']}" for run, _, row in entries]
        blocks.append(main_table(rows, labels))
        shared = "; ".join(f"{name}: {condition[name]}" for name in names)
        remarks = [f"Measured with {shared}."]
        if condition["target"].startswith("unknown"):
            remarks.append("These reports name no target fingerprint: the targets may differ.")
        remarks += notes(rows, labels)
        blocks.append(Bullets(remarks))
    return blocks


def measured_how(row: dict[str, Any], target: dict[str, Any]) -> dict[str, str]:
    """What two rows must share before their numbers may be compared."""
    fingerprint = target.get("fingerprint")
    if isinstance(fingerprint, dict):
        fingerprint = json.dumps(fingerprint, sort_keys=True)
    shape = f"tree {row['tree']}" if row.get("tree") is not None else str(row.get("K"))
    return {
        "target": str(fingerprint or "") or f"unknown ({target.get('name')})",
        "prompts hash": str(row["prompts"]["hash"]),
        "number of prompts": str(row["num_prompts"]),
        "temperature": f"{row['temperature']:g}",
        "top-k": str(row["top_k"]),
        "top-p": f"{row['top_p']:g}",
        "K": shape,
        "counting": row["counting"],
        "policy": str(row["policy"]),
        "verifier": str(row["verifier"]),
        "max new tokens": str(row.get("max_new_tokens")),
        "measured by": str(row["measured_by"]),
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
