"""A page as a list of blocks, written as Markdown or as one HTML file that needs no network.

Both forms come from the same blocks, so they cannot disagree. All text is escaped here and
nowhere else; only the SVG of a figure goes in as it is.
"""

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
class Figure:
    """Only in the HTML; the numbers behind it stand in the rows."""

    title: str
    svg: str
    caption: str


Block = Heading | Text | Bullets | Table | Figure

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


def to_html(title: str, blocks: list[Block]) -> str:
    body = "\n".join(_html_block(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


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


def _html_block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{html.escape(i)}</li>" for i in block.items) + "</ul>"
    if isinstance(block, Figure):
        return (
            f"<figure><h3>{html.escape(block.title)}</h3>{block.svg}"
            f"<figcaption>{html.escape(block.caption)}</figcaption></figure>"
        )
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.headers)
    rows = []
    for index, row in enumerate(block.rows):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        strong = ' class="strong"' if index in block.strong else ""
        rows.append(f"<tr{strong}>{cells}</tr>")
    kind = ' class="facts"' if len(block.headers) == 2 else ""
    return (
        f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


_CSS = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --line: #dfe3e7;
  --paper: #fdfdfc; --band: #f1f4f6; --accent: #2f6fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6e9; --soft: #9aa4ad; --line: #343b42;
  --paper: #16191c; --band: #20262b; --accent: #6ea8e0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .8rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
h1 + p { font-size: 1.08rem; }
ul { padding-left: 1.2rem; color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line); }
th, td { padding: .38rem .8rem; text-align: right; white-space: nowrap; }
td { border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: .4rem; }
.facts th, .facts td { text-align: left; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.facts td:first-child { white-space: nowrap; color: var(--soft); }
tr.strong td { background: var(--band); font-weight: 650; }
tr.strong td:first-child { box-shadow: inset 3px 0 var(--accent); padding-left: .7rem; }
figure { margin: 1rem 0 1.6rem; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .88rem; max-width: 46rem; }
"""
