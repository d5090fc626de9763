"""How many rows that cannot be read are left out, what is said of them, and what stops."""

from __future__ import annotations

import pytest

from data.bad_rows import DROP, NONE, ranges
from data.prompts import load_prompts
from tests.helpers.commands import write_jsonl
from trainer.errors import UserError


def load(tmp_path, monkeypatch, bad, good=400, **options):
    """Bad rows first: the columns are known from the rest."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "x.jsonl", [*bad, *({"prompt": f"{i}"} for i in range(good))])
    return load_prompts("x.jsonl", count=999, **options)


@pytest.mark.parametrize(
    ("num_bad", "good", "stops"),
    [(3, 1, False), (4, 100, True), (4, 400, False), (5, 400, True)],
)
def test_one_percent_and_at_least_three_rows_may_be_left_out(
    tmp_path, monkeypatch, num_bad, good, stops
):
    bad = [{"prompt": 1}] * num_bad
    if stops:
        with pytest.raises(UserError) as caught:
            load(tmp_path, monkeypatch, bad, good)
        most = max(3, (num_bad + good) // 100)
        begins = f"{num_bad} of {num_bad + good} rows cannot be read, more than {most}: "
        assert caught.value.rule.startswith(begins)
    else:
        assert len(load(tmp_path, monkeypatch, bad, good)) == good


def test_what_stops_the_run_is_the_whole_table_and_the_way_on(tmp_path, monkeypatch):
    bad = [{"prompt": 1}, {"prompt": 2}, {"prompt": {}}, {"id": 7}, {"prompt": 3}]
    with pytest.raises(UserError) as caught:
        load(tmp_path, monkeypatch, bad, 10)
    error = caught.value
    assert (error.key, error.value) == ("data.prompts", "x.jsonl")
    assert error.rule.endswith(
        "4 x no text in the column 'prompt', first line 1 (int 1), all: line 1-3 5; "
        "1 x nothing in the column prompt, first line 4 (has id)"
    )
    assert "data.bad_rows=drop" in error.remedy
    left_out = {}
    assert len(load(tmp_path, monkeypatch, bad, 10, bad_rows=DROP, left_out=left_out)) == 10
    assert left_out["data.prompts"]["left_out"] == 5


def test_of_prompts_of_the_report_none_is_left_out(tmp_path, monkeypatch):
    with pytest.raises(UserError) as caught:
        load(tmp_path, monkeypatch, [{"prompt": 1}], key="eval.prompts", bad_rows=NONE)
    assert caught.value.key == "eval.prompts"


def test_a_source_without_a_row_that_can_be_read_says_why(tmp_path, monkeypatch):
    with pytest.raises(UserError) as caught:
        load(tmp_path, monkeypatch, [{"prompt": 1}], 0, bad_rows=DROP)
    assert "1 x no text in the column 'prompt'" in caught.value.rule
    (tmp_path / "x.jsonl").write_text("no JSON\nat all\n")
    with pytest.raises(UserError) as caught:
        load_prompts("x.jsonl", count=9)
    assert "2 x not JSON" in caught.value.rule


def test_places_are_listed_as_ranges():
    places = [f"a line {i}" for i in (1, 2, 3, 7)] + ["b row 8", "b row 9"]
    assert ranges(places) == "a line 1-3 7, b row 8-9"
