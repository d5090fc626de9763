"""The line of a user's mistake is made of its fields."""

from __future__ import annotations

import pickle

import pytest

from trainer.errors import UserError, require

CASES = [
    ({"rule": "two keys disagree"}, "two keys disagree"),
    ({"rule": "must be >= 1", "key": "eval.K", "value": 0}, "eval.K must be >= 1, got 0"),
    ({"rule": "must be set", "key": "run.dir", "value": None}, "run.dir must be set, got None"),
    ({"rule": "must be alone", "key": "config", "remedy": "drop recipe"},
     "config must be alone; drop recipe"),
    ({"rule": "lacks a layer", "key": "model.target", "value": "runs/x", "remedy": "save it again"},
     "model.target=runs/x: lacks a layer; save it again"),
    ({"rule": "is empty", "key": "data.prompts"}, "data.prompts: is empty"),
    ({"rule": "do not differ", "key": "script.ids", "value": [1, 2]},
     "script.ids=[1, 2]: do not differ"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "line"), CASES)
def test_a_line_shows_the_fields_that_are_given(fields, line):
    error = UserError(**fields)
    assert str(error) == line
    sent = pickle.loads(pickle.dumps(error))  # between processes
    assert str(sent) == line
    assert vars(sent) == vars(error)


def test_a_check_that_fails_names_key_value_and_rule():
    require(True, "eval.K", "be >= 1", 4)
    with pytest.raises(UserError) as caught:
        require(False, "eval.K", "be >= 1", 0)
    assert (caught.value.key, caught.value.value, caught.value.rule) == (
        "eval.K",
        0,
        "must be >= 1",
    )
