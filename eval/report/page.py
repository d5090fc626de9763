"""The content of a report in its order: tables, plots and sentences made of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report import plots
from eval.report.breakdown import domain_tables, position_tables
from eval.report.load import load_blocks
from eval.report.policies import policy_blocks, policy_figures
from eval.report.render import (
    NONE,
    Block,
    Bullets,
    Figure,
    Figures,
    Fold,
    Heading,
    ReadingBlock,
    Table,
    Text,
    flatten,
    number,
    with_interval,
)
from eval.report.rows import (
    PLAIN,
    TARGET,
    TRAINED,
    Report,
    best_chain,
    draft_shape,
    focus,
    focus_rows,
    groups,
    known_positions,
    label,
    once,
    prompts_of,
)
from eval.report.stages import stage_tables
from eval.report.tables import (
    MIDDLE_COST,
    cost_tables,
    depth_tables,
    drafter_facts,
    goodput_tables,
    main_tables,
    row_goodput,
)
from eval.report.tiles import COMPARED, tile_blocks
from eval.row import Json, Row
from eval.serving_defaults import unmeasured_words

WRITERS = {"hf": "transformers", "vllm": "vLLM", "openai": "OpenAI-compatible servers",
           "log": "the servers that a log is of"}  # fmt: skip
DEFINITIONS = [
    "draft: K n is a chain of n drafted tokens; a tree holds `nodes` drafted tokens down to its "
    "depth. The target verifies all of them in one forward.",
    "tokens per round (tokens_per_round, block efficiency): emitted tokens per target forward; "
    "bonus token counted, token of the prefill not, cut at end of text and length.",
    "accepted_per_round: accepted drafts per target forward, without the bonus token.",
    "alpha: mean overlap sum_v min(p_v, q_v) of target and drafter on text the target wrote; at "
    "temperature 0 the share of positions where both choose the same token. Of the first draft of "
    "a round: a head has less further on (alpha_by_depth), a language model the same.",
    "greedy match (greedy_match): share of those positions where the two most likely tokens agree.",
    "draft acceptance (draft_acceptance_rate): accepted / submitted draft tokens; depends on K and "
    "on the size of a tree. discard_rate is the rest of it.",
    "alpha_hat: accepted / (accepted + rounds with a rejection); too high when prompts differ.",
    "alpha_pos[i]: position i accepted, given that all before it were. reach_pos[i]: at least i "
    "accepted. alpha_by_depth[i]: alpha of the i-th draft of a round, the tokens before it given.",
    "draft vocabulary: alpha lost is the target's probability of tokens outside of it, tokens per "
    "round lost what the rounds would emit more if all of those were accepted.",
    "speed-up (speedup): plain seconds per token / speculative seconds per token, on prompts timed "
    "both ways, one at a time, on this machine.",
    "cost ratio (c): seconds of a drafter step / seconds of a target forward on one token.",
    "modelled speed-up: tokens per round / (depth c + cost of verifying); K is a chain's depth. "
    "Acceptance carries over to other machines, measured speed-up does not.",
    "mbsu: tokens per round / (K r + 1) with r = drafter bytes / target bytes read per step.",
    "verification_rate: target forwards per emitted token.",
    "engine_*: the same run as a serving engine counts it, not cut at end of text or length.",
    "identical: share of prompts whose greedy output equals plain decoding token by token.",
    "Brackets hold 95 % intervals, bootstrapped over prompts.",
]


def report_title(report: Report) -> str:
    """The title: recipe or drafter, and target."""
    run, target = report["run"], report["target"]
    name = run.get("recipe") or run.get("name") or report["drafter"].get("name") or "drafter"
    return f"{name} for {target['name']}" if target.get("name") else str(name)


def headline(report: Report) -> str:
    """One sentence per temperature: the best lossless shape, what was gained, how surely."""
    found = groups(once(report["results"]))
    several = len({row.prompts["name"] for row in report["results"]}) > 1
    sentences = []
    for rows in found.values():
        row = focus(rows)
        if row is None:
            continue
        subject = "the trained drafter" if row.drafter == "after" else row.drafter
        sentence = (
            f"At temperature {row.temperature:g}{', on ' * several}"
            f"{row.prompts['name'] * several}, {subject} gives "
            f"{with_interval(row.tokens_per_round, row.tokens_per_round_ci95)} tokens per target "
            "forward"
        )
        if row.tree is not None:
            sentence += f" with a tree ({draft_shape(row)})"
        elif row.K is not None:
            sentence += f" with K = {row.K}"
        sentence += ", not lossless" * (not row.lossless)
        if row.speedup is not None:
            times = with_interval(row.speedup, row.speedup_ci95)
            sentence += f", {times} times as fast as plain decoding here"
        gains = [c for c in report["comparisons"] if _belongs(c, row, len(found))]
        sentences.append(sentence + _gains(row, rows, gains) + ".")
    return " ".join(sentences) or "No drafter was measured."


def _belongs(comparison: Json, row: Row, num_groups: int) -> bool:
    """Whether a comparison is of tokens per round at the row's temperature."""
    here = comparison.get("temperature", row.temperature) == row.temperature
    known = comparison["metric"] == "tokens_per_round" and comparison["diff"] is not None
    return here and known and ("temperature" in comparison or num_groups == 1)


def _gains(row: Row, rows: Sequence[Row], comparisons: Sequence[Json]) -> str:
    """The gains of a tree over the chain, and of the chain over other drafters' chains."""
    if row.tree is None:
        text = ""
        for c in comparisons:
            if c["a"] == row.drafter:
                others = [
                    r for r in rows if (r.drafter, draft_shape(r)) == (c["b"], draft_shape(row))
                ]
                against = f" ({number(others[0].tokens_per_round)})" if others else ""
                text += f"; {_difference(c)} over {c['b']}{against}"
        return text
    chain, tokens = best_chain(rows, row.drafter), row.tokens_per_round
    if chain is None or chain.tokens_per_round is None or tokens is None:
        return ""
    pairs = [
        c
        for c in comparisons
        if (c["a"], c["b"]) == (f"{row.drafter}, {draft_shape(row)}", row.drafter)
    ]
    plain = {"diff": tokens - chain.tokens_per_round, "ci95": None}
    own = f"which gives {with_interval(chain.tokens_per_round, chain.tokens_per_round_ci95)}"
    return (
        f"; {_difference(pairs[0] if pairs else plain)} over its chain of K = {chain.K}, {own}"
        + _gains(chain, rows, comparisons)
    )


def _difference(comparison: Json) -> str:
    interval = comparison["ci95"]
    text = number(comparison["diff"], 2, sign=True)
    return f"{text} [{number(interval, 2, sign=True)}]" if interval else text


def _comparison_table(comparisons: Sequence[Json]) -> Table:
    rows = []
    for c in sorted(comparisons, key=lambda c: c.get("temperature", 0)):
        clear = c["ci95"] and (c["ci95"][0] > 0 or c["ci95"][1] < 0)
        rows.append(
            [
                f"{c['a']} - {c['b']}",
                f"{c['temperature']:g}" if "temperature" in c else NONE,
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


def _figures(report: Report) -> list[Block]:
    """The main plots; the others are folded."""
    blocks: list[Block] = []
    more: list[Figure] = []
    for heading, rows in groups(once(report["results"])).items():
        main = _main_figures(rows)
        if main:
            blocks += [Heading(heading, 3), Figures(main)]
        more += _more_figures(heading, rows)
    more += policy_figures(report.get("policies", []))
    if report["series"] and (plot := plots.over_steps(report["series"])):
        caption = "Measured without decoding, on held-out text of the target."
        if any("alpha_prequential" in point for point in report["series"]):
            caption += (
                " Prequential, static and offline: on the requests since the last point, before "
                "each was trained on."
            )
        more.append(Figure("Acceptance during the run", plot, caption))
    if more:
        blocks.append(Fold("More plots", [Figures(more)]))
    return [Heading("Plots"), *blocks] if blocks else []


def _main_figures(rows: list[Row]) -> list[Figure]:
    found: list[Figure] = []
    best, shown = focus(rows), _named(rows)
    if any(map(_decided, shown)):
        caption = (
            "The chance that a drafted token is accepted, given that all before it were. It often "
            "rises, because deep positions are reached on the easier prompts. Of a tree: dashed."
        )
        plot = plots.acceptance_by_depth([row for row in shown if _decided(row)])
        found.append(Figure("Acceptance by depth", plot, caption))
    domains = [row for row in shown if row.domains]
    if domains and (plot := plots.tokens_by_domain(domains)):
        caption = "The domain with the fewest comes first."
        found.append(Figure("Tokens per round by domain", plot, caption))
    if plot := plots.tokens_by_position(shown):
        caption = (
            "Rounds by the place in the answer at which they begin. Further right there are the "
            "rounds of long answers alone."
        )
        found.append(Figure("Tokens per round by position in the answer", plot, caption))
    chain = best_chain(rows, best.drafter) if best else None
    if chain and chain.policy == "fixed" and _decided(chain):  # a rule changes alpha_pos
        caption = (
            f"{label(chain)}: measured acceptance at assumed costs c of a drafter step, with "
            "verification at the cost of one forward, and at the costs here. Dashed: beyond the "
            "measured K, with the acceptance of the last position held."
        )
        found.append(Figure("Modelled speed-up against K", plots.speedup_over_K(chain), caption))
    lines = [(row, row_goodput(row, MIDDLE_COST)) for row in focus_rows(rows)]
    if lines := [(row, [ratio for _, ratio in values]) for row, values in lines if values]:
        caption = (
            f"Goodput over that of plain decoding, modelled at c = {MIDDLE_COST:g}; below 1 "
            "speculation slows the batch down. Assumptions: at the table of the same name."
        )
        plot = plots.goodput_by_batch(lines)
        found.append(Figure("Modelled speed-up against batch size", plot, caption))
    return found


def _more_figures(heading: str, rows: list[Row]) -> list[Figure]:
    found: list[Figure] = []
    decided = [row for row in _named(rows) if _decided(row)]
    if decided:
        plot = plots.acceptance_by_depth(decided, "reach_pos")
        caption = "The share of rounds that get at least so far. Of a tree: dashed."
        found.append(Figure(f"Rounds that reach a depth. {heading}", plot, caption))
    calibrated = [row for row in rows if row.calibration]
    if calibrated:
        caption = (
            "Above the dotted line the drafter is accepted more often than it expects. "
            "Bigger dots hold more tokens."
        )
        plot = plots.calibration(calibrated)
        found.append(Figure(f"Confidence and acceptance. {heading}", plot, caption))
    return found


def _named(rows: list[Row]) -> list[Row]:
    """Rows of the drafter, last, and of those it is compared with; else all that were measured."""
    named = [row for row in rows if row.role in (*COMPARED, TRAINED)]
    return named or [row for row in rows if row.role not in (PLAIN, TARGET)]


def _decided(row: Row) -> bool:
    """Whether at least the first position was ever tested."""
    return bool(known_positions(row))


def _measured(rows: Sequence[Row]) -> list[str]:
    def values(key: str) -> str:
        return ", ".join(sorted({str(getattr(row, key)) for row in rows if row.role != PLAIN}))

    counted = {f"{r.prompts['name']} ({prompts_of(r)}, hash {r.prompts['hash']})" for r in rows}
    written = sorted({WRITERS[r.text_by] for r in rows if r.text_by})
    compared = any(r.speedup is not None or r.identical_to_plain is not None for r in rows)
    lines = [
        f"Prompts: {'; '.join(sorted(counted))}.",
        f"Measured by: {values('measured_by')}. Verifier: {values('verifier')}. "
        f"Draft length policy: {values('policy')}.",
        f"Counting: {values('counting')}, bonus token counted.",
    ]
    if written:
        lines.insert(1, f"The target's answers were generated by {', '.join(written)}.")
    if compared:
        lines.append(
            "Baseline of identity and speed: the same target, prompts and limits, speculation off."
        )
    return lines


def report_blocks(report: Report) -> list[Block]:
    """The report as text and tables."""
    rows = report["results"]
    blocks: list[Block] = [Heading(report_title(report), 1), Text(headline(report))]
    blocks += [Heading("Results"), *main_tables(rows)]
    if report["comparisons"]:
        blocks += [
            Heading("Comparisons"),
            Text(
                "Paired on the same prompts; intervals resample prompts, and training seeds "
                "where there are several."
            ),
            _comparison_table(report["comparisons"]),
        ]
    blocks += [*stage_tables(rows), *depth_tables(rows), *cost_tables(rows)]
    blocks += [*goodput_tables(rows), *domain_tables(rows), *position_tables(rows)]
    if points := report.get("policies"):
        blocks += policy_blocks(points)
    if parts := report.get("load"):
        blocks += load_blocks(parts)
    if rows:
        defaults = unmeasured_words(report["target"].get("serving_defaults_not_measured", {}))
        said = [f"The target: {defaults}."] if defaults else []
        blocks += [Heading("How it was measured"), Bullets(_measured(rows) + said)]
    for name in ("run", "target", "drafter"):
        if report[name]:
            facts = (drafter_facts if name == "drafter" else flatten)(report[name])
            blocks += [Heading(name.capitalize(), 3), Table(["key", "value"], facts)]
    return [*blocks, Heading("What the numbers mean"), Bullets(DEFINITIONS)]


def page_blocks(report: Report) -> list[Block]:
    """The report as an HTML page: results, plots and answers first, the other tables folded."""
    title, text, *rest = report_blocks(report)
    sections: list[Fold] = []
    for block in rest:
        if isinstance(block, Heading) and block.level == 2:
            sections.append(Fold(block.text, []))
        else:
            sections[-1].blocks.append(block)
    results, *others = sections
    blocks = [title, *tile_blocks(report), text, *results.blocks, *_figures(report)]
    if readings := report.get("readings"):
        blocks += [
            Heading("A reading of answers"),
            Text(
                "Held-out prompts as they were decoded. A bar begins a round, one forward of the "
                "target. Point at a round, or tap it, to see what was drafted in it."
            ),
            ReadingBlock(readings),
        ]
    return [*blocks, Heading("Tables"), *others]
