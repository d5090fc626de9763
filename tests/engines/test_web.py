"""Requests with a proxy in the environment, redirects, and addresses that are none."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import types

import pytest

from engines import completions
from engines import vllm_server as vllm
from engines.completions import ServerError, ask, complete
from engines.vllm_run import scrape
from engines.web import fetch, is_own, past_proxy, server_root
from target.decode import Request
from target.sampling import Sampling
from tests.helpers.commands import ROOT
from trainer.errors import RunFault, UserError

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
COUNTERS = """
vllm:spec_decode_num_drafts_total{engine="0"} 1.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 2.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 1.0
"""


@contextlib.contextmanager
def recording(status=200, **headers):
    """A web server that writes down what it is asked: (method, address, headers). As a proxy it
    is asked for whole addresses."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append((self.command, self.path, dict(self.headers)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            metrics = self.path.endswith("/metrics")
            self.wfile.write(COUNTERS.encode() if metrics else json.dumps({"fine": 1}).encode())

        do_GET = do_POST = do_CONNECT = reply

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield types.SimpleNamespace(url=f"http://127.0.0.1:{running.server_port}", seen=seen)
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


@pytest.fixture
def server():
    with recording() as state:
        yield state


@pytest.fixture(params=[str.lower, str.upper])
def proxy(request, monkeypatch):
    """A proxy that the environment names for every address."""
    for name in (*PROXIES, "no_proxy", "request_method"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(completions.KEY_VARIABLE, "secret")
    with recording() as state:
        for name in PROXIES:
            monkeypatch.setenv(request.param(name), state.url)
        yield state


def test_no_proxy_is_asked_for_this_machine(proxy, server):
    port = server.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "LocalHost", "0.0.0.0"):
        assert ask(f"http://{host}:{port}/v1/models") == {"fine": 1}
        assert ask(f"http://{host}:{port}/v1/completions", {"prompt": [1]}) == {"fine": 1}
        scrape(f"http://{host}:{port}")
    assert len(server.seen) == 12
    assert not proxy.seen


def test_our_own_engine_is_waited_for_without_a_proxy(proxy, server):
    vllm._await(vllm.Server(server.url, alive=lambda: None))
    assert [path for _, path, _ in server.seen] == ["/health"]
    assert not proxy.seen


def test_other_hosts_are_asked_through_the_proxy(proxy, monkeypatch):
    assert ask("http://models.invalid:8000/v1/models") == {"fine": 1}
    assert [path for _, path, _ in proxy.seen] == ["http://models.invalid:8000/v1/models"]
    monkeypatch.setenv("no_proxy", "models.invalid")
    with pytest.raises(ServerError):  # it is no host
        ask("http://models.invalid:8000/v1/models")
    assert len(proxy.seen) == 1


def test_which_hosts_are_this_machine():
    assert all(map(is_own, ("127.0.0.1", "127.255.1.2", "::1", "localhost", "0.0.0.0", "::")))
    others = ("128.0.0.1", "10.0.0.1", "localhost.example", "example.com", "::2", "1270.0.0.1")
    assert not any(map(is_own, others))


@pytest.mark.parametrize(
    ("given", "lower", "upper"),
    [
        ({}, "127.0.0.1,localhost,::1", "127.0.0.1,localhost,::1"),
        ({"no_proxy": "a, .b"}, "a,.b,127.0.0.1,localhost,::1", "a,.b,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "localhost,a"}, "localhost,a,127.0.0.1,::1", "localhost,a,127.0.0.1,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,127.0.0.1,localhost,::1",
         "b,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*", "*"),
    ],
)  # fmt: skip
def test_a_child_is_told_to_ask_this_machine_without_a_proxy(given, lower, upper):
    assert past_proxy(given) == {"no_proxy": lower, "NO_PROXY": upper}


def test_the_engine_gets_that_environment(proxy, server, monkeypatch):
    """Its own parts ask each other, through whatever library."""
    monkeypatch.setenv("no_proxy", "example.com")
    found = vllm.environment()
    assert found["no_proxy"] == "example.com,127.0.0.1,localhost,::1"
    for name, value in os.environ.items():
        assert name.lower() == "no_proxy" or found[name] == value
    code = f"import urllib.request as u; u.urlopen('{server.url}/inside').close()"
    subprocess.run([sys.executable, "-c", code], env=found, check=True)
    assert [path for _, path, _ in server.seen] == ["/inside"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("content", [None, {"prompt": [1]}])
def test_no_redirect_is_followed_with_the_key(server, monkeypatch, status, content):
    monkeypatch.setenv(completions.KEY_VARIABLE, "secret")
    with recording(status, Location=server.url + "/elsewhere") as first:
        with pytest.raises(RunFault, match=f"it redirects to {server.url}/elsewhere") as error:
            ask(first.url + "/v1/models", content)
        with pytest.raises(UserError, match=f"it redirects to {server.url}/elsewhere"):
            scrape(first.url)
        assert not error.value.transient
        assert "\n" not in str(error.value)
        assert [path for _, path, _ in first.seen] == ["/v1/models", "/metrics"]
    assert not server.seen


@pytest.mark.parametrize(
    "address",
    ["http://h:abc", "http://h:99999", "http://127.0.0.1:99999", "http://h:0", "http://",
     "http://[::1", "http://a b", "http://" + "a" * 70, "http://127.0.0.1:1/\x7f"],
)  # fmt: skip
def test_what_is_no_address_is_one_line_at_once(tiny_target, address):
    requests = [Request([5], 0, Sampling(0.0))]
    rows = complete(tiny_target("llama"), [address], requests, max_new_tokens=2, concurrency=2)
    with pytest.raises(UserError, match="the address of a server must be http://") as error:
        next(rows)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"address.* must (be|begin with) http://"):
        scrape(address)


def test_a_key_that_no_header_can_carry_is_not_shown(server, monkeypatch):
    monkeypatch.setenv(completions.KEY_VARIABLE, "sec\nret")
    with pytest.raises(UserError, match=f"^{completions.KEY_VARIABLE} holds a character") as error:
        ask(server.url)
    assert "sec" not in str(error.value)
    monkeypatch.setenv(completions.KEY_VARIABLE, "secret\n")
    ask(server.url)
    assert server.seen[0][2]["Authorization"] == "Bearer secret"


def test_what_is_asked_is_asked_here():
    """urllib's own functions take the proxy and follow redirects."""
    for room in ("data", "drafters", "eval", "recipes", "scripts", "trainer", "benchmarks"):
        for path in (ROOT / room).rglob("*.py"):
            if path.name not in ("web.py", "request_proxy.py"):
                assert "request.urlopen" not in path.read_text(), path


def test_an_answer_that_is_no_http_is_an_exchange_that_failed(server):
    assert json.loads(fetch(server.url)) == {"fine": 1}
    with recording(99) as strange, pytest.raises(ServerError) as error:
        ask(strange.url)
    assert error.value.transient


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_as_clients_of_openais_interface_have_it(end):
    assert server_root(f"http://h:8000{end}") == "http://h:8000"
    assert server_root(f"https://h/llm{end}") == "https://h/llm"
    with recording() as server:
        assert scrape(f"{server.url}{end}").drafts == 1
        assert scrape(f"{server.url}/metrics").drafts == 1
        assert [path for _, path, _ in server.seen] == ["/metrics"] * 2
