"""A page as one HTML file: the blocks of `eval.report.render` in the template `page.html`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from eval.report.readings import Json
from eval.report.render import Block, number
from trainer.errors import HIDDEN

KINDS = {
    "accepted": "drafted and accepted",
    "correction": "correction: the target's token in place of a rejected draft",
    "bonus": "bonus: the target's token after a draft that was accepted whole",
    "prefill": "from the prefill, before the first round",
    "rejected": "drafted and rejected",
}
_ESTIMATE = re.compile(r"(\S+) (\[[^]]*\])")  # with its interval
LONGEST_HEAD = 90  # characters of a prompt that stand above it


def to_html(title: str, blocks: list[Block]) -> str:
    """The blocks as one HTML file."""
    return _template().render(title=title, blocks=blocks)


@cache
def _template() -> Template:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.globals |= {
        "kind_of": lambda block: type(block).__name__, "kinds": KINDS, "number": number,
        "drafted": drafted,
    }  # fmt: skip
    made.filters |= {one.__name__: one for one in (estimate, shown, beginning, in_a_line)}
    return made.get_template("page.html")


class Drafts(NamedTuple):
    """What a round drafted: in words, and rows of (text, kind)."""

    words: str
    rows: list[list[tuple[str, str]]]


def drafted(one: Json) -> Drafts:
    """The drafts of a round: a chain in one row, a tree with a row for each depth."""
    accepted, last = one["accepted"], one["last"]
    path, branches = one["tokens"][:accepted], one["rejected"]
    listed = sum(len(branch["tokens"]) for branch in branches)
    depths = sorted({branch["depth"] for branch in branches} | set(range(1, accepted + 1)))
    tree = len(branches) > 1 or any(branch["depth"] <= accepted for branch in branches)
    rows = []
    for depth in depths:
        row = [(path[depth - 1], "accepted")] if depth <= accepted else []
        here = (branch["tokens"] for branch in branches if branch["depth"] == depth)
        rows.append(row + [(text, "rejected") for tokens in here for text in tokens])
    rows.append([(one["tokens"][-1], last)] if last else [])
    if not tree:
        rows = [[chip for row in rows for chip in row]]
    rest = one["drafted"] - accepted - listed
    words = f"{one['drafted']} drafted, {accepted} accepted"
    words += f", {rest} more not on this path" if tree and rest > 0 else ""
    words += ", the answer ended here" if last is None else ""
    return Drafts(words, [row for row in rows if row])


def beginning(prompt: str) -> str:
    """The beginning of a prompt, in a line."""
    text = " ".join(prompt.split())
    return text if len(text) <= LONGEST_HEAD else text[: LONGEST_HEAD - 1].rstrip() + "…"


def in_a_line(text: str) -> str:
    """A token by itself, its white space to be seen."""
    text = "␣" * len(text) if not text.strip(" ") else text
    return text.replace("\n", "↵").replace("\t", "⇥")


def estimate(cell: str) -> Markup:
    """A cell, whose interval may stand on a line of its own."""
    found = _ESTIMATE.fullmatch(cell)
    return Markup("{} <small>{}</small>").format(*found.groups()) if found else escape(cell)


def shown(text: str) -> Markup:
    """Escaped text with its line ends marked; characters that hide or reorder it by number."""
    found = escape(HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
    return Markup(found.replace("\n", Markup('<i class="end"></i>\n')))
