"""Which columns of a table make a prompt, what is said of the others, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data.prompts import load_prompts
from tests.helpers.commands import write_jsonl
from trainer.errors import UserError

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Why?"},
]
SHOWN = [("user", "Hi"), ("assistant", "Ho"), ("user", "Why?")]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(rows, **options):
    write_jsonl(Path("x.jsonl"), rows)
    return load_prompts("x.jsonl", count=99, **options)


def shown(prompt):
    return [(message["role"], message["content"]) for message in prompt.messages]


def refused(rows, **options):
    with pytest.raises(UserError) as caught:
        load(rows, **options)
    return caught.value


@pytest.mark.parametrize(
    "value",
    [
        json.dumps(CHAT),
        json.dumps({"messages": CHAT}),
        json.dumps({"conversations": [{"from": m["role"], "value": m["content"]} for m in CHAT]}),
        repr(CHAT),  # as pandas writes a column of lists
        {"messages": CHAT},
    ],
)
def test_a_conversation_is_read_from_text_too(value):
    (prompt,) = load([{"prompt": value}])
    assert shown(prompt) == SHOWN


@pytest.mark.parametrize("text", ["[1, 2] sorted?", '[{"a": 1}]', '{"role": "x"}', "[INST"])
def test_text_that_only_looks_like_json_stays_text(text):
    (prompt,) = load([{"prompt": text}])
    assert prompt.text == text


def test_messages_as_text_that_cannot_be_read_are_no_prompt():
    error = refused([{"prompt": "[{'role': 'user' 'content': 'numpy writes no comma'}]"}])
    assert "1 x messages as text that is neither JSON nor Python" in error.rule


def test_csv_holds_conversations_as_text(tmp_path):
    quoted = json.dumps(CHAT).replace('"', '""')
    (tmp_path / "x.csv").write_text(f'id,Messages\n1,"{quoted}"\n')
    (prompt,) = load_prompts("x.csv", count=9)
    assert shown(prompt) == SHOWN


def test_rows_of_a_merged_table_are_read_from_the_column_that_they_fill(tmp_path, caplog):
    caplog.set_level("INFO")
    sharegpt = [{"from": "human", "value": "Who?", "role": None, "content": None}]
    rows = [
        {"messages": CHAT, "conversations": None},
        {"messages": None, "conversations": sharegpt},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "x.parquet")
    first, second = load_prompts("x.parquet", count=9)
    assert (shown(first), shown(second)) == (SHOWN, [("user", "Who?")])
    assert caplog.messages[0] == (
        "x.parquet: prompts from messages (1 rows), conversations (1 rows); columns of text that "
        "are not read: none"
    )


def test_context_of_dolly_belongs_to_the_prompt_and_the_line_names_what_is_not_read(caplog):
    caplog.set_level("INFO")
    row = {"instruction": "Who?", "response": "A.", "category": "qa", "url": "u", "n": 1}
    first, second = load([row | {"context": "A ran."}, row | {"context": ""}])
    assert (first.text, second.text) == ("Who?\n\nA ran.", "Who?")
    assert caplog.messages[0] == (
        "x.jsonl: prompts from instruction + context, answers from response; columns of text that "
        "are not read: url"
    )


def test_rows_that_differ_in_a_joined_column_are_no_duplicates():
    assert len(load([{"instruction": "Sum up.", "context": text} for text in "abca"])) == 3


def test_a_column_of_system_messages_is_one(caplog):
    row = {"system_prompt": "Be brief.", "question": "Who?"}
    first, second, third = load(
        [row, row | {"system_prompt": ""}, {"system": "Be kind.", "messages": CHAT}]
    )
    assert shown(first) == [("system", "Be brief."), ("user", "Who?")]
    assert second.text == "Who?"
    assert shown(third) == SHOWN  # of two columns of system messages the first is read


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ({"question": "Which?", "choices": ["red", "blue"]}, "choices"),
        ({"question": "Which?", "options": {"text": ["red"], "label": ["A"]}}, "options"),
        ({"prompt": "Sum up.", "document": "A long one."}, "document"),
        ({"prompt": "Sum up.", "Article": "A long one."}, "Article"),
        ({"question": "Who?", "context": "A ran."}, "context"),
        ({"prompt": "Who?", "question": "Where?"}, "question"),
        ({"question": "Who?", "text": "A passage."}, "text"),
    ],
)
def test_a_column_that_may_belong_to_the_prompt_is_refused(row, other):
    name = next(iter(row))
    error = refused([row])
    assert (error.key, error.value) == ("data.prompts", "x.jsonl")
    assert error.rule == f"the columns {name!r} and {other!r} may both belong to the prompt"
    assert f"data.prompts_column=[{other},{name}]" in error.remedy
    assert load([row], column=[name])[0].text == row[name]


def test_the_columns_that_the_user_names_are_joined_in_their_order():
    rows = [{"context": "A ran.", "question": "Who?", "choices": ["A", "B"]}]
    (prompt,) = load(rows, column=["context", "question", "choices"])
    assert prompt.text == "A ran.\n\nWho?\n\nA\nB"
    (prompt,) = load([{"instruction": "Add.", "input": "1 and 2"}], column=["instruction"])
    assert prompt.text == "Add."
    assert (
        "no other column can be joined" in refused([{"a": CHAT, "b": "x"}], column=["a", "b"]).rule
    )


def test_a_column_that_holds_the_prompt_once_more_is_no_other_prompt():
    """The text of Alpaca, the question inside a prompt."""
    whole = "### Instruction:\nAdd.\n### Input:\n1 and 2\n### Response:\n3"
    rows = [{"instruction": "Add.", "input": "1 and 2", "text": whole},
            {"prompt": "Answer: Who?", "question": "Who?"}]  # fmt: skip
    assert load(rows[:1])[0].text == "Add.\n\n1 and 2"
    assert load(rows[1:])[0].text == "Answer: Who?"


@pytest.mark.parametrize("column", ["text", "content"])
def test_a_table_with_one_message_a_row_is_refused(column):
    rows = [{"role": role, column: "Hi"} for role in ("prompter", "assistant")]
    error = refused(rows)
    assert error.rule == "one message a row, whose role is in the column 'role'"
    assert "as a list in the column messages" in error.remedy
    assert load([{"role": "a pirate", "text": "Hi"}])[0].text == "Hi"


def test_lists_of_texts_are_turns_of_the_user_only_where_the_name_says_so():
    """In other columns every second one is the assistant's."""
    assert shown(load([{"turns": ["Hi", "Why?"]}])[0]) == [("user", "Hi"), ("user", "Why?")]
    error = refused([{"conversations": ["Hi", "Ho"]}])
    assert "1 x a list in 'conversations' that is no list of messages" in error.rule


def test_completions_in_the_form_of_messages_are_answers():
    (prompt,) = load([{"prompt": CHAT[:1], "completion": CHAT[1:2]}])
    assert prompt.response == "Ho"
