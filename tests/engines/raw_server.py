"""A server that answers with whatever bytes a test gives it, HTTP or not."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

PLAY_S = 4.0  # then a connection is closed: a client without limits is found out
MODELS = {"data": [{"id": "tiny"}]}


class RawServer:
    """Answers GET with the names of its models, and POST with what `play` writes: it is given the
    JSON that was sent, and a function that sends bytes. `asked`: what was sent, in order."""

    def __init__(self, play: Callable[..., object]):
        self.play, self.asked = play, []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        # shut down first: a thread that waits in accept keeps a closed socket open
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._listening.accept()[0]
                threading.Thread(target=self._answer, args=(one,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        until = time.monotonic() + PLAY_S

        def send(some: bytes) -> None:
            if time.monotonic() > until:
                raise OSError("played for long enough")
            connection.sendall(some)

        connection.settimeout(PLAY_S)
        with connection, connection.makefile("rb") as read, contextlib.suppress(OSError):
            first = read.readline()
            headers = http.client.parse_headers(read)
            sent = read.read(int(headers.get("Content-Length") or 0))
            if first.startswith(b"GET"):
                send(page(MODELS))
                return
            self.asked.append(json.loads(sent))
            self.play(self.asked[-1], send)


def page(content: object, head: bytes = b"HTTP/1.1 200 OK\r\n") -> bytes:
    """A whole answer."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def forever(begin: bytes, again: bytes, pause_s: float = 0.0) -> Callable[..., None]:
    """A play that sends `begin`, then `again` without an end."""

    def play(asked: object, send: Callable[[bytes], None]) -> None:
        send(begin)
        while True:
            time.sleep(pause_s)
            send(again)

    return play


def once(some: bytes, then_s: float = 0.0) -> Callable[..., None]:
    """A play that sends this, and closes the connection after `then_s` seconds."""

    def play(asked: object, send: Callable[[bytes], None]) -> None:
        send(some)
        time.sleep(then_s)

    return play


@contextlib.contextmanager
def raw_server(play: Callable[..., object]) -> Iterator[RawServer]:
    server = RawServer(play)
    try:
        yield server
    finally:
        server.close()
