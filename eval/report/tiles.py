"""The three figures that the page opens with: tokens per round, measured speed-up, acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.render import Block, Estimate, Heading, Tile, Tiles, number
from eval.report.rows import (
    BASELINE,
    BEFORE,
    CONTROL,
    UNTRAINED,
    Report,
    best_chain,
    draft_shape,
    focus,
    groups,
    is_trained,
    once,
    role_of,
)
from eval.row import Json, Row

COMPARED = (BEFORE, CONTROL)
COLOURS = {"before": "--before", "control": "--control", "offline": "--spare-1",
           "untrained": "--untrained", "prompt_lookup": "--lookup"}  # fmt: skip


def tile_blocks(report: Report) -> list[Block]:
    """A row of tiles per temperature and set of prompts."""
    blocks: list[Block] = []
    for heading, rows in groups(once(report["results"])).items():
        best = focus(rows)
        if best is None:
            continue
        comparisons = [
            c
            for c in report["comparisons"]
            if c.get("temperature", best.temperature) == best.temperature
        ]
        chain = best_chain(rows, best.drafter) or best
        own = [best] if best is chain else [chain, best]
        others = [one for one in rows if one.role in COMPARED and not one.tree]
        others = others or [one for one in rows if one.role == UNTRAINED]
        others += [one for one in rows if one.role == BASELINE]
        tokens = _tile("Tokens per round", best, [*others, *own], "tokens_per_round", 1.0)
        tokens.notes = _differences(best, comparisons, "tokens_per_round")
        # a tree has no alpha of its own
        acceptance = _tile(
            "Acceptance (alpha, depth 1)", chain, [*others, chain], "alpha", 0.0, 1.0
        )
        acceptance.notes = _differences(chain, comparisons, "alpha")
        blocks += [Heading(heading, 3), Tiles([tokens, _speed(best, own), acceptance])]
    return blocks


def _tile(
    title: str, row: Row, shown: Sequence[Row], metric: str, low: float, high: float = 0.0
) -> Tile:
    """A tile with the number of `row`, and `shown` below it on an axis from `low` to `high`.

    `high` 0: the axis ends at the largest value.
    """
    both = {bool(one.tree) for one in shown} == {True, False}
    estimates = [one for one in (_estimate(r, metric, both) for r in shown) if one is not None]
    ends = [edge for one in estimates for edge in (one.interval or [one.value])]
    interval = _interval(row, metric)
    shape = "tree: " * (row.tree is not None) + draft_shape(row)
    brackets = f"[{number(interval)}]" if interval else ""
    high = high or max([low + 0.1, *ends]) * 1.02
    return Tile(title, shape, number(getattr(row, metric)), brackets, low, high, estimates, [])


def _speed(row: Row, own: Sequence[Row]) -> Tile:
    tile = _tile("Measured speed-up", row, own, "speedup", 0.0)
    if row.speedup is None:
        modelled = row.modelled_speedup
        tile.notes = ["Not timed." + (f" Modelled: {number(modelled)}×." if modelled else "")]
        return tile
    tile.value += "×"
    tile.high = max(tile.high, 1.1)
    tile.estimates.insert(0, Estimate("plain decoding", 1.0, None, "--control"))
    tile.notes = ["The same target and prompts, one at a time, on this machine."]
    if row.speedup < 1 and (reason := _slower(row)):
        tile.notes.append(reason)
    return tile


def _slower(row: Row) -> str:
    """Why a measured speed-up is below 1; "" where the costs are not known."""
    tokens, modelled = row.tokens_per_round, row.modelled_speedup
    if tokens is None or not modelled:
        return ""
    if modelled >= 1:
        return (
            f"Below 1 though the two networks alone would give {number(modelled)}×: the rest is "
            "overhead of this implementation."
        )
    return (
        f"Below 1: a round takes the time of {number(tokens / modelled)} target forwards here and "
        f"gives {number(tokens)} tokens."
    )


def _differences(row: Row, comparisons: Sequence[Json], metric: str) -> list[str]:
    """Differences of the row's drafter to the others, and of a tree to the same drafter's chain."""
    name, tree, found = row.drafter, row.tree, list[str]()
    for c in comparisons:
        if c["metric"] != metric or c["diff"] is None:
            continue
        digits = 3 if metric == "alpha" else 2
        text = number(c["diff"], digits, sign=True)
        if c["ci95"]:
            text += f" [{number(c['ci95'], digits, sign=True)}]"
        if tree is not None and c["a"] == f"{name}, {draft_shape(row)}":
            found.append(f"{text} over its own chain")
        elif c["a"] == name and role_of(c["b"]) in COMPARED:
            found.append(f"{text} over {c['b']}{' (chains)' * (tree is not None)}")
    return found


def _estimate(row: Row, metric: str, both: bool) -> Estimate | None:
    """The estimate of a row; `both`: chains and trees are shown, so that names must differ."""
    value, name = getattr(row, metric), row.drafter
    if value is None:
        return None
    if row.tree:
        name += " (tree)"
    elif both and is_trained(row):
        name += f" (K {row.K})"
    colour = COLOURS.get(row.drafter, "--after")
    return Estimate(name, value, _interval(row, metric), colour)


def _interval(row: Row, metric: str) -> list[float] | None:
    interval = getattr(row, f"{metric}_ci95")
    return interval if interval and None not in interval else None
