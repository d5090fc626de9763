"""Rules that stand at the fields of settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from trainer.errors import UserError
from trainer.keys import Rule, key, rules_of
from trainer.sections import Section

EVEN = Rule("be even", lambda value: value % 2 == 0)


@dataclass
class Parent(Section):
    NAME: ClassVar[str] = "x"
    share: float = key(0.5, ge=0, le=1)
    rate: float = key(1.0, gt=0, lt=math.inf)


@dataclass
class Settings(Parent):
    share: float = 0.25  # the rule is the parent's
    open: float = key(0.5, gt=0, lt=1)
    count: int = key(2, EVEN, ge=0, le=8, note="0: off")
    maybe: int | None = key(None, ge=1)
    name: str = key("a", one_of=("a", "b"))
    either: str | None = key(None, one_of=(None, "c"))
    numbers: list[float] = key([1.0], Rule("name one", bool), ge=0)
    parsed: str = key("z", Rule("be a name that somebody else checks"))
    free: list[int] = field(default_factory=list)


@dataclass
class Named(Section):
    NAME: ClassVar[str] = "x"
    name: str | None = key(None, one_of=("seqkd", "imitkd"))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("share", -0.1, "lie in [0, 1]"),
        ("share", 1.1, "lie in [0, 1]"),
        ("rate", 0.0, "be > 0 and finite"),
        ("rate", math.inf, "be > 0 and finite"),
        ("rate", math.nan, "be > 0 and finite"),
        ("open", 1.0, "lie in (0, 1)"),
        ("open", 0.0, "lie in (0, 1)"),
        ("count", 3, "be even"),
        ("count", 10, "lie in 0..8 (0: off)"),
        ("maybe", 0, "be >= 1"),
        ("name", "c", "be one of a, b"),
        ("either", "a", "be one of null, c"),
        ("numbers", [], "name one"),
        ("numbers", [1.0, -1.0], "be >= 0"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_with_key_value_and_rule(name, value, rule):
    with pytest.raises(UserError) as caught:
        Settings(**{name: value})
    error = caught.value
    assert (error.key, error.value, error.rule) == (f"x.{name}", value, f"must {rule}")


def test_values_at_the_bounds_and_null_are_taken():
    Settings(share=0.0, count=0, maybe=None, either="c", numbers=[0.0], parsed="anything")
    assert Settings().numbers is not Settings().numbers
    assert Settings().share == 0.25
    assert rules_of(Settings)["share"] == rules_of(Parent)["share"]
    assert "free" not in rules_of(Settings)


def test_the_closest_of_the_names_is_named():
    with pytest.raises(UserError) as caught:
        Named(name="seqdk")
    assert caught.value.remedy == "did you mean 'seqkd'?"
    assert str(caught.value) == (
        "x.name must be one of seqkd, imitkd, got 'seqdk'; did you mean 'seqkd'?"
    )
    with pytest.raises(UserError) as caught:
        Named(name="z")
    assert caught.value.remedy == ""
