"""The plots of a report, made of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from eval import speed_model
from eval.report.breakdown import position_name
from eval.report.chart import Axis, Line, Plot, linear, named, whole
from eval.report.rows import known_positions
from eval.row import Json, Point, Row
from eval.speed_model import BATCH_SIZES, expected_tokens_positions, modelled_speedup

COST_RATIOS = (*speed_model.COST_RATIOS, 0.2)
COLOURS = {
    "after": "--after",
    "before": "--before",
    "control": "--control",
    "untrained": "--untrained",
    "prompt_lookup": "--lookup",
}
SPARE = ("--spare-1", "--spare-2", "--spare-3")
SHADES = ("--lookup", "--untrained", "--before", "--spare-2")  # of assumed costs
AXES = {"alpha_pos": "accepted, given all before it", "reach_pos": "share of rounds"}
MOST_DOMAINS = 12


def acceptance_by_depth(rows: list[Row], key: str = "alpha_pos") -> Plot:
    """alpha_pos (given the positions before) or reach_pos of each row; trees dashed."""
    lines = []
    for index, row in enumerate(rows):
        values = known_positions(row, key)
        lines.append(_line(row, index, list(enumerate(values, start=1))))
    deepest = max((len(line.points) for line in lines), default=1)
    return Plot(
        whole("depth in the draft", 1, max(1, deepest)), linear(AXES[key], [], 0, 1.02), lines
    )


def tokens_by_domain(rows: list[Row]) -> Plot | None:
    """Tokens per round of each row in each domain, the domains with the fewest first; None where
    there is one domain."""
    values = [{name: one["tokens_per_round"] for name, one in row.domains.items()} for row in rows]
    lowest = values[-1] if values else {}
    names = sorted(lowest, key=lambda name: (lowest[name] is None, lowest[name] or 0.0, name))
    names = names[:MOST_DOMAINS]
    if len(names) < 2:
        return None
    lines = []
    for index, (row, own) in enumerate(zip(rows, values, strict=True)):
        known = [(own.get(name), place) for place, name in enumerate(names)]
        points = [(value, float(place)) for value, place in known if value is not None]
        line = _line(row, index, points)
        line.style = "none"
        lines.append(line)
    short = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
    x = linear("tokens per round", [x for line in lines for x, _ in line.points])
    height = max(270.0, 90.0 + 28 * len(names))
    return Plot(x, named("", short, high_first=True), lines, height=height)


def tokens_by_position(rows: list[Row]) -> Plot | None:
    """Tokens per round of each row by the range of the answer in which rounds begin; None where
    there is one range."""
    shown = [row for row in rows if row.by_position]
    firsts = {p["first"]: position_name(p) for row in shown for p in row.by_position or []}
    if len(firsts) < 2:
        return None
    places = {first: float(place) for place, first in enumerate(sorted(firsts))}
    lines = [
        _line(
            row,
            index,
            [(places[one["first"]], one["tokens_per_round"]) for one in row.by_position or []],
        )
        for index, row in enumerate(shown)
    ]
    x = named("position in the answer", [firsts[first] for first in places])
    return Plot(x, linear("tokens per round", _heights(lines), low=1), lines)


def speedup_over_K(row: Row) -> Plot:
    """Modelled speed-up of one row for assumed cost ratios and for its own cost, with what was
    measured.

    Dashed beyond the measured K, where the last position's acceptance is held.
    """
    alpha_pos = known_positions(row)
    measured_K = len(alpha_pos)
    longest = max(8, measured_K + 4)
    extended = alpha_pos + [alpha_pos[-1]] * (longest - measured_K)
    tokens = [expected_tokens_positions(extended[:K]) for K in range(longest + 1)]
    costs = [(f"c = {c:g}", colour, c, 1.0) for c, colour in zip(COST_RATIOS, SHADES, strict=True)]
    own = row.cost_ratio
    if own is not None:
        verify = row.verify_cost or 1.0
        costs.append((f"c = {own:.3g}, verification {verify:.3g}: here", "--after", own, verify))
    lines = []
    for label, colour, c, verify in costs:
        points = [
            (float(K), modelled_speedup(tokens[K], K, c, verify if K else 1.0))
            for K in range(longest + 1)
        ]
        thick = colour == "--after"
        lines += [
            Line(label, colour, points[: measured_K + 1], thick=thick),
            Line("", colour, points[measured_K:], style="dashed", thick=thick),
        ]
    if row.speedup is not None and isinstance(row.K, int):
        point = (float(row.K), row.speedup)
        lines.append(Line("measured speed-up", "--ink", [point], "none", "diamond", thick=True))
    y = linear("modelled speed-up", [*_heights(lines), 1.0])
    return Plot(whole("K, drafted tokens per round", 0, longest), y, lines, level=1.0)


def goodput_by_batch(rows: list[tuple[Row, list[float]]]) -> Plot:
    """Goodput over plain decoding's at each of BATCH_SIZES."""
    lines = [
        _line(row, index, [(float(b), r) for b, r in zip(BATCH_SIZES, ratios, strict=True)])
        for index, (row, ratios) in enumerate(rows)
    ]
    ticks = [(float(batch), str(batch)) for batch in BATCH_SIZES]
    x = Axis("batch size", BATCH_SIZES[0] * 0.85, BATCH_SIZES[-1] * 1.18, ticks, doubling=True)
    y = linear("goodput over plain decoding", [*_heights(lines), 1.0], low=0)
    return Plot(x, y, lines, level=1.0)


def over_steps(series: list[Json]) -> Plot | None:
    """Acceptance (metrics named alpha* or greedy_match*) over training steps or requests."""
    axis = "step" if any("step" in point for point in series) else "request"
    found: dict[str, list[tuple[float, float]]] = {}
    for point in series:
        for key, value in point.items():
            shown = key.startswith(("alpha", "greedy_match")) and not key.endswith("_ci95")
            if shown and axis in point and isinstance(value, int | float):
                name = f"{point['name']}: {key}" if "name" in point else key
                found.setdefault(name, []).append((float(point[axis]), float(value)))
    if not found:
        return None
    colours = [*COLOURS.values(), *SPARE]
    lines = [
        Line(name, colours[index % len(colours)], sorted(points), mark="dot")
        for index, (name, points) in enumerate(found.items())
    ]
    x = linear(axis, [x for line in lines for x, _ in line.points])
    return Plot(x, linear("acceptance", _heights(lines)), lines)


def calibration(rows: list[Row]) -> Plot:
    """Acceptance by the drafter's own confidence; bigger dots hold more tokens."""
    lines = [Line("calibrated", "--ink", [(0.0, 0.0), (1.0, 1.0)], style="dotted")]
    for index, row in enumerate(rows):
        bins = [
            b
            for b in (row.calibration or {"bins": []})["bins"]
            if b["count"] and b["acceptance"] is not None
        ]
        most = max((b["count"] for b in bins), default=1)
        points = [(b["confidence"], b["acceptance"]) for b in bins]
        sizes = [1.5 + 3.5 * (b["count"] / most) ** 0.5 for b in bins]
        lines.append(Line(row.drafter, _colour(row, index), points, mark="dot", sizes=sizes))
    x = linear("confidence (largest drafter probability)", [], 0, 1.02)
    return Plot(x, linear("share accepted", [], 0, 1.02), lines)


def discards_over_verification(points: Sequence[Point]) -> Plot:
    """Discarded drafts against target forwards, both per emitted token; one line per family."""
    families = dict.fromkeys(point["family"] for point in points)
    lines = []
    for family, colour in zip(families, ["--before", *SPARE, "--after"], strict=False):
        own = sorted(
            (point for point in points if point["family"] == family),
            key=lambda point: point["verification_rate"],
        )
        places = [(p["verification_rate"], p["discards_per_token"]) for p in own]
        chosen = [place for place, p in zip(places, own, strict=True) if p["chosen"]]
        lines.append(Line(family, colour, places, mark="dot"))
        lines.append(Line("", colour, chosen, "none", "dot", thick=True))
    x = linear("target forwards per token", [x for line in lines for x, _ in line.points])
    return Plot(x, linear("discarded drafts per token", _heights(lines), low=0), lines)


def _heights(lines: Sequence[Line]) -> list[float]:
    return [y for line in lines for _, y in line.points]


def _line(row: Row, index: int, points: Sequence[tuple[float, float]]) -> Line:
    """A row's line: chains solid with dots, trees dashed with squares. Its name is the drafter's,
    with a tree's kind and size: legends are narrow."""
    colour = _colour(row, index)
    if row.tree is None:
        return Line(row.drafter, colour, points, mark="dot")
    name = ", ".join([row.drafter, *row.tree.split(", ")[:2]])
    return Line(name, colour, points, style="dashed", mark="square")


def _colour(row: Row, index: int) -> str:
    return COLOURS.get(row.drafter, SPARE[index % len(SPARE)])
