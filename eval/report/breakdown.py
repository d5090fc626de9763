"""Tokens per round by domain and by position in the answer; what a draft vocabulary costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report.render import NONE, Block, Heading, Table, Text, number, percent, with_interval
from eval.report.rows import groups, label, once
from eval.row import AtPosition, Row


def domains_of(rows: Sequence[Row]) -> list[str]:
    """The domains of these rows; [] where there is one alone."""
    names = {name for row in rows for name in row.domains}
    return sorted(names) if len(names) > 1 else []


def domain_tables(rows: Sequence[Row]) -> list[Block]:
    """Tokens per round and alpha of every row, a column for each domain."""
    blocks: list[Block] = []
    for heading, group in groups(once(rows)).items():
        names = domains_of(group)
        lines = []
        for row in group:
            if (own := row.by_domain) is None or not names:
                continue
            worst = own["worst"].get("tokens_per_round")
            cells = [_domain_cell(row.domains.get(name, {})) for name in names]
            worst_cell = f"{number(worst['value'])} ({worst['domain']})" if worst else NONE
            lines.append([label(row), *cells, _domain_cell(own["mean"]), worst_cell])
        if lines:
            headers = ["drafter", *names, "mean over domains", "worst"]
            blocks += [Heading(heading, 3), Table(headers, lines)]
    if blocks:
        blocks.insert(0, Text("Tokens per round, and alpha after the slash."))
        blocks.insert(0, Heading("By domain"))
    return blocks


def _domain_cell(metrics: Mapping[str, Any]) -> str:
    alpha = metrics.get("alpha")
    tokens = with_interval(metrics.get("tokens_per_round"), metrics.get("tokens_per_round_ci95"))
    return tokens if alpha is None else f"{tokens} / {number(alpha, 3)}"


def position_name(place: AtPosition) -> str:
    """`32-63`, or `65536-` for the range without an end."""
    return f"{place['first']}-{'' if place['last'] is None else place['last']}"


def position_tables(rows: Sequence[Row]) -> list[Block]:
    """Tokens per round of every row, a column for each range of positions in the answer."""
    blocks: list[Block] = []
    for heading, group in groups(once(rows)).items():
        shown = [row for row in group if row.by_position]
        firsts = {p["first"]: position_name(p) for row in shown for p in row.by_position or []}
        if len(firsts) < 2:
            continue
        lines = []
        for row in shown:
            own = {place["first"]: place for place in row.by_position or []}
            cells = (_position_cell(own.get(first)) for first in sorted(firsts))
            lines.append([label(row), *cells])
        headers = ["drafter", *(firsts[first] for first in sorted(firsts))]
        blocks += [Heading(heading, 3), Table(headers, lines)]
    if blocks:
        text = (
            "Tokens per round of the rounds that begin there; position 0 is the token of the "
            "prefill. Only long answers have rounds in the last columns, so these are of other "
            "prompts too."
        )
        blocks = [Heading("By position in the answer"), Text(text), *blocks]
    return blocks


def _position_cell(place: AtPosition | None) -> str:
    if place is None:
        return NONE
    return with_interval(place["tokens_per_round"], place["tokens_per_round_ci95"])


def vocabulary_words(name: str, cost: Mapping[str, Any]) -> str:
    """One sentence on what the draft vocabulary of a row costs."""
    return (
        f"{name}: {percent(cost['tokens_outside'])} of the target's tokens are not among the "
        f"{cost['size']:,} of the draft vocabulary, which costs at most "
        f"{number(cost['alpha_lost'], 3)} of alpha and "
        f"{number(cost['tokens_per_round_lost'], 2)} tokens per round."
    )
