"""The separator of CSV files of prompts."""

from __future__ import annotations

import csv
import io

import pytest

from data.prompts import load_prompts
from data.tables import csv_separator
from trainer.errors import UserError

ROWS = [("prompt", "answer"), ("a, b; c | d\te?", "1,5"), ('say "x"', "no\nyes")]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("first", ["", "sep={}\n", '"sep={}"\r\n'], ids=["plain", "sep", "quoted"])
def test_the_separator_of_a_csv_file_is_found(tmp_path, separator, first):
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator).writerows(ROWS)
    path = tmp_path / "x.csv"
    path.write_text(first.format(separator) + file.getvalue())
    assert [(p.text, p.response) for p in load_prompts(str(path), count=9)] == ROWS[1:]


@pytest.mark.parametrize(
    ("text", "separator"),
    [("prompt\nyes; no; or | maybe\n", ","),  # of one column
     ("prompt;note, if any\na;b\nc, d;e\n", ";"),  # the header holds a comma
     ("prompt,answer\na;b,1\nc\n", ","),  # uneven rows
     ('prompt,answer\n"a"b;c,"d\n', ","),  # broken quotes
     ("prompt;answer\na\n", ";"), ("\n\nprompt|answer\na|b\n", "|"), ("", ",")],
)  # fmt: skip
def test_the_separator_splits_header_and_rows_alike(text, separator):
    assert csv_separator("x.csv", text) == (separator, text)


def test_a_csv_file_that_two_separators_split_alike_is_refused():
    with pytest.raises(UserError) as caught:
        csv_separator("x.csv", "prompt,note;more\na,b;c\n")
    assert caught.value.key == "prompts file x.csv"
    assert caught.value.rule == "header and rows can be split at commas and semicolons alike"


def test_a_row_with_too_many_fields_names_the_separator(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("prompt;answer\na;b;c\n")
    with pytest.raises(UserError, match="quote fields that hold semicolons"):
        load_prompts(str(path), count=9)
