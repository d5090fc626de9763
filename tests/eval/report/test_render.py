"""Hostile names come out of Markdown as the text they are, by a real parser."""

from __future__ import annotations

import random

import pytest
import yaml
from markdown_it import MarkdownIt

from drafters.export.card import Serving, model_card
from eval.report.render import Bullets, Heading, Table, Text, escape_markdown, to_markdown
from eval.report.web import to_html
from eval.row import row_with

HOSTILE = [
    "[x](javascript:alert(1))",
    "![x](http://evil.example/pixel.png)",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<http://evil.example>",
    "[x]: http://evil.example",
    "[x][y] [x] [[x]](http://e) ![[x]][y]",
    "a | b\\| c",
    "`code` ``` ~~~ ~~gone~~",
    "# heading", "- item", "+ item", "* item", "1. item", "2) item", "---", "===", "> quote",
    "line\n# heading\n\n    code\n[y]: http://evil.example",
    "__bold__ *bold* _x_ a_b_c **",
    "\\[x](http://evil.example) \\\\[x](http://evil.example)",
    "&#91;x](http://e) &lt;b&gt; <!-- x -->",
    "$\\href{http://evil.example}{x}$",
    "a\x00b\u202ec\ud800",
]  # fmt: skip
PIECES = [
    "[", "]", "(", ")", "!", "<", ">", "`", "```", "*", "**", "_", "__", "~~", "~~~", "|", "\\",
    "#", "-", "+", "=", "1.", "2)", "a", "x y", " ", "\n", "\n\n", "http://e.x", "www.e.x", "@a",
    "&lt;", "&#91;", "$", ":", "---", "<b", "-->", "\t", "    ", "^", "[x]: u", "[^1]", '"',
]  # fmt: skip
PLAIN = {"inline", "text"}
PARSER = MarkdownIt("gfm-like", {"html": True, "linkify": False})


def parsed(markdown):
    """(kinds of all nodes without their _open and _close, their text)."""
    nodes = [node for top in PARSER.parse(markdown) for node in [top, *(top.children or [])]]
    kinds = {node.type.removesuffix("_open").removesuffix("_close") for node in nodes}
    inline = "".join(node.content for node in nodes if node.type not in ("inline", "html_block"))
    return kinds, inline


def written(name):
    """What is to be seen of a name: one line without what cannot be printed."""
    return "".join(c for c in " ".join(name.split()) if c.isprintable())


def check(name):
    blocks = {"heading": Heading(name), "paragraph": Text(name)}
    for kind, block in blocks.items():
        # a name that ends a definition, or begins one, must not make a link of its neighbours
        markdown = to_markdown([Text("[x] and [x][y]"), block, Text("[x] and [x][y]")])
        assert parsed(markdown)[0] <= {*PLAIN, "paragraph", kind}, markdown
    assert parsed(to_markdown([Text(name)]))[1].replace("\u2060", "") == written(name)
    assert parsed(to_markdown([Bullets([name, name])]))[0] <= {
        *PLAIN, "paragraph", "bullet_list", "list_item"}  # fmt: skip
    table = to_markdown([Table(["h", name], [[name, "b"], [name, name]], strong={0})])
    parts = {"table", "thead", "tbody", "tr", "th", "td"}
    assert parsed(table)[0] <= {*PLAIN, "strong", *parts}, table
    assert sum(node.type == "td_open" for node in PARSER.parse(table)) == 4, table


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_text(name):
    check(name)
    assert "<script" not in to_html(name, [Heading(name), Text(name), Table([name], [[name]])])


def test_a_name_of_any_marks_is_only_text():
    draw = random.Random(0)
    for _ in range(100):
        check("x" + "".join(draw.choices(PIECES, k=draw.randint(1, 9))))
        check("".join(draw.choices(PIECES, k=draw.randint(1, 9))) + "x")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("2.91 [2.80, 3.02]", "2.91 [2.80, 3.02]"),
        ("data.max_new_tokens=96, -0.05 (K 4)", "data.max_new_tokens=96, -0.05 (K 4)"),
        ("~/models/x and ~/y", "~/models/x and ~/y"),
        ("see http://e.x, www.e.x", "see http\\://e.x, www\\.e.x"),  # GitHub links bare addresses
        ("@team, me@e.x, model@e4d0", "@\u2060team, me@\u2060e.x, model@e4d0"),
    ],
)
def test_what_does_nothing_stays_readable(text, escaped):
    assert escape_markdown(text) == escaped


@pytest.mark.parametrize("name", [*HOSTILE, "``` \n```\n# heading", "'; rm -rf x; '", '"+x+"'])
def test_a_hostile_name_is_only_text_in_a_model_card(name):
    row = row_with(drafter="after", measured_by="offline", tokens_per_round=2.0, alpha=0.5,
                   temperature=1.0, K=4, num_prompts=9, prompts={"name": name})  # fmt: skip
    report = {"run": {"command": name, "commit": name}, "results": [row]}

    def card(name):
        whole = model_card(report, Serving(name, "draft_model", 4), recipe=name)
        front, end, body = whole.removeprefix("---\n").partition("\n---\n")
        assert end
        return front, body

    kinds = {"heading", "paragraph", "bullet_list", "list_item", "code_inline", "fence",
             "softbreak", *PLAIN}  # fmt: skip
    front, body = card(name)
    (result,) = yaml.safe_load(front)["model-index"][0]["results"]
    assert result["dataset"]["name"] == result["dataset"]["type"] == " ".join(name.split())
    plain = card("name")[1]
    assert parsed(body)[0] <= kinds
    tokens, usual = PARSER.parse(body), PARSER.parse(plain)
    assert [token.type for token in tokens] == [token.type for token in usual]
