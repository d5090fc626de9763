"""The report of a run: report.json (schema 1), report.md and report.html, all from the same rows.

A row is the output of `eval.metrics.summarise` plus what identifies the measurement. Optional in a
row: `tree` (its description; null for a chain), `tree_children`, `nodes`, `alpha_by_depth`,
`modelled_speedup_at` ({"0.05": x}), `verify_cost`, `cost_source` (`eval.costs.timed_on`; of a row
of an engine: that engine), `token_s`, `round_s` and `round_cost` of an engine
(`eval.served.engine_costs`), whose `cost_ratio` and `verify_cost` are null,
`draft_time_share`, `by_domain` (of `eval.metrics.per_domain`), `by_position` (of `per_position`
there), `draft_vocabulary` (of a reduced one: `eval.draft_vocabulary.DraftVocabulary`),
`beyond_context` ({"context", "share"}: the drafter's own context, and the share of rounds that it
leaves without drafts), `text_by` (the value of `data.engine` that the target's answers were
generated with), `calibration` ({"bins": [{"confidence", "acceptance", "count"}]}),
`draft_temperature`, where the drafter has one
of its own, `quality` and `quality_metric` of a lossy verifier, and `note`, a sentence below its
table. `K` of a tree is its depth. `alpha` is that of the first draft of a round; further drafts of
heads: `alpha_by_depth`. Optional in the report: `policies`, points of `eval.policies.rollouts` for
`eval.report.policies`, and `readings`, the text of a few answers (`eval.report.readings`); in a
comparison: `a_role` and `b_role`, of the rows compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from eval.metrics import HEADLINE
from eval.report.page import page_blocks, report_blocks, report_title
from eval.report.readings import Json, check_readings
from eval.report.render import to_markdown
from eval.report.rows import MEASURED, ORDER, PLAIN, ROLES, Report, Row, asked, role_of
from eval.report.tables import main_tables
from eval.report.web import to_html
from trainer.checks import is_file
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.redaction import shown

SCHEMA = 1
COUNTING = "emitted_per_target_forward"
PARTS = {"run": dict, "target": dict, "drafter": dict,
         "results": list, "comparisons": list, "series": list}  # fmt: skip
ROW_KEYS = (
    "drafter",
    "role",
    "prompts",
    "temperature",
    "top_k",
    "top_p",
    "verifier",
    "policy",
    "counting",
    "bonus_counted",
    "lossless",
    "measured_by",
    "num_prompts",
    "num_rounds",
    *HEADLINE,
    *(f"{name}_ci95" for name in HEADLINE),
    "alpha_pos",
    "reach_pos",
    "discard_rate",
    "verification_rate",
    "engine_drafts",
    "engine_drafted",
    "engine_accepted",
    "engine_accepted_per_position",
    "identical_to_plain",
    "plain_tokens_per_s",
    "speculative_tokens_per_s",
    "cost_ratio",
    "modelled_speedup",
    "mbsu",
)
COMPARISON_KEYS = ("a", "b", "metric", "diff", "ci95", "seeds", "num_prompts")
OPTIONAL: dict[str, tuple[type, ...]] = {
    "K": (int,), "tree": (str,), "nodes": (int,), "alpha_by_depth": (list,),
    "draft_temperature": (int, float), "quality": (int, float), "quality_metric": (str,),
    "by_position": (list,), "draft_vocabulary": (dict,),
    "modelled_speedup_at": (dict,), "verify_cost": (int, float), "draft_time_share": (int, float),
    "cost_source": (str,), "text_by": (str,),
    "beyond_context": (dict,), "token_s": (list,), "round_s": (list,), "round_cost": (int, float),
}  # fmt: skip


def build_report(
    run: Mapping[str, object],
    target: Mapping[str, object],
    drafter: Mapping[str, object],
    results: list[Row],
    comparisons: list[Row],
    series: list[Row],
    readings: list[Json] | None = None,
) -> Report:
    """The content of report.json, checked, with rows in the order in which they are shown.

    Secrets and paths of this machine are left out. `readings` hold neither
    (`eval.report.readings.reading`) and stay unchanged.
    """
    rows = sorted(results, key=_order)
    report = {"schema": SCHEMA, "run": run, "target": target, "drafter": drafter,
              "results": rows, "comparisons": comparisons, "series": series}  # fmt: skip
    report = shown(report) | ({"readings": readings} if readings else {})
    check_report(report, "the report")
    return report


def check_report(report: object, source: str) -> None:
    """Raise UserError unless `report` has schema 1 and could be written as JSON."""
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
            keys = {"results": ROW_KEYS, "comparisons": COMPARISON_KEYS, "series": ()}[name]
            missing = [key for key in keys if key not in row]
            if missing:
                raise UserError(f"{where} lacks {', '.join(missing)}")
            if name == "results":
                _check_row(row, where)
    if "readings" in report:
        check_readings(report["readings"], source)
    _check_json(report, source, "")


def plain_row(row: Row) -> Row:
    """Plain decoding as a row of its own, from any row measured on the same prompts."""
    known = ("prompts", "temperature", "top_k", "top_p", "num_prompts", "measured_by")
    plain = dict.fromkeys(ROW_KEYS) | {key: row[key] for key in known}
    timed = row["plain_tokens_per_s"] is not None
    return plain | {
        "drafter": "plain",
        "role": PLAIN,
        "verifier": "none",
        "policy": "none",
        "K": 0,
        "counting": COUNTING,
        "bonus_counted": True,
        "lossless": True,
        "num_rounds": round((row["tokens_per_round"] or 0) * row["num_rounds"]),
        "tokens_per_round": 1.0,
        "accepted_per_round": 0.0,
        "verification_rate": 1.0,
        "alpha_pos": [],
        "reach_pos": [],
        "engine_accepted_per_position": [],
        "plain_tokens_per_s": row["plain_tokens_per_s"],
        "speedup": 1.0 if timed else None,
        "modelled_speedup": 1.0,
        "mbsu": 1.0,
    }


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write report.md, report.html and last report.json; each file appears whole or not at all."""
    check_report(report, "the report")
    text = json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    markdown = to_markdown(report_blocks(report))
    page = to_html(report_title(report), page_blocks(report))
    contents = {"report.md": markdown, "report.html": page, "report.json": text}
    for name, content in contents.items():
        write_atomic(Path(folder) / name, content)
    return [Path(folder) / name for name in contents]


def without_readings(report: Report) -> Report:
    """The report as it may leave this machine: prompts and answers are the user's own."""
    return {name: part for name, part in report.items() if name != "readings"}


def headline_numbers(report: Report) -> dict[str, float | None]:
    """Headline metrics of every chain by "<drafter>/T=<T>/<metric>", for a tracker."""
    return {
        f"{row['drafter']}/T={row['temperature']:g}/{name}": row[name]
        for row in asked(report["results"]) if not row.get("tree") and row["policy"] == "fixed"
        for name in HEADLINE
    }  # fmt: skip


def read_report(path: str | Path) -> Report:
    """Read and check a report.json; UserError where it is missing, damaged or of another schema."""
    if not is_file("report", path):
        raise UserError(f"report {path} does not exist")
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"report {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # not UTF-8 or not JSON
        raise UserError(f"report {path} is damaged, not JSON ({error})") from error
    _translate(report)
    check_report(report, f"report {path}")
    return report


def _translate(report: object) -> None:
    """Add to the rows of an earlier version their role and the verifier of sampled trees."""
    rows = report.get("results") if isinstance(report, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict) or "role" in row or not isinstance(row.get("drafter"), str):
            continue
        row["role"] = role_of(row["drafter"])
        if row.get("tree_children") == "sampled":
            top = str(row.get("tree")).startswith("dynamic, ")  # which has no other children
            row |= {"tree_children": "top"} if top else {}
            if not top and row.get("verifier") == "token":
                row["verifier"] = "multi_round"


def markdown_table(results: list[Row]) -> str:
    """The main tables alone, one per temperature and prompt set, as in the report."""
    return to_markdown(main_tables(sorted(results, key=_order)))


def _check_row(row: Row, where: str) -> None:
    if "K" not in row and "tree" not in row:
        raise UserError(f"{where} lacks K or tree")
    prompts = row["prompts"]
    if not isinstance(prompts, dict) or not {"name", "hash"} <= set(prompts):
        raise UserError(f"{where}.prompts must hold name and hash, got {prompts!r}")
    if not isinstance(row["drafter"], str) or not row["drafter"]:
        raise UserError(f"{where}.drafter must be a name, got {row['drafter']!r}")
    if row["role"] not in (*ROLES.values(), MEASURED):
        known = ", ".join(dict.fromkeys([*ROLES.values(), MEASURED]))
        raise UserError(f"{where}.role must be one of {known}, got {row['role']!r}")
    if not isinstance(row["lossless"], bool):
        raise UserError(f"{where}.lossless must be true or false, got {row['lossless']!r}")
    if row["bonus_counted"] is not True or row["counting"] != COUNTING:
        got = (row["bonus_counted"], row["counting"])
        raise UserError(f"{where} must count {COUNTING} with the bonus token, got {got!r}")
    number_keys = ("temperature", "top_k", "top_p", "num_prompts", "num_rounds")
    shapes: list[tuple[str, tuple[type, ...]]] = [(key, (int, float)) for key in number_keys]
    shapes += [(key, (int, float, list, type(None))) for key in HEADLINE]
    shapes += [(f"{key}_ci95", (list, type(None))) for key in HEADLINE]
    shapes += [(key, (list, type(None))) for key in ("alpha_pos", "reach_pos")]
    shapes += [(key, (*kinds, type(None))) for key, kinds in OPTIONAL.items() if key in row]
    for key, kinds in shapes:
        if not isinstance(row[key], kinds) or isinstance(row[key], bool):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{where}.{key} must be {allowed}, got {row[key]!r}")


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
    name = row.get("drafter", "")
    rank = ORDER.index(name if name in ORDER else "prompt_lookup")
    prompts = row.get("prompts")
    place = str(prompts.get("name") if isinstance(prompts, dict) else prompts)
    tree = row.get("tree")
    shape = (tree is not None, row.get("K") or 0, str(tree))
    return (row.get("temperature", 0), place, rank, name, *shape, str(row.get("measured_by")))
