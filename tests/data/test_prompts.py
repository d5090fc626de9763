"""Readers, choice, split and rendering of prompts, and the sentence that answers each mistake."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.answers import AnswerFormat
from data.bad_rows import NONE
from data.prompts import (
    Prompt,
    load_prompts,
    user_turns,
)
from data.render import fixed_response_ids, render, with_answers
from data.split import held_out_turns
from tests.helpers.commands import pipe
from trainer.errors import UserError

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('system not first') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture(autouse=True)
def _everything_stays_here(tmp_path, monkeypatch):
    """File names in messages are short, and `datasets` neither calls out nor fills a real cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def make_tokenizer(chat_template=None, adds_bos=True, eos="</s>"):
    """Byte-level, no merges: what was encoded can be read back from the ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"])
    if adds_bos:
        bos = ("<s>", inner.token_to_id("<s>"))
        inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="module")
def base():
    return make_tokenizer()


@pytest.fixture(scope="module")
def chat():
    return make_tokenizer(CHAT_TEMPLATE)


def write(tmp_path, name, content):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return name


def write_rows(tmp_path, rows, name="x.jsonl"):
    return write(tmp_path, name, "".join(json.dumps(row) + "\n" for row in rows))


def texts(prompts):
    return [prompt.text for prompt in prompts]


def shown(prompt):
    return [(message["role"], message["content"]) for message in prompt.messages]


def plain(text, **fields):
    rest = {"response": None, "domain": "d", "source": "s", "conversation_id": text} | fields
    return Prompt(text=text, messages=None, **rest)


def conversation(*turns, **fields):
    rest = {"response": None, "domain": "d", "source": "s", "conversation_id": "c"} | fields
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Prompt(text=None, messages=messages, **rest)


def refused(call, *args, **kwargs):
    """The one line a user reads."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# --- readers -------------------------------------------------------------------------------------

ROWS = [{"prompt": "one\u2028line", "answer": "1"}, {"prompt": 'two, "2"\nlines', "answer": "2"}]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, kind, suffix):
    name = f"quiz{kind}"
    if kind == ".jsonl":
        write_rows(tmp_path, ROWS, name)
    elif kind == ".json":
        write(tmp_path, name, json.dumps(ROWS))
    else:
        table = datasets.Dataset.from_list(ROWS)
        (table.to_csv if kind == ".csv" else table.to_parquet)(tmp_path / name)
    if suffix:
        write(tmp_path, name + suffix, (tmp_path / name).read_bytes())
        (tmp_path / name).unlink()
    prompts = load_prompts(name + suffix, count=9)
    assert texts(prompts) == ["one\u2028line", 'two, "2"\nlines']
    assert [prompt.response for prompt in prompts] == ["1", "2"]
    assert {prompt.domain for prompt in prompts} == {"quiz"}
    assert prompts[1].source == f"quiz{kind}{suffix} {'line' if kind == '.jsonl' else 'row'} 2"


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
def test_text_file_is_one_prompt_a_line_without_blank_ones(tmp_path, name):
    write(tmp_path, name, b"\xef\xbb\xbffirst\r\n\r\n  \nsecond \xe2\x80\xa8 still\n")
    prompts = load_prompts(name, count=9)
    assert texts(prompts) == ["first", "second \u2028 still"]
    assert prompts[1].source == f"{name} line 4"


def test_csv_takes_long_fields(tmp_path):
    long = "word " * 40_000
    write(tmp_path, "x.csv", f'prompt\n"{long}"\n')
    assert texts(load_prompts("x.csv", count=1)) == [long]


def test_folder_of_files_is_read_by_datasets_with_config_and_split(tmp_path):
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set", [{"question": "Q?", "answer": "A"}], "train.jsonl")
    write_rows(tmp_path / "set", [{"question": "T?", "answer": "B"}], "test.jsonl")
    assert load_prompts("set", split="test", count=9) == [
        plain("T?", response="B", domain="set", source="set test row 1",
              conversation_id=plain("T?").hash),
    ]  # fmt: skip
    message = refused(load_prompts, "set", split="dev", count=9)
    assert message == (
        "prompts set: has no split 'dev'; it has: train, test; set prompts_split to one of them"
    )


def test_a_folder_of_several_data_sets_is_read_one_by_one(tmp_path, caplog):
    """Each with its own columns, a training and a test part among them, and one in two shapes."""
    caplog.set_level("INFO")
    for name in ("all/math", "all/mixed", "all/novels"):
        (tmp_path / name).mkdir(parents=True)
    write_rows(tmp_path / "all/math", [{"question": "Q?", "answer": "A"}], "train.jsonl")
    write_rows(tmp_path / "all/math", [{"question": "T?", "answer": "B"}], "test.jsonl")
    write_rows(tmp_path / "all/mixed", [{"instruction": "Do."}], "a.jsonl")
    write_rows(tmp_path / "all/mixed", [{"prompt": "P", "category": "chat"}], "b.jsonl")
    write_rows(tmp_path / "all", [{"ids": [1, 2]}], "traces.jsonl")
    write_rows(tmp_path / "all", [{"messages": [{"role": "user", "content": "Hi"}]}], "talk.jsonl")
    write(tmp_path, "all/novels/one.txt", "a line\n")
    write(tmp_path, "all/README.md", "what it is")
    found = load_prompts("all", count=9)
    assert [(p.text or p.messages[0]["content"], p.domain) for p in found] == [
        ("Q?", "math"), ("Do.", "mixed"), ("P", "chat"), ("Hi", "talk"),
    ]  # fmt: skip
    said = [record.message for record in caplog.records]
    assert [line for line in said if line.startswith("left out: ")] == [
        "left out: all/traces.jsonl has none of the usual columns (messages, conversations,"
        " conversation, prompt, instruction, question, text, turns); columns: ids; set"
        " data.prompts_column"
    ]
    assert "all/mixed/b.jsonl: 1 prompts of domain mixed" in said
    refused(load_prompts, "all", column=["ids2"], count=9)


def test_a_data_set_that_is_read_file_by_file_keeps_to_its_split(tmp_path, caplog):
    """Its two training files differ in the type of a column, so that they load as no one table."""
    caplog.set_level("INFO")
    for name in ("all/code", "all/math", "all/model"):
        (tmp_path / name).mkdir(parents=True)
    for split in ("train", "test"):
        write_rows(tmp_path / "all/code", [{"prompt": f"code {split}"}], f"{split}.jsonl")
        write_rows(tmp_path / "all/math", [{"prompt": f"{split}", "n": "1"}], f"{split}.jsonl")
    write_rows(tmp_path / "all/math", [{"prompt": "train 2", "n": {"x": 1}}], "train-2.jsonl")
    write(tmp_path, "all/math/test.csv", "prompt\nother\n")
    write(tmp_path, "all/model/config.json", "{}")
    assert texts(load_prompts("all", count=9)) == ["code train", "train 2", "train"]
    assert texts(load_prompts("all", count=9, split="test")) == ["code test", "test"]
    said = [record.message for record in caplog.records]
    for line in (
        "left out: all/math/test.csv is of no split of all/math",
        "left out: all/model/config.json is of no split of all/model",
    ):
        assert said.count(line) == 2


@pytest.mark.parametrize(("has", "split"), [("test", "train"), ("train", "test")])
def test_a_split_that_one_of_several_data_sets_lacks_stops_the_run(tmp_path, has, split):
    for name in ("all/code", "all/math"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train", "test"):
        write_rows(tmp_path / "all/code", [{"prompt": name}], f"{name}.jsonl")
    write_rows(tmp_path / "all/math", [{"prompt": "a"}], f"{has}.jsonl")
    assert refused(load_prompts, "all", count=9, split=split) == (
        f"all/math has no split '{split}'; it has: {has}: set prompts_split to one that every data "
        "set in all has, or move math elsewhere"
    )
    assert texts(load_prompts("all", count=9, split=has)) == [has, "a"]


def test_a_data_set_whose_files_nobody_can_tell_apart_stops_the_run(tmp_path):
    """Its card names configurations, of which none was chosen."""
    for name in ("all/code", "all/math"):
        (tmp_path / name).mkdir(parents=True)
        write_rows(tmp_path / name, [{"prompt": name}], "a.jsonl")
    one, two = ({"config_name": name, "data_files": "a.jsonl"} for name in ("one", "two"))
    write(tmp_path, "all/math/README.md", f"---\nconfigs: {json.dumps([one, two])}\n---\n")
    assert "Config name is missing" in refused(load_prompts, "all", count=9)


@pytest.mark.parametrize("names", ["train test", "data more", "en fr"])
def test_parts_of_one_data_set_are_not_several(names, tmp_path):
    """By their names, or by a card that says what they are."""
    for number, name in enumerate(names.split()):
        (tmp_path / "set" / name).mkdir(parents=True)
        write_rows(tmp_path / "set" / name, [{"question": f"{number}?"}], "x.jsonl")
    if names == "en fr":
        write(tmp_path, "set/README.md", "---\nlicense: mit\n---\n")
    expected = ["0?"] if names == "train test" else ["0?", "1?"]
    assert [p.text for p in load_prompts("set", count=9)] == expected
    assert {p.domain for p in load_prompts("set", count=9)} == {"set"}


def test_hub_without_network_names_the_id_and_the_remedy():
    message = refused(load_prompts, "nobody/nothing-here", count=1)
    assert message.startswith("prompts 'nobody/nothing-here' are neither toy, nor a file (.jsonl")
    assert message.endswith("check id, config and split, or download it and name the file")


def test_usual_columns_are_found_in_their_order(tmp_path):
    write_rows(tmp_path, [{"text": "a prompt", "Prompt": "prompt", "question": "", "CODE": "c"}])
    (prompt,) = load_prompts("x.jsonl", count=1)
    assert (prompt.text, prompt.response) == ("prompt", "c")
    (prompt,) = load_prompts("x.jsonl", count=1, column=["text"], response_column="Prompt")
    assert (prompt.text, prompt.response) == ("a prompt", "prompt")


def test_domain_comes_from_the_row_where_it_names_one(tmp_path):
    write_rows(tmp_path, [{"text": "a", "category": "math"}, {"text": "b", "category": 7}])
    assert [prompt.domain for prompt in load_prompts("x.jsonl", count=9)] == ["math", "x"]


def test_alpaca_joins_instruction_and_input_by_a_blank_line(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Sing.", "input": "", "output": "La"},
        {"instruction": "Hum.", "input": None, "output": " "},
    ]
    write(tmp_path, "alpaca.json", json.dumps(rows))
    prompts = load_prompts("alpaca.json", count=9)
    assert texts(prompts) == ["Add.\n\n1 and 2", "Sing.", "Hum."]
    assert [prompt.response for prompt in prompts] == ["3", "La", None]


def test_openai_messages_keep_the_answers_and_name_the_last_as_response(tmp_path):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"), ("user", "Why?"),
             ("assistant", "So.")]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in turns]
    write_rows(tmp_path, [{"messages": messages, "prompt": "Hi"}, {"messages": messages[:4]}])
    whole, *rest = load_prompts("x.jsonl", count=9)
    assert shown(whole) == turns
    assert whole.response == "So."
    assert rest == []  # the same user turns: the same prompt


def test_sharegpt_conversations_are_translated(tmp_path):
    turns = [("system", " "), ("human", "Hi"), ("gpt", "Ho"), ("human", "Why?")]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in turns]}]
    write_rows(tmp_path, rows)
    (prompt,) = load_prompts("x.jsonl", count=9)
    assert shown(prompt) == [("user", "Hi"), ("assistant", "Ho"), ("user", "Why?")]
    assert prompt.response is None


def test_turns_of_mt_bench_are_user_messages(tmp_path):
    write_rows(
        tmp_path, [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}]
    )
    (prompt,) = load_prompts("x.jsonl", count=9)
    assert shown(prompt) == [("user", "Write."), ("user", "Again.")]
    assert prompt.domain == "writing"


def test_prompt_column_may_hold_messages(tmp_path):
    write_rows(tmp_path, [{"prompt": [{"role": "user", "content": "Hi"}], "completion": "Ho"}])
    (prompt,) = load_prompts("x.jsonl", count=9)
    assert shown(prompt) == [("user", "Hi")]
    assert prompt.response == "Ho"


def test_an_answer_column_that_is_no_text_counts_only_when_asked_for(tmp_path):
    write_rows(tmp_path, [{"question": "Which?", "answer": 2}])
    assert load_prompts("x.jsonl", count=1)[0].response is None
    message = refused(load_prompts, "x.jsonl", count=1, response_column="answer")
    assert "1 x no text in the column 'answer', first line 1 (int 2)" in message


def test_duplicates_and_empty_prompts_are_dropped_and_counted(tmp_path, caplog):
    write_rows(tmp_path, [{"prompt": p} for p in ("a", "b", " ", "a")] + [{"prompt": []}])
    with caplog.at_level(logging.INFO):
        assert texts(load_prompts("x.jsonl", count=9)) == ["a", "b"]
    line = "x.jsonl: 2 prompts taken of 2; 1 duplicates and 2 empty ones dropped"
    assert caplog.messages[-1] == line


def test_white_space_around_a_text_makes_no_other_prompt(tmp_path, caplog):
    """Most templates drop it, so that both would be one prompt of the target."""
    turns = [[{"role": "user", "content": text} for text in ("a", last)] for last in ("b", " b\n")]
    rows = [{"prompt": p} for p in ("a", "a\n", [{"role": "user", "content": " a"}], "b", *turns)]
    write_rows(tmp_path, rows)
    with caplog.at_level(logging.INFO):
        first, second, third = load_prompts("x.jsonl", count=9)
    assert (first.text, second.text, shown(third)) == ("a", "b", [("user", "a"), ("user", "b")])
    line = "x.jsonl: 3 prompts taken of 3; 3 duplicates and 0 empty ones dropped"
    assert caplog.messages[-1] == line


# --- the sentence for each mistake ---------------------------------------------------------------

SURROGATE = "half of a surrogate pair"
NO_LIST = "a list in 'prompt' that is no list of messages"
ROW_MISTAKES = [
    ({"prompt": None}, "nothing in the column prompt", "has prompt"),
    ({"prompt": 3}, "no text in the column 'prompt'", "int 3"),
    ({"prompt": ["a", 3]}, NO_LIST, "list ['a', 3]"),
    ({"instructions": "b"}, "nothing in the column prompt", "has instructions"),
    ({"prompt": "\ud83d!"}, SURROGATE, "'prompt', character 1"),
    ({"prompt": "a", "conversation_id": "\ud83d"}, SURROGATE, "conversation_id, character 1"),
    ({"prompt": "a", "category": "\ud83d"}, SURROGATE, "domain, character 1"),
    ({"prompt": [{"role": ["user"], "content": "a"}]}, "the unknown role ['user']", None),
    ({"prompt": [{"speaker": "user"}]}, "the unknown role None", None),
    ({"prompt": [{"from": "agent", "value": "a"}]}, "the unknown role 'agent'", None),
    ({"prompt": [{"role": "user", "content": None}]}, "a content that is no text",
     "message 1, got nothing"),
    ({"prompt": [{"from": "human", "value": 1}]}, "a content that is no text",
     "message 1, got int 1"),
    ({"prompt": [{"role": "system", "content": "s"}]}, "a conversation without a user message", ""),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason", "detail"), ROW_MISTAKES)
def test_a_bad_row_is_named_with_its_line(tmp_path, caplog, row, reason, detail):
    caplog.set_level("INFO")
    write_rows(tmp_path, [{"prompt": "fine"}, row])
    left_out = {}
    assert texts(load_prompts("x.jsonl", count=9, left_out=left_out)) == ["fine"]
    first = {"reason": reason, "count": 1, "first": "x.jsonl line 2"}
    assert left_out == {"data.prompts": {"rows": 2, "left_out": 1, "reasons": [first]}}
    line = f"x.jsonl: 1 of 2 rows cannot be read and are left out: 1 x {reason}, first line 2"
    (said,) = [one for one in caplog.messages if one.startswith(line)]
    assert detail is None or said.removeprefix(line) == (f" ({detail})" if detail else "")


def test_alpaca_input_of_the_wrong_type_is_named(tmp_path):
    write_rows(tmp_path, [{"instruction": "Add.", "input": [1, 2]}])
    message = refused(load_prompts, "x.jsonl", count=9)
    assert "1 x no text in the column 'input', first line 1 (list [1, 2])" in message


FILE_MISTAKES = [
    ("x.jsonl", '{"prompt": "a"}\n\n{prompt: "b"}\n', "line 3 (Expecting property name"),
    ("x.jsonl", '"a"\n', "1 x no object with named columns, first row 1 (str 'a')"),
    ("x.jsonl", " \n\n", "prompts file x.jsonl is empty"),
    ("x.jsonl", '{"prompt": ""}\n', "x.jsonl holds no prompt that is not empty; name another file"),
    (
        "x.jsonl",
        b'{"prompt": "\xff"}',
        "prompts file x.jsonl: line 1 is not UTF-8 ('utf-8' codec can't de",
    ),
    ("x.jsonl", '{"id": 1, "body": "a"}', "x.jsonl has none of the usual columns (messages, conv"),
    (
        "x.json",
        '{"prompt": \n',
        "prompts file x.json: not JSON (Expecting value: line 2, column 1)",
    ),
    ("x.json", '{"prompt": "a"}', "prompts file x.json must hold one list of objects, got dict"),
    ("x.json", '[{"prompt": "a"}, "b"]', "1 x no object with named columns, first row 2 (str"),
    ("x.csv", "prompt,answer\na,b,c\n", "1 x more fields than the header, first row 1 (quote"),
    ("x.csv", 'prompt\n"a"b\n', "x.csv row 1 is not CSV ("),
    ("x.csv", "answer,prompt\nonly\n", "1 x nothing in the column prompt, first row 1"),
    ("x.csv", "prompt\n", "x.csv holds no prompt that is not empty"),
    ("x.jsonl", '{"prompt": ' + "[" * 9999, "1 x JSON that is nested too deep, first line 1;"),
    (
        "x.jsonl",
        '{"prompt": "a"}\n{"id": ' + "9" * 5000,
        "1 x a whole number of thousands of digits, first line 2;",
    ),
    ("x.json", "[" * 9999, "prompts file x.json: JSON that is nested too deep"),
    ("x.json", '[{"id": ' + "9" * 5000, "prompts file x.json: a whole number of thousands"),
    ("x.jsonl", '{"messages": []}', "x.jsonl holds no prompt that is not empty"),
    ("x.jsonl", json.dumps({f"c{i}": "a" for i in range(999)}), "x.jsonl has none of the usual"),
    ("x.jsonl", json.dumps({"prompt": [{"role": "r" * 999}]}), "1 x the unknown role 'rrrr"),
    ("x.csv", b"prompt\n\xff\n", "prompts file x.csv: line 2 is not UTF-8 ("),
    ("x.parquet", "PAR?", "x.parquet is not a Parquet file, or damaged ("),
    ("x.md", "a", "prompts file x.md must end in one of .jsonl .json .parquet .csv .txt, or in"),
    ("x.txt.gz", None, "prompts file x.txt.gz cannot be read (Not a gzipped file"),
]


@pytest.mark.parametrize(("name", "content", "complaint"), FILE_MISTAKES)
def test_a_bad_file_is_named_with_the_rule(tmp_path, name, content, complaint):
    if content is None:
        (tmp_path / name).write_text("not packed")
    else:
        write(tmp_path, name, content)
    assert complaint in refused(load_prompts, name, count=9, bad_rows=NONE)


def texts_or_complaint(name):
    try:
        return texts(load_prompts(name, count=999))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_flipped_byte_of_a_parquet_file_is_found(tmp_path, checksums):
    """Anywhere, where the pages have checksums; else it may only change a letter of the text."""
    written = [f"What is {i} plus {i * i}?" for i in range(200)]
    table = pyarrow.table({"prompt": written})
    pyarrow.parquet.write_table(table, "x.parquet", write_page_checksum=checksums)
    content, kept = (tmp_path / "x.parquet").read_bytes(), 0
    for place in range(4, len(content), 97):
        flipped = bytearray(content)
        flipped[place] ^= 0xFF
        (tmp_path / "x.parquet").write_bytes(flipped)
        if isinstance(found := texts_or_complaint("x.parquet"), str):
            assert found.startswith("x.parquet is not a Parquet file, or damaged (")
            assert "\n" not in found
        else:
            kept += 1
            assert found == written or not checksums
    assert kept < 20


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.csv", "x.txt.gz", "x"])
@pytest.mark.parametrize("what", ["pipe", "socket", "device"])
def test_prompts_are_read_from_a_regular_file_alone(tmp_path, name, what):
    path = tmp_path / name
    if what == "pipe":
        pipe(path)
    elif what == "device":
        path.symlink_to("/dev/null")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    message = refused(load_prompts, name, count=9)
    assert message == f"prompts file {name} is a {what}: name a regular file"


def test_a_folder_with_the_name_of_a_file_is_said_to_be_one(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    message = refused(load_prompts, "x.jsonl", count=9)
    assert message == "prompts file x.jsonl is a folder: name a regular file"


@pytest.mark.parametrize("name", ["a" * 300 + ".jsonl", "a" * 300, "a" * 9999 + ".txt"])
def test_a_name_that_no_file_can_have_is_named(name):
    message = refused(load_prompts, name, count=9)
    assert message.startswith("prompts file 'aaa")
    assert message.endswith("cannot be read (File name too long)")


def test_a_home_that_is_nobodys_is_no_fault_of_ours():
    assert refused(load_prompts, "~nobody-here/x.txt", count=9).endswith("does not exist")


def test_any_character_may_stand_in_a_prompt(tmp_path, base):
    """NUL and escapes too: a model is asked about them."""
    write_rows(
        tmp_path, [{"prompt": "a\0b\x1b[31m", "domain": "d\0\n", "conversation_id": {"a": 1}}]
    )
    (prompt,) = load_prompts("x.jsonl", count=9)
    assert base.decode(render(prompt.text, base)) == "<s>a\0b\x1b[31m"


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.txt.gz", "some/where/else", "/x"])
def test_a_missing_file_is_named(name):
    assert refused(load_prompts, name, count=9) == f"prompts file {name} does not exist"


def test_a_cut_off_gz_is_refused(tmp_path):
    write(tmp_path, "x.txt.gz", "a line\n" * 99)
    whole = (tmp_path / "x.txt.gz").read_bytes()
    (tmp_path / "x.txt.gz").write_bytes(whole[:-12])
    message = refused(load_prompts, "x.txt.gz", count=9)
    assert message.startswith("prompts file x.txt.gz cannot be read (Compressed file ended")


def test_a_misspelt_column_gets_the_list_and_a_suggestion(tmp_path):
    write_rows(tmp_path, [{"body": "a", "reply": "b"}])
    message = refused(load_prompts, "x.jsonl", count=9, column=["bodi"])
    assert message == "x.jsonl has no column 'bodi'; columns: body, reply; did you mean 'body'?"
    message = refused(load_prompts, "x.jsonl", count=9, column=["body"], response_column="code")
    assert message == "x.jsonl has no column 'code'; columns: body, reply"
    assert refused(load_prompts, "x.jsonl", count=9).endswith(
        "text, turns); columns: body, reply; set data.prompts_column"
    )


# --- the toy -------------------------------------------------------------------------------------


def test_toy_gives_its_domains_in_turn_with_their_continuations():
    prompts = load_prompts("toy", count=6)
    assert [prompt.domain for prompt in prompts] == ["code", "prose", "math"] * 2
    assert all(prompt.response and prompt.messages is None for prompt in prompts)
    assert prompts[2].source == "toy:math train row 3"
    assert {
        prompt.domain for prompt in load_prompts("toy:math+code", count=6, toy_split="eval")
    } == {"code", "math"}
    assert load_prompts("toy:math", count=3, seed=1) != load_prompts("toy:math", count=3, seed=2)


def test_toy_evaluation_prompts_are_never_training_prompts():
    train, held_out = (load_prompts("toy", count=600, toy_split=s) for s in ("train", "eval"))
    assert not any(map(any, held_out_turns(train, held_out)))


def test_the_toy_is_not_drawn_for_ever():
    message = refused(load_prompts, "toy", count=10**11)
    assert message.startswith("the prompts of toy are at most 100000, got 100000000000: lower data")


def test_an_unknown_toy_domain_is_refused():
    message = refused(load_prompts, "toy:code+maths", count=1)
    assert message == "unknown toy domain 'maths' in 'toy:code+maths'; available: code, prose, math"


def test_toy_prompts_go_as_they_are_to_a_target_without_template(base):
    prompt = load_prompts("toy:code", count=1, toy_split="eval")[0]
    assert base.decode(render(*user_turns(prompt), base)) == "<s>" + prompt.text


# --- choice --------------------------------------------------------------------------------------


def test_choice_is_fixed_by_the_seed_and_survives_new_rows(tmp_path):
    rows = [{"prompt": f"prompt {i}"} for i in range(200)]
    write_rows(tmp_path, rows)
    write_rows(tmp_path, rows[::-1] + [{"prompt": f"new {i}"} for i in range(20)], "grown.jsonl")
    chosen = texts(load_prompts("x.jsonl", count=50))
    assert chosen == texts(load_prompts("x.jsonl", count=50))
    assert chosen == [row["prompt"] for row in rows if row["prompt"] in chosen]
    assert set(chosen) <= set(texts(load_prompts("x.jsonl", count=60)))
    assert set(chosen) != set(texts(load_prompts("x.jsonl", count=50, seed=1)))
    # of 220 rows 50 are taken: about 50 * 20 / 220 = 5 of the new ones push out old ones
    assert len(set(chosen) & set(texts(load_prompts("grown.jsonl", count=50)))) >= 35


def test_more_than_there_are_gives_all_there_are(tmp_path):
    write(tmp_path, "x.txt", "b\na\n")
    assert texts(load_prompts("x.txt", count=3)) == ["b", "a"]


def test_hash_is_of_what_is_shown_alone():
    assert plain("a").hash == plain("a", response="x", domain="e", source="t").hash
    assert plain("a").hash != plain("b").hash
    two = conversation(("user", "a"), ("user", "b"))
    assert two.hash == conversation(("user", "a"), ("assistant", "x"), ("user", "b")).hash
    assert two.hash != conversation(("user", "ab")).hash
    assert re.fullmatch("[0-9a-f]{64}", two.hash)


# --- turns and token ids -------------------------------------------------------------------------

LONG = conversation(
    ("system", "Be brief."), ("user", "u1"), ("assistant", "human 1"), ("user", "u2"),
    ("assistant", "human 2"), ("user", "u3"),
)  # fmt: skip


def test_user_turns_leave_the_source_answers_out_and_grow_in_order():
    turns = list(user_turns(LONG))
    roles = [[(m["role"], m["content"]) for m in turn] for turn in turns]
    system, *users = [("system", "Be brief."), ("user", "u1"), ("user", "u2"), ("user", "u3")]
    assert roles == [[system, *users[:1]], [system, *users[:2]], [system, *users]]
    assert list(user_turns(plain("text"))) == ["text"]
    turns[2][1]["content"] = "changed"
    assert LONG.messages[1]["content"] == "u1"


def test_the_targets_answers_stand_between_the_user_turns(chat):
    answers: list[dict[str, str]] = []
    contexts = []
    for turn in user_turns(LONG):
        contexts.append(chat.decode(render(with_answers(turn, answers), chat)))
        answers.append({"role": "assistant", "content": f"own {len(answers) + 1}"})
    head = "<s><|system|>Be brief.</s><|user|>u1</s>"
    second = f"{head}<|assistant|>own 1</s><|user|>u2</s>"
    third = f"{second}<|assistant|>own 2</s><|user|>u3</s>"
    assert contexts == [text + "<|assistant|>" for text in (head, second, third)]


def test_answers_must_match_the_turns():
    last = list(user_turns(LONG))[-1]
    with pytest.raises(ValueError, match="need 2 answers to earlier user messages, got 1"):
        with_answers(last, [{"role": "assistant", "content": "own 1"}])
    with pytest.raises(ValueError, match="need 0 answers to earlier"):
        with_answers("text", [{"role": "assistant", "content": "own"}])
    assert with_answers("text", []) == "text"


def test_plain_text_becomes_one_user_message_where_there_is_a_template(chat):
    assert chat.decode(render("Hi", chat)) == "<s><|user|>Hi</s><|assistant|>"
    with_system = chat.decode(render("Hi", chat, " Be kind.\n"))
    assert with_system == "<s><|system|>Be kind.</s><|user|>Hi</s><|assistant|>"


def test_rendered_ids_are_a_plain_list_with_one_bos(chat, base):
    for ids in (render("Hi", chat), render("Hi", base), render("<s>Hi", base)):
        assert type(ids) is list
        assert all(type(i) is int for i in ids)
        assert ids.count(chat.bos_token_id) == 1
    assert chat("x").input_ids[0] == chat.bos_token_id  # this tokenizer would have added another


def test_special_tokens_of_plain_text_are_the_tokenizers_own():
    assert (
        make_tokenizer(adds_bos=False).decode(render("Hi", make_tokenizer(adds_bos=False))) == "Hi"
    )


def test_system_message_of_the_conversation_wins(chat):
    turn = next(user_turns(LONG))
    assert render(turn, chat, "Be long.") == render(turn, chat)


def test_template_arguments_change_the_prompt(chat):
    ids = render("Hi", chat, None, {"enable_thinking": True})
    assert chat.decode(ids).endswith("<|assistant|><think>")


def test_a_template_argument_without_effect_is_refused(chat):
    key = "data.chat_template_kwargs"
    message = refused(render, "Hi", chat, None, {"enable_thinkin": True})
    complaint = "is not read by the target's chat template; remove or correct it"
    assert message == f"{key}: 'enable_thinkin' {complaint}"
    for name in ("tokenize", "messages", "add_generation_prompt", "return_dict"):
        message = refused(render, "Hi", chat, None, {name: True})
        assert message == f"{key}: {name!r} is set by this program; remove or correct it"


def test_a_target_without_template_refuses_what_would_do_nothing(base):
    message = refused(render, next(user_turns(LONG)), base)
    assert message == (
        "the target has no chat template but the prompts are conversations; remedy: use an"
        " instruction-tuned target, or a column of plain text (data.prompts_column)"
    )
    message = refused(render, "Hi", base, "Be brief.")
    assert message == (
        "data.system_prompt must be empty for a target without a chat template, got 'Be brief.';"
        " remedy: remove it, or use an instruction-tuned target"
    )
    message = refused(render, "Hi", base, None, {"enable_thinking": False})
    assert message.startswith("data.chat_template_kwargs must be empty for a target without")


def test_a_template_that_refuses_or_drops_the_system_message_is_named():
    refuses = make_tokenizer("{{ raise_exception('System role not supported') }}")
    message = refused(render, "Hi", refuses, "Be brief.")
    assert message == (
        "the target's chat template refuses the conversation [system user] (System role not"
        " supported); remedy: prompts or data.system_prompt that it accepts"
    )
    drops = make_tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert drops.decode(render("Hi", drops)) == "Hi"
    message = refused(render, "Hi", drops, "Be brief.")
    assert message.startswith("the target's chat template drops the system message; remedy: rem")


def test_fixed_response_ends_in_eos_and_has_no_bos(base):
    answers = AnswerFormat(base, (base.eos_token_id,))
    ids = fixed_response_ids(plain("Q:", response=" yes"), answers)
    assert base.decode(ids) == " yes</s>"
    assert ids[-1] == base.eos_token_id
    assert ids.count(base.bos_token_id) == 0
    assert fixed_response_ids(plain("Q:"), answers) is None
    single = conversation(("user", "u1"), ("assistant", "a1"), response="a1")
    assert base.decode(fixed_response_ids(single, answers)) == "a1</s>"
    several = conversation(("user", "u1"), ("assistant", "a1"), ("user", "u2"), response="a2")
    assert fixed_response_ids(several, answers) is None


def test_fixed_response_needs_an_eos():
    with pytest.raises(UserError) as caught:
        fixed_response_ids(plain("Q:", response="A"), AnswerFormat(make_tokenizer(eos=None), ()))
    assert caught.value.rule.startswith("the target's tokenizer has no EOS token, in which fixed")
    assert caught.value.remedy == "set its eos_token"
