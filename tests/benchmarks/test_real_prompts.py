"""Prompts of the chat model: which are taken, and what is refused."""

from __future__ import annotations

import json

import pytest

from benchmarks.real_prompts import main

pytestmark = pytest.mark.tools


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["count=3"], "name the folder of the data: python -m benchmarks.real_prompts <folder>"),
        (["x", "y"], "name the folder of the data: python -m benchmarks.real_prompts <folder>"),
        (["x"], "x/gsm8k/test_first_half.jsonl is missing: name the folder that holds it"),
        (["x", "cuont=60"], "unknown key 'cuont'; did you mean 'count'?"),
        (["x", "use=foo"], "use must be one of evaluation, dialogue, training, got 'foo'"),
        (["x", "count=abc"], "count must be a whole number above 0, got 'abc'"),
        (["x", "out="], "out must have a value, got None"),
    ],
)
def test_a_wrong_word_gets_one_line(words, complaint, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


def test_at_most_count_prompts_are_taken_of_a_source(tmp_path):
    (tmp_path / "arena_hard").mkdir()
    rows = "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(9))
    (tmp_path / "arena_hard" / "question_dev.jsonl").write_text(rows)
    out = tmp_path / "out.jsonl"
    assert main([str(tmp_path), "use=dialogue", "count=4", f"out={out}"]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["messages"][0]["content"] for row in found}) == len(found) == 4
    assert {row["domain"] for row in found} == {"dialogue"}
