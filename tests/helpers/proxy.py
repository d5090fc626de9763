"""A server that answers as vLLM does, and the proxy before it, for the tests of both."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engines.request_proxy import RequestProxy
from tests.helpers.tiny import EOS

ANSWER = {"choices": [{"text": "C", "token_ids": [40, EOS], "prompt_token_ids": [20, 21],
                       "finish_reason": "stop"}]}  # fmt: skip
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
     "id": "chat-7", "prompt_token_ids": [30, 31]},
    {"choices": [{"index": 0, "delta": {"content": "M"}, "token_ids": [50]}]},
    {"choices": [{"index": 0, "delta": {"content": "N"}, "token_ids": [51, EOS],
                  "finish_reason": "stop"}]},
]  # fmt: skip
EVENTS = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in CHUNKS] + [b"data: [DONE]\n\n"]


class Upstream(ThreadingHTTPServer):
    """As much of a server as the proxy sees. `seen`: (command, target, headers) of each request,
    `asked`: the bodies; `elsewhere`: where /redirect leads. A stream waits for `go_on` after its
    first event, and sets `left` where its client is gone by then."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str, Any]] = []
        self.asked: list[Any] = []
        self.begun, self.go_on, self.left = (threading.Event() for _ in range(3))
        self.go_on.set()
        self.elsewhere = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A proxy that went away is what some tests are about."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Upstream
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        target = self.requestline.split()[1]  # self.path is without a second slash in front
        self.server.seen.append((self.command, target, self.headers))
        if self.path == "/redirect":
            self._answer(302, b"", Location=self.server.elsewhere)
        elif self.path == "/cookie":
            self._answer(200, b"a cookie", **{"Set-Cookie": "of=one-client"})
        elif self.path == "/nothing":
            self.server.go_on.wait(20)
        else:
            self._answer(200, b"models")

    do_DELETE = do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.seen.append((self.command, self.path, self.headers))
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(json.loads(content) if content.startswith(b"{") else content)
        prompt = self.server.asked[-1].get("prompt") if content.startswith(b"{") else None
        if prompt == "bad":
            self._answer(400, b"no")
        elif prompt == "packed":
            packed = gzip.compress(json.dumps(ANSWER).encode())
            self._answer(200, packed, **{"Content-Encoding": "gzip"})
        elif prompt == "aborted":
            choice = {**ANSWER["choices"][0], "finish_reason": "abort"}
            self._answer(200, json.dumps({"choices": [choice]}).encode())
        elif prompt == "odd":
            self._answer(200, b'{"choices": [3]}')
        elif prompt == "failed":
            self._answer(200, b'{"error": {"message": "no"}, "choices": []}')
        elif content.startswith(b"{") and self.server.asked[-1].get("stream"):
            self._stream(broken_off=prompt == "broken")
        else:
            self._answer(200, json.dumps(ANSWER).encode())

    def _answer(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _stream(self, broken_off: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i, event in enumerate(EVENTS):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            if i == 0:
                self.server.begun.set()
                while not self.server.go_on.wait(0.02):
                    if _is_gone(self.connection):
                        self.server.left.set()
                        return
                if broken_off:
                    self.close_connection = True
                    return
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None: ...


def _is_gone(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


@contextlib.contextmanager
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def running(proxy: RequestProxy) -> Iterator[RequestProxy]:
    """It answers in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def finish(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)

    try:
        finish(proxy.__aenter__())
        try:
            yield proxy
        finally:
            finish(proxy.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def exchange(port: int, *parts: bytes) -> bytes:
    """What a connection answers to bytes that are sent as they are, until it is closed."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        with contextlib.suppress(ConnectionResetError):  # closed before it had read all of it
            while more := connection.recv(65536):
                said += more
    return said


def head(target: str = "/v1/completions", *headers: str, method: str = "POST") -> bytes:
    """Of a request; without a Host among `headers`, the one that belongs there."""
    lines = [*headers, "Connection: close"]
    if not any(line.startswith("Host:") for line in lines):
        lines.append("Host: 127.0.0.1")
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1")
