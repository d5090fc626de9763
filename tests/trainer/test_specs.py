"""Named specs: what they are read as, how they are written, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from trainer.errors import UserError, require
from trainer.specs import form, parse, spelled


@dataclass
class Plain:
    name: ClassVar[str] = "plain"


@dataclass
class Bush:
    name: ClassVar[str] = "bush"
    nodes: int
    depth: int
    share: float = 0.5
    file: str = field(default="", kw_only=True)
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "nodes", "be >= 1", self.nodes)


TABLE = {one.name: one for one in (Plain, Bush)}
FORM = r"bush:<nodes>:<depth>\[:<share>\]\[,file=<file>\]"


@pytest.mark.parametrize(
    ("text", "made", "canonical"),
    [
        ("plain", Plain(), "plain"),
        ("bush:6:2", Bush(6, 2), "bush:6:2"),
        ("bush:6:2:0.5", Bush(6, 2), "bush:6:2"),
        ("bush:6:2:1e-4", Bush(6, 2, 1e-4), "bush:6:2:0.0001"),
        ("bush:6:2:0.123456789", Bush(6, 2, 0.123456789), "bush:6:2:0.123456789"),
        ("bush:6,depth=2", Bush(6, 2), "bush:6:2"),
        ("bush,depth=2,nodes=6,share=1", Bush(6, 2, 1.0), "bush:6:2:1"),
        ("bush:6:2,file=a=b:c.json", Bush(6, 2, file="a=b:c.json"), "bush:6:2,file=a=b:c.json"),
    ],
)
def test_a_spec_is_read_and_written(text, made, canonical):
    found = parse("key", text, TABLE)
    assert found == made
    assert spelled(found) == canonical
    assert parse("key", canonical, TABLE) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", rf"key must be one of plain, {FORM}, got ''"),
        ("bsh:6:2", rf"key must be one of plain, {FORM}, got 'bsh:6:2'; did you mean 'bush'\?"),
        ("plain:3", "key must be plain, got 'plain:3'"),
        ("plain,depth=3", "key must be plain, got 'plain,depth=3'"),
        ("bush", rf"key must be {FORM}, got 'bush'"),
        ("bush:6", rf"key must be {FORM}, got 'bush:6'"),
        ("bush:6:2:1:4", rf"key must be {FORM}"),
        ("bush:6:2,nodes=6", rf"key must be {FORM}, each value once"),
        ("bush:6:2,share", rf"key must be {FORM}, each value once"),
        ("bush:6:2,made=3", rf"key must be {FORM}, got"),
        ("bush:6:x", "key='bush:6:x': depth must be a whole number of at most twelve digits"),
        ("bush:6:", "depth must be a whole number of at most twelve digits, got ''"),
        ("bush:6:2.0", "depth must be a whole number"),
        (f"bush:{'9' * 5000}:2", "nodes must be a whole number"),
        ("bush:6:2:high", "key='bush:6:2:high': share must be a number, got 'high'"),
        ("bush:6:2:nan", "share must be a number, got 'nan'"),
        ("bush:0:2", "key='bush:0:2': nodes must be >= 1, got 0"),
    ],
)
def test_what_no_spec_is_says_key_value_and_rule(text, says):
    with pytest.raises(UserError, match=says) as error:
        parse("key", text, TABLE)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_the_form_names_the_parameters():
    assert [form(Plain), form(Bush)] == ["plain", "bush:<nodes>:<depth>[:<share>][,file=<file>]"]
