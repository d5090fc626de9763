"""The plots of a report, as SVG text that sits inside its HTML file.

matplotlib takes a second to import, so it is imported when a plot is drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

from eval import speed_model
from eval.report_rows import Row, known_positions
from eval.speed_model import BATCH_SIZES, expected_tokens_positions, modelled_speedup

COST_RATIOS = (*speed_model.COST_RATIOS, 0.2)
COLOURS = {
    "after": "#2f7fc9",
    "before": "#d07a2a",
    "control": "#7d8a94",
    "untrained": "#b09a6b",
    "prompt_lookup": "#4f9d69",
}
_SPARE = ("#8e6fc0", "#c05f7a", "#3f9aa6")
_INK = "#a1b2c3"  # becomes currentColor, so that the text follows the page's light or dark
_Panel = Callable[[Any], None]


def acceptance_by_position(rows: list[Row]) -> str:
    """alpha_pos (given the positions before) and reach_pos of each row; trees dashed."""

    def panel(key: str, title: str) -> _Panel:
        def draw(axes: Any) -> None:
            for index, row in enumerate(rows):
                values = known_positions(row, key)
                positions = range(1, len(values) + 1)
                axes.plot(
                    positions, values, _line(row), label=_name(row), color=_colour(row, index)
                )
            _integer_ticks(axes, max((len(known_positions(row, key)) for row in rows), default=1))
            axes.set(title=title, xlabel="position in the draft", ylim=(0, 1.02))

        return draw

    return _svg(
        [
            panel("alpha_pos", "accepted, given all before (alpha_pos)"),
            panel("reach_pos", "at least this many accepted (reach_pos)"),
        ]
    )


def speedup_over_K(row: Row) -> str:
    """Modelled speed-up of one row for fixed cost ratios and for its own, with what was measured.

    Dashed beyond the measured K, where the last position's acceptance is held.
    """
    alpha_pos = known_positions(row)
    measured_K = len(alpha_pos)
    longest = max(8, measured_K + 4)
    extended = alpha_pos + [alpha_pos[-1]] * (longest - measured_K)
    tokens = [expected_tokens_positions(extended[:K]) for K in range(longest + 1)]
    own = row.get("cost_ratio")

    def draw(axes: Any) -> None:
        lines = [(c, f"c = {c:g}", _shade(i)) for i, c in enumerate(COST_RATIOS)]
        if own is not None:
            lines.append((own, f"c = {own:.3g} (measured)", COLOURS["after"]))
        for c, label, colour in lines:
            speedups = [modelled_speedup(tokens[K], K, c) for K in range(longest + 1)]
            width = 2.2 if label.endswith("(measured)") else 1.3
            split = measured_K + 1
            axes.plot(range(split), speedups[:split], color=colour, label=label, linewidth=width)
            axes.plot(range(measured_K, longest + 1), speedups[measured_K:], "--", color=colour,
                      linewidth=width)  # fmt: skip
        if row.get("speedup") is not None and isinstance(row.get("K"), int):
            axes.plot([row["K"]], [row["speedup"]], "D", color=COLOURS["before"], markersize=7,
                      label="measured speed-up")  # fmt: skip
        axes.axhline(1.0, color=_INK, linewidth=0.8, alpha=0.6)
        _integer_ticks(axes, longest, first=0)
        axes.set(xlabel="K, drafted tokens per round", ylabel="modelled speed-up")

    return _svg([draw])


def goodput_by_batch(lines: list[tuple[Row, list[float]]]) -> str:
    """Goodput over plain decoding's at each of BATCH_SIZES."""

    def draw(axes: Any) -> None:
        for index, (row, ratios) in enumerate(lines):
            axes.plot(BATCH_SIZES, ratios, _line(row), label=_name(row), color=_colour(row, index))
        axes.axhline(1.0, color=_INK, linewidth=0.8, alpha=0.6)
        axes.set_xscale("log", base=2)
        axes.set_xticks(BATCH_SIZES, [str(batch) for batch in BATCH_SIZES])
        axes.set(xlabel="batch size", ylabel="goodput over plain decoding", ylim=(0, None))

    return _svg([draw])


def over_steps(series: list[Row]) -> str | None:
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

    def draw(axes: Any) -> None:
        for index, (name, points) in enumerate(lines.items()):
            steps, values = zip(*sorted(points), strict=True)
            colour = [*COLOURS.values(), *_SPARE][index % (len(COLOURS) + len(_SPARE))]
            axes.plot(steps, values, "o-", label=name, color=colour)
        axes.set(xlabel=axis, ylabel="acceptance")

    return _svg([draw])


def calibration(rows: list[Row]) -> str:
    """Acceptance by the drafter's own confidence; bigger dots hold more tokens."""

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], ":", color=_INK, linewidth=1.2, label="calibrated")
        for index, row in enumerate(rows):
            bins = [
                b for b in row["calibration"]["bins"] if b["count"] and b["acceptance"] is not None
            ]
            most = max((b["count"] for b in bins), default=1)
            x, y = [b["confidence"] for b in bins], [b["acceptance"] for b in bins]
            colour = _colour(row, index)
            axes.plot(x, y, color=colour, label=row["drafter"])
            axes.scatter(x, y, s=[8 + 70 * b["count"] / most for b in bins], color=colour)
        axes.set(xlabel="confidence (largest drafter probability)", ylabel="accepted",
                 xlim=(0, 1.02), ylim=(0, 1.02))  # fmt: skip

    return _svg([draw])


def discards_over_verification(points: list[Row]) -> str:
    """Discarded drafts against target forwards, both per emitted token; one line per family."""

    def draw(axes: Any) -> None:
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

    return _svg([draw])


def _svg(panels: list[_Panel]) -> str:
    """Draw the panels side by side and return one `<svg>` element."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "draftsmith",  # the same report gives the same file
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.titlesize": 10.5,
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
        width = 9.2 if len(panels) > 1 else 6.4
        figure, axes = plt.subplots(1, len(panels), figsize=(width, 3.5), squeeze=False)
        for draw, ax in zip(panels, axes[0], strict=True):
            draw(ax)
            ax.grid(alpha=0.25, color=_INK, linewidth=0.6)
            ax.set_axisbelow(True)
        handles = axes[0][-1].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", frameon=False)
        figure.set_layout_engine("constrained")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(_INK, "currentColor").strip()


def _name(row: Row) -> str:
    """The drafter, with a tree's kind and size: legends are narrow."""
    tree = row.get("tree")
    return row["drafter"] if tree is None else ", ".join([row["drafter"], *tree.split(", ")[:2]])


def _line(row: Row) -> str:
    return "o-" if row.get("tree") is None else "s--"


def _integer_ticks(axes: Any, last: int, first: int = 1) -> None:
    axes.set_xticks(range(first, last + 1, math.ceil((last - first + 1) / 12)))


def _colour(row: Row, index: int) -> str:
    return COLOURS.get(row["drafter"], _SPARE[index % len(_SPARE)])


def _shade(index: int) -> str:
    return ("#4f9d69", "#8fae4b", "#c9a23c", "#c05f5a")[index]
