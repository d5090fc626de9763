"""A page as a list of blocks, and its Markdown, whose text is escaped here. `eval.report.web` makes
HTML of the same blocks, so that the two cannot disagree."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Heading:
    text: str
    level: int = 2


@dataclass
class Text:
    text: str


@dataclass
class Bullets:
    items: list[str]


@dataclass
class Table:
    headers: list[str]
    rows: list[list[str]]
    strong: set[int] = field(default_factory=set)  # rows to set in bold


@dataclass
class Key:
    """A line of a plot: its name, the variable of its colour in page.css, and what it looks like:
    line, dashed, dotted, dot, square or diamond."""

    label: str
    colour: str
    mark: str


@dataclass
class Plot:
    svg: str
    keys: list[Key]


@dataclass
class Figure:
    """Only in the HTML; the numbers behind it stand in the rows."""

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
    """A figure that the page opens with. `low` and `high`: the ends of the axis that the estimates
    are drawn on; `notes`: lines below them."""

    title: str
    shape: str  # of the draft
    value: str
    interval: str
    low: float
    high: float
    estimates: list[Estimate]
    notes: list[str]


@dataclass
class Tiles:
    """Only in the HTML, side by side."""

    tiles: list[Tile]


@dataclass
class Figures:
    """Only in the HTML, side by side where there is room."""

    figures: list[Figure]


@dataclass
class Fold:
    """Only in the HTML: what a reader opens."""

    title: str
    blocks: list[Block]


@dataclass
class Readings:
    """Only in the HTML: prompts and their answers (`eval.report.readings`)."""

    contents: list[dict[str, Any]]


Block = Heading | Text | Bullets | Table | Figure | Figures | Tiles | Fold | Readings

NONE = "–"


def number(value: Any, digits: int = 2, sign: bool = False) -> str:
    """A number, a list of them (one per depth), or a dash for null."""
    if value is None:
        return NONE
    if isinstance(value, list):
        return ", ".join(number(v, digits, sign) for v in value)
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def with_interval(row: dict[str, Any], metric: str, digits: int = 2) -> str:
    """`2.91 [2.80, 3.02]`, without brackets where there is no interval."""
    text, interval = number(row.get(metric), digits), row.get(f"{metric}_ci95")
    return f"{text} [{number(interval, digits)}]" if interval and None not in interval else text


def to_markdown(blocks: list[Block]) -> str:
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


def flatten(nested: dict[str, Any], prefix: str = "") -> list[list[str]]:
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
    """Text that Markdown, with GitHub's tables and links of bare addresses, shows as it stands and
    on one line: no link, image, HTML or block comes of it, whoever chose the words. A mark that
    does nothing where it stands, as in `[2.80, 3.02]` or `max_new_tokens`, is left readable."""
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
