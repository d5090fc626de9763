"""Text that a chat template has rendered already is not rendered a second time."""

from __future__ import annotations

import pytest

from data.render import render
from data.rendered import describe_rendered
from tests.data.test_prompts import make_tokenizer
from trainer.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def chat():
    return make_tokenizer(TEMPLATE)


def shown(text, tokenizer, *options):
    return tokenizer.decode(render(text, tokenizer, *options))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|user|>Hi</s><|assistant|>\n", "<|user|>Hi</s><|assistant|>\n"),
        ("<|user|>Hi</s><|assistant|>\nHo</s>", "<|user|>Hi</s><|assistant|>\n"),
        (
            "<s><|system|>S</s><|user|>Hi</s><|assistant|>\nHo</s><|user|>So</s><|assistant|>\nA",
            "<|system|>S</s><|user|>Hi</s><|assistant|>\nHo</s><|user|>So</s><|assistant|>\n",
        ),
    ],
)
def test_text_of_the_targets_own_template_goes_up_to_its_last_answer(chat, text, expected):
    assert shown(text, chat) == "<s>" + expected


def test_a_template_that_starts_an_answer_with_the_end_of_the_question(chat):
    tokenizer = make_tokenizer(INST)
    assert shown("[INST] Hi [/INST] Ho</s>", tokenizer) == "<s>[INST] Hi [/INST]"


@pytest.mark.parametrize(
    "text",
    [
        "[INST] Hi [/INST]",
        "### Human: Hi\n### Assistant: Ho",
        "Below is a task.\n### Instruction:\nHi\n### Response:\n",
        "<|im_start|>user\nHi<|im_end|>\n",
    ],
)
def test_text_of_another_template_is_refused(chat, text):
    with pytest.raises(UserError) as caught:
        render(text, chat)
    assert caught.value.rule.startswith("is rendered already, and not by the target's chat templat")
    assert "column of messages" in caught.value.remedy
    assert shown(text, make_tokenizer()) == "<s>" + text  # without a template it is text


def test_a_user_may_ask_about_a_special_token(chat):
    for text in ("What is [INST]?", "Why does <|im_start|> stand there?", "What is <|user|> for?"):
        assert shown(text, chat) == f"<|user|>{text}</s><|assistant|>\n"


def test_a_system_prompt_beside_rendered_text_is_refused(chat):
    with pytest.raises(UserError) as caught:
        render("<|user|>Hi</s><|assistant|>\n", chat, "Be brief.")
    assert caught.value.key == "data.system_prompt"


def test_how_many_are_rendered_already_is_said(chat):
    texts = ["Hi", None, "<|user|>Hi</s><|assistant|>\n"]
    assert str(describe_rendered(texts, chat)).startswith("1 of 3 prompts are rendered already")
    assert describe_rendered(texts[:2], chat) is None
