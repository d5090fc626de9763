"""The table of a drafter that is trained in several stages: the results of each by domain.

Layout and measures of FastDraft (Zafrir et al. 2024, arXiv:2411.11055): acceptance rate by task for
every stage, with the overlap beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.render import Block, Heading, Table, Text, number
from eval.report.rows import STAGES, groups, once
from eval.row import Row


def stage_tables(rows: Sequence[Row]) -> list[Block]:
    """Tables by temperature; [] where no stage but the last was measured."""
    blocks: list[Block] = []
    for heading, group in groups(once(rows)).items():
        shown = [r for r in group if r.drafter in ("before", *STAGES, "after")]
        shown = [r for r in shown if r.tree is None and r.domains]
        if not any(row.drafter in STAGES for row in shown):
            continue
        domains = sorted({name for row in shown for name in row.domains})
        lines = [[row.drafter, *_cells(row, domains)] for row in shown]
        headers = ["stage", *domains, "all", "block efficiency", "mbsu, by parameters"]
        blocks += [Heading(heading, 3), Table(headers, lines)]
    if blocks:
        text = "Draft acceptance rate / alpha of the drafter at the end of each stage."
        blocks = [Heading("By stage"), Text(text), *blocks]
    return blocks


def _cells(row: Row, domains: Sequence[str]) -> list[str]:
    found = [row.domains.get(name, {}) for name in domains]
    rates = [(one.get("draft_acceptance_rate"), one.get("alpha")) for one in found]
    return [
        *(
            f"{number(rate, 3)} / {number(alpha, 3)}"
            for rate, alpha in (*rates, (row.draft_acceptance_rate, row.alpha))
        ),
        number(row.tokens_per_round),
        number(row.mbsu_params),
    ]
