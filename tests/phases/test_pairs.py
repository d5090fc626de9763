"""Comparisons of two measurements."""

from __future__ import annotations

import pytest

from eval.config import EvalConfig
from eval.measure import Measurement
from eval.metrics import PromptCounters
from eval.row import row_with
from phases.pairs import compare
from trainer.errors import UserError


def measurement(role, prompts, **row):
    counters = [
        PromptCounters(f"p{i}", "d", 2, rounds=4, emitted=4 + i + (role == "after"), reach=[3, 1])
        for i in prompts
    ]
    return Measurement(row_with(role=role, drafter=role, **row), counters)


def test_a_target_that_was_trained_is_compared_on_the_turns_that_both_have():
    """Each writes answers of its own, after which a later turn may be too long for one of them."""
    before, config = measurement("before", range(6)), EvalConfig(bootstrap_draws=20)
    after = measurement("after", [0, 1, 2, 3, 7], target_changed=True)
    rows = compare("after", {"before": before, "after": after}, 0.0, config)
    (found,) = [row for row in rows if row["metric"] == "tokens_per_round"]
    assert found["num_prompts"] == 4
    assert found["diff"] == pytest.approx(4 / 16)


def test_one_target_has_the_same_prompts_on_both_sides():
    measured = {"before": measurement("before", range(6)), "after": measurement("after", range(5))}
    with pytest.raises(UserError, match="needs the same prompts on both sides, 1 differ"):
        compare("after", measured, 0.0, EvalConfig(bootstrap_draws=20))
