"""Servers that answer without an end, with absurd lengths, or with what is no answer at all: each
request to them ends, in one line, and so does a run without another server."""

from __future__ import annotations

import json
import socket
import time

import pytest

import train
from engines import completions, web
from engines.completions import ask, complete, continuation, served_model
from engines.states import StatesClient
from engines.vllm_run import EngineCounters, from_metrics, scrape
from engines.web import ServerError, answer_limits
from target.decode import Request
from target.sampling import Sampling
from tests.engines.raw_server import forever, once, page, raw_server
from tests.helpers.commands import command, stored_traces, training_stores
from tests.helpers.servers import NEW, answers_of, filled, plan_of, played
from tests.helpers.tiny import EOS, VOCAB_SIZE
from trainer.errors import RunFault, UserError

OK = b"HTTP/1.1 200 OK\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SETTINGS = {"max_new_tokens": NEW, "eos_ids": [EOS], "vocab_size": VOCAB_SIZE}
WIDE = b" " * 2**16

# what goes past a limit -> what is said of it
PAST = {
    "a body without an end": (forever(OK + b"\r\n", WIDE), "has over 3072 bytes"),
    "a length of terabytes": (once(OK + b"Content-Length: %d\r\n\r\n" % 10**13, 9), "over 3072"),
    "a chunk of terabytes": (forever(OK + CHUNKED + b"fffffffffff\r\n", WIDE), "over 3072 bytes"),
    "chunks without an end": (forever(OK + CHUNKED, b"1\r\n \r\n" * 999), "has over 3072 bytes"),
    "an error without an end": (forever(BUSY + b"\r\n", WIDE), "has over 65536 bytes"),
    "an error of terabytes": (once(BUSY + b"Content-Length: %d\r\n\r\n" % 10**13, 9), "over 65536"),
    "a body that drips": (forever(OK + b"\r\n", b" ", 0.02), "not whole after 0.3 s"),
    "an error that drips": (forever(BUSY + b"\r\n", b" ", 0.02), "not whole after 0.3 s"),
    "a head that drips": (forever(OK + b"X: ", b"y", 0.02), "not whole after 0.3 s"),
    "100 Continue without an end": (forever(b"", b"HTTP/1.1 100 Go\r\n\r\n"), "after 0.3 s"),
    "103 Early Hints without an end": (forever(b"", b"HTTP/1.1 103 X\r\n\r\n"), "after 0.3 s"),
}  # fmt: skip


SILENT = {
    "silence": once(b"", 9),
    "silence in a head": once(b"HTTP/1.1 2", 9),
    "silence in a body": once(OK + b"\r\n{", 9),
    "silence in a chunk": once(OK + CHUNKED + b"9\r\n{", 9),
    "silence in an error": once(BUSY + b"\r\n{", 9),
}


@pytest.fixture
def tight(monkeypatch):
    """Limits that are passed in no time."""
    monkeypatch.setattr(web, "SILENT_S", 0.3)
    monkeypatch.setattr(web, "TOKEN_S", 0.0)
    monkeypatch.setattr(web, "SILENT_TOKEN_S", 0.0)
    monkeypatch.setattr(web, "TOKEN_BYTES", 0)
    monkeypatch.setattr(web, "PAGE_BYTES", 3072)


def request():
    return Request([5, 6, 7], 0, Sampling(0.0))


def failure(server):
    """How a request to a server fails: in one line that names it, within PLAY_S."""
    began = time.monotonic()
    with pytest.raises(ServerError) as error:
        continuation(server.url, "tiny", request(), **SETTINGS)
    assert time.monotonic() - began < 3
    assert str(error.value).startswith(server.url)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400
    return error


@pytest.mark.parametrize("kind", PAST)
def test_an_answer_ends_at_its_limits_and_its_server_is_not_asked_again(tight, kind):
    play, said = PAST[kind]
    with raw_server(play) as server:
        error = failure(server)
    assert error.match(said)
    assert not error.value.transient


@pytest.mark.parametrize("kind", SILENT)
def test_silence_ends_before_the_time_of_a_long_answer(tight, monkeypatch, kind):
    monkeypatch.setattr(web, "TOKEN_S", 60.0)
    with raw_server(SILENT[kind]) as server:
        error = failure(server)
    assert error.match(r"it sent nothing for 0\.3 s")
    assert not error.value.transient


def test_a_server_that_does_not_read_its_request_is_not_waited_for(tight):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"not whole after 0\.3 s") as error:
            ask(address, {"prompt": "a" * 2**25})
    assert not error.value.transient


def test_limits_grow_with_the_tokens():
    """An answer that is not streamed is silent until its last token."""
    assert answer_limits() == (600, 2**20, 600)
    assert answer_limits(500, 1000) == (600, 2**20 + 64 * 1500, 600)
    assert answer_limits(4096) == (4096, 2**20 + 64 * 4096, 600)
    assert answer_limits(32_768) == (32_768, 2**20 + 64 * 32_768, pytest.approx(3276.8))


@pytest.mark.parametrize("length", [3000, 4000])
def test_what_is_within_the_limits_is_read(tight, length):
    body = json.dumps({"data": [{"id": "a" * length}]}).encode()
    with raw_server(once(page(body))) as server:
        if length < 3072:
            assert ask(server.url, {})["data"][0]["id"] == "a" * length
        else:
            with pytest.raises(ServerError, match="over 3072 bytes"):
                ask(server.url, {})


# what is no answer: the server may be starting, so that it is asked again
STRANGE = {
    "no JSON": page(b"<html>"),
    "no object": page([1]),
    "JSON that is nested deep": page(b"[" * 10**5 + b"]" * 10**5),
    "objects that are nested deep": page(b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "a number of 5000 digits": page(b'{"choices": %s}' % (b"9" * 5000)),
    "bad UTF-8": page(b'{"choices": "\xff\xfe\xfa"}'),
    "nothing": b"",
    "a close in the head": b"HTTP/1.1 200 O",
    "a close in the body": OK + b"Content-Length: 99\r\n\r\n{",
    "a close in a chunk": OK + CHUNKED + b"99\r\n{",
    "no HTTP": b"220 smtp.example.com ESMTP\r\n",
    "bytes": bytes(range(256)) * 9,
    "HTTP/9": b"HTTP/9.9 200 OK\r\n\r\n{}",
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n{}",
    "a length of letters": OK + b"Content-Length: abc\r\n\r\n{}",
    "a length below zero": OK + b"Content-Length: -5\r\n\r\n{}",
    "a length of 5000 digits": OK + b"Content-Length: %s\r\n\r\n{}" % (b"9" * 5000),
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk of letters": OK + CHUNKED + b"xyz\r\n{}\r\n",
    "a chunk below zero": OK + CHUNKED + b"-5\r\n{}\r\n",
    "a chunk of 40 digits": OK + CHUNKED + b"f" * 40 + b"\r\n{}\r\n",
    "gzip that is none": OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\xff{",
    "thousands of headers": OK + b"X: y\r\n" * 5000 + b"\r\n{}",
    "a header of a megabyte": OK + b"X: " + b"y" * 2**20 + b"\r\n\r\n{}",
    "odd parameters of a type": OK + b"Content-Type: multipart/x; a*=x; a*0=y\r\n\r\n{",
    "a line of escapes": BUSY[:-2] + b" \x1b[2J\x07\r\n\r\n\x1b[31m\n\nno",
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_answer_is_an_exchange_that_failed(kind):
    with raw_server(once(STRANGE[kind])) as server:
        assert failure(server).value.transient


def test_the_key_that_a_server_repeats_is_not_shown(monkeypatch):
    monkeypatch.setenv(completions.KEY_VARIABLE, "secret")
    for status in (b"401 No secret", b"302 No\r\nLocation: http://b/secret"):
        with raw_server(once(page(b"bad key: secret.", b"HTTP/1.1 %s\r\n" % status))) as server:
            assert "secret" not in str(failure(server).value)


# what is JSON and no answer: the server is not asked again
WRONG = {
    "no choices": {"choices": None},
    "choices that are an object": {"choices": {"0": 1}},
    "a choice that is text": {"choices": ["abc"]},
    "a choice that is a number": {"choices": [5]},
    "a choice of keys that are lists": {"choices": [[[[], 1]]]},
    "tokens that are NaN": {"choices": [{"token_ids": [float("nan")] * NEW}]},
    "tokens that are Infinity": {"choices": [{"token_ids": [float("inf")] * NEW}]},
    "tokens that are huge": {"choices": [{"token_ids": [10**4000] * NEW}]},
    "tokens that are lists": {"choices": [{"token_ids": [[[[]]]] * NEW}]},
    "tokens that are surrogates": {"choices": [{"token_ids": ["\ud800"] * NEW}]},
    "a reason that is an object": {"choices": [{"token_ids": [5] * NEW, "finish_reason": {}}]},
    "a reason that is NaN": {
        "choices": [{"token_ids": [5] * NEW, "finish_reason": float("nan")}]
    },
    "a prompt that is text": {"choices": [{"token_ids": [5] * NEW, "prompt_token_ids": "x"}]},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_of_wrong_types_is_refused(kind):
    with raw_server(once(page(WRONG[kind]))) as server:
        assert not failure(server).value.transient


def nested(depth):
    """A list in lists, as JSON."""
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [400, 700, 850, 900, 920, 940, 960, 980])
def test_what_json_may_just_nest_is_not_too_deep_for_a_line(depth):
    """Its parser and the printing of values reach the end of the stack at different depths."""
    for field in (b'"token_ids": [%s]', b'"token_ids": [5], "finish_reason": %s'):
        body = b'{"choices": [{%s}]}' % (field % nested(depth))
        with raw_server(once(page(body))) as server:
            failure(server)


@pytest.mark.parametrize(
    "models", [[], {"data": 5}, {"data": {"0": 5}}, {"data": [{"id": [5]}]}, {"data": [{"id": 5}]}]
)
def test_a_model_without_a_name_is_no_model(models, monkeypatch):
    monkeypatch.setattr("tests.engines.raw_server.MODELS", models)
    with raw_server(once(b"")) as server, pytest.raises(ServerError) as error:
        served_model(server.url)
    assert error.value.transient


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def known(target, tmp_path_factory):
    plan = plan_of(40, served=False)
    found = filled(plan, target, tmp_path_factory.mktemp("known"))
    return {tuple(t.prompt_ids): t for t in found}


@pytest.fixture
def quick(monkeypatch):
    """Limits that are passed soon, but not by a server that answers."""
    monkeypatch.setattr(completions, "DELAYS_S", (0.01,))
    monkeypatch.setattr(web, "SILENT_S", 0.8)
    monkeypatch.setattr(web, "TOKEN_S", 0.0)
    monkeypatch.setattr(web, "SILENT_TOKEN_S", 0.0)


def healthy(known):
    """A play that answers as the target does."""
    answers = answers_of(known.values())
    return lambda asked, send: send(
        page({"choices": [{"token_ids": answers[tuple(asked["prompt"])]}]})
    )


def until(count, good, bad):
    """A play that is good until it has been asked so often."""
    seen = []

    def play(asked, send):
        seen.append(asked)
        (good if len(seen) <= count else bad)(asked, send)

    return play


SOME = {
    "silence": SILENT["silence"],
    **{
        kind: PAST[kind][0]
        for kind in ("a body without an end", "a length of terabytes", "a body that drips")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_a_server_past_its_limits_is_left_out_by_name_and_the_others_go_on(
    target, known, quick, tmp_path, capsys, kind
):
    bad = until(5, healthy(known), SOME[kind])
    with played(known) as good, raw_server(bad) as server:
        good.delay = 0.05  # so that the other is asked often enough
        found = filled(plan_of(40), target, tmp_path, [server.url, good.url])
    assert len(found) == 40
    for trace in found:
        assert trace.response_ids == known[tuple(trace.prompt_ids)].response_ids
    (line,) = [s for s in capsys.readouterr().out.splitlines() if server.url in s]
    assert "it is not used any more" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_without_another_server_the_run_ends_and_the_same_command_resumes(
    target, known, quick, tmp_path, kind
):
    with raw_server(until(20, healthy(known), SOME[kind])) as server:
        with pytest.raises(RunFault, match="run the same command again to resume") as error:
            filled(plan_of(40), target, tmp_path, [server.url])
        assert str(error.value).isprintable()
        kept = len(stored_traces(tmp_path))
        assert kept >= 8
        server.play, before = healthy(known), len(server.asked)
        found = filled(plan_of(40), target, tmp_path, [server.url])
        assert len(server.asked) - before == 40 - kept
    assert len({trace.prompt_hash for trace in found}) == 40


@pytest.mark.slow
def test_a_command_whose_server_never_ends_its_answer_exits_with_3(
    tiny_folder, quick, tmp_path, capsys
):
    with raw_server(PAST["a body without an end"][0]) as server:
        words = command(
            tmp_path, tiny_folder("llama"), "data.engine=openai", f"data.servers=[{server.url}]"
        )
        assert train.main(words) == 3
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    (line,) = [s for s in (said.out + said.err).splitlines() if "its answer has over" in s]
    assert "run the same command again to resume" in line
    assert training_stores(tmp_path / "cache")


def test_a_server_that_sends_nonsense_ends_the_run_once_patience_is_over(
    target, known, monkeypatch, tmp_path
):
    monkeypatch.setattr(completions, "DELAYS_S", (0.01,))
    monkeypatch.setattr(completions, "PATIENCE_S", 0.1)
    requests = [Request(list(ids), 0, Sampling(0.0)) for ids in known]
    with raw_server(once(STRANGE["bytes"])) as server:
        rows = complete(target, [server.url], requests, max_new_tokens=NEW, concurrency=3)
        with pytest.raises(RunFault, match="run the same command again to resume"):
            next(rows)


@pytest.mark.parametrize("kind", SOME)
def test_states_are_not_waited_for_past_the_limits(tight, kind):
    with raw_server(SOME[kind]) as server:
        client = StatesClient([server.url], [1], 8, concurrency=1, alive=lambda: None)
        with pytest.raises(
            RunFault, match=r"data\.features_engine: .* same command again"
        ) as error:
            client.submit([5, 6]).result(timeout=3)
        client.close()
    assert str(error.value).isprintable()


def test_the_answer_to_a_request_for_states_is_an_object(monkeypatch):
    monkeypatch.setattr("engines.states.PATIENCE_S", -1.0)
    for answer in ([], {"kv_transfer_params": []}, {"kv_transfer_params": {"path": [[]]}}):
        with raw_server(once(page(answer))) as server:
            client = StatesClient([server.url], [1], 8, concurrency=1, alive=lambda: None)
            with pytest.raises(RunFault, match=r"data\.features_engine"):
                client.submit([5, 6]).result(timeout=20)
            client.close()


# --- counters ------------------------------------------------------------------------------------

DRAFTS = 'vllm:spec_decode_num_drafts_total{engine="0"} %s\n'


@pytest.mark.parametrize("value", ["NaN", "inf", "abc", "1e999", "--1", "\ufffd"])
def test_a_counter_that_is_no_number_is_one_line(value):
    with pytest.raises(UserError, match=r"a counter of .* which is no number"):
        from_metrics(DRAFTS % value)


def test_a_page_of_counters_ends(monkeypatch):
    monkeypatch.setattr("engines.vllm_run.METRICS_S", 0.3)
    monkeypatch.setattr("engines.vllm_run.METRICS_BYTES", 5000)
    monkeypatch.setattr("tests.engines.raw_server.MODELS", WIDE)
    with raw_server(once(b"")) as server, pytest.raises(UserError, match="has over 5000 bytes"):
        scrape(server.url)


def test_counters_of_another_number_of_positions_are_of_another_server():
    with pytest.raises(RunFault, match="the server was started again meanwhile"):
        EngineCounters(5, 9, 2, [1, 1]) - EngineCounters(4, 8, 1, [1])
