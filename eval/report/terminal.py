"""The main numbers of a report for a terminal; the report has the rest, with definitions."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.breakdown import domains_of
from eval.report.load import sentences
from eval.report.page import report_title
from eval.report.render import NONE, number, with_interval
from eval.report.rows import Report, groups, label, once, prompts_of
from eval.report.tables import beyond_words
from eval.row import Json, Row
from trainer.errors import one_line

HEADERS = ("", "tokens per round", "alpha, depth 1", "speed-up")
LEFT_OUT = ("plain", "untrained", "target")  # known in advance: near 1, and near K + 1


def summary(report: Report) -> str:
    """A title, a table for every temperature and set of prompts, and the gains over other rows."""
    lines = [report_title(report)]
    for heading, rows in groups(once(report["results"])).items():
        shown = [row for row in rows if row.drafter not in LEFT_OUT]
        names = domains_of(shown)  # each a column of tokens per round
        table = [(*HEADERS, *names), *(_cells(row, names) for row in shown)]
        cells = [[one_line(cell) for cell in row] for row in table]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", f"{heading} ({prompts_of(rows[0])})"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        lines += [
            f"  {label(row)}: {beyond_words(row.beyond_context)}"
            for row in shown
            if row.beyond_context
        ]
    for part in report.get("load", []):
        lines += ["", *(f"T={part['temperature']:g}: {said}" for said in sentences(part))]
    gains = _gains(report["comparisons"])
    return "\n".join([*lines, "", *gains] if gains else lines)


def _cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    name = label(row) + ", not lossless" * (not row.lossless)
    measured = [
        with_interval(row.tokens_per_round, row.tokens_per_round_ci95),
        with_interval(row.alpha, row.alpha_ci95, 3),
        with_interval(row.speedup, row.speedup_ci95),
    ]
    by_domain = (number(row.domains.get(one, {}).get("tokens_per_round")) for one in names)
    return (f"  {name}", *measured, *by_domain)


def _gains(comparisons: Sequence[Json]) -> list[str]:
    """One line for every pair: its difference in tokens per round at each temperature."""
    found: dict[str, list[str]] = {}
    for one in comparisons:
        if one["metric"] != "tokens_per_round" or one["diff"] is None:
            continue
        interval = number(one["ci95"], 2, sign=True) if one["ci95"] else NONE
        place = f" at T={one['temperature']:g}" if "temperature" in one else ""
        text = f"{number(one['diff'], 2, sign=True)} [{interval}]{place}"
        found.setdefault(f"{one['a']} - {one['b']}", []).append(text)
    return [f"{pair}, tokens per round: {', '.join(gains)}" for pair, gains in found.items()]
