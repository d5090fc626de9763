"""What is said about each key is read from the code that defines it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

import train
from phases import help as helping
from recipes import base
from scripts.maintain.pages import PAGES
from trainer.keys import Rule, key


@dataclass
class Parent:
    above: int = key(1, ge=1)
    inherited: float = key(0.5, ge=0, le=1)  # of the parent


@dataclass
class Settings(Parent):
    # two lines above a field
    # are one sentence
    above: int = key(2, ge=1, lt=100)
    behind: str = key("a", one_of=("a", "b"))  # a remark with a # in it
    inherited: float = 0.25
    plain: list[str] = field(default_factory=list)
    several: dict[str, float] = field(
        default_factory=lambda: {"a": 1.0}  # inside of the field
    )
    maybe: int | None = key(None, gt=0)  # of its own


def test_a_meaning_is_the_comment_above_or_behind_a_field_or_of_the_inherited_one():
    assert helping.comments(Settings) == {
        "above": "two lines above a field are one sentence",
        "behind": "a remark with a # in it",
        "inherited": "of the parent",
        "several": "inside of the field",
        "maybe": "of its own",
    }


def test_what_is_allowed_is_what_the_checks_say():
    keys = {one.name: one for one in helping.keys_of("x", Settings())}
    assert keys["x.above"].allowed == "whole number; in [1, 100)"
    assert keys["x.behind"].allowed == "a, b"
    assert keys["x.inherited"].allowed == "number; in [0, 1]"
    assert keys["x.plain"].allowed == "list of text"
    assert keys["x.several"].allowed == "mapping of numbers"
    assert keys["x.maybe"].allowed == "whole number; > 0; or null"


def test_options_that_all_choices_share_are_said_once():
    known = "a[,t=<t>], b:<n>[,t=<t>][,m=<m>], c[:<k>][,t=<t>]"

    @dataclass
    class Named:
        spec: str = key("b", Rule(f"be one of {known}"))

    (found,) = helping.keys_of("x", Named())
    assert found.allowed == "a, b:<n>[,m=<m>], c[:<k>]; each with [,t=<t>]"


def test_a_default_is_written_as_on_the_command_line():
    keys = {one.name: one.default for one in helping.keys_of("x", Settings(behind="b"))}
    assert keys == {
        "x.above": "2", "x.behind": "b", "x.inherited": "0.25", "x.plain": "[]",
        "x.several": '{"a": 1.0}', "x.maybe": "null",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_stored_page_is_that_of_the_code_and_every_key_has_a_meaning(path):
    page = PAGES[path]()
    without = [line for line in page.splitlines() if line.endswith("|  |")]
    assert without == [], "put a comment at these fields"
    assert path.read_text() == page, "stale: run python -m scripts.maintain.pages"


@pytest.mark.slow
def test_help_shows_the_values_of_the_recipe_and_of_the_command_line():
    config = helping.composed("eagle3")
    assert config.trainer.adam_beta2 == 0.95  # of its YAML
    config.trainer = dataclasses.replace(config.trainer, lr=0.25)
    text = helping.recipe_help(config)
    assert "\nmethod.steps=5\n" in text
    assert "\ntrainer.adam_beta2=0.95\n" in text
    assert "\ntrainer.lr=0.25\n" in text
    assert max(map(len, text.splitlines()[1:])) <= 100


@pytest.mark.slow
def test_help_loads_no_model_and_knows_its_recipes(capsys):
    words = ["help=true", "model.target=nowhere"]
    assert train.main(["recipe=medusa", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recipe=medusa: Medusa-1")
    assert "method.num_heads=4" in out
    assert "model.target=nowhere" in out
    assert train.main(["recipe=medusas", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"error: unknown recipe 'medusas'; available: {', '.join(base.names())}; did you mean "
        "'medusa'?"
    ]
