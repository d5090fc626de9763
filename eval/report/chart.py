"""Plots as data: lines on two axes, which `page.html` draws in the colours of `page.css`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WIDTH = 440.0  # of a plot, in the units of its SVG
CHARACTER = 6.4  # width of one, at most
BOTTOM, TOP, RIGHT = 42.0, 8.0, 14.0  # margins


@dataclass
class Axis:
    """An axis from `low` to `high` with its ticks, (value, text) each. `doubling`: the same length
    for every factor of two."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    doubling: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high = self.low, self.high
        if self.doubling:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return (value - low) / (high - low)


@dataclass
class Line:
    """Points (x, y) with a name in the legend, none if "". `colour`: a variable of page.css;
    `style`: solid, dashed, dotted or none; `mark` at each point: dot, square, diamond or "", of
    radius `sizes` where these are given."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    style: str = "solid"
    mark: str = ""
    thick: bool = False
    sizes: Sequence[float] = ()

    @property
    def key(self) -> str:
        """What stands before the name in the legend: a stroke, or a mark where there is none."""
        return self.mark if self.style == "none" else self.style

    def marks(self) -> list[tuple[float, float, float]]:
        """x, y and radius of each mark."""
        radius = 4.5 if self.thick else 3.2
        sizes = self.sizes or [radius] * len(self.points)
        return [(x, y, size) for (x, y), size in zip(self.points, sizes, strict=True)]


@dataclass
class Plot:
    """Lines in one panel. `level`: the height of a line that lies across it."""

    x: Axis
    y: Axis
    lines: list[Line] = field(default_factory=list)
    level: float | None = None
    height: float = 270.0
    width: float = WIDTH

    @property
    def named(self) -> list[Line]:
        """The lines that are in the legend."""
        return [line for line in self.lines if line.label]

    @property
    def left(self) -> float:
        """Where the panel begins, behind the texts of the vertical axis."""
        longest = max((len(text) for _, text in self.y.ticks), default=1)
        return (26.0 if self.y.label else 8.0) + CHARACTER * longest

    @property
    def right(self) -> float:
        return WIDTH - RIGHT

    @property
    def top(self) -> float:
        return TOP

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def across(self, value: float) -> float:
        """The place of a value on the horizontal axis."""
        return round(self.left + self.x.place(value) * (self.right - self.left), 1)

    def down(self, value: float) -> float:
        """The place of a value on the vertical axis, which grows upwards."""
        return round(self.bottom - self.y.place(value) * (self.bottom - self.top), 1)

    def path(self, line: Line) -> str:
        """The points of a line, as SVG writes them."""
        return " ".join(f"{self.across(x)},{self.down(y)}" for x, y in line.points)


def linear(
    label: str, values: Iterable[float], low: float | None = None, high: float | None = None
) -> Axis:
    """An axis over these values with round ticks; `low`, `high`: its ends, where they are given."""
    found = [*values] or [0.0, 1.0]
    bottom, top = (min(found) if low is None else low), (max(found) if high is None else high)
    if top - bottom < 1e-9:
        bottom, top = (bottom, bottom + 1) if low is not None else (bottom - 0.5, bottom + 0.5)
    room = 0.04 * (top - bottom)
    bottom, top = bottom - room * (low is None), top + room * (high is None)
    step = _step((top - bottom) / 6)
    first, last = math.ceil(bottom / step - 1e-9), math.floor(top / step + 1e-9)
    ticks = [(i * step, f"{round(i * step, 9):,g}") for i in range(first, last + 1)]
    return Axis(label, bottom, top, ticks)


def whole(label: str, first: int, last: int) -> Axis:
    """An axis of whole numbers with at most twelve ticks, and a little room at both ends."""
    every = math.ceil((last - first + 1) / 12)
    ticks = [(float(n), str(n)) for n in range(first, last + 1, every)]
    room = 0.04 * max(1, last - first)
    return Axis(label, first - room, last + room, ticks)


def named(label: str, names: Sequence[str], high_first: bool = False) -> Axis:
    """An axis with a name at each of 0, 1, ...; `high_first`: the first name stands highest."""
    places = range(len(names))
    if high_first:
        ends = len(names) - 0.4, -0.6
        return Axis(label, *ends, [(float(n), names[n]) for n in places])
    return Axis(label, -0.3, len(names) - 0.7, [(float(n), names[n]) for n in places])


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))
