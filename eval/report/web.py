"""A page as one HTML file: no network, no script, light and dark, from 390 px of width up.

All text is escaped here and nowhere else; only the SVG of a plot goes in as it is. What a round of
decoding drafted is shown while the pointer is over it or, on a touch screen, once it is tapped: an
element that takes the focus needs no script.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from eval.report.readings import Json
from eval.report.render import (
    Block,
    Bullets,
    Estimate,
    Figure,
    Figures,
    Fold,
    Heading,
    ReadingBlock,
    Table,
    Text,
    Tile,
    Tiles,
    number,
)
from trainer.errors import HIDDEN

KINDS = {
    "accepted": "drafted and accepted",
    "correction": "correction: the target's token in place of a rejected draft",
    "bonus": "bonus: the target's token after a draft that was accepted whole",
    "prefill": "from the prefill, before the first round",
    "rejected": "drafted and rejected",
}


def to_html(title: str, blocks: list[Block]) -> str:
    """The blocks as one HTML file."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    body = "\n".join(_block(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figure):
        return _figure(block)
    if isinstance(block, Figures):
        return f'<div class="figures">{"".join(map(_figure, block.figures))}</div>'
    if isinstance(block, Tiles):
        return f'<div class="tiles">{"".join(map(_tile, block.tiles))}</div>'
    if isinstance(block, Fold):
        inner = "\n".join(_block(one) for one in block.blocks)
        return f"<details><summary>{escape(block.title)}</summary>\n{inner}\n</details>"
    return _readings(block)


def _table(block: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in block.headers)
    rows = []
    for index, row in enumerate(block.rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        strong = ' class="strong"' if index in block.strong else ""
        rows.append(f"<tr{strong}>{cells}</tr>")
    kind = ' class="facts"' if len(block.headers) == 2 else ""
    return (
        f'<div class="wide" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(block: Figure) -> str:
    keys = "".join(
        f'<li><i class="{key.mark}" style="color:var({key.colour})"></i>{escape(key.label)}</li>'
        for key in block.plot.keys
    )
    return (
        f"<figure><h4>{escape(block.title)}</h4>{block.plot.svg}"
        f'<ul class="keys">{keys}</ul><figcaption>{escape(block.caption)}</figcaption></figure>'
    )


# --- tiles ---------------------------------------------------------------------------------------


def _tile(tile: Tile) -> str:
    lines = "".join(_estimate(one, tile) for one in tile.estimates)
    lines = f'<div class="strip">{lines}</div>' if lines else ""
    notes = "".join(f"<li>{escape(text)}</li>" for text in tile.notes)
    interval = f" <small>{escape(tile.interval)}</small>" if tile.interval else ""
    return (
        f'<section class="tile"><h4>{escape(tile.title)}</h4>'
        f'<p class="shape">{escape(tile.shape)}</p>'
        f'<p class="big">{escape(tile.value)}{interval}</p>'
        f"{lines}<ul>{notes}</ul></section>"
    )


def _estimate(one: Estimate, tile: Tile) -> str:
    """A name, a dot with its interval on the tile's axis, and the number."""

    def place(value: float) -> float:
        span = tile.high - tile.low
        return 100 * min(1.0, max(0.0, (value - tile.low) / span)) if span > 0 else 0.0

    bar = ""
    if one.interval:
        left, right = map(place, one.interval)
        bar = f'<b style="left:{left:.1f}%;width:{max(0.0, right - left):.1f}%"></b>'
    dot = f'<i style="left:{place(one.value):.1f}%"></i>'
    return (
        f'<span class="name">{escape(one.name)}</span>'
        f'<span class="track" style="color:var({one.colour})">{bar}{dot}</span>'
        f'<span class="value">{number(one.value)}</span>'
    )


# --- answers -------------------------------------------------------------------------------------


def _readings(block: ReadingBlock) -> str:
    legend = "".join(
        f'<li><span class="t {kind}">token</span> {escape(words)}</li>'
        for kind, words in KINDS.items()
    )
    prompts = (_reading(one, index == 0) for index, one in enumerate(block.contents))
    return f'<ul class="legend">{legend}</ul>{"".join(prompts)}'


def _reading(content: Json, is_open: bool) -> str:
    columns = "".join(map(_answer, content["answers"]))
    head = " ".join(content["prompt"].split())
    head = head if len(head) <= 90 else head[:89].rstrip() + "…"
    return (
        f'<details class="reading"{" open" * is_open}>'
        f'<summary><span class="domain">{_text(content["domain"])}</span> {_text(head)}</summary>'
        f'<div class="prompt">{_text(content["prompt"])}</div>'
        f'<div class="answers">{columns}</div></details>'
    )


def _answer(answer: Json) -> str:
    rounds, tokens = answer["num_rounds"], answer["num_tokens"]
    per_round = f", {(tokens - 1) / rounds:.2f} tokens per round" if rounds else ""
    shown = 1 + sum(len(one["tokens"]) for one in answer["rounds"])
    rest = f' <span class="rest">… {tokens - shown} more tokens</span>' if shown < tokens else ""
    text = _token(answer["first"], "prefill")
    text += "".join(_round(one, i) for i, one in enumerate(answer["rounds"], start=1))
    return (
        f"<article><h4>Temperature {answer['temperature']:g}, {escape(answer['draft'])}</h4>"
        f"<p>{tokens} tokens in {rounds} rounds{per_round}</p>"
        f'<div class="answer">{text}{rest}</div></article>'
    )


def _round(one: Json, turn: int) -> str:
    accepted, last = one["accepted"], one["last"]
    kinds = ["accepted"] * accepted + ([] if last is None else [last])
    tokens = "".join(map(_token, one["tokens"], kinds))
    return f'<span class="round" tabindex="0">{tokens}{_drafted(one, turn)}</span>'


def _drafted(one: Json, turn: int) -> str:
    """The drafts of a round: a chain in one line, a tree with a line for each depth."""
    accepted, last = one["accepted"], one["last"]
    path, branches = one["tokens"][:accepted], one["rejected"]
    listed = sum(len(branch["tokens"]) for branch in branches)
    depths = sorted({branch["depth"] for branch in branches} | set(range(1, accepted + 1)))
    tree = len(branches) > 1 or any(branch["depth"] <= accepted for branch in branches)
    lines = list[str]()
    for depth in depths:
        line = _chip(path[depth - 1], "accepted") if depth <= accepted else ""
        here = [
            text for branch in branches if branch["depth"] == depth for text in branch["tokens"]
        ]
        lines.append(line + "".join(_chip(text, "rejected") for text in here))
    end = _chip(one["tokens"][-1], last) if last else ""
    if tree:
        lines.append(end)
        rows = "".join(f"<span>{line}</span>" for line in lines if line)
    else:
        rows = f"<span>{''.join(lines)}{end}</span>"
    rest = one["drafted"] - accepted - listed
    more = f", {rest} more not on this path" if tree and rest > 0 else ""
    ended = ", the answer ended here" if last is None else ""
    return (
        f'<span class="drafts" role="tooltip"><em>Round {turn}: {one["drafted"]} drafted, '
        f"{accepted} accepted{more}{ended}</em>{rows}</span>"
    )


def _token(text: str, kind: str) -> str:
    if not text:
        return f'<span class="t {kind} part" title="part of the next character"></span>'
    return f'<span class="t {kind}">{_text(text)}</span>'


def _chip(text: str, kind: str) -> str:
    """A token by itself, on one line."""
    if not text:
        return f'<span class="t {kind} part" title="part of a character"></span>'
    text = "␣" * len(text) if not text.strip(" ") else text
    return f'<span class="t {kind}">{_text(text.replace(chr(10), "↵").replace(chr(9), "⇥"))}</span>'


def _text(text: str) -> str:
    """Escaped text with its line ends marked; characters that hide or reorder it by number."""
    text = escape(HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
    return text.replace("\n", '<i class="end"></i>\n')
