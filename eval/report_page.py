"""What a report says and in which order: tables, plots and sentences made of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from eval import plots
from eval.render import (
    NONE,
    Block,
    Bullets,
    Figure,
    Heading,
    Table,
    Text,
    flatten,
    number,
    with_interval,
)

DEFINITIONS = [
    "tokens per round (tokens_per_round, block efficiency): emitted tokens per target forward; "
    "bonus token counted, token of the prefill not, cut at end of text and length.",
    "accepted_per_round: accepted drafts per target forward, without the bonus token.",
    "alpha: mean overlap sum_v min(p_v, q_v) of target and drafter on text the target wrote; at "
    "temperature 0 the share of positions where both choose the same token.",
    "greedy match (greedy_match): share of those positions where the two most likely tokens agree.",
    "draft acceptance (draft_acceptance_rate): accepted / submitted draft tokens; depends on K. "
    "discard_rate is the rest of it.",
    "alpha_hat: accepted / (accepted + rounds with a rejection); too high when prompts differ.",
    "alpha_pos[i]: position i accepted, given that all before it were. reach_pos[i]: at least i "
    "accepted.",
    "speed-up (speedup): plain seconds per token / speculative seconds per token, on prompts timed "
    "both ways, one at a time, on this machine.",
    "cost ratio (c): seconds of a drafter step / seconds of a target forward on one token.",
    "modelled speed-up: tokens per round / (K c + cost of verifying). Acceptance carries over to "
    "other machines, measured speed-up does not.",
    "mbsu: tokens per round / (K r + 1) with r = drafter bytes / target bytes read per step.",
    "verification_rate: target forwards per emitted token.",
    "engine_*: the same run as a serving engine counts it, not cut at end of text or length.",
    "identical: share of prompts whose greedy output equals plain decoding token by token.",
    "Brackets hold 95 % intervals, bootstrapped over prompts.",
]

Row = dict[str, Any]


def _names(rows: Sequence[Row]) -> list[str]:
    """Drafter names; a row that was decoded says so where its twin was not."""
    twins = Counter(row["drafter"] for row in rows)
    return [
        row["drafter"]
        + ", decoded" * (row["measured_by"] == "decoding" and twins[row["drafter"]] > 1)
        for row in rows
    ]


def _once(rows: Sequence[Row]) -> list[Row]:
    """Without the decoded twins of rows that were measured on the traces as well."""
    offline = {(r["drafter"], r["temperature"]) for r in rows if r["measured_by"] == "offline"}
    return [
        row
        for row in rows
        if row["measured_by"] != "decoding" or (row["drafter"], row["temperature"]) not in offline
    ]


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that may stand in one table, by its heading."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        prompts = row["prompts"]
        heading = f"Temperature {row['temperature']:g}, prompts {prompts['name']}"
        heading += f", top-k {row['top_k']}" if row["top_k"] else ""
        heading += f", top-p {row['top_p']:g}" if row["top_p"] < 1 else ""
        same_name = {r["prompts"]["hash"] for r in rows if r["prompts"]["name"] == prompts["name"]}
        heading += f" ({prompts['hash']})" if len(same_name) > 1 else ""
        groups.setdefault(heading, []).append(row)
    return groups


def main_table(rows: Iterable[Row], labels: Sequence[str] | None = None) -> Table:
    """One table of comparable rows; `labels` replaces the drafter's name in the first column."""
    rows = list(rows)
    names = labels or _names(rows)
    cells = [
        [
            names[index],
            _shape(row),
            with_interval(row, "tokens_per_round"),
            with_interval(row, "alpha", 3),
            with_interval(row, "greedy_match", 3),
            number(row["draft_acceptance_rate"], 3),
            with_interval(row, "speedup"),
            number(row["modelled_speedup"]),
            number(row["mbsu"]),
            number(_tokens_per_s(row), 1),
            _percent(row["identical_to_plain"]),
            "yes" if row["lossless"] else "no",
        ]
        for index, row in enumerate(rows)
    ]
    headers = ["drafter", "K", "tokens per round", "alpha", "greedy match", "draft acceptance",
               "speed-up", "modelled", "mbsu", "tokens/s", "identical", "lossless"]  # fmt: skip
    strong = {i for i, row in enumerate(rows) if names[i] == "after" and not labels}
    return Table(headers, cells, strong)


def notes(rows: Iterable[Row], labels: Sequence[str] | None = None) -> list[str]:
    """What a reader must know before trusting a table's rows."""
    found, slower = [], []
    rows = list(rows)
    for name, row in zip(labels or _names(rows), rows, strict=True):
        share = row["identical_to_plain"]
        if share is not None and row.get("num_compared"):
            found.append(_compared(name, row))
        if row.get("replay_differs_from_decoding") is not None:
            found.append(
                f"{name}: replayed and decoded counters differ on "
                f"{row['replay_differs_from_decoding']} of {row['num_prompts']} prompts."
            )
        if not row["lossless"]:
            found.append(f"{name}: lossy, the output law is not the target's.")
        measured, modelled = row["speedup"], row["modelled_speedup"]
        if row["drafter"] != "plain" and measured and modelled and modelled > 1.15 * measured:
            slower.append(name)
        if row.get("note"):
            found.append(f"{name}: {row['note']}")
    if slower:
        found.append(
            f"{', '.join(slower)}: measured speed-up more than 15 % below the modelled one: "
            "overheads beside the two networks."
        )
    return found


def _compared(name: str, row: Row) -> str:
    """How many greedy outputs were compared with plain decoding, and every one that differs."""
    text = f"{name}: compared with plain decoding on {row['num_compared']} prompts"
    differing = row.get("differing_prompts") or []
    if not differing:
        return f"{text}, all identical."
    listed = ", ".join(
        f"{one['prompt_hash'][:12]} at token {one['position']} (gap {one['logit_gap']:.2g})"
        for one in differing
    )
    return f"{text}, {len(differing)} differ: {listed}."


def _shape(row: Row) -> str:
    return f"tree {row['tree']}" if row.get("tree") is not None else str(row.get("K", NONE))


def _tokens_per_s(row: Row) -> float | None:
    return row["plain_tokens_per_s" if row["drafter"] == "plain" else "speculative_tokens_per_s"]


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.4g} %"


def main_tables(rows: Sequence[Row]) -> list[Block]:
    blocks: list[Block] = []
    for heading, group in _groups(rows).items():
        blocks += [Heading(heading, 3), main_table(group)]
        if remarks := notes(group):
            blocks.append(Bullets(remarks))
    return blocks


def report_title(report: dict[str, Any]) -> str:
    run, target = report["run"], report["target"]
    name = run.get("recipe") or run.get("name") or report["drafter"].get("name") or "drafter"
    return f"{name} for {target['name']}" if target.get("name") else str(name)


def _focus(rows: Sequence[Row]) -> Row | None:
    """The row the headline speaks about: `after`, else the best that is no reference."""
    own = [row for row in rows if row["drafter"] not in ("plain", "target")]
    own = [row for row in own if row["tokens_per_round"] is not None]
    after = [row for row in own if row["drafter"] == "after"]
    return max(after or own, key=lambda row: row["tokens_per_round"], default=None)


def headline(report: dict[str, Any]) -> str:
    """One sentence per temperature: what was gained, against what, how surely."""
    groups = _groups(_once(report["results"]))
    sentences = []
    for rows in groups.values():
        row = _focus(rows)
        if row is None:
            continue
        subject = "the trained drafter" if row["drafter"] == "after" else row["drafter"]
        sentence = (
            f"At temperature {row['temperature']:g}, {subject} gives "
            f"{with_interval(row, 'tokens_per_round')} tokens per target forward"
        )
        if row.get("K") is not None:
            sentence += f" with K = {row['K']}"
        if len(groups) > 1 and len({r["prompts"]["name"] for r in report["results"]}) > 1:
            sentence += f" on {row['prompts']['name']}"
        others = [r for r in rows if r["drafter"] in ("before", "control") and r is not row]
        against = [
            f"{r['drafter']} {number(r['tokens_per_round'])}"
            for r in others
            if (r.get("K"), r.get("tree")) == (row.get("K"), row.get("tree"))
        ]
        sentence += f" ({', '.join(against)})" if against else ""
        for c in report["comparisons"]:
            mine = (c["a"], c["metric"]) == (row["drafter"], "tokens_per_round")
            here = c.get("temperature", row["temperature"]) == row["temperature"]
            if mine and here and c["diff"] is not None and ("temperature" in c or len(groups) == 1):
                interval = f" [{number(c['ci95'], 2, sign=True)}]" if c["ci95"] else ""
                sentence += f"; {number(c['diff'], 2, sign=True)}{interval} over {c['b']}"
        if row["speedup"] is not None:
            sentence += f"; {with_interval(row, 'speedup')} times as fast as plain decoding here"
        sentences.append(sentence + ".")
    return " ".join(sentences) or "No drafter was measured."


def _comparison_table(comparisons: Sequence[Row]) -> Table:
    rows = []
    for c in sorted(comparisons, key=lambda c: c.get("temperature", 0)):
        clear = c["ci95"] and (c["ci95"][0] > 0 or c["ci95"][1] < 0)
        rows.append(
            [
                f"{c['a']} - {c['b']}",
                number(c.get("temperature"), 1),
                c["metric"],
                number(c["diff"], 3, sign=True),
                f"[{number(c['ci95'], 3, sign=True)}]" if c["ci95"] else NONE,
                NONE if not c["ci95"] else ("yes" if clear else "no"),
                str(c["seeds"]),
                str(c["num_prompts"]),
            ]
        )
    headers = ["pair", "temperature", "metric", "difference", "95 % interval", "excludes 0",
               "training seeds", "prompts"]  # fmt: skip
    return Table(headers, rows)


def _domain_tables(rows: Sequence[Row]) -> list[Block]:
    blocks: list[Block] = []
    for heading, group in _groups(rows).items():
        shown = [row for row in group if row.get("by_domain")]
        if not shown:
            continue
        names = sorted({name for row in shown for name in row["by_domain"]["domains"]})
        lines = []
        for name in names:
            domains = [row["by_domain"]["domains"].get(name, {}) for row in shown]
            lines.append([name, *(_domain_cell(domain) for domain in domains)])
        means = [row["by_domain"]["mean"] for row in shown]
        lines.append(["mean over domains", *(_domain_cell(mean) for mean in means)])
        worst = [row["by_domain"]["worst"].get("tokens_per_round") for row in shown]
        lines.append(
            ["worst", *(f"{number(w['value'])} ({w['domain']})" if w else NONE for w in worst)]
        )
        headers = ["domain", *(f"{row['drafter']} (K {_shape(row)})" for row in shown)]
        blocks += [Heading(heading, 3), Table(headers, lines)]
    if blocks:
        blocks.insert(0, Text("Tokens per round, and alpha after the slash."))
        blocks.insert(0, Heading("By domain"))
    return blocks


def _domain_cell(metrics: dict[str, Any]) -> str:
    return f"{number(metrics.get('tokens_per_round'))} / {number(metrics.get('alpha'), 3)}"


def _figures(report: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for heading, rows in _groups(_once(report["results"])).items():
        focus = _focus(rows)
        chains = [r for r in rows if r["drafter"] not in ("plain", "target") and _decided(r)]
        named = [r for r in chains if r["drafter"] in ("before", "control", "after")]
        if chains:
            svg = plots.acceptance_by_position(named or chains)
            caption = (
                "Left: the chance that a position is accepted once all before it were. It often "
                "rises, because later positions are reached on the easier prompts. Right: the "
                "share of rounds that get at least that far."
            )
            blocks.append(Figure(f"Acceptance by position. {heading}", svg, caption))
        if focus and _decided(focus):
            caption = (
                f"{focus['drafter']}: measured acceptance at assumed costs c of a drafter step, "
                "verification at the cost of one forward. Dashed: beyond the measured K, with the "
                "acceptance of the last position held."
            )
            svg = plots.speedup_over_K(focus)
            blocks.append(Figure(f"Modelled speed-up over K. {heading}", svg, caption))
        calibrated = [row for row in rows if row.get("calibration")]
        if calibrated:
            caption = (
                "Above the dotted line the drafter is accepted more often than it expects. "
                "Bigger dots hold more tokens."
            )
            svg = plots.calibration(calibrated)
            blocks.append(Figure(f"Confidence and acceptance. {heading}", svg, caption))
    if report["series"] and (svg := plots.over_steps(report["series"])):
        caption = "Measured without decoding, on held-out text of the target."
        blocks.append(Figure("Acceptance during the run", svg, caption))
    return [Heading("Plots"), *blocks] if blocks else []


def _decided(row: Row) -> bool:
    """Whether at least the first position was ever tested."""
    return bool(row["alpha_pos"]) and row["alpha_pos"][0] is not None


def _measured(rows: Sequence[Row]) -> list[str]:
    def values(key: str) -> str:
        return ", ".join(sorted({str(row[key]) for row in rows if row["drafter"] != "plain"}))

    prompts = sorted({(r["prompts"]["name"], r["prompts"]["hash"], r["num_prompts"]) for r in rows})
    counted = {f"{name} ({number_} prompts, hash {hash_})" for name, hash_, number_ in prompts}
    compared = any(r["speedup"] is not None or r["identical_to_plain"] is not None for r in rows)
    lines = [
        f"Prompts: {'; '.join(sorted(counted))}.",
        f"Measured by: {values('measured_by')}. Verifier: {values('verifier')}. "
        f"Draft length policy: {values('policy')}.",
        f"Counting: {values('counting')}, bonus token counted.",
    ]
    if compared:
        lines.append("Baseline of identity and speed: the same target, prompts and limits, "
                     "speculation off.")  # fmt: skip
    return lines


def report_blocks(report: dict[str, Any], figures: bool = False) -> list[Block]:
    rows = report["results"]
    blocks: list[Block] = [Heading(report_title(report), 1), Text(headline(report))]
    blocks += [Heading("Results"), *main_tables(rows)]
    if report["comparisons"]:
        blocks += [
            Heading("Comparisons"),
            Text("Paired on the same prompts; intervals resample prompts, and training seeds "
                 "where there are several."),
            _comparison_table(report["comparisons"]),
        ]  # fmt: skip
    blocks += _domain_tables(_once(rows))
    if figures:
        blocks += _figures(report)
    if rows:
        blocks += [Heading("How it was measured"), Bullets(_measured(rows))]
    for name in ("run", "target", "drafter"):
        if report[name]:
            blocks += [
                Heading(name.capitalize(), 3),
                Table(["key", "value"], flatten(report[name])),
            ]
    return [*blocks, Heading("What the numbers mean"), Bullets(DEFINITIONS)]
