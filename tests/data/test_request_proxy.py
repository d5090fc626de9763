"""The log of a server that answers as vLLM does: whole answers, streams, errors."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data.request_log import RequestLog
from data.request_proxy import RequestProxy, joined
from scripts import request_log
from tests.commands import read_jsonl
from tests.tiny import EOS
from trainer.config import UserError

ANSWER = {"choices": [{"text": "ab", "token_ids": [40, EOS], "prompt_token_ids": [20, 21],
                       "finish_reason": "stop"}]}  # fmt: skip
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
     "prompt_token_ids": [30, 31]},
    {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [50]}]},
    {"choices": [{"index": 0, "delta": {"content": "y"}, "token_ids": [51, EOS],
                  "finish_reason": "stop"}]},
]  # fmt: skip


class Upstream(BaseHTTPRequestHandler):
    """As much of a server as the proxy sees."""

    def do_GET(self):
        self._answer(200, b"models")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if asked.get("prompt") == "bad":
            self._answer(400, b"no")
        elif asked.get("stream"):
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS]
            self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())
        else:
            self._answer(200, json.dumps(ANSWER).encode())

    def _answer(self, code, content):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args): ...


@pytest.fixture
def upstream():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(upstream, tmp_path):
    found = RequestProxy(f"http://127.0.0.1:{upstream.server_port}/", 0, tmp_path / "a" / "log")
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def ask(proxy, path, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{proxy.server_port}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()


def test_answers_pass_through_and_are_written_down_with_their_ids(proxy, upstream, tiny_target):
    assert json.loads(ask(proxy, "/v1/completions", prompt="Hi", temperature=0.5)) == ANSWER
    streamed = ask(proxy, "/v1/chat/completions", messages=[], stream=True, top_p=0.9)
    assert streamed.count(b"data: ") == 4
    assert ask(proxy, "/v1/models") == b"models"
    assert [asked["return_token_ids"] for asked in upstream.asked] == [True, True]
    first, second = RequestLog(proxy.log, tiny_target("llama"), 256).read(9)
    assert (first.prompt_ids, first.response_ids) == ([20, 21], [40, EOS])
    assert (second.prompt_ids, second.response_ids) == ([30, 31], [50, 51, EOS])
    assert [one.sampling.temperature for one in (first, second)] == [0.5, 1.0]
    assert not first.retokenised
    assert not second.retokenised
    assert "return_token_ids" not in read_jsonl(proxy.log)[0]["request"]


def test_text_alone_is_asked_for_where_ids_are_refused(proxy, upstream):
    proxy.token_ids = False
    ask(proxy, "/v1/completions", prompt="Hi")
    assert upstream.asked == [{"prompt": "Hi"}]


def test_what_failed_is_passed_on_and_not_written_down(proxy, upstream):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(proxy, "/v1/completions", prompt="bad")
    upstream.shutdown()
    upstream.server_close()
    with pytest.raises(urllib.error.HTTPError, match="502"):
        ask(proxy, "/v1/completions", prompt="Hi")
    assert proxy.log.read_text() == ""


def test_a_stream_that_broke_off_is_no_answer():
    lines = [f"data: {json.dumps(chunk)}\n".encode() for chunk in CHUNKS]
    assert joined(lines[:2]) is None
    assert joined([b": ping\n", b"data: [DONE]\n"]) is None
    assert joined(lines)["choices"][0]["text"] == "xy"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "script.server must be given"),
        (["script.server=host", "script.log=x"], "script.server must be http:"),
        (["script.server=http://h"], "script.log must be given"),
        (["script.server=http://h", "script.log=x", "script.port=high"], "script.port must be"),
        (["script.server=http://h", "script.log=x", "script.port=99999"], "cannot be opened"),
        (["script.server=http://h", "script.log=x", "script.token_ids=3"], "true or false"),
    ],
)
def test_a_wrong_word_is_one_line(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert request_log.main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        RequestProxy("http://h", 0, tmp_path / "file" / "log")
