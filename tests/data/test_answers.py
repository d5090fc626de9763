"""Answers as messages of later turns, for the formats that chat templates of targets have."""

from __future__ import annotations

import pytest

from data.answers import AnswerFormat, Cut
from tests.data.test_traces import make
from tests.helpers.tiny import tiny_tokenizer

LOOP = "{% for m in messages %}{% if m.role == 'assistant' %}"
REST = "{% endfor %}{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + REST +
    "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
HARMONY = (
    LOOP + "{% if '<|channel|>' in m.content %}{{ raise_exception('channels') }}{% endif %}"
    "{% if loop.last and not add_generation_prompt %}{% if m.thinking %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + REST +
    "<|start|>assistant{% endif %}"
)  # fmt: skip
SPLITTING = LOOP + (
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
) + REST + "<|im_start|>assistant\n{% if opens %}<think>\n{% endif %}{% endif %}"  # fmt: skip
FIELD = LOOP + (  # which does not look into the content
    "<|im_start|>assistant\n<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
) + REST + "<|im_start|>assistant\n{% endif %}"  # fmt: skip
INSTRUCT = (
    LOOP + "{{ m.content }}<|im_end|>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
PARTS = LOOP + (
    "<|turn>model\n{{ m.content.split('<channel|>')[-1] }}<turn|>\n{% else %}<|turn>{{ m.role }}\n"
    "{{ m.content }}<turn|>\n{% endif %}"
) + REST + "<|turn>model\n{% endif %}"  # fmt: skip
RESPONSE = LOOP + (
    "<|BOT|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN|>{% else %}"
    "<|USER|>{{ m.content }}<|END_OF_TURN|>{% endif %}"
) + REST + "<|BOT|>{% endif %}"  # fmt: skip
# a turn ends where the next one begins
NO_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + REST + "<|assistant|>{% endif %}"
)

HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")


def answers_of(template, special, eos=(), added=(), **options):
    """The format of a tokenizer with these tokens; `eos`: names of its EOS set."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    return AnswerFormat(tokenizer, tokenizer.convert_tokens_to_ids(list(eos)), options)


def ids(answers, text):
    return answers.tokenizer(text, add_special_tokens=False).input_ids


def content(answers, text):
    """What stands for the answer `text` in later turns, and its thought where it has a field."""
    message = answers.message(ids(answers, text))
    if message is None:
        return None
    assert message.pop("role") == "assistant"
    return message.pop("content"), *message.values()


def harmony():
    return answers_of(HARMONY, HARMONY_MARKS, eos=("<|return|>", "<|call|>", "<|endoftext|>"))


def chatml(template=CHATML, **options):
    return answers_of(template, ("<|im_start|>", "<|im_end|>", "[TOOL]"), ("<|im_end|>",),
                      added=("<think>", "</think>"), **options)  # fmt: skip


ANALYSIS = "<|channel|>analysis<|message|>x<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>y<|return|>", ("y", "x")),
        ("<|channel|>final<|message|>y<|return|>", ("y",)),
        (f"{ANALYSIS}{ANALYSIS}<|channel|>final<|message|>y<|return|>", ("y",)),
        (f"{ANALYSIS}<|channel|>commentary to=f<|message|>{{}}<|call|>", None),  # a tool call
        ("<|channel|>analysis<|message|>x<|return|>", None),  # no final text
        ("<|channel|>final<|message|>y<|start|>z<|return|>", None),
        ("<|channel|>x<|start|>assistant<|channel|>final<|message|>y<|return|>", None),  # broken
    ],
)
def test_the_final_channel_goes_back(text, kept):
    assert content(harmony(), text) == kept


@pytest.mark.parametrize(
    ("answers", "text", "kept"),
    [
        (chatml(), " Yes.\n<|im_end|>", (" Yes.\n",)),
        (chatml(), "Yes.", ("Yes.",)),  # ended by a stop string
        (chatml(), "a [TOOL]b<|im_end|>", None),
        (chatml(), "<think>\nt\n</think>\n\ny<|im_end|>", ("y",)),
        (chatml(SPLITTING), "<think>\nt\n</think>\n\ny<|im_end|>",
         ("<think>\nt\n</think>\n\ny",)),  # as servers without a parser send it back
        (chatml(SPLITTING, opens=True), "t\n</think>\n\ny<|im_end|>", ("t\n</think>\n\ny",)),
        (chatml(FIELD), "<think>\nt\n</think>\n\ny<|im_end|>", ("y", "t")),
        (answers_of(INSTRUCT, ("<|im_end|>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "[ARGS]"),
                    ("<|im_end|>",)), "[THINK]t[/THINK]y<|im_end|>", ("y",)),
        (answers_of(INSTRUCT, ("<|im_end|>", "[INST]", "[/INST]", "[CALL]", "[ARGS]"),
                    ("<|im_end|>",)), "[CALL]f[ARGS]{}<|im_end|>", None),
        (answers_of(PARTS, ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|call>", "<call|>"),
                    ("<turn|>",)), "<|channel>thought\nt<channel|>y<turn|>", ("y",)),
        (answers_of(PARTS, ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|call>", "<call|>"),
                    ("<turn|>",)), "<|call>f{}<call|><turn|>", None),
        (answers_of(RESPONSE, ("<|BOT|>", "<|USER|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
                               "<|END_OF_TURN|>", "<|START_THINKING|>", "<|END_THINKING|>"),
                    ("<|END_OF_TURN|>",)),
         "<|START_THINKING|>t<|END_THINKING|><|START_RESPONSE|>y<|END_RESPONSE|><|END_OF_TURN|>",
         ("y",)),
    ],
)  # fmt: skip
def test_what_a_chat_server_would_keep_goes_back(answers, text, kept):
    assert content(answers, text) == kept


def test_later_turns_hold_the_final_text_where_the_template_puts_it():
    answers = harmony()
    message = answers.message(ids(answers, f"{ANALYSIS}<|channel|>final<|message|>y<|return|>"))
    user = {"role": "user", "content": "q"}
    text = answers.tokenizer.apply_chat_template([user, message, user], tokenize=False)
    assert "<|start|>assistant<|channel|>final<|message|>y<|end|><|start|>user" in text
    assert "x" not in text


@pytest.mark.parametrize(
    ("answers", "text", "cut"),
    [
        (chatml(), "<think>t<|im_end|>", True),
        (chatml(), "<think>t</think>y<|im_end|>", False),
        (chatml(), "y<|im_end|>", False),
        (chatml(SPLITTING, opens=True), "t<|im_end|>", True),
        (chatml(SPLITTING, opens=True), "t</think>y<|im_end|>", False),
        (answers_of(SPLITTING, ("<|im_end|>",), ("<|im_end|>",)), "<think>t<|im_end|>", True),
        (answers_of(SPLITTING, ("<|im_end|>",), ("<|im_end|>",)), "<think></think>y", False),
        (harmony(), f"{ANALYSIS}<|channel|>final<|message|>y<|return|>", False),
    ],
)
def test_an_answer_that_ends_inside_a_thought_is_cut(answers, text, cut):
    found = ids(answers, text)
    assert answers.is_cut(found, "eos") == cut
    assert answers.is_cut(found, "length")
    traces = [make(0, response_ids=found), make(1, response_ids=found, finish_reason="length")]
    assert Cut.of(traces, answers, []) == Cut(2, 1 + cut, 2 * cut, 0)


@pytest.mark.parametrize(
    ("answers", "end", "foreign"),
    [
        (chatml(), "<|im_end|>", None),
        (answers_of(CHATML, ("<|im_start|>", "<|im_end|>"), ("<|endoftext|>",)), "<|im_end|>",
         "<|im_end|>"),
        (harmony(), "<|return|>", None),
        (answers_of(NO_END, ("<|user|>", "<|assistant|>"), ("<|user|>",)), "<|user|>", None),
        (answers_of(NO_END, (), ("<|endoftext|>",)), "<|endoftext|>", None),
        (answers_of(None, (), ("<|endoftext|>",)), "<|endoftext|>", None),
        (answers_of(RESPONSE, ("<|END_RESPONSE|>", "<|END_OF_TURN|>"), ("<|END_OF_TURN|>",)),
         "<|END_RESPONSE|><|END_OF_TURN|>", None),
    ],
)  # fmt: skip
def test_answers_end_as_the_template_ends_a_turn(answers, end, foreign):
    assert answers.tokenizer.decode(answers.end_ids) == end
    found = answers.foreign_end
    assert (None if found is None else answers.tokenizer.decode([found])) == foreign
