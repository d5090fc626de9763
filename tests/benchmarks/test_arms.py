"""The arms of a benchmark: what is saved, what a second start measures, and that both benchmarks of
a GPU run small."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from benchmarks import gpu, gpu_training
from benchmarks.arms import chat_lengths, run_arms, sizes_of
from benchmarks.gpu_training import Arm

pytestmark = pytest.mark.tools


def results(path):
    return json.loads(path.read_text())["results"]


def test_a_second_start_measures_the_arms_that_have_no_result(tmp_path):
    path, measured = tmp_path / "results.json", []

    def arm(name, error=None):
        def measure():
            measured.append(name)
            if error is not None:
                raise error
            assert not path.exists() or name not in results(path)
            return {"value": len(measured)}

        return measure

    full = torch.OutOfMemoryError("no memory\nat all")
    arms = {"a": arm("a"), "b": arm("b", ValueError("odd")), "c": arm("c", full), "d": arm("d")}
    with pytest.raises(SystemExit) as end:
        run_arms(arms, path, 60, goal=0.5)
    assert end.value.code == 1
    assert measured == ["a", "b", "c", "d"]
    found = results(path)
    assert found["b"]["failed"] == "ValueError: odd"
    assert found["c"]["out of memory"] == "no memory"
    assert found["a"]["value"] == 1

    measured.clear()
    run_arms({**arms, "b": lambda: measured.append("b") or {"value": 5}}, path, 60)
    assert measured == ["b"]
    assert results(path) | {"b": found["b"]} == found
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "machine": "another one"}))
    run_arms({"a": lambda: {"value": 0}}, path, 60)
    assert list(results(path)) == ["a"]


def test_no_arm_begins_after_the_budget(tmp_path, capsys):
    assert sizes_of("benchmarks.gpu", ["tiny", "budget=1.5"]) == ("tiny", 1.5)
    run_arms({"a": dict, "b": dict}, tmp_path / "results.json", 0)
    assert not list(tmp_path.iterdir())
    assert "2 arms are left" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["tinny"], ["tiny", "out=x"], ["budget=3"]])
def test_arguments_that_cannot_be_used_are_refused(words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: "):
        sizes_of("benchmarks.gpu", words)


def test_texts_of_a_chat_are_ragged_and_a_quarter_of_the_longest():
    lengths = chat_lengths(1000, 2048)
    assert lengths == chat_lengths(1000, 2048)
    assert len(set(lengths)) > 300
    assert statistics.mean(lengths) / 2048 == pytest.approx(0.25, abs=0.03)
    assert 8 <= min(lengths) < max(lengths) <= 2048


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [gpu, gpu_training])
def test_a_benchmark_goes_on_with_the_arm_that_is_missing(benchmark, tmp_path, monkeypatch):
    if benchmark is gpu_training:
        eager = Arm("distillspec", 64, settings={"trainer.compile": "null"})
        few = [gpu_training.arms("tiny")[0], eager]
        monkeypatch.setattr(gpu_training, "arms", lambda size: few)
    path = tmp_path / "results.json"
    benchmark.main(["tiny"], path)
    before = json.loads(path.read_text())
    missing = list(before["results"])[-1]
    former = before["results"].pop(missing)
    path.write_text(json.dumps(before))
    benchmark.main(["tiny"], path)
    after = results(path)
    assert {**after, missing: 0} == {**before["results"], missing: 0}
    assert after[missing].keys() == former.keys()
