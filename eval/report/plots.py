"""The plots of a report: SVG that sits inside its HTML file, with the keys of its lines beside it.

Colours are variables of the page's style sheet, so that light and dark each have their own; the
keys are HTML, so that long names wrap on a phone. matplotlib takes a second to import, so it is
imported when a plot is drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eval import speed_model
from eval.report.breakdown import position_name
from eval.report.render import LegendKey, Plot
from eval.report.rows import known_positions
from eval.row import Json, Point, Row
from eval.speed_model import BATCH_SIZES, expected_tokens_positions, modelled_speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

COST_RATIOS = (*speed_model.COST_RATIOS, 0.2)
# what matplotlib draws with -> the variable in page.css that takes its place
VARIABLES = {
    "#2f7fc9": "--after",
    "#d07a2a": "--before",
    "#7d8a94": "--control",
    "#b09a6b": "--untrained",
    "#4f9d69": "--lookup",
    "#8e6fc0": "--spare-1",
    "#c05f7a": "--spare-2",
    "#3f9aa6": "--spare-3",
    "#a1b2c3": "--ink",
}
_AFTER, _BEFORE, _CONTROL, _UNTRAINED, _LOOKUP, *_SPARE, _INK = VARIABLES
COLOURS = {
    "after": _AFTER,
    "before": _BEFORE,
    "control": _CONTROL,
    "untrained": _UNTRAINED,
    "prompt_lookup": _LOOKUP,
}
MOST_DOMAINS = 12
_Panel = Callable[["Axes"], None]


def acceptance_by_depth(rows: list[Row], key: str = "alpha_pos") -> Plot:
    """alpha_pos (given the positions before) or reach_pos of each row; trees dashed."""

    def draw(axes: Axes) -> None:
        for index, row in enumerate(rows):
            values = known_positions(row, key)
            positions = range(1, len(values) + 1)
            axes.plot(positions, values, _line(row), label=_name(row), color=_colour(row, index))
        _integer_ticks(axes, max((len(known_positions(row, key)) for row in rows), default=1))
        axes.set(xlabel="depth in the draft", ylabel=key, ylim=(0, 1.02))

    return _svg(draw)


def tokens_by_domain(rows: list[Row]) -> Plot | None:
    """Tokens per round of each row in each domain, the domains with the fewest first; None where
    there is one domain."""
    values = [{name: one["tokens_per_round"] for name, one in row.domains.items()} for row in rows]
    lowest = values[-1] if values else {}
    names = sorted(lowest, key=lambda name: (lowest[name] is None, lowest[name] or 0.0, name))
    names = names[:MOST_DOMAINS]
    if len(names) < 2:
        return None

    def draw(axes: Axes) -> None:
        for index, (row, own) in enumerate(zip(rows, values, strict=True)):
            known = [(own.get(name), y) for y, name in enumerate(names)]
            x = [value for value, _ in known if value is not None]
            y = [place for value, place in known if value is not None]
            axes.plot(x, y, _line(row)[0], label=_name(row), color=_colour(row, index))
        short = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
        axes.set_yticks(range(len(names)), short)
        axes.set(xlabel="tokens per round", ylim=(-0.6, len(names) - 0.4))
        axes.invert_yaxis()

    return _svg(draw, height=max(2.9, 1.0 + 0.3 * len(names)))


def tokens_by_position(rows: list[Row]) -> Plot | None:
    """Tokens per round of each row by the range of the answer in which rounds begin; None where
    there is one range."""
    shown = [row for row in rows if row.by_position]
    firsts = {p["first"]: position_name(p) for row in shown for p in row.by_position or []}
    if len(firsts) < 2:
        return None
    places = {first: place for place, first in enumerate(sorted(firsts))}

    def draw(axes: Axes) -> None:
        for index, row in enumerate(shown):
            own = row.by_position or []
            x, y = [places[one["first"]] for one in own], [one["tokens_per_round"] for one in own]
            axes.plot(x, y, _line(row), label=_name(row), color=_colour(row, index))
        axes.set_xticks(range(len(places)), [firsts[first] for first in places])
        axes.set(xlabel="position in the answer", ylabel="tokens per round", ylim=(1, None))

    return _svg(draw)


def speedup_over_K(row: Row) -> Plot:
    """Modelled speed-up of one row for fixed cost ratios and for its own, with what was measured.

    Dashed beyond the measured K, where the last position's acceptance is held.
    """
    alpha_pos = known_positions(row)
    measured_K = len(alpha_pos)
    longest = max(8, measured_K + 4)
    extended = alpha_pos + [alpha_pos[-1]] * (longest - measured_K)
    tokens = [expected_tokens_positions(extended[:K]) for K in range(longest + 1)]
    own = row.cost_ratio

    def draw(axes: Axes) -> None:
        lines = [(c, f"c = {c:g}", _shade(i)) for i, c in enumerate(COST_RATIOS)]
        if own is not None:
            lines.append((own, f"c = {own:.3g} (measured)", COLOURS["after"]))
        for c, label, colour in lines:
            speedups = [modelled_speedup(tokens[K], K, c) for K in range(longest + 1)]
            width = 2.2 if label.endswith("(measured)") else 1.3
            split, rest = measured_K + 1, range(measured_K, longest + 1)
            axes.plot(range(split), speedups[:split], color=colour, label=label, linewidth=width)
            axes.plot(rest, speedups[measured_K:], "--", color=colour, linewidth=width)
        if row.speedup is not None and isinstance(row.K, int):
            axes.plot(
                [row.K], [row.speedup], "D", color=_INK, markersize=7, label="measured speed-up"
            )
        axes.axhline(1.0, color=_INK, linewidth=0.8, alpha=0.6)
        _integer_ticks(axes, longest, first=0)
        axes.set(xlabel="K, drafted tokens per round", ylabel="modelled speed-up")

    return _svg(draw)


def goodput_by_batch(lines: list[tuple[Row, list[float]]]) -> Plot:
    """Goodput over plain decoding's at each of BATCH_SIZES."""

    def draw(axes: Axes) -> None:
        for index, (row, ratios) in enumerate(lines):
            axes.plot(BATCH_SIZES, ratios, _line(row), label=_name(row), color=_colour(row, index))
        axes.axhline(1.0, color=_INK, linewidth=0.8, alpha=0.6)
        axes.set_xscale("log", base=2)
        axes.set_xticks(BATCH_SIZES, [str(batch) for batch in BATCH_SIZES])
        axes.set(xlabel="batch size", ylabel="goodput over plain decoding", ylim=(0, None))

    return _svg(draw)


def over_steps(series: list[Json]) -> Plot | None:
    """Acceptance (metrics named alpha* or greedy_match*) over training steps or requests."""
    axis = "step" if any("step" in point for point in series) else "request"
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in series:
        for key, value in point.items():
            shown = key.startswith(("alpha", "greedy_match")) and not key.endswith("_ci95")
            if shown and axis in point and isinstance(value, int | float):
                name = f"{point['name']}: {key}" if "name" in point else key
                lines.setdefault(name, []).append((point[axis], value))
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for index, (name, points) in enumerate(lines.items()):
            steps, values = zip(*sorted(points), strict=True)
            colour = [*COLOURS.values(), *_SPARE][index % (len(COLOURS) + len(_SPARE))]
            axes.plot(steps, values, "o-", label=name, color=colour)
        axes.set(xlabel=axis, ylabel="acceptance")

    return _svg(draw)


def calibration(rows: list[Row]) -> Plot:
    """Acceptance by the drafter's own confidence; bigger dots hold more tokens."""

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], ":", color=_INK, linewidth=1.2, label="calibrated")
        for index, row in enumerate(rows):
            bins = [
                b
                for b in (row.calibration or {"bins": []})["bins"]
                if b["count"] and b["acceptance"] is not None
            ]
            most = max((b["count"] for b in bins), default=1)
            x, y = [b["confidence"] for b in bins], [b["acceptance"] for b in bins]
            colour = _colour(row, index)
            axes.plot(x, y, color=colour, label=row.drafter)
            axes.scatter(x, y, s=[8 + 70 * b["count"] / most for b in bins], color=colour)
        axes.set(xlabel="confidence (largest drafter probability)", ylabel="accepted")
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))

    return _svg(draw)


def discards_over_verification(points: Sequence[Point]) -> Plot:
    """Discarded drafts against target forwards, both per emitted token; one line per family."""

    def draw(axes: Axes) -> None:
        families = dict.fromkeys(point["family"] for point in points)
        colours = [COLOURS["before"], *_SPARE, COLOURS["after"]]
        for family, colour in zip(families, colours, strict=False):
            own = [point for point in points if point["family"] == family]
            own.sort(key=lambda point: point["verification_rate"])
            x, y = ([p[key] for p in own] for key in ("verification_rate", "discards_per_token"))
            axes.plot(x, y, "o-", label=family, color=colour)
            best = [point for point in own if point["chosen"]]
            x, y = ([p[key] for p in best] for key in ("verification_rate", "discards_per_token"))
            axes.plot(x, y, "o", color=colour, markersize=9)
        axes.set(xlabel="target forwards per token", ylabel="discarded drafts per token")
        axes.set_ylim(bottom=0)

    return _svg(draw)


def _svg(draw: _Panel, height: float = 2.9) -> Plot:
    """Draw one panel, `height` inches high."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "draftsmith",  # the same report gives the same file
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
    }
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=(4.6, height))
        draw(axes)
        axes.grid(alpha=0.25, color=_INK, linewidth=0.6)
        axes.set_axisbelow(True)
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
        keys = [_key(line) for line in lines]
        figure.set_layout_engine("constrained")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return Plot(text.strip(), keys)


def _key(line: Line2D) -> LegendKey:
    marks = {"-": "line", "--": "dashed", ":": "dotted"}
    markers = {"o": "dot", "s": "square", "D": "diamond"}
    mark = marks.get(str(line.get_linestyle())) or markers[str(line.get_marker())]
    return LegendKey(str(line.get_label()), VARIABLES[str(line.get_color())], mark)


def _name(row: Row) -> str:
    """The drafter, with a tree's kind and size: legends are narrow."""
    tree = row.tree
    return row.drafter if tree is None else ", ".join([row.drafter, *tree.split(", ")[:2]])


def _line(row: Row) -> str:
    return "o-" if row.tree is None else "s--"


def _integer_ticks(axes: Axes, last: int, first: int = 1) -> None:
    axes.set_xticks(range(first, last + 1, math.ceil((last - first + 1) / 12)))


def _colour(row: Row, index: int) -> str:
    return COLOURS.get(row.drafter, _SPARE[index % len(_SPARE)])


def _shade(index: int) -> str:
    return (_LOOKUP, _UNTRAINED, _BEFORE, _SPARE[1])[index]
