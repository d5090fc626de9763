"""The log of a server that answers as vLLM does: whole answers, streams, errors; what is passed on
and what is written down."""

from __future__ import annotations

import http.client
import json
import shutil
import time
import urllib.error
import urllib.request

import pytest

from data.request_log import RequestLog
from engines import request_proxy
from engines.request_proxy import RequestProxy, joined
from tests.helpers import proxy as tools
from tests.helpers.commands import read_jsonl, write_jsonl
from tests.helpers.proxy import ANSWER, CHUNKS, EVENTS, exchange, head, running
from tests.helpers.tiny import EOS
from trainer.errors import UserError


@pytest.fixture
def upstream():
    with tools.upstream() as server:
        yield server


@pytest.fixture
def proxy(upstream, tmp_path):
    with running(RequestProxy(f"{upstream.address}/", 0, tmp_path / "a" / "log")) as found:
        yield found


def ask(proxy, path="/v1/completions", headers=(), **body):
    request = urllib.request.Request(
        f"{proxy.address}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json", **dict(headers)},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()


def streaming(proxy, **body):
    """The answer to a streamed request, as soon as it begins."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps({"stream": True, **body}))
    return connection, connection.getresponse()


# --- what is written down -----------------------------------------------------------------------


def test_answers_pass_through_and_are_written_down_with_their_ids(proxy, upstream, tiny_target):
    assert json.loads(ask(proxy, prompt="Hi", temperature=0.5)) == ANSWER
    streamed = ask(proxy, "/v1/chat/completions", messages=[], stream=True, top_p=0.9)
    assert streamed == b"".join(EVENTS)
    assert ask(proxy, "/v1/models") == b"models"
    assert [asked["return_token_ids"] for asked in upstream.asked] == [True, True]
    first, second = RequestLog(proxy.log, tiny_target("llama"), 256).read(9)
    assert (first.prompt_ids, first.response_ids) == ([20, 21], [40, EOS])
    assert (second.prompt_ids, second.response_ids) == ([30, 31], [50, 51, EOS])
    assert [one.sampling.temperature for one in (first, second)] == [0.5, 1.0]
    assert not first.retokenised
    assert not second.retokenised
    rows = read_jsonl(proxy.log)
    assert [set(row) for row in rows] == [{"request", "response"}] * 2
    assert rows[0]["request"] == {"prompt": "Hi", "temperature": 0.5}
    assert rows[1]["response"]["id"] == "chat-7"
    assert all(abs(row["response"]["created"] - time.time()) < 600 for row in rows)


def test_text_alone_is_asked_for_where_ids_are_refused(proxy, upstream):
    proxy.token_ids = False
    ask(proxy, prompt="Hi")
    assert upstream.asked == [{"prompt": "Hi"}]


def test_what_failed_is_passed_on_and_not_written_down(proxy, upstream):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(proxy, prompt="bad")
    upstream.shutdown()
    upstream.server_close()
    with pytest.raises(urllib.error.HTTPError, match="502"):
        ask(proxy, prompt="Hi")
    assert proxy.log.read_text() == ""


def test_a_stream_that_broke_off_is_no_answer():
    lines = [f"data: {json.dumps(chunk)}\n".encode() for chunk in CHUNKS]
    assert joined(lines[:2]) is None
    assert joined([b": ping\n", b"data: [DONE]\n"]) is None
    assert joined(lines)["choices"][0]["text"] == "MN"


@pytest.mark.parametrize("prompt", ["aborted", "odd", "failed"])
def test_what_is_no_whole_answer_is_passed_on_and_not_written_down(proxy, prompt):
    assert b"choices" in ask(proxy, prompt=prompt)
    assert proxy.log.read_text() == ""


def lines_of(*chunks):
    return [f"data: {json.dumps(chunk)}\r\n".encode() for chunk in (*CHUNKS, *chunks)]


def test_a_stream_with_an_error_is_no_answer():
    assert joined(lines_of({"error": {"message": "the engine died"}})) is None
    assert joined(lines_of({"error": None})) is not None


def test_a_stream_keeps_the_servers_count_and_that_tools_were_called():
    last = CHUNKS[-1]["choices"][0]
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"id": "1"}]}}]}
    thought = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}
    ended = {"choices": [{**last, "delta": {}, "token_ids": [], "stop_reason": None}]}
    usage = {"model": "m", "choices": [], "usage": {"completion_tokens": 3}}
    found = joined(lines_of(call, thought, thought, ended, usage))
    assert (found["usage"], found["model"]) == ({"completion_tokens": 3}, "m")
    (choice,) = found["choices"]
    assert choice["message"] == {"tool_calls": [{"id": "1"}], "reasoning": "hmhm"}
    assert choice["stop_reason"] is None  # an EOS ended it
    assert "stop_reason" not in joined(lines_of())["choices"][0]


def test_an_endpoint_that_is_not_logged_is_named_once(proxy, capsys):
    for path in ("/v1/responses", "/generate", "/v1/responses?x=1", "/v1/completions"):
        ask(proxy, path, prompt="Hi")
    with pytest.raises(urllib.error.HTTPError):
        ask(proxy, "/v1/messages", prompt="bad")
    ask(proxy, "/v1/models")
    said = capsys.readouterr().err
    named = [line.partition("answers of ")[2].split()[0] for line in said.splitlines()]
    assert named == ["'/v1/responses'", "'/generate'"]
    assert "not logged: only those of /v1/completions and /v1/chat/completions" in said
    assert len(read_jsonl(proxy.log)) == 1
    for i in range(99):
        ask(proxy, f"/v1/{i}", prompt="Hi")
    assert len(capsys.readouterr().err.splitlines()) == request_proxy.MOST_NAMED - 2


def test_the_server_may_be_named_as_clients_name_it(upstream, tmp_path):
    with running(RequestProxy(f"{upstream.address}/v1/", 0, tmp_path / "log")) as proxy:
        ask(proxy, prompt="Hi")
    assert [target for _, target, _ in upstream.seen] == ["/v1/completions"]


def test_a_client_sees_that_an_answer_broke_off(proxy, capsys):
    with pytest.raises(http.client.IncompleteRead) as seen:
        ask(proxy, stream=True, prompt="broken")
    assert seen.value.partial == EVENTS[0]
    assert proxy.log.read_text() == ""
    assert "ended an answer early" in capsys.readouterr().err


# --- streams as they come -----------------------------------------------------------------------


def test_a_stream_is_passed_on_as_it_comes(proxy, upstream):
    upstream.go_on.clear()
    connection, answer = streaming(proxy)
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert answer.read(len(EVENTS[0])) == EVENTS[0]
    upstream.go_on.set()
    assert answer.read() == b"".join(EVENTS[1:])
    connection.close()


def test_a_client_that_leaves_ends_its_answer_at_the_server(proxy, upstream):
    upstream.go_on.clear()
    connection, answer = streaming(proxy)
    answer.read(len(EVENTS[0]))
    answer.close()
    connection.close()
    assert upstream.left.wait(20)
    assert proxy.log.read_text() == ""


def test_an_answer_is_written_down_though_its_client_leaves_at_the_last_word(proxy):
    for _ in range(5):
        connection, answer = streaming(proxy)
        answer.read(len(b"".join(EVENTS)))  # not the end of the body
        answer.close()
        connection.close()
    for _ in range(400):  # the proxy may still be at it
        if len(read_jsonl(proxy.log)) == 5:
            break
        time.sleep(0.01)
    assert len(read_jsonl(proxy.log)) == 5


def test_answers_under_way_are_broken_off_when_it_ends(upstream, tmp_path, monkeypatch):
    monkeypatch.setattr(request_proxy, "ENDING_S", 0.05)
    upstream.go_on.clear()
    with running(RequestProxy(upstream.address, 0, tmp_path / "log")) as proxy:
        connection, answer = streaming(proxy)
        assert upstream.begun.wait(20)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()
    assert proxy.log.read_text() == ""


# --- headers ------------------------------------------------------------------------------------


def test_headers_of_clients_are_passed_on_and_never_written_down(proxy, upstream):
    body = b'{"prompt": "Hi"}'
    secret = {"Authorization": "Bearer sk-secret", "X-Team": "secret-team", "Cookie": "a=secret"}
    hops = ["TE: gzip", "X-Hop: 1", "Connection: X-Hop", f"Content-Length: {len(body)}"]
    own = [f"{name}: {value}" for name, value in secret.items()]
    assert b" 200 " in exchange(proxy.port, head("/v1/completions", *own, *hops), body)
    (_, _, headers), *_ = upstream.seen
    assert secret.items() <= dict(headers).items()
    assert headers["Host"] == upstream.address.removeprefix("http://")
    assert not {"X-Hop", "TE", "Accept", "User-Agent"} & set(headers)
    assert read_jsonl(proxy.log)[0]["request"] == {"prompt": "Hi"}
    assert "secret" not in proxy.log.read_text()


def test_a_cookie_is_its_clients_alone(proxy, upstream):
    with urllib.request.urlopen(f"{proxy.address}/cookie", timeout=20) as answer:
        assert answer.headers["Set-Cookie"] == "of=one-client"
    ask(proxy, "/v1/models")
    assert upstream.seen[-1][2]["Cookie"] is None


def test_a_packed_answer_is_unpacked_for_client_and_log(proxy, upstream):
    assert json.loads(ask(proxy, headers={"Accept-Encoding": "gzip"}, prompt="packed")) == ANSWER
    assert upstream.seen[-1][2]["Accept-Encoding"] == "identity"
    (row,) = read_jsonl(proxy.log)
    assert row["response"]["choices"] == ANSWER["choices"]
    body = b'{"prompt": "packed"}'
    said = exchange(proxy.port, head("/v1/x", f"Content-Length: {len(body)}"), body)
    assert b"Content-Encoding" not in said
    assert json.loads(said.partition(b"\r\n\r\n")[2].split(b"\r\n")[1]) == ANSWER


def test_a_packed_request_is_unpacked(proxy, upstream):
    body = tools.gzip.compress(b'{"prompt": "Hi"}')
    said = exchange(
        proxy.port,
        head("/v1/completions", "Content-Encoding: gzip", f"Content-Length: {len(body)}"), body,
    )  # fmt: skip
    assert said.startswith(b"HTTP/1.1 200 ")
    assert upstream.asked == [{"prompt": "Hi", "return_token_ids": True}]


@pytest.mark.parametrize("method", ["DELETE", "HEAD"])
def test_every_method_is_passed_on(proxy, upstream, method):
    said = exchange(proxy.port, head("/v1/x?y=%2F..", method=method))
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Length: 6\r\n" in said
    assert [one[:2] for one in upstream.seen] == [(method, "/v1/x?y=%2F..")]


# --- the log's file -----------------------------------------------------------------------------


def test_an_answer_is_passed_on_though_the_log_cannot_be_written(proxy, capsys):
    shutil.rmtree(proxy.log.parent)
    for _ in range(2):
        assert json.loads(ask(proxy, prompt="Hi")) == ANSWER
    assert capsys.readouterr().err.count("cannot be written (No such file or directory)") == 1
    proxy.log.parent.mkdir()
    ask(proxy, prompt="Hi")
    assert "can be written again, 2 answers are missing in it" in capsys.readouterr().err
    assert len(read_jsonl(proxy.log)) == 1


def test_old_lines_are_deleted_while_it_runs(upstream, tmp_path, monkeypatch):
    monkeypatch.setattr(request_proxy, "SWEEP_S", 0.01)
    day = 86400
    log = tmp_path / "log"
    rows = [{"request": {}, "response": {"created": time.time() - age * day}} for age in (9, 2)]
    write_jsonl(log, rows)
    with running(RequestProxy(upstream.address, 0, log, keep_days=5)):
        assert [bool(line.strip()) for line in log.read_text().splitlines()] == [False, True]
        write_jsonl(log, rows[:1])
        for _ in range(400):
            if not log.read_text().strip():
                break
            time.sleep(0.01)
        assert not log.read_text().strip()


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be written"),
        running(RequestProxy("http://h", 0, tmp_path / "file" / "log")),
    ):
        pass
