"""The embedded toy and its card are those of the script."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.maintain.make_toy import CONTEXT, TARGET_STEPS, VOCAB_SIZE
from scripts.maintain.toy_card import CARD

TOY = Path(__file__).resolve().parents[2] / "assets" / "toy"


def test_the_target_has_as_many_steps_as_the_script_trains_by_default():
    assert json.loads((TOY / "target" / "training.json").read_text())["steps"] == TARGET_STEPS


def test_the_card_is_what_the_script_writes():
    blank = dict.fromkeys(("table", "ends", "samples"), "")
    text = CARD.format(vocabulary=VOCAB_SIZE, context=CONTEXT, count=60, limit=192, **blank)
    lines = (TOY / "README.md").read_text().splitlines()
    assert [line for line in text.splitlines() if line not in lines] == []
    assert "at a constant rate, until its loss falls" in text
