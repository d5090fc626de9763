"""The end of a stage, after which the run goes on with the next one or stops."""

from __future__ import annotations

import os
import signal

import pytest

from drafters.base import weights_hash
from tests.recipes.test_train_phase import run_of, staged, trained
from trainer.interrupt import stop_requested


@pytest.mark.slow
def test_a_signal_in_the_last_step_of_a_stage_stops_the_run_behind_it(
    tmp_path, tiny_target, monkeypatch
):
    """The finished stage is restored by the next call, which does not see the old request."""
    target = tiny_target("llama")
    recipe, base = staged(target)
    expected, _ = trained(run_of(tmp_path / "straight", target), recipe, base)
    recipe, base = staged(target)
    run, loss = run_of(tmp_path, target), recipe.objective.loss

    def signalling(drafter, batch, outputs, step, denominators=None):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(drafter, batch, outputs, step, denominators)

    with monkeypatch.context() as patched:
        patched.setattr(recipe.objective, "loss", signalling)
        with pytest.raises(SystemExit) as stopped:
            trained(run, recipe, base)
    assert stopped.value.code == 75
    assert stop_requested()
    assert [path.name for path in (run.folder / "stages").iterdir()] == ["0-first"]
    assert (run.folder / "stages/0-first/finished.json").exists()
    rows, results = trained(run, recipe, base)
    assert list(results) == ["first", "second", "third"]
    assert weights_hash(rows["after"]) == weights_hash(expected["after"])
