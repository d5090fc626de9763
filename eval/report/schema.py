"""The report of a run: report.json (schema 1), report.md and report.html, all from the same rows.

Rows (`eval.row.Row`) become JSON here, and JSON becomes rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from eval.metrics import HEADLINE
from eval.report.page import page_blocks, report_blocks, report_title
from eval.report.readings import check_readings
from eval.report.render import to_markdown
from eval.report.rows import MEASURED, ORDER, PLAIN, ROLES, Report, asked
from eval.report.tables import main_tables
from eval.report.web import to_html
from eval.row import COUNTING, Json, Row, row_with
from trainer.checks import is_file
from trainer.errors import UserError
from trainer.files import load_json, write_atomic
from trainer.redaction import shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA = 1
PARTS = {"run": dict, "target": dict, "drafter": dict,
         "results": list, "comparisons": list, "series": list}  # fmt: skip
COMPARISON_KEYS = ("a", "b", "metric", "diff", "ci95", "seeds", "num_prompts")


def build_report(
    run: Mapping[str, object],
    target: Mapping[str, object],
    drafter: Mapping[str, object],
    results: list[Row],
    comparisons: list[Json],
    series: list[Json],
    readings: list[Json] | None = None,
    load: list[Json] | None = None,
) -> Report:
    """The content of report.json, checked, with rows in the order in which they are shown.

    Secrets and paths of this machine are left out. `readings` hold neither
    (`eval.report.readings.reading`) and stay unchanged.
    """
    rows = [vars(row) for row in sorted(results, key=_order)]
    report = {"schema": SCHEMA, "run": run, "target": target, "drafter": drafter,
              "results": rows, "comparisons": comparisons, "series": series}  # fmt: skip
    report |= {"load": load} if load else {}
    return parsed(shown(report) | ({"readings": readings} if readings else {}), "the report")


def parsed(report: object, source: str) -> Report:
    """The report with its rows as records. Raises UserError unless it has schema 1 and could be
    written as JSON."""
    if not isinstance(report, dict) or "schema" not in report:
        raise UserError(f"{source} is not a report: it has no key 'schema'")
    if report["schema"] != SCHEMA:
        raise UserError(
            f"{source}: schema must be {SCHEMA}, got {report['schema']!r}: write the report anew "
            "with this version"
        )
    for name, kind in PARTS.items():
        if not isinstance(report.get(name), kind):
            raise UserError(f"{source}: {name} must be a {kind.__name__}, got {report.get(name)!r}")
    for name in ("results", "comparisons", "series"):
        for index, row in enumerate(report[name]):
            where = f"{source}: {name}[{index}]"
            if not isinstance(row, dict):
                raise UserError(f"{where} must be a dict, got {row!r}")
            missing = [key for key in COMPARISON_KEYS if key not in row]
            if missing and name == "comparisons":
                raise UserError(f"{where} lacks {', '.join(missing)}")
    if "readings" in report:
        check_readings(report["readings"], source)
    _check_json(report, source, "")
    rows = [row_of(row, f"{source}: results[{i}]") for i, row in enumerate(report["results"])]
    return Report(**{**report, "results": rows})


def as_json(report: Report) -> Json:
    """The report as it is written: a row is a flat dict, with null where nothing was measured."""
    return {**report, "results": [vars(row) for row in report["results"]]}


def row_of(values: Json, where: str) -> Row:
    """The row with these values, of which unknown ones are left out; UserError where one is
    missing or has another type. `where` names it in messages."""
    from pydantic import ValidationError

    try:
        row = _row_type().validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        if first["type"] == "missing":
            raise UserError(f"{where} lacks {key}") from None
        rule = first["msg"].replace("Input should be", "must be")
        raise UserError(f"{where}.{key} {rule}, got {first['input']!r}") from None
    if row.K is None and row.tree is None:
        raise UserError(f"{where} lacks K or tree")
    if not {"name", "hash"} <= set(row.prompts):
        raise UserError(f"{where}.prompts must hold name and hash, got {row.prompts!r}")
    if not row.drafter:
        raise UserError(f"{where}.drafter must be a name, got {row.drafter!r}")
    if row.role not in (*ROLES.values(), MEASURED):
        known = ", ".join(dict.fromkeys([*ROLES.values(), MEASURED]))
        raise UserError(f"{where}.role must be one of {known}, got {row.role!r}")
    if not row.bonus_counted or row.counting != COUNTING:
        got = (row.bonus_counted, row.counting)
        raise UserError(f"{where} must count {COUNTING} with the bonus token, got {got!r}")
    return row


@cache
def _row_type() -> TypeAdapter[Row]:
    from pydantic import TypeAdapter  # takes a while to import

    return TypeAdapter(Row)


def plain_row(row: Row) -> Row:
    """Plain decoding as a row of its own, from any row measured on the same prompts."""
    return row_with(
        drafter="plain",
        role=PLAIN,
        prompts=row.prompts,
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        verifier="none",
        policy="none",
        K=0,
        counting=COUNTING,
        bonus_counted=True,
        lossless=True,
        measured_by=row.measured_by,
        num_prompts=row.num_prompts,
        num_rounds=round((row.tokens_per_round or 0) * row.num_rounds),
        tokens_per_round=1.0,
        accepted_per_round=0.0,
        verification_rate=1.0,
        alpha_pos=[],
        reach_pos=[],
        engine_accepted_per_position=[],
        plain_tokens_per_s=row.plain_tokens_per_s,
        speedup=None if row.plain_tokens_per_s is None else 1.0,
        modelled_speedup=1.0,
        mbsu=1.0,
    )


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write report.md, report.html and last report.json; each file appears whole or not at all."""
    content = as_json(report)
    report = parsed(content, "the report")
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    markdown = to_markdown(report_blocks(report))
    page = to_html(report_title(report), page_blocks(report))
    contents = {"report.md": markdown, "report.html": page, "report.json": text}
    for name, content in contents.items():
        write_atomic(Path(folder) / name, content)
    return [Path(folder) / name for name in contents]


def without_readings(report: Report) -> Report:
    """The report as it may leave this machine: prompts and answers are the user's own."""
    kept = report.copy()
    kept.pop("readings", None)
    return kept


def headline_numbers(report: Report) -> dict[str, float | None]:
    """Headline metrics of every chain by "<drafter>/T=<T>/<metric>", for a tracker."""
    return {
        f"{row.drafter}/T={row.temperature:g}/{name}": getattr(row, name)
        for row in asked(report["results"])
        if not row.tree and row.policy == "fixed"
        for name in HEADLINE
    }


def read_report(path: str | Path) -> Report:
    """Read and check a report.json; UserError where it is missing, damaged or of another schema."""
    if not is_file("report", path):
        raise UserError(f"report {path} does not exist")
    try:
        report = load_json(Path(path))
    except OSError as error:
        raise UserError(f"report {path} cannot be read ({error.strerror})") from error
    except ValueError as error:  # not UTF-8 or not JSON
        raise UserError(f"report {path} is damaged, not JSON ({error})") from error
    return parsed(report, f"report {path}")


def markdown_table(results: list[Row]) -> str:
    """The main tables alone, one per temperature and prompt set, as in the report."""
    return to_markdown(main_tables(sorted(results, key=_order)))


def _check_json(value: object, source: str, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UserError(f"{source}: key {key!r} below {where or 'the top'} must be text")
            _check_json(inner, source, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_json(inner, source, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{source}: {where} must be finite or null, got {value}")
    elif not isinstance(value, str | int | bool | None):
        raise UserError(f"{source}: {where} is not JSON, got {type(value).__name__} {value!r}")


def _order(row: Row) -> tuple[float, str, int, str, bool, int, str, str]:
    rank = ORDER.index(row.drafter if row.drafter in ORDER else "prompt_lookup")
    shape = (row.tree is not None, row.K or 0, str(row.tree))
    name, place = row.drafter, str(row.prompts["name"])
    return (row.temperature, place, rank, name, *shape, row.measured_by)
