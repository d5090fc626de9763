"""The tables of a report, each made of its rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.report.breakdown import vocabulary_words
from eval.report.render import (
    NONE,
    Block,
    Bullets,
    Heading,
    Table,
    Text,
    flatten,
    number,
    percent,
    with_interval,
)
from eval.report.rows import (
    ENGINES,
    PLAIN,
    REFERENCES,
    USUAL,
    draft_shape,
    focus_rows,
    groups,
    is_trained,
    key,
    known_positions,
    label,
    num_nodes,
    once,
)
from eval.row import Row
from eval.speed_model import BATCH_SIZES, COST_RATIOS, KNEE, best_K, best_K_at, goodput

MIDDLE_COST = COST_RATIOS[1]
FACTS = {
    "kind": "kind",
    "parameters": "parameters",
    "trained_parameters": "parameters trained",
    "active_parameters": "parameters active per step",
    "feature_bytes_per_token": "bytes per token of features",
    "captures": "target layers read",
    "draft_vocab_size": "draft vocabulary",
    "coverage": "coverage of the draft vocabulary",
}

# --- main table --------------------------------------------------------------------------------


def _names(rows: Sequence[Row]) -> list[str]:
    """Drafter names, with "decoded" or "vLLM" where the same was measured on traces too."""
    twins = Counter(map(key, rows))
    how = {"decoding": ", decoded"} | {name: f", {words}" for name, words in ENGINES.items()}
    return [
        row.drafter + (how.get(row.measured_by, "") if twins[key(row)] > 1 else "") for row in rows
    ]


def main_table(rows: Iterable[Row]) -> Table:
    """One table of comparable rows; the trained drafter in bold, once per shape."""
    rows = list(rows)
    names = _names(rows)
    cells = [
        [
            name,
            with_interval(row.tokens_per_round, row.tokens_per_round_ci95),
            with_interval(row.speedup, row.speedup_ci95),
            number(row.modelled_speedup),
            draft_shape(row),
            with_interval(row.alpha, row.alpha_ci95, 3),
            with_interval(row.greedy_match, row.greedy_match_ci95, 3),
            number(row.draft_acceptance_rate, 3),
            count(num_nodes(row)),
            number(row.mbsu),
            number(_tokens_per_s(row), 1),
            percent(row.identical_to_plain),
            yes(row.lossless),
            row.role,
        ]
        for name, row in zip(names, rows, strict=True)
    ]
    headers = ["drafter", "tokens per round", "speed-up", "modelled", "draft", "alpha, depth 1",
               "greedy match", "draft acceptance", "nodes", "mbsu", "tokens/s",
               "identical", "lossless", "role"]  # fmt: skip
    return Table(headers, cells, {i for i, name in enumerate(names) if name == "after"})


def notes(rows: Iterable[Row], labels: Sequence[str] | None = None) -> list[str]:
    """Remarks on the rows of a table; a drafter that was measured twice gets them once, an engine
    its own."""
    found, slower = [], []
    rows = list(rows)
    shown, labels = {id(row) for row in once(rows)}, labels or _note_names(rows)
    for name, row in zip(labels, rows, strict=True):
        if id(row) not in shown and row.measured_by not in ENGINES:
            continue
        share = row.identical_to_plain
        if share is not None and row.num_compared:
            found.append(_compared(name, row))
        if row.replay_differs_from_decoding is not None:
            found.append(
                f"{name}: replayed and decoded counters differ on "
                f"{row.replay_differs_from_decoding} of {row.num_prompts} prompts."
            )
        if not row.lossless:
            parted = row.verifier in USUAL and any(
                not one["near_tie"] for one in row.differing_prompts or []
            )
            found.append(
                f"{name}: not lossless, its greedy text differs from the target's where the two "
                "best logits are not close."
                if parted
                else f"{name}: lossy, the output does not have the target's distribution."
            )
        if row.quality is not None:
            found.append(f"{name}: its answers have {row.quality:.3f} {row.quality_metric}.")
        measured, modelled = row.speedup, row.modelled_speedup
        overheads = row.role != PLAIN and not row.round_s  # an engine's round holds them
        if overheads and measured and modelled and modelled > 1.15 * measured:
            slower.append(name)
        if row.draft_vocabulary and is_trained(row):
            found.append(vocabulary_words(name, row.draft_vocabulary))
        if row.beyond_context:
            found.append(f"{name}: {beyond_words(row.beyond_context)}")
        if row.note:
            found.append(f"{name}: {row.note}")
    if slower:
        found.append(
            f"{', '.join(slower)}: measured speed-up more than 15 % below the modelled one: "
            "overheads beside the two networks."
        )
    own = [row for row in rows if row.modelled_speedup is not None and not row.round_s]
    found += [
        f"modelled: with costs of {source}. An engine has others."
        for source in sorted({row.cost_source for row in own if row.cost_source})
    ]
    by_engine = [(name, row) for name, row in zip(labels, rows, strict=True) if row.round_s]
    return found + [_engine_costs(name, row) for name, row in by_engine]


def beyond_words(beyond: Mapping[str, Any]) -> str:
    """What the drafter's own context costs."""
    return (
        f"{beyond['share']:.1%} of its rounds draft nothing and emit one token, as in vLLM: text "
        f"and drafts would be longer than the {beyond['context']} positions that the drafter knows."
    )


def _engine_costs(name: str, row: Row) -> str:
    """What a round costs in the engine, and what follows from that."""
    round_s, token_s = row.round_s or [], row.token_s or []
    said = f"{name}: a round takes {_milliseconds(round_s)} in {row.cost_source}"
    if row.round_cost is None:
        return f"{said}, which drafts in every round: its time of plain decoding is not known."
    least, most = (round_s[i] / token_s[-1 - i] for i in (0, -1))
    return (
        f"{said}, a token of plain decoding {_milliseconds(token_s)}. A round costs as much as "
        f"{row.round_cost:.2f} such tokens ({least:.2f} to {most:.2f} between the quartiles): "
        f"at K={row.K} the speed-up of any drafter of this shape is its tokens per round over "
        f"that.{_where_a_round_goes(row)}"
    )


def _where_a_round_goes(row: Row) -> str:
    """Of an engine whose forwards were timed by their tokens: what they cost, and why it loses."""
    by_rows, share, tokens = row.seconds_by_rows, row.draft_time_share, row.tokens_per_round
    if not by_rows or share is None or row.round_cost is None or tokens is None:
        return ""
    token = by_rows["1"][0]
    table = ", ".join(
        f"{rows}: {1000 * verified:.3g} + {1000 * drafted:.3g} ms "
        f"({(verified + drafted) / token:.2f})"
        for rows, (verified, drafted) in by_rows.items()
    )
    said = (
        " By the tokens that a round verifies, verifying + drafting (and the tokens per round "
        f"that it takes to be as fast as plain decoding): {table}. Drafting takes {share:.0%} of "
        "the time."
    )
    if tokens < row.round_cost:
        said += f" With this drafter it is slower than alone: {tokens:.2f} tokens per round are "
        said += f"fewer than {row.round_cost:.2f}."
    return said


def _milliseconds(quartiles: Sequence[float]) -> str:
    lower, median, upper = (1000 * seconds for seconds in quartiles)
    return f"{median:.3g} ms (quartiles {lower:.3g} and {upper:.3g})"


def _note_names(rows: Sequence[Row]) -> list[str]:
    """The names of the main table, with the shape where a drafter has several."""
    shapes: dict[str, set[str]] = {}
    for row in rows:
        shapes.setdefault(row.drafter, set()).add(draft_shape(row))
    return [
        name + (f" ({draft_shape(row)})" if len(shapes[row.drafter]) > 1 else "")
        for name, row in zip(_names(rows), rows, strict=True)
    ]


def _compared(name: str, row: Row) -> str:
    """How many greedy outputs were compared with plain decoding, and every one that differs."""
    text = f"{name}: compared with plain decoding on {row.num_compared} prompts"
    differing = row.differing_prompts or []
    if not differing:
        return f"{text}, all identical."
    listed = ", ".join(
        f"{one['prompt_hash'][:12]} at token {one['position']} (gap {one['logit_gap']:.2g})"
        for one in differing
    )
    return f"{text}, {len(differing)} differ: {listed}."


def _tokens_per_s(row: Row) -> float | None:
    return row.plain_tokens_per_s if row.role == PLAIN else row.speculative_tokens_per_s


def count(value: object) -> str:
    """A whole number, its thousands set apart; other values as they are."""
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else str(value)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def modelled_cells(row: Row) -> list[str]:
    """The modelled speed-up at each of COST_RATIOS."""
    modelled = row.modelled_speedup_at or {}
    return [number(modelled.get(str(c))) for c in COST_RATIOS]


def main_tables(rows: Sequence[Row]) -> list[Block]:
    """The main tables, one for each temperature and set of prompts, with remarks."""
    blocks: list[Block] = []
    for heading, group in groups(rows).items():
        blocks += [Heading(heading, 3), main_table(group)]
        if remarks := notes(group):
            blocks.append(Bullets(remarks))
    return blocks


# --- the other tables ----------------------------------------------------------------------------


def depth_tables(rows: Sequence[Row]) -> list[Block]:
    """Acceptance by depth of networks that were trained."""
    blocks: list[Block] = []
    for heading, group in groups(once(rows)).items():
        lines = []
        for row in group:
            if row.role in REFERENCES:
                continue
            chain = row.tree is None
            for name in ("alpha_by_depth", "alpha_pos") if chain else ("alpha_pos", "reach_pos"):
                values = getattr(row, name) or []
                if any(value is not None for value in values):
                    lines.append([label(row), name, *(number(value, 3) for value in values)])
        if lines:
            deepest = max(map(len, lines))
            headers = ["drafter", "measure", *(f"depth {i}" for i in range(1, deepest - 1))]
            padded = [[*line, *[NONE] * (deepest - len(line))] for line in lines]
            blocks += [Heading(heading, 3), Table(headers, padded)]
    if blocks:
        text = (
            "alpha_by_depth counts every position, the tokens before it being the target's; "
            "alpha_pos only the rounds that got that far, which they do on the easier prompts."
        )
        blocks = [Heading("Acceptance by depth"), Text(text), *blocks]
    return blocks


def cost_tables(rows: Sequence[Row]) -> list[Block]:
    """Modelled speed-up at assumed costs and at those of this machine; the best K in words."""
    blocks: list[Block] = []
    shares = {key(r): r.draft_time_share for r in rows if r.draft_time_share is not None}
    for heading, group in groups(rows).items():
        # a replay under a stop rule knows no cost, the decoded row does
        shown = once([row for row in group if row.modelled_speedup_at])
        if not shown:
            continue
        lines = [
            [
                label(row),
                *modelled_cells(row),
                number(row.cost_ratio, 3),
                number(row.verify_cost),
                number(row.modelled_speedup),
                number(shares.get(key(row))),
            ]
            for row in shown
        ]
        headers = ["drafter", *(f"c = {c:g}" for c in COST_RATIOS), "c here", "verification here",
                   "modelled here", "share of time drafting"]  # fmt: skip
        strong = {i for i, row in enumerate(shown) if row.drafter == "after"}
        blocks += [Heading(heading, 3), Table(headers, lines, strong)]
        if words := [_best_K_words(row) for row in shown if _has_best_K(row)]:
            blocks.append(Bullets(words))
    if blocks:
        text = (
            "c: seconds of a drafting step over seconds of a target forward on one token. At the "
            "assumed c verification costs one such forward whatever the number of nodes, a tree "
            "drafts as many steps as it is deep, and prompt lookup and the target as its own "
            "drafter are charged like the rest. The best K comes from alpha_pos and is sought up "
            "to the K measured."
        )
        blocks = [Heading("Modelled speed-up"), Text(text), *blocks]
    return blocks


def _has_best_K(row: Row) -> bool:
    """A trained drafter's chain of fixed length: a stop rule changes what alpha_pos means."""
    chain = row.tree is None and row.policy == "fixed"
    return chain and is_trained(row) and bool(known_positions(row))


def _best_K_words(row: Row) -> str:
    positions = known_positions(row)
    words = []
    for c in COST_RATIOS:
        K, speedup = best_K(positions, c)
        more = " or more" if len(positions) == K else ""
        best = f"best K is {K}{more}, {speedup:.1f}x" if K else "best is not to speculate"
        words.append(f"at a cost ratio of {c:g} the {best}")
    return f"{row.drafter}: {'; '.join(words)}."


def row_goodput(row: Row, cost_ratio: float) -> list[tuple[float, float]]:
    """(goodput, its ratio to plain decoding's) at each of BATCH_SIZES; [] for an unknown shape."""
    tokens, depth, nodes = row.tokens_per_round, row.K, num_nodes(row)
    if tokens is None or not depth or not nodes:
        return []
    if row.policy != "fixed":  # a rule drafts fewer, and not alike
        return []
    found = []
    for batch in BATCH_SIZES:
        ours = goodput(tokens, depth, nodes, cost_ratio, batch)
        found.append((ours, ours / goodput(1.0, 0, 0, cost_ratio, batch)))
    return found


def goodput_tables(rows: Sequence[Row]) -> list[Block]:
    """Modelled goodput at each batch size."""
    blocks: list[Block] = []
    for heading, group in groups(once(rows)).items():
        plain = [f"{goodput(1.0, 0, 0, 0.0, batch):.1f}" for batch in BATCH_SIZES]
        lines = [["plain decoding", *plain]]
        for row in focus_rows(group):
            for c in COST_RATIOS if row_goodput(row, MIDDLE_COST) else ():
                cells = [f"{ours:.1f} ({ratio:.2f})" for ours, ratio in row_goodput(row, c)]
                lines.append([f"{label(row)}, c = {c:g}", *cells])
            if _has_best_K(row):
                lines.append([f"{row.drafter}, best K, c = {MIDDLE_COST:g}", *_best_Ks(row)])
        if len(lines) > 1:
            headers = ["drafter", *(f"batch {batch}" for batch in BATCH_SIZES)]
            blocks += [Heading(heading, 3), Table(headers, lines)]
    if blocks:
        text = (
            "A model, not a measurement: tokens of the whole batch per time of one target forward "
            "on one token, and in brackets the factor over plain decoding at the same batch. "
            f"Assumed: a forward takes the same time up to {KNEE} tokens (peak arithmetic over "
            "bandwidth, 150 to 300 for 16-bit weights on current accelerators) and grows in "
            "proportion beyond (real knees are soft); a round verifies batch x (nodes + 1) tokens; "
            "a drafting step costs c, on batch x nodes / depth tokens, and grows alike; acceptance "
            "as measured here; no other overheads and no reading of keys and values, which keeps "
            "long contexts memory-bound for longer. Best K: of the K up to the one measured (+: "
            "perhaps more), 0 for not speculating."
        )
        blocks = [Heading("Goodput by batch size"), Text(text), *blocks]
    return blocks


def _best_Ks(row: Row) -> list[str]:
    positions = known_positions(row)
    found = [best_K_at(positions, MIDDLE_COST, batch) for batch in BATCH_SIZES]
    return [f"{K}{'+' if len(positions) == K else ''} ({ratio:.2f})" for K, ratio in found]


def drafter_facts(drafter: Mapping[str, object]) -> list[list[str]]:
    """Facts of the drafter, [name, value] each; keys without a name in words come last."""
    lines = []
    for name, words in FACTS.items():
        value = drafter.get(name)
        if value is None:
            continue
        if name == "coverage" and isinstance(value, int | float):
            text = percent(value)
        elif isinstance(value, list | tuple):
            text = ", ".join(map(str, value)) or "none"
        elif isinstance(value, dict):
            text = json.dumps(value, ensure_ascii=False)
        else:
            text = count(value)
        lines.append([words, text])
    rest = {name: value for name, value in drafter.items() if name not in FACTS}
    return lines + flatten(rest)
