"""The split of training from evaluation, and the training turns that are held out as well."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from data.prompts import Prompt, keyed_hash, load_prompts
from data.render import render
from data.split import (
    HeldOut,
    contexts,
    count_left_out,
    drop_held_out,
    held_out_turns,
    split_by_hash,
)
from tests.helpers.commands import write_jsonl
from tests.helpers.tiny import tiny_tokenizer
from trainer.errors import UserError


def chat(*users, system=None, name=None):
    """A conversation of these user messages; its id is made of them unless it is given."""
    messages = [{"role": "system", "content": system}] * (system is not None)
    messages += [{"role": "user", "content": text} for text in users]
    name = name or " | ".join(users)
    return Prompt(None, tuple(messages), None, "any", f"chat {name}", name)


def plain(text):
    return Prompt(text, None, None, "any", f"text {text}", text)


def ids_of(prompts):
    return [prompt.conversation_id for prompt in prompts]


def greeted(count, of, texts=("hi",)):
    """`of` chats of two turns, of which the first `count` begin with one of `texts`."""
    return [
        chat(texts[i % len(texts)] if i < count else f"question {i}", f"more {i}")
        for i in range(of)
    ]


# --- the split -----------------------------------------------------------------------------------


def test_the_split_holds_out_the_share_and_ignores_order_and_neighbours():
    prompts = [plain(f"prompt {i}") for i in range(2000)]
    train, held_out = split_by_hash(prompts, 0.1)
    assert 150 < len(held_out) < 250  # 200 +- 3.7 standard deviations
    assert len(train) + len(held_out) == 2000
    again_train, again_held_out = split_by_hash(prompts[::-2], 0.1)
    assert set(ids_of(again_held_out)) <= set(ids_of(held_out))
    assert set(ids_of(again_train)) <= set(ids_of(train))
    assert set(ids_of(split_by_hash(prompts, 0.1, seed=1)[1])) != set(ids_of(held_out))
    # fixed for good: a change of the rule would move prompts of old runs to the other side
    assert ids_of(held_out)[:3] == ["prompt 4", "prompt 8", "prompt 30"]


def test_the_split_keeps_a_conversation_on_one_side(tmp_path):
    rows = [{"prompt": f"{i}", "conversation_id": i // 4} for i in range(400)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    train, held_out = split_by_hash(load_prompts(str(path), count=400), 0.2)
    assert not set(ids_of(train)) & set(ids_of(held_out))
    assert len(held_out) % 4 == 0


@pytest.mark.parametrize("texts", [("hi",), ("hi", "hi "), ("hi", "hello", "good morning")])
def test_conversations_that_share_a_first_turn_stay_on_one_side(texts):
    prompts = greeted(20, 1000, texts)
    train, held_out = split_by_hash(prompts, 0.1)
    first = [{next(contexts(p)) for p in side} for side in (train, held_out)]
    assert not first[0] & first[1]
    # the others as if there were no such conversation
    alone = split_by_hash(prompts[20:], 0.1)[1]
    assert set(ids_of(alone)) == set(ids_of(held_out)) - set(ids_of(prompts[:20]))


def test_a_group_moves_as_its_first_turn_says_whatever_joins_it():
    sides = {}
    for text in (f"greeting {i}" for i in range(40)):
        alone = [chat(text, "a"), chat(text, "b")]
        others = [plain(f"prompt {i}") for i in range(300)]
        for prompts in (alone, [*alone, plain(text)]):
            held_out = ids_of(split_by_hash([*others, *prompts], 0.2)[1])
            sides.setdefault(text, set()).add(ids_of(prompts)[0] in held_out)
    assert all(len(found) == 1 for found in sides.values())
    assert {side for found in sides.values() for side in found} == {True, False}


def test_a_third_conversation_links_two_that_share_no_first_turn():
    """Rows of one conversation begin with different turns."""
    for i in range(30):
        linked = [chat("hi", f"{i}", name=f"a{i}"), chat(f"yo {i}", name=f"b{i}")]
        linked += [chat("hi", "else", name=f"c{i}"), chat(f"yo {i}", "else", name=f"c{i}")]
        others = [plain(f"prompt {j}") for j in range(100)]
        held_out = ids_of(split_by_hash([*linked, *others], 0.2)[1])
        assert len({p in held_out for p in ids_of(linked)}) == 1


def test_the_system_prompt_is_a_part_of_the_first_turn():
    prompts = [plain(f"prompt {i}") for i in range(50)]
    prompts += [chat(f"prompt {i}", "more", system="Be brief.") for i in range(50)]

    def apart(system_prompt):
        train, held_out = split_by_hash(prompts, 0.5, system_prompt=system_prompt)
        texts = [{p.text or p.messages[1]["content"] for p in side} for side in (train, held_out)]
        return not texts[0] & texts[1]

    assert apart("Be brief.")
    assert not apart(None)


def test_a_first_turn_of_more_than_the_share_is_trained_on(capsys):
    for text in (f"greeting {i}" for i in range(20)):
        prompts = greeted(600, 1000, (text,))
        train, held_out = split_by_hash(prompts, 0.1)
        assert set(ids_of(prompts[:600])) <= set(ids_of(train))
        assert 15 < len(held_out) < 75
    assert not capsys.readouterr().out


def test_where_all_share_their_first_turn_they_are_held_out_one_by_one(capsys):
    prompts = greeted(200, 200)
    train, held_out = split_by_hash(prompts, 0.2)
    assert ids_of(held_out) == [
        name for name in ids_of(prompts) if int(keyed_hash(0, name), 16) < 0.2 * 2**256
    ]
    assert "200 of 200 prompts are of conversations that share" in capsys.readouterr().out
    assert len(drop_held_out(train, held_out, None, "k", 0)) == len(train)


@pytest.mark.parametrize(
    ("share", "prompts", "rule"),
    [
        (0.001, [plain("a"), plain("b")], "leaves none of 2 prompts for evaluation"),
        (0.999, [plain("a"), plain("b")], "leaves none of 2 prompts for training"),
        (0.1, [chat(f"{i}", name="x") for i in range(9)],
         "leaves none of 9 prompts for evaluation, all of them have the conversation_id 'x'"),
    ],
)  # fmt: skip
def test_an_empty_side_is_refused(share, prompts, rule):
    assert split_by_hash(prompts, 0.0) == (prompts, [])
    with pytest.raises(UserError) as caught:
        split_by_hash(prompts, share)
    assert (caught.value.key, caught.value.value) == ("data.eval_share", share)
    assert caught.value.rule == rule
    assert "eval.prompts" in caught.value.remedy


# --- turns that are held out as well -------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "held_out", "shared"),
    [
        (plain("What is 2 + 2?"), chat("\tWhat is 2 + 2?\n"), [True]),
        (plain("What is 2 + 2?"), plain("What is  2 + 2?"), [False]),
        (chat("hi", "a"), chat("hi", "b"), [True, False]),
        (chat("hi", "a"), chat("hi", "a", "b"), [True, True]),
        (chat("hi", "a", "b"), chat("hi", "a"), [True, True, False]),
        (chat("a", "hi"), chat("hi"), [False, False]),
        (chat("hi", system="Be brief."), chat("hi"), [False]),
        (chat("hi", system=" Be brief."), chat("hi ", system="Be brief."), [True]),
    ],
)
def test_a_turn_is_held_out_where_its_context_is(trained, held_out, shared):
    assert held_out_turns([trained], [plain("other"), held_out]) == [shared]


def test_the_system_prompt_of_the_run_is_a_part_of_the_context():
    pair = [chat("hi", system="Be brief.")], [plain("hi")]
    assert held_out_turns(*pair) == held_out_turns(*pair, "Be long.") == [[False]]
    assert held_out_turns(*pair, "Be brief.") == [[True]]
    assert held_out_turns(*pair[::-1], "Be brief.") == [[True]]


def test_only_prompts_all_of_whose_turns_are_held_out_are_dropped(capsys):
    train = [chat("hi", "a"), plain("hi"), plain("other"), chat("yo\n", "b"), chat("yo", "c", "d")]
    left = drop_held_out(train, [chat("yo", "z"), plain("hi")], None, "eval.prompts", "x")
    assert left == [train[0], *train[2:]]
    line, = capsys.readouterr().out.splitlines()  # fmt: skip
    said = "4 of 9 training turns have a context that is held out as well: 'hi' (2), 'yo' (2), "
    assert line == said + "first in chat hi | a; these are not trained on"
    assert drop_held_out(train, [plain("new")], None, "eval.prompts", "x") == train
    assert not capsys.readouterr().out


def test_more_than_half_stops_and_half_does_not():
    shared = [(text, f"row {i}") for i, text in enumerate(["a", "a", "b", "c", "d\ne"])]
    assert "5 of 10" in count_left_out(shared, 10, "eval.prompts", "x")
    with pytest.raises(UserError) as caught:
        count_left_out(shared, 9, "eval.prompts", "own.jsonl")
    assert (caught.value.key, caught.value.value) == ("eval.prompts", "own.jsonl")
    said = "5 of 9 training turns have a context that is held out as well: 'a' (2), 'b' (1), "
    assert caught.value.rule == said + "'c' (1) and 1 more texts, first in row 0"
    assert caught.value.remedy


# --- prompts that are token ids ------------------------------------------------------------------

DATED = "<|turn|>system\nToday is {}.\n"


def logged(tokenizer, *texts, system=None):
    """The rendered conversation of these texts, user and assistant in turn, as a log has it."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] * (system is not None)
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return SimpleNamespace(prompt_ids=render(messages, tokenizer))


def find(traces, *held_out, tokenizer):
    find = HeldOut(held_out, tokenizer, None, {})
    return [find.asked(trace.prompt_ids) for trace in traces]


@pytest.mark.parametrize(
    ("given", "held_out", "shared"),
    [
        ("[DATE]the same question", "the same question", True),
        ("[SYSTEM]the same question", "the same question", True),
        ("the same question", "[SYSTEM]the same question", True),
        ("[DATE]say the same question", "the same question", False),
        ("[DATE]the same", "the same question", False),
        ("[DATE]?", "?", True),
        ("[DATE]0", "?", False),
    ],
)
def test_a_held_out_question_is_found_behind_another_system_message_or_date(
    given, held_out, shared
):
    """`[DATE]`: logged on another day, by a template that names it; `[SYSTEM]`: behind a system
    message."""
    tokenizer = tiny_tokenizer(chat_template=True)
    template = tokenizer.chat_template

    def parts(text):
        return text.split("]")[-1], "Be brief." if "[SYSTEM]" in text else None

    tokenizer.chat_template = DATED.format("Friday" if "[DATE]" in given else "Monday") + template
    text, system = parts(given)
    trace = logged(tokenizer, text, system=system)
    tokenizer.chat_template = DATED.format("Monday") + template
    text, system = parts(held_out)
    expected = [text if shared else None]
    assert find([trace], chat(text, system=system), tokenizer=tokenizer) == expected


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        (("hi",), True),
        (("hi", "Hello!", "why?"), True),  # with whatever answer
        (("hi", "Hello!", "why?", "So.", "and?"), True),
        (("yo", "Hello!", "why?"), False),
        (("hi", "Hello!", "how?"), False),
        (("why?",), False),
        (("why?", "So.", "hi", "Hello!", "and?"), False),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_later_turn_is_found_behind_its_own_earlier_ones(given, shared, thinks):
    tokenizer = tiny_tokenizer(chat_template=True)
    if thinks:  # the start of an answer is written otherwise than an answer that was given
        tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    (found,) = find([logged(tokenizer, *given)], chat("hi", "why?", "and?"), tokenizer=tokenizer)
    assert found == (given[-1] if shared else None)


def test_a_text_without_a_template_is_compared_as_a_whole():
    tokenizer = tiny_tokenizer(chat_template=False)
    traces = [SimpleNamespace(prompt_ids=render(text, tokenizer)) for text in ("the sea", "sea")]
    assert find(traces, plain("sea"), tokenizer=tokenizer) == [None, "sea"]
