"""The log of a server: its three forms, what is skipped and named, how it is followed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from data import request_log
from data.request_log import RequestLog
from target.model import Target
from target.sampling import Sampling
from tests.commands import write_jsonl
from tests.tiny import EOS, VOCAB_SIZE
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


def exchange(**choice):
    messages = [{"role": "user", "content": "Hi"}]
    return {
        "request": {"messages": messages, "top_p": 0.9},
        "response": {"choices": [{"finish_reason": "stop", **choice}]},
    }


def test_an_exchange_of_a_chat_server_brings_its_token_ids(tmp_path, chat):
    message = {"role": "assistant", "content": "Yo"}
    with_ids = exchange(message=message, token_ids=[40, EOS])
    with_ids["response"]["prompt_token_ids"] = [20, 21]
    text_only = exchange(message=message)
    completion = {
        "request": {"prompt": "Hi", "temperature": 0.0, "top_k": -1},
        "response": {"choices": [{"text": "x", "token_ids": [50], "prompt_token_ids": [51]}]},
    }
    log = opened(tmp_path, chat, [with_ids, text_only, completion])
    first, second, third = log.read(4)
    assert (first.prompt_ids, first.response_ids) == ([20, 21], [40, EOS])
    assert first.sampling == Sampling(1.0, 0, 0.9)  # OpenAI's default temperature
    assert second.prompt_ids == ids(chat, "<|turn|>user\nHi\n<|turn|>assistant\n")
    assert second.response_ids == [*ids(chat, "Yo"), EOS]
    assert [one.retokenised for one in (first, second, third)] == [False, True, False]
    assert (third.prompt_ids, third.response_ids) == ([51], [50])
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
        ({**ROW, "min_p": 0.1}, "min_p=0.1 changes the server's distribution"),
        ({**ROW, "presence_penalty": 1.0}, "presence_penalty=1.0"),
        ({**ROW, "prompt_ids": [5] * 30}, "32 tokens, the context is 31"),
        ({"request": {}, "response": {"choices": []}}, "exactly one choice"),
        ({"request": {}, "response": {"choices": [{"message": "hi"}]}}, "no attribute"),
        ({"prompt": "a\ud83d", "response": "b", "temperature": 1}, "line 11: "),
        ("[" * 100_000, "line 11: "),
        ('{"prompt_ids": [5], "response_ids": [6], "temperature": 1, "top_k": 1e999}',
         "top_k is inf, not a number"),
        ({**ROW, "min_tokens": 3}, "min_tokens=3 changes the server's distribution"),
        ({**ROW, "response_format": {"type": "json_object"}}, "response_format="),
        ({**ROW, "guided_choice": ["a"]}, "guided_choice="),
        ({**ROW, "tool_choice": "required"}, "tool_choice=required"),
        ({"messages": [{"role": "user", "content": "a"}], "response": "b", "temperature": 1,
          "tools": [{}]}, "tools without the prompt's token ids"),
        ({"prompt_ids": [5], "response": "b", "reasoning": "hm", "temperature": 1},
         "reasoning apart from the answer"),
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
    assert "1 of 11 lines skipped (line 11: " in log.summary()
    log.check()


def test_more_than_a_tenth_stops(tmp_path, target):
    log = opened(tmp_path, target, [ROW] * 18 + ["x"] * 2)
    assert len(log.read(99)) == 18  # a tenth may be
    with log.path.open("a") as file:
        file.write('"x"\n')
    with pytest.raises(UserError, match=r"3 of 21 lines cannot be used, more than 10%.*line 19: "):
        log.read(1)


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
    assert again.summary().endswith("1 of 9 lines skipped (line 9: not a JSON object)")


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_log_that_was_replaced_is_refused(size, tmp_path, target):
    """By a shorter one, one as long, and one that is longer."""
    log = opened(tmp_path, target, [ROW] * 3)
    log.read(3)
    state = log.state_dict()
    write_jsonl(log.path, [{**ROW, "prompt_ids": [10, 12]}] * size)
    again = RequestLog(log.path, target, 256)
    again.load_state_dict(state)
    for one in (log, again):
        with pytest.raises(UserError, match="it was replaced"):
            one.read(1)


def test_a_log_that_is_moved_away_is_named(tmp_path, target):
    log = opened(tmp_path, target, [ROW] * 3)
    log.read(1)
    log.path.rename(tmp_path / "log.1")
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        log.read(1)
    (tmp_path / "log.1").rename(log.path)
    assert len(log.read(9)) == 2


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
    plain = exchange(text="x", token_ids=[50], prompt_token_ids=[51])
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
