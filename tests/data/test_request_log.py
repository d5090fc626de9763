"""The log of a server: its three forms, what is skipped and named, how it is followed."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from data import request_keys, request_log
from data.request_log import FOREIGN, HELD_OUT, RequestLog
from data.split import HeldOut
from target.model import Target
from target.sampling import Sampling
from tests.data.test_split import chat as asked_of
from tests.helpers.commands import ROOT, write_jsonl
from tests.helpers.tiny import EOS, VOCAB_SIZE
from trainer.errors import UserError

ROW = {"prompt_ids": [10, 11], "response_ids": [12, 13], "temperature": 0.7, "top_k": 5}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def chat(tiny_target):
    return tiny_target("llama", chat_template=True)


def opened(tmp_path, target, rows, limit=256):
    return RequestLog(write_jsonl(tmp_path / "log.jsonl", rows), target, limit)


def ids(target, text):
    return target.tokenizer(text).input_ids


def test_ids_and_sampling_are_taken_as_they_are(tmp_path, target):
    (one,) = opened(tmp_path, target, [{**ROW, "domain": "code"}]).read(4)
    assert (one.prompt_ids, one.response_ids) == ([10, 11], [12, 13])
    assert one.sampling == Sampling(0.7, 5, 1.0)
    assert (one.domain, one.retokenised) == ("code", False)


def test_text_is_tokenised_and_marked(tmp_path, target):
    row = {"prompt": "Two and two? ", "response": "Four.", "temperature": 0}
    ended, cut = opened(
        tmp_path, target, [{**row, "finish_reason": "stop"}, {**row, "finish_reason": "length"}]
    ).read(4)
    assert ended.prompt_ids == ids(target, "Two and two? ")
    assert ended.response_ids == [*ids(target, "Four."), EOS]
    assert cut.response_ids == ids(target, "Four.")
    assert ended.retokenised
    assert cut.retokenised


def spelled(target, text, *more):
    """The token ids of an answer."""
    return [*target.tokenizer(text, add_special_tokens=False).input_ids, *more]


def exchange(**choice):
    messages = [{"role": "user", "content": "Hi"}]
    return {
        "request": {"messages": messages, "top_p": 0.9},
        "response": {"choices": [{"finish_reason": "stop", **choice}]},
    }


def test_an_exchange_of_a_chat_server_brings_its_token_ids(tmp_path, chat):
    message = {"role": "assistant", "content": "Yo"}
    answer = spelled(chat, "Yo", EOS)
    with_ids = exchange(message=message, token_ids=answer)
    with_ids["response"]["prompt_token_ids"] = [20, 21]
    text_only = exchange(message=message)
    completion = {
        "request": {"prompt": "Hi", "temperature": 0.0, "top_k": -1},
        "response": {"choices": [{"text": "x", "token_ids": spelled(chat, "x"),
                                  "prompt_token_ids": [51]}]},
    }  # fmt: skip
    log = opened(tmp_path, chat, [with_ids, text_only, completion])
    first, second, third = log.read(4)
    assert (first.prompt_ids, first.response_ids) == ([20, 21], answer)
    assert first.sampling == Sampling(1.0, 0, 0.9)  # OpenAI's default temperature
    assert second.prompt_ids == ids(chat, "<|turn|>user\nHi\n<|turn|>assistant\n")
    assert second.response_ids == [*ids(chat, "Yo"), EOS]
    assert [one.retokenised for one in (first, second, third)] == [False, True, False]
    assert (third.prompt_ids, third.response_ids) == ([51], spelled(chat, "x"))
    assert third.sampling == Sampling(0.0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({**ROW, "response_ids": [VOCAB_SIZE]}, "response_ids: 100 is outside the vocabulary"),
        ({**ROW, "prompt_ids": [-1]}, "prompt_ids: -1 is outside the vocabulary of 100"),
        ({**ROW, "prompt_ids": []}, "prompt_ids is not a list of ids"),
        ({**ROW, "response_ids": ["a"]}, "response_ids is not a list of ids"),
        ({"prompt_ids": [5], "temperature": 1}, "no response_ids and no response text"),
        ({"response_ids": [5], "temperature": 1}, "no prompt_ids, messages or prompt"),
        ({**ROW, "temperature": None}, "temperature is None, not a number"),
        ({**ROW, "temperature": -1}, "temperature -1"),
        ({**ROW, "top_p": 0}, "top_p 0 is no sampling"),
        ({**ROW, "min_p": 0.1}, "min_p=0.1 may change the server's distribution"),
        ({**ROW, "presence_penalty": 1.0}, "presence_penalty=1.0"),
        ({**ROW, "prompt_ids": [5] * 30}, "32 tokens, the context is 31"),
        ({"request": {}, "response": {"choices": []}}, "exactly one choice"),
        ({"request": {}, "response": {"choices": [{"message": "hi"}]}}, "no attribute"),
        ({"prompt": "a\ud83d", "response": "b", "temperature": 1}, "line 11: "),
        ({**ROW, "domain": "\ud83d"}, "surrogates not allowed"),
        ("[" * 100_000, "RecursionError"),
        ('{"temperature": ' + "9" * 5000 + "}", "not JSON"),
        ({**ROW, "temperature": 10**400}, "OverflowError"),
        ({**ROW, "top_k": 0.5}, "top_k 0.5"),
        ('{"prompt_ids": [5], "response_ids": [6], "temperature": 1, "top_k": 1e999}',
         "top_k is inf, not a number"),
        ({**ROW, "min_tokens": 3}, "min_tokens=3 may change the server's distribution"),
        ({**ROW, "response_format": {"type": "json_object"}}, "response_format may change"),
        ({**ROW, "guided_choice": ["a"]}, "guided_choice may change"),
        ({**ROW, "tool_choice": "required"}, "tool_choice may change"),
        ({"messages": [{"role": "user", "content": "a"}], "response": "b", "temperature": 1,
          "tools": [{}]}, "tools without the token ids of prompt and answer"),
        ({"prompt_ids": [5], "response": "b", "reasoning": "hm", "temperature": 1},
         "thoughts apart from the answer"),
        ({"messages": [{"role": "user", "content": "a"}], "response": "b", "temperature": 1},
         "its messages cannot be rendered"),
    ],
)  # fmt: skip
def test_a_useless_line_is_skipped_counted_and_named(tmp_path, target, row, says):
    log = opened(tmp_path, target, [ROW] * 10, limit=31)
    with log.path.open("a") as file:
        file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    assert len(log.read(20)) == 10
    assert says in log.summary()
    assert re.search(r"1 of 11 lines skipped \(.* 1, first line 11: ", log.summary())
    log.check(over=True)


def test_lines_of_no_use_do_not_stop_a_run_and_a_log_without_any_other_does(tmp_path, target):
    log = opened(tmp_path, target, ["x"] * 30 + [ROW])
    assert len(log.read(99)) == 1
    log.check(over=True)
    useless = opened(tmp_path, target, ["x"] * 30)
    assert useless.read(99) == []
    useless.check()
    with pytest.raises(UserError) as caught:
        useless.check(over=True)
    assert caught.value.key == "method.log"
    assert caught.value.rule.startswith("30 of 30 lines cannot be used (not JSON 30, first line 1")


def test_more_than_a_tenth_of_another_model_stops(tmp_path, target):
    log = opened(tmp_path, target, [ROW] * 30 + ["x"] * 30)
    assert len(log.read(99)) == 30
    for line in (1, 2, 3):
        log.skip(FOREIGN, "not its own", line)
    with pytest.raises(UserError) as caught:
        log.skip(FOREIGN, "not its own", 4)
    assert caught.value.rule.startswith("4 of 30 lines cannot be used, more than 10%")
    assert "not this target's 4, first line 1: not its own" in caught.value.rule
    assert "model.target" in caught.value.remedy


@pytest.mark.parametrize(("others", "stops"), [(3, False), (1, True)])
def test_answers_to_held_out_prompts_are_not_learned_from(tmp_path, chat, others, stops):
    """More of them than of others stop the run: nearly all that is left is the evaluation's."""
    find = HeldOut([asked_of("What is two and two?", "why?")], chat.tokenizer, None, {})
    asked = ["What is two and two?"] * 2 + ["Hi"] * others
    rows = [
        exchange(message={"role": "assistant", "content": "Four."}) | {"domain": text}
        for text in asked
    ]
    for row, text in zip(rows, asked, strict=True):
        row["request"]["messages"] = [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": text},
        ]  # fmt: skip
    path = write_jsonl(tmp_path / "log.jsonl", rows)
    log = RequestLog(path, chat, 256, held_out=find)
    assert [one.domain for one in log.read(9)] == ["Hi"] * others
    assert kinds(log) == {HELD_OUT: 2}
    assert "'What is two and two?' is held out for the evaluation" in log.summary()
    if not stops:
        log.check(over=True)
        return
    with pytest.raises(UserError) as caught:
        log.check()
    assert caught.value.key == "method.log"
    assert caught.value.rule.startswith("2 of 3 answers are to prompts that are held out (held out")
    assert caught.value.remedy == "name other prompts as eval.prompts"


def test_a_line_that_is_being_written_is_waited_for(tmp_path, target, monkeypatch):
    log = opened(tmp_path, target, [ROW])
    whole = json.dumps({**ROW, "prompt_ids": [77]}) + "\n"
    with log.path.open("a") as file:
        file.write(whole[:20])
    assert len(log.read(2)) == 1
    assert log.read(2) == []

    waits = []

    def write_the_rest(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            with log.path.open("a") as file:
                file.write(whole[20:])

    monkeypatch.setattr(request_log.time, "sleep", write_the_rest)
    (one,) = log.read(1, wait_s=30)
    assert len(waits) == 3
    assert one.prompt_ids == [77]
    assert log.num_bad == 0


def test_it_goes_on_where_a_checkpoint_stood(tmp_path, target):
    rows = [{**ROW, "prompt_ids": [i]} for i in range(4, 12)] + ["x"]
    log = opened(tmp_path, target, rows)
    log.read(3)
    again = RequestLog(log.path, target, 256)
    again.load_state_dict(log.state_dict())
    assert again.read(9) == log.read(9)
    assert again.state_dict() == log.state_dict()
    assert again.summary().endswith(
        "1 of 9 lines skipped (not JSON 1, first line 9: not a JSON object)"
    )


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_log_that_was_replaced_is_read_from_its_beginning(size, tmp_path, target, capsys):
    """By a shorter one, one as long, and one that is longer, as when logs are rotated."""
    log = opened(tmp_path, target, [ROW] * 3)
    log.read(3)
    again = RequestLog(log.path, target, 256)
    again.load_state_dict(log.state_dict())
    log.path.rename(tmp_path / "log.1")
    write_jsonl(log.path, [{**ROW, "prompt_ids": [10, 12]}] * size)
    for one in (log, again):
        assert [row.prompt_ids for row in one.read(99)] == [[10, 12]] * size
        assert "log.jsonl was replaced: the new file is read from" in capsys.readouterr().out
        assert one.read(9) == []


def test_a_log_that_is_moved_away_is_waited_for(tmp_path, target, monkeypatch, capsys):
    log = opened(tmp_path, target, [ROW] * 3)
    log.read(1)
    log.path.rename(tmp_path / "log.1")
    assert log.read(1) == []
    assert "log.jsonl is gone" in capsys.readouterr().out
    back = [lambda: None, lambda: (tmp_path / "log.1").rename(log.path)]
    monkeypatch.setattr(request_log.time, "sleep", lambda _: back and back.pop(0)())
    assert len(log.read(9, wait_s=1)) == 2


def test_a_last_line_without_its_end_is_read_once_it_is_whole(tmp_path, target):
    log = opened(tmp_path, target, [ROW])
    whole = json.dumps({**ROW, "prompt_ids": [77]})
    log.path.write_text(log.path.read_text() + whole[:-1])
    assert len(log.read(9)) == 1
    with log.path.open("a") as file:
        file.write("}")
    assert [one.prompt_ids for one in log.read(9)] == [[77]]
    with log.path.open("a") as file:
        file.write("\n" + whole + "\n")
    assert [one.prompt_ids for one in log.read(9)] == [[77]]
    assert (log.lines, log.num_bad) == (3, 0)


def test_a_wait_ends_after_its_time_and_when_the_run_is_stopped(tmp_path, target, monkeypatch):
    waits = []
    monkeypatch.setattr(request_log.time, "sleep", waits.append)
    log = opened(tmp_path, target, [ROW])
    assert len(log.read(2, wait_s=60)) == 1
    assert sum(waits) == pytest.approx(60)
    waits.clear()
    assert log.read(1, wait_s=60, stopped=lambda: len(waits) == 2) == []
    assert len(waits) == 2


def test_what_a_request_does_not_say_is_what_the_model_says(tmp_path, tiny_target, monkeypatch):
    """As vLLM fills it in from generation_config.json; neutral values may be said in any form."""
    target = tiny_target("llama")
    monkeypatch.setattr(target.model.generation_config, "temperature", 0.6)
    monkeypatch.setattr(target.model.generation_config, "top_p", 0.95)
    plain = exchange(text="x", token_ids=spelled(target, "x"), prompt_token_ids=[51])
    own = json.loads(json.dumps(plain))
    plain["request"] = {"response_format": {"type": "text"}, "tool_choice": "auto", "top_k": None}
    own["request"] = {"temperature": 0.3, "top_p": None}
    greedy = {**ROW, "temperature": 1e-6}
    log = opened(tmp_path, target, [plain, own, ROW, greedy])
    samplings = [one.sampling for one in log.read(4)]
    assert samplings[:2] == [Sampling(0.6, 0, 0.95), Sampling(0.3, 0, 0.95)]
    assert samplings[2:] == [Sampling(0.7, 5, 1.0), Sampling(0.0, 5, 1.0)]
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 1.1)
    log = opened(tmp_path, target, [plain])
    assert log.read(1) == []
    assert "repetition_penalty=1.1" in log.summary()


def test_a_text_that_a_stop_string_ended_has_no_eos(tmp_path, chat):
    message = {"role": "assistant", "content": "Yo"}
    by_string = exchange(message=message, stop_reason="\n")
    by_eos = exchange(message=message, stop_reason=None)
    unknown = exchange(message=message)
    for row in (by_eos, unknown):
        row["request"]["stop"] = ["\n"]
    found = opened(tmp_path, chat, [by_string, by_eos, unknown]).read(3)
    assert [one.response_ids[-1] == EOS for one in found] == [False, True, False]


def test_a_text_ends_in_the_eos_that_ended_it(tmp_path, tiny_folder):
    """vLLM names each EOS but the tokenizer's own, which is here not the smallest of the set."""
    name = tiny_folder("llama", chat_template=True)
    chat = Target.load(str(name))
    turn, other = chat.tokenizer.convert_tokens_to_ids(["<|turn|>", "A"])
    chat.tokenizer.eos_token = "<|turn|>"
    many = dataclasses.replace(chat, eos_ids=(EOS, turn, other))
    message = {"role": "assistant", "content": "Yo"}
    reasons = ({"stop_reason": None}, {}, {"stop_reason": other}, {"stop_reason": 50})
    rows = [exchange(message=message, **reason) for reason in reasons]
    found = [one.response_ids for one in opened(tmp_path, many, rows).read(9)]
    text = ids(chat, "Yo")
    assert found == [[*text, turn], [*text, turn], [*text, other], text]
    without = dataclasses.replace(chat, eos_ids=(EOS, other))
    (one,) = opened(tmp_path, without, rows[:1]).read(9)
    assert one.response_ids == [*text, EOS]


def test_options_of_the_template_are_those_of_the_request(tmp_path, chat, monkeypatch):
    seen = []
    monkeypatch.setattr(
        request_log, "render", lambda *_, chat_template_kwargs: seen.append(chat_template_kwargs)
    )
    row = exchange(message={"content": "Yo"})
    row["request"]["chat_template_kwargs"] = {"enable_thinking": False}
    opened(tmp_path, chat, [row]).read(1)
    assert seen == [{"enable_thinking": False}]


def test_a_missing_log_is_named(tmp_path, target):
    with pytest.raises(UserError, match=r"nothing\.jsonl does not exist"):
        RequestLog(tmp_path / "nothing.jsonl", target, 256)


# --- the keys of a request -----------------------------------------------------------------------


def answered(target, request=(), response=(), **choice):
    """An exchange with token ids and the server's count of them."""
    choice = {"text": "Yo", "token_ids": spelled(target, "Yo", EOS), "prompt_token_ids": [51],
              "finish_reason": "stop", "stop_reason": None, **choice}  # fmt: skip
    return {
        "request": {"prompt": "Hi", "temperature": 1.0, **dict(request)},
        "response": {"choices": [choice], "usage": {"completion_tokens": 3}, **dict(response)},
    }


def kinds(log):
    return {kind: number for kind, (number, _) in log.kinds.items()}


@pytest.mark.parametrize(
    "keys",
    [
        {"user": "u", "metadata": {"a": "b"}, "stream_options": {"include_usage": True},
         "service_tier": "auto", "store": True, "prompt_cache_key": "k", "rid": "7",
         "logprobs": 1, "max_completion_tokens": 9, "return_token_ids": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0,
         "typical_p": 1, "logit_bias": {}, "response_format": {"type": "text"}, "tools": [],
         "xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0, "repeat_penalty": 1.0},
        {"regex": None, "guided_json": None, "whatever": None, "best_of": None},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": None}}],
         "tool_choice": "auto", "chat_template": "{{x}}", "reasoning_effort": "low",
         "skip_special_tokens": False, "stop_token_ids": [7]},
    ],
)  # fmt: skip
def test_keys_that_leave_the_distribution_as_it_is_are_learned_from(tmp_path, target, keys):
    log = opened(tmp_path, target, [answered(target, keys)])
    assert [one.response_ids for one in log.read(9)] == [spelled(target, "Yo", EOS)], log.kinds


CHANGED = {
    "regex": "[0-9]+", "json_schema": "{}", "ebnf": "root", "structural_tag": {"a": 1},
    "grammar": "root", "typical_p": 0.5, "mirostat": 2, "xtc_probability": 0.5,
    "dry_multiplier": 0.8, "repeat_penalty": 1.3, "logits_processors": ["x"],
    "vllm_xargs": {"a": 1}, "lora_path": "other", "ignore_eos": True, "echo": True,
    "guided_choice": ["a"], "best_of": 4, "thinking_token_budget": 5, "suffix": "x",
    "of_next_year": 0, "session_params": {"id": "s"},
    "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
}  # fmt: skip


def test_any_other_key_is_not_learned_from_and_counted_under_its_name(tmp_path, target):
    rows = [answered(target, {key: value}) for key, value in CHANGED.items()]
    log = opened(tmp_path, target, [*rows, answered(target), answered(target, {"regex": "b"})])
    assert len(log.read(99)) == 1
    assert kinds(log) == {**dict.fromkeys(CHANGED, 1), "regex": 2}
    assert "regex 2, first line 1: regex may change the server's distribution" in log.summary()
    assert "[0-9]" not in log.summary(), "what a client has sent may be private"


def test_a_key_of_a_client_is_shown_as_one_short_word(tmp_path, target):
    row = answered(target, {"a\nb" * 99: 1})
    log = opened(tmp_path, target, [row])
    assert log.read(9) == []
    (kind,) = log.kinds
    assert len(kind) <= 40
    assert "\n" not in log.summary()


@pytest.mark.parametrize("key", ["chat_template", "reasoning_effort", "stop_token_ids", "tools"])
def test_what_changes_the_prompt_or_the_text_needs_the_token_ids(tmp_path, chat, key):
    row = exchange(message={"content": "Yo"})
    row["request"][key] = ["x"]
    log = opened(tmp_path, chat, [row])
    assert log.read(9) == []
    assert kinds(log) == {key: 1}


@pytest.mark.parametrize(
    ("names", "learned"),
    [
        (["m", "m", "my-lora", "m"], ["m", "m", "m"]),
        (["my-lora", "OWN", "my-lora", "BASE"], ["my-lora", "OWN", "BASE"]),
        ([None, "m", None, "x"], [None, "m", None]),
    ],
)
def test_one_name_is_the_targets_and_another_is_a_loras(tmp_path, target, names, learned):
    own = {"OWN": target.name, "BASE": target.name.rpartition("/")[2]}
    rows = [answered(target, {"model": own.get(n, n), "seed": i}) for i, n in enumerate(names)]
    log = opened(tmp_path, target, rows)
    assert [names[one.seed] for one in log.read(99)] == learned
    assert kinds(log) == {"model": len(names) - len(learned)}
    again = RequestLog(log.path, target, 256)
    again.load_state_dict(log.state_dict())
    assert again.model == log.model


# --- whether the token ids are the whole answer ---------------------------------------------------


LONG = "def add(a, b):"


@pytest.mark.parametrize(
    ("lost", "count", "more", "kind"),
    [
        (slice(0, 0), True, {}, None),
        (slice(0, 0), False, {}, None),
        (slice(3, 6), True, {}, "tokens lost"),
        (slice(3, 6), False, {}, "tokens lost"),
        (slice(0, 14), False, {}, "tokens lost"),
        (slice(3, 6), True, {"text": "", "message": {"tool_calls": [{}]}}, "tokens lost"),
        (slice(0, 0), True, {"text": "def sub(a, b):"}, "tokens lost"),
        (slice(0, 0), True, {"logprobs": {"tokens": ["a"] * 14}}, "tokens lost"),
        (slice(0, 0), False, {"text": "", "message": {"reasoning": LONG}}, "no usage"),
        (slice(0, 0), True, {"text": "", "message": {"reasoning": LONG}}, None),
        (slice(0, 0), True, {"text": "add", "message": {"reasoning": "def"}}, None),
        (slice(0, 0), False, {"text": "", "message": {"tool_calls": [{}]}}, "no usage"),
        (slice(0, 0), True, {"text": "", "message": {"tool_calls": [{}]}}, None),
        (slice(0, 0), False, {"text": " def add(a,b):\n"}, None),  # servers strip white space
        (slice(0, 0), False, {"text": "def add"}, "tokens lost"),
        (slice(0, 0), False, {"text": "def add", "stop_reason": "("}, None),  # cut by a stop string
    ],
)  # fmt: skip
def test_token_ids_are_proven_by_count_and_text(tmp_path, target, lost, count, more, kind):
    whole = spelled(target, LONG, EOS)
    kept = [token for i, token in enumerate(whole) if i not in range(*lost.indices(99))]
    usage = {"usage": {"completion_tokens": len(whole)} if count else None}
    row = answered(target, response=usage, **{"text": LONG, "token_ids": kept, **more})
    log = opened(tmp_path, target, [row])
    found = log.read(9)
    assert (kinds(log), len(found)) == (({}, 1) if kind is None else ({kind: 1}, 0))


@pytest.mark.parametrize("behind", [[5, 6], [EOS]])
def test_an_answer_that_goes_on_after_its_eos_is_not_learned_from(tmp_path, target, behind):
    ids_ = [*spelled(target, "Yo", EOS), *behind]
    row = answered(target, response={"usage": {"completion_tokens": len(ids_)}}, token_ids=ids_)
    log = opened(tmp_path, target, [row])
    assert log.read(9) == []
    assert kinds(log) == {"past the EOS": 1}


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"message": {"content": "Let me see.", "tool_calls": [{"id": "1"}]}}, "response"),
        ({"message": {"content": "Let me see.", "function_call": {"name": "f"}}}, "response"),
        ({"message": {"content": "Let me see."}, "finish_reason": "tool_calls"}, "response"),
        ({"message": {"content": "Let me see."}, "finish_reason": "content_filter"},
         "finish_reason"),
    ],
)  # fmt: skip
def test_a_text_that_is_not_the_whole_answer_is_not_ended_by_an_eos(tmp_path, chat, choice, kind):
    log = opened(tmp_path, chat, [exchange(**choice)])
    assert log.read(9) == []
    assert kinds(log) == {kind: 1}


def test_a_text_whose_thoughts_were_left_out_is_told_by_the_count(tmp_path, chat):
    rows = [exchange(message={"content": "Yo there"}) for _ in range(3)]
    for row, count in zip(rows, (9, 8, 90), strict=True):
        row["response"]["usage"] = {"completion_tokens": count}
    log = opened(tmp_path, chat, rows)
    assert len(log.read(9)) == 2  # not every server counts the EOS
    assert kinds(log) == {"tokens lost": 1}


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, None),
        ({"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]},
         "messages"),
        ({"role": "user", "content": [{"type": "text", "text": "Hi"}] * 2}, "messages"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages"),
        ({"role": "tool", "content": "3"}, "messages"),
        ("Hi", "messages"),
    ],
)  # fmt: skip
def test_messages_are_rendered_as_the_server_did_or_not_at_all(tmp_path, chat, message, kind):
    row = exchange(message={"content": "Yo"})
    row["request"]["messages"] = [message]
    log = opened(tmp_path, chat, [row])
    found = log.read(9)
    assert kinds(log) == ({kind: 1} if kind else {})
    if found:
        assert found[0].prompt_ids == ids(chat, "<|turn|>user\nHi\n<|turn|>assistant\n")


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [[51, 52]], [51, 52]])
def test_a_prompt_may_be_a_batch_of_one(tmp_path, target, prompt):
    row = answered(target, {"prompt": prompt}, prompt_token_ids=None)
    (one,) = opened(tmp_path, target, [row]).read(9)
    assert one.prompt_ids == ([51, 52] if 51 in np.ravel(prompt) else ids(target, "Hi"))


def test_an_image_is_not_read_from_token_ids_either(tmp_path, target):
    row = answered(target)
    row["request"]["messages"] = [{"role": "user", "content": [{"type": "image_url"}]}]
    log = opened(tmp_path, target, [row])
    assert log.read(9) == []
    assert kinds(log) == {"messages": 1}


def test_docs_hold_the_tables_of_keys():
    text = " ".join((ROOT / "docs" / "online.md").read_text().split())

    def spelled_out(values):
        return ", ".join(json.dumps(value) for value in values)

    free = ", ".join(f"`{key}`" for key in request_keys.FREE)
    neutral = ", ".join(f"`{k}` {spelled_out(v)}" for k, v in request_keys.NEUTRAL.items()
                        if v != request_keys.EMPTY)  # fmt: skip
    empty = ", ".join(f"`{k}`" for k, v in request_keys.NEUTRAL.items() if v == request_keys.EMPTY)
    with_ids = ", ".join(f"`{key}`" for key in request_keys.WITH_IDS)
    for table in (free, neutral, empty, with_ids):
        assert table in text, table
