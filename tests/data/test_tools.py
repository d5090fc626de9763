"""Conversations that call tools: what is context, and what a text."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from data.bad_rows import BadRow
from data.messages import read_messages
from data.prompts import load_prompts, user_turns
from data.render import num_answers, render, with_answers
from tests.data.test_prompts import make_tokenizer
from tests.helpers.commands import write_jsonl
from trainer.errors import UserError

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é"}'}}
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"found": true}'},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
BODY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} ARGUMENTS]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
AS_OBJECT = "{% if tools %}{{ tools[0].function.name }}:{% endif %}" + BODY.replace(
    "ARGUMENTS", "{{ c.function.arguments | tojson }}"
)
AS_TEXT = BODY.replace("ARGUMENTS", "{{ '!' + c.function.arguments }}")
AS_IT_IS = BODY.replace("ARGUMENTS", "{{ c.function.arguments }}")


def prompt_of(tmp_path, messages, **columns):
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": messages, **columns}])
    (prompt,) = load_prompts(str(path), count=9)
    return prompt


def texts(prompt, tokenizer):
    own = [{"role": "assistant", "content": "own"}]
    return [
        tokenizer.decode(render(with_answers(turn, own * num_answers(turn)), tokenizer))
        for turn in user_turns(prompt)
    ]


def test_from_the_first_call_on_the_logs_turns_are_context_and_texts(tmp_path, caplog):
    caplog.set_level("INFO")
    prompt = prompt_of(tmp_path, CHAT, tools=TOOLS)
    begin = "<s>find:<user>Hi"
    asked = f"{begin}<assistant>own<user>Find it."
    found = asked + '<assistant>[find {"q": "é"}]<tool>{"found": true}'
    last = f"{found}<assistant>Here.<user>Thanks."
    shown = texts(prompt, make_tokenizer(AS_OBJECT, adds_bos=False))
    assert ["<s>" + text.removeprefix("<s>") for text in shown] == [
        text + "<|assistant|>" for text in (begin, asked, found, last)
    ]
    assert any("1 conversations call tools" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("template", "written"), [(AS_TEXT, '!{"q": "é"}'), (AS_IT_IS, '{"q": "é"}')]
)
@pytest.mark.parametrize("arguments", ['{"q": "é"}', {"q": "é", "absent": None}])
def test_arguments_are_objects_or_text_as_the_template_takes_them(
    tmp_path, template, written, arguments
):
    call = {**CALL, "function": {"name": "find", "arguments": arguments}}
    messages = [*CHAT[2:3], {"role": "assistant", "tool_calls": [call]}, CHAT[4]]
    assert f"[find {written}]" in texts(prompt_of(tmp_path, messages), make_tokenizer(template))[1]


def test_tools_and_calls_change_the_prompt(tmp_path):
    """Prompts with the same words are others with other tools, or other returned values."""
    hashes = {
        prompt_of(tmp_path, messages, tools=tools).hash
        for messages in (CHAT, [*CHAT[:4], {"role": "tool", "content": "no"}, *CHAT[5:]])
        for tools in (None, TOOLS, json.dumps([*TOOLS, *TOOLS]))
    }
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("form", "role"),
    [
        ({"from": "function_call", "value": '{"name": "find", "arguments": {"q": "é"}}'}, "tool"),
        ({"role": "assistant", "function_call": {"name": "find", "arguments": '{"q": "é"}'}},
         "function"),
        ({"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm"}, "ipython"),
    ],
)  # fmt: skip
def test_every_form_of_a_call_is_one(form, role):
    items = [CHAT[2], form, {"role": role, "name": "find", "content": "[]"}]
    _, call, returned = read_messages(items, Counter())
    assert call["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": "é"}}
    assert returned == {"role": "tool", "name": "find", "content": "[]"}
    assert call.get("reasoning_content") == form.get("reasoning_content")


def test_assistant_texts_are_read_only_where_they_are_context():
    bad = {"role": "assistant", "content": [{"type": "image_url"}]}
    assert read_messages([CHAT[0], bad, CHAT[2]], Counter())[1]["content"] == ""
    with pytest.raises(BadRow) as caught:
        read_messages([*CHAT[2:5], bad, CHAT[6]], Counter())
    assert caught.value.reason == "a part of type 'image_url', which is no text"


def test_parts_of_text_are_joined_and_others_refused_by_name():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b", "image_url": None}]
    assert read_messages([{"role": "user", "content": parts}], Counter())[0]["content"] == "a\nb"
    with pytest.raises(BadRow) as caught:
        read_messages([{"role": "user", "content": [{"type": "audio", "text": "a"}]}], Counter())
    assert caught.value.reason == "a part of type 'audio', which is no text"


@pytest.mark.parametrize(
    "template",
    [
        BODY.replace("m.tool_calls or []", "[]"),
        AS_TEXT.replace("in messages", "in messages if m.role != 'tool'"),
    ],
)
def test_a_template_that_leaves_out_a_call_or_what_it_returned_is_named(tmp_path, template):
    with pytest.raises(UserError) as caught:
        texts(prompt_of(tmp_path, CHAT), make_tokenizer(template))
    said = "the target's chat template leaves out a tool call, or what it returned"
    assert caught.value.rule == said


def test_the_developers_message_is_the_systems_where_the_template_knows_no_other(tmp_path):
    prompt = prompt_of(tmp_path, [{"role": "Developer", "content": "Be brief."}, CHAT[0]])
    assert "<system>Be brief.<user>Hi" in texts(prompt, make_tokenizer(BODY))[0]
    knows = BODY + "{# developer #}"
    assert "<developer>Be brief.<user>Hi" in texts(prompt, make_tokenizer(knows))[0]


@pytest.mark.parametrize(
    ("roles", "turns", "note"),
    [
        ("assistant user assistant", ["user1"], "begin with the assistant"),
        ("user user assistant user", ["user0\n\nuser1", "user3"], "without an answer between"),
        ("user assistant system user", ["user0", "user3"], None),
        ("user assistant empty assistant user", ["user0"], "hold an empty user message"),
    ],
)
def test_odd_orders_of_turns_are_read_and_counted(tmp_path, caplog, roles, turns, note):
    caplog.set_level("INFO")
    messages = [
        {"role": role.replace("empty", "user"), "content": f"{role}{i}" if role != "empty" else " "}
        for i, role in enumerate(roles.split())
    ]
    prompt = prompt_of(tmp_path, messages)
    assert [turn[-1]["content"] for turn in user_turns(prompt)] == turns
    assert note is None or any(note in one for one in caplog.messages)
