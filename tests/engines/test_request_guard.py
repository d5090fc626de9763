"""What the request proxy refuses: strange requests, slow ones, those of web pages; and where it
sends what it was given."""

from __future__ import annotations

import socket

import pytest

from engines import request_proxy
from engines.request_proxy import RequestProxy
from tests.helpers import proxy as tools
from tests.helpers.proxy import exchange, head, running


@pytest.fixture
def upstream():
    with tools.upstream() as server:
        yield server


@pytest.fixture
def other():
    """A server that nobody means to ask."""
    with tools.upstream() as server:
        yield server


@pytest.fixture
def proxy(upstream, tmp_path):
    with running(RequestProxy(upstream.address, 0, tmp_path / "log")) as found:
        yield found


def status(said):
    return int(said.split(b" ", 2)[1])


KEY = "Authorization: Bearer sk-secret"


@pytest.mark.parametrize("target", ["@127.0.0.1:{}/x", ":{}/x", "http://127.0.0.1:{}/x", "x"])
def test_no_target_reaches_another_server(other, tmp_path, target):
    """What it is put together with has no port."""
    with running(RequestProxy("http://127.0.0.1", 0, tmp_path / "log")) as proxy:
        said = exchange(proxy.port, head(target.format(other.server_port), KEY, method="GET"))
    assert status(said) == 400
    assert other.seen == []


def test_a_path_stays_a_path(proxy, upstream, other):
    for target in (f"//127.0.0.1:{other.server_port}/x", "/@other/../x"):
        assert status(exchange(proxy.port, head(target, method="GET"))) == 200
        assert upstream.seen[-1][1] == target
    assert other.seen == []


def test_a_redirect_is_passed_on_and_not_followed(proxy, upstream, other):
    upstream.elsewhere = f"{other.address}/x"
    said = exchange(proxy.port, head("/redirect", KEY, method="GET"))
    assert status(said) == 302
    assert f"Location: {other.address}/x\r\n".encode() in said
    assert len(upstream.seen) == 1
    assert other.seen == []


def test_no_proxy_of_the_environment_is_used(upstream, other, tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, other.address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with running(RequestProxy(upstream.address, 0, tmp_path / "log")) as proxy:
        assert status(exchange(proxy.port, head("/v1/models", method="GET"))) == 200
    assert len(upstream.seen) == 1
    assert other.seen == []


# --- bodies -------------------------------------------------------------------------------------


def test_a_body_in_chunks_is_passed_on(proxy, upstream):
    said = exchange(
        proxy.port, head("/v1/completions", "Transfer-Encoding: chunked"),
        b'9\r\n{"prompt"\r\n', b'6\r\n: "Hi"\r\n1\r\n}\r\n0\r\n\r\n',
    )  # fmt: skip
    assert status(said) == 200
    assert upstream.asked == [{"prompt": "Hi", "return_token_ids": True}]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Content-Length: -1"], b"{}"),
        (["Content-Length: 2", "Content-Length: 3"], b"{}"),
        (["Content-Length: 2", "Transfer-Encoding: chunked"], b"{}"),
        (["Transfer-Encoding: chunked"], b"no chunk\r\n"),
        ([KEY, "no header"], b""),
        (["Content-Encoding: gzip", "Content-Length: 9"], b"no gzip.."),
    ],
)
def test_a_malformed_request_is_refused(proxy, upstream, headers, body, caplog):
    said = exchange(proxy.port, head("/v1/completions", *headers) + body)
    assert status(said) == 400
    assert upstream.seen == []
    assert caplog.text == ""  # nothing of it is shown


def test_a_client_may_leave_in_the_middle_of_its_body(upstream, tmp_path, caplog):
    with (
        running(RequestProxy(upstream.address, 0, tmp_path / "log")) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as connection,
    ):
        connection.sendall(head("/v1/completions", "Content-Length: 9", "Expect: 100-continue"))
        assert status(connection.recv(4096)) == 100
        connection.sendall(b"{")
    assert upstream.seen == []
    assert caplog.text == ""


def test_bytes_that_are_no_text_do_no_harm(proxy, upstream):
    assert status(exchange(proxy.port, head("/v1/\xff", method="GET"))) == 400
    strange = head("/v1/models", "X-Strange: \xff", method="GET")
    assert status(exchange(proxy.port, strange)) == 200
    assert "X-Strange" in upstream.seen[-1][2]


def test_a_body_that_is_no_json_is_passed_on_as_it_is(proxy, upstream):
    for body in (b"[" * 100_000, b"no json", b"\xff\xfe"):
        length = f"Content-Length: {len(body)}"
        assert status(exchange(proxy.port, head("/v1/completions", length), body)) == 200
        assert upstream.asked[-1] == body


def test_a_body_that_is_too_large_is_refused(upstream, tmp_path):
    body = b'{"prompt": "%s"}' % (b"a" * 3000)
    with running(RequestProxy(upstream.address, 0, tmp_path / "log", max_body_mb=0.002)) as proxy:
        whole = exchange(proxy.port, head("/v1/completions", f"Content-Length: {len(body)}"), body)
        chunks = exchange(
            proxy.port, head("/v1/completions", "Transfer-Encoding: chunked"),
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        )  # fmt: skip
        packed = tools.gzip.compress(body)
        assert len(packed) < 100
        headers = ("Content-Encoding: gzip", f"Content-Length: {len(packed)}")
        unpacked = exchange(proxy.port, head("/v1/completions", *headers), packed)
    for said in (whole, chunks, unpacked):
        assert status(said) == 413
        assert b"script.max_body_mb=0.002" in said
    assert upstream.seen == []


def test_a_body_that_does_not_come_is_not_waited_for(proxy, upstream, monkeypatch):
    monkeypatch.setattr(request_proxy, "BODY_S", 0.05)
    for length, body in (("Content-Length: 9", b"{"), ("Transfer-Encoding: chunked", b"9\r\n{")):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as connection:
            connection.sendall(head("/v1/completions", length) + body)
            assert status(connection.recv(4096)) == 408
    assert upstream.seen == []


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_a_head_that_does_not_come_is_not_waited_for(upstream, tmp_path, monkeypatch, sent):
    monkeypatch.setattr(request_proxy, "HEADER_S", 0.05)
    with running(RequestProxy(upstream.address, 0, tmp_path / "log")) as proxy:
        assert exchange(proxy.port, sent) == b""  # it is closed
        # nor after another request of the same connection
        first = head("/v1/models", method="GET").replace(b"Connection: close\r\n", b"")
        assert exchange(proxy.port, first, sent).count(b"HTTP/1.1 200") == 1


def test_a_server_that_does_not_answer_is_not_waited_for(upstream, tmp_path, monkeypatch):
    monkeypatch.setattr(request_proxy, "SILENT_S", 0.05)
    upstream.go_on.clear()
    with running(RequestProxy(upstream.address, 0, tmp_path / "log")) as proxy:
        assert status(exchange(proxy.port, head("/nothing", method="GET"))) == 504


# --- who may ask --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("127.0.0.1", None, True),
        ("127.0.0.1:{port}", None, True),
        ("LocalHost:9000", None, True),  # a tunnel's port
        ("gpu-box", None, True),  # named by the user
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", True),
        ("gpu-box", "https://GPU-box", True),  # a server before us that speaks TLS
        ("evil.example", None, False),  # its name was pointed here
        ("evil.example:{port}", "http://evil.example:{port}", False),
        ("127.0.0.2:{port}", None, False),
        ("", None, False),
        ("127.0.0.1:{port}", "http://evil.example", False),
        ("127.0.0.1:{port}", "http://127.0.0.1:3000", False),
        ("127.0.0.1:{port}", "http://127.0.0.1", False),
        ("127.0.0.1:{port}", "null", False),
    ],
)
def test_web_pages_cannot_add_to_the_log(upstream, tmp_path, host, origin, allowed):
    log = tmp_path / "log"
    with running(RequestProxy(upstream.address, 0, log, allowed_hosts=["GPU-box"])) as proxy:
        headers = [f"Host: {host.format(port=proxy.port)}", "Content-Type: text/plain"]
        if origin is not None:
            headers.append(f"Origin: {origin.format(port=proxy.port)}")
        body = b'{"prompt": "Hi"}'
        said = exchange(
            proxy.port, head("/v1/completions", *headers, f"Content-Length: {len(body)}"), body
        )
    assert status(said) == (200 if allowed else 403)
    assert (len(upstream.seen), log.read_text().count("\n")) == (allowed, allowed)
    if not allowed:
        reason = said.partition(b"\r\n\r\n")[2]
        assert b"another origin" in reason or b"script.allowed_hosts=[" in reason
        assert reason.count(b"\n") == 1


@pytest.mark.parametrize(
    ("site", "code"),
    [("cross-site", 403), ("Cross-Site", 403), ("same-origin", 200), ("same-site", 200),
     ("none", 200)],
)  # fmt: skip
def test_a_browser_says_that_a_page_of_another_site_asks(proxy, upstream, site, code):
    """Also where it leaves the origin out, as for a picture."""
    said = exchange(proxy.port, head("/v1/models", f"Sec-Fetch-Site: {site}", method="GET"))
    assert status(said) == code
    assert len(upstream.seen) == (code == 200)
    assert (b"another site are refused" in said) == (code == 403)


def test_it_listens_on_this_machine_alone(proxy):
    assert proxy.address == f"http://127.0.0.1:{proxy.port}"
    with pytest.raises(ConnectionRefusedError):  # as any other address of the machine
        socket.create_connection(("127.0.0.2", proxy.port), timeout=20)


def test_it_is_called_by_the_address_that_it_was_reached_at(upstream, tmp_path):
    with running(RequestProxy(upstream.address, 0, tmp_path / "log", host="0.0.0.0")) as proxy:
        request = head("/v1/models", "Host: 127.0.0.2:80", method="GET")
        with socket.create_connection(("127.0.0.2", proxy.port), timeout=20) as connection:
            connection.sendall(request)
            assert status(connection.recv(4096)) == 200
        assert status(exchange(proxy.port, request)) == 403
