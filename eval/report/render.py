"""A page as a list of blocks, and its Markdown, whose text is escaped here.

`eval.report.web` makes HTML of the same blocks, so that the two cannot disagree.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eval.report.chart import Plot
from eval.report.readings import Json


@dataclass
class Heading:
    """A heading of a level from 1."""

    text: str
    level: int = 2


@dataclass
class Text:
    """A paragraph."""

    text: str


@dataclass
class Bullets:
    """A list of sentences."""

    items: list[str]


@dataclass
class Table:
    """A table of text cells."""

    headers: list[str]
    rows: list[list[str]]
    strong: set[int] = field(default_factory=set)  # rows to set in bold


@dataclass
class Figure:
    """A plot with its caption; the rows hold its numbers."""

    title: str
    plot: Plot
    caption: str


@dataclass
class Estimate:
    """A line of a tile: a value with its 95 % interval, drawn and written out."""

    name: str
    value: float
    interval: list[float] | None
    colour: str  # a variable of page.css


@dataclass
class Tile:
    """A number at the top of the page.

    `low` and `high`: the ends of the axis of the estimates; `notes`: lines below them.
    """

    title: str
    shape: str  # of the draft
    value: str
    interval: str
    low: float
    high: float
    estimates: list[Estimate]
    notes: list[str]

    def place(self, value: float) -> float:
        """The place of a value on the axis, in percent."""
        span = self.high - self.low
        return 100 * min(1.0, max(0.0, (value - self.low) / span)) if span > 0 else 0.0


@dataclass
class Tiles:
    """Tiles side by side, only in the HTML."""

    tiles: list[Tile]


@dataclass
class Figures:
    """Figures side by side where there is room, only in the HTML."""

    figures: list[Figure]


@dataclass
class Fold:
    """Blocks that a reader unfolds, only in the HTML."""

    title: str
    blocks: list[Block]


@dataclass
class ReadingBlock:
    """Prompts and their answers (`eval.report.readings`), only in the HTML."""

    contents: list[Json]


Block = Heading | Text | Bullets | Table | Figures | Tiles | Fold | ReadingBlock

NONE = "–"


def number(
    value: float | Sequence[float | None] | None, digits: int = 2, sign: bool = False
) -> str:
    """A number, a list of them (one per depth), or a dash for null."""
    if value is None:
        return NONE
    if isinstance(value, Sequence):
        return ", ".join(number(v, digits, sign) for v in value)
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """`97.12 %`, or a dash for null."""
    return NONE if share is None else f"{100 * share:.4g} %"


def with_interval(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    """`2.91 [2.80, 3.02]`, without brackets where there is no interval."""
    text = number(value, digits)
    return f"{text} [{number(interval, digits)}]" if interval and None not in interval else text


def to_markdown(blocks: list[Block]) -> str:
    """The blocks as Markdown; those that exist only in the HTML are left out."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {escape_markdown(block.text)}")
        elif isinstance(block, Text):
            parts.append(escape_markdown(block.text))
        elif isinstance(block, Bullets):
            parts.append("\n".join(f"- {escape_markdown(item)}" for item in block.items))
        elif isinstance(block, Table):
            lines = [_markdown_row(block.headers)]
            side = " --- |" if len(block.headers) == 2 else " ---: |"
            lines.append("| --- |" + side * (len(block.headers) - 1))
            for index, row in enumerate(block.rows):
                cells = [escape_markdown(cell) for cell in row]
                if index in block.strong:
                    cells[0] = f"**{cells[0]}**"
                lines.append("| " + " | ".join(cells) + " |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def flatten(nested: Mapping[str, object], prefix: str = "") -> list[list[str]]:
    """Rows (`key.subkey`, value) of a nested dict, for a table of facts."""
    rows = []
    for key, value in nested.items():
        if isinstance(value, dict):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append([f"{prefix}{key}", NONE if value is None else text])
    return rows


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"


def escape_markdown(text: str) -> str:
    """Escape text so that GitHub's Markdown shows it unchanged, on one line.

    No link, image, HTML or block comes of it, whoever chose the words. A mark without effect in its
    place, as in `[2.80, 3.02]` or `max_new_tokens`, stays readable.
    """
    text = " ".join(text.split())
    text = html.escape("".join(c for c in text if c.isprintable()), quote=False)
    text = _LIST_NUMBER.sub(r"\1\\\2", _MARKS.sub(r"\\\g<0>", text))
    return _MENTION.sub("@\N{WORD JOINER}", text)


_MARKS = re.compile(
    r"[\\`*|$]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis never begins or ends inside a word
    r"|(?<=\S)~|~(?=~)"  # struck out; a fence of code
    r"|!(?=\[)|\](?=[(\[:])"  # ![image](address), [text](address), [text][name], [name]: address
    r"|:(?=//)|(?<=www)\."  # bare addresses
    r"|^(?:#(?=#{0,5}(?:\s|$))|[-+](?=\s|$)|[-=](?=[-=\s]*$))",  # a heading, a list, a rule
    re.IGNORECASE,
)
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_MENTION = re.compile(r"(?<!\w)@(?=\w)|@(?=[\w-]+\.\w)")  # is found even if escaped
