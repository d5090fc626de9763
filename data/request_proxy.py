"""Stands before an OpenAI-compatible server and writes down what it answers.

Everything passes through unchanged but for one key: completions are asked for their token ids
(`return_token_ids`, which vLLM knows), so that nothing has to be tokenised again. Streamed answers
are passed on as they come and written down once they are whole; failed ones are not.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trainer.config import UserError, require_address

LOGGED = ("/completions", "/chat/completions")
OWN_HEADERS = ("host", "content-length", "accept-encoding", "connection", "transfer-encoding")
TIMEOUT_S = 600


class RequestProxy(ThreadingHTTPServer):
    """`server`: its address without /v1; `token_ids`: ask for them (a server that refuses keys it
    does not know needs False: its text is then tokenised again by whoever reads the log)."""

    daemon_threads = True

    def __init__(self, server: str, port: int, log: str | Path, token_ids: bool = True):
        require_address("script.server", server)
        self.upstream, self.log, self.token_ids = server.rstrip("/"), Path(log), token_ids
        self.lock = threading.Lock()
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.touch()
        except OSError as error:
            raise UserError(f"script.log={log} cannot be written ({error.strerror})") from error
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"script.port={port} cannot be opened ({error})") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no fault of ours."""
        print(f"an exchange with {client_address[0]} broke off ({sys.exc_info()[1]})", flush=True)

    def keep(self, request: dict[str, Any], response: dict[str, Any]) -> None:
        """One line, at once: whoever follows the log reads whole lines only."""
        line = json.dumps({"request": request, "response": response}) + "\n"
        with self.lock, self.log.open("a") as file:
            file.write(line)


class _Handler(BaseHTTPRequestHandler):
    server: RequestProxy

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        self._forward(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def log_message(self, format: str, *args: Any) -> None:
        """Its own lines would hide what the user is told."""

    def _forward(self, body: bytes | None) -> None:
        asked = self._completion(body)
        if asked is not None and self.server.token_ids:
            body = json.dumps({**asked, "return_token_ids": True}).encode()
        headers = {k: v for k, v in self.headers.items() if k.lower() not in OWN_HEADERS}
        request = urllib.request.Request(
            self.server.upstream + self.path, body, headers, method=self.command
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                self._pass_on(answer, asked)
        except urllib.error.HTTPError as error:
            self._head(error.code, error.headers)
            self.wfile.write(error.read())
        except urllib.error.URLError as error:
            self._head(502, {"Content-Type": "text/plain"})
            self.wfile.write(
                f"{self.server.upstream} cannot be reached ({error.reason})\n".encode()
            )

    def _completion(self, body: bytes | None) -> dict[str, Any] | None:
        if body is None or not self.path.partition("?")[0].endswith(LOGGED):
            return None
        try:
            asked = json.loads(body)
        except ValueError:  # the server will say so
            return None
        return asked if isinstance(asked, dict) else None

    def _head(self, code: int, headers: Any) -> None:
        self.send_response(code)
        for name, value in headers.items():
            if name.lower() not in (*OWN_HEADERS, "date", "server"):
                self.send_header(name, value)
        self.end_headers()

    def _pass_on(self, answer: Any, asked: dict[str, Any] | None) -> None:
        self._head(answer.status, answer.headers)
        lines = []
        for line in answer:
            lines.append(line)
            self.wfile.write(line)
            self.wfile.flush()
        if asked is None or answer.status != 200:
            return
        found = joined(lines) if asked.get("stream") else _parsed(b"".join(lines))
        if found is not None:
            self.server.keep(asked, found)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def joined(lines: list[bytes]) -> dict[str, Any] | None:
    """The answer that a stream of server-sent events adds up to; None where it broke off."""
    found: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in lines:
        chunk = _parsed(line[5:]) if line.startswith(b"data:") else None
        if chunk is None:
            continue
        found.setdefault("prompt_token_ids", chunk.get("prompt_token_ids"))
        for part in chunk.get("choices") or []:
            one = choices.setdefault(part.get("index", 0), {"text": ""})
            delta = part.get("delta") or {}
            one["text"] += part.get("text") or delta.get("content") or ""
            if part.get("token_ids") is not None:
                one["token_ids"] = one.get("token_ids", []) + part["token_ids"]
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought:
                message = one.setdefault("message", {"reasoning": ""})
                message["reasoning"] += thought
            for key in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if part.get(key) is not None:
                    one[key] = part[key]
    if not choices or not all(one.get("finish_reason") for one in choices.values()):
        return None
    return {**found, "choices": [choices[i] for i in sorted(choices)]}
