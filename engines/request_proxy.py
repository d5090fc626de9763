"""A proxy before an OpenAI-compatible server, which logs requests and answers.

It passes everything on unchanged but for one key: completions are asked for their token ids
(`return_token_ids`, which vLLM supports), so that nothing has to be tokenised again. Answers are
passed on as they come and logged once they are complete; failed ones are not logged. Headers of
clients are passed on and never logged.

Every client of the proxy adds to the training text of a drafter. The proxy therefore listens on
this machine alone by default, and refuses what a web page can send: a request from another origin
or site, or under a host name that somebody else may have pointed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from engines import request_file
from engines.web import server_root
from trainer.checks import require_address
from trainer.errors import UserError, excerpt

LOGGED = ("/completions", "/chat/completions")
INCOMPLETE = ("abort", "error")  # finish_reason of an answer that vLLM ended early
UNUSABLE = (ValueError, TypeError, AttributeError, RecursionError)  # what malformed answers raise
# of one connection only (RFC 9110, section 7.6.1)
HOP_BY_HOP = ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
              "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")  # fmt: skip
DECODED = ("gzip", "deflate", "br", "zstd")  # what aiohttp unpacks
HEADER_S = 60  # from one request to the whole head of the next
BODY_S = 60
LINGER_S = 2  # to read the rest of a request that was refused: else its client sees no answer
CONNECT_S, SILENT_S = 30, 600  # of the server
ENDING_S = 2  # for answers under way when the proxy is ended, twice at most
MOST_NAMED = 20  # endpoints whose answers are not logged
SWEEP_S, DAY_S = 3600, 86400

# aiohttp quotes a malformed request in what it logs, and there may be a key in it
MALFORMED = (HttpProcessingError, web.RequestPayloadError)
_log = logging.getLogger(__name__)
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], MALFORMED)))


class RequestProxy:
    """The proxy runs inside `async with RequestProxy(...)`.

    `server`: the server's address; `port`: 0 for any, then `self.port` is the one used;
    `token_ids`: request them (False for a server that refuses unknown keys: the reader of the log
    then tokenises the text again); `allowed_hosts`: names besides localhost and its own address by
    which clients may call it; `max_body_mb`: of a request; `keep_days`: older lines are deleted.
    Raises UserError where the port or the log cannot be opened."""

    def __init__(
        self,
        server: str,
        port: int,
        log: str | Path,
        *,
        host: str = "127.0.0.1",
        token_ids: bool = True,
        allowed_hosts: Collection[str] = (),
        max_body_mb: float = 64,
        keep_days: float | None = None,
    ):
        require_address("script.server", server)
        self.upstream, self.port, self.log = server_root(server), port, Path(log)
        self.host, self.token_ids = host, token_ids
        self.allowed_hosts = {name.lower() for name in ("localhost", *allowed_hosts)}
        self.max_body_mb, self.keep_days = max_body_mb, keep_days
        self.lost = 0  # answers in a row that could not be logged
        self._unlogged: set[str] = set()  # endpoints that were named as not logged
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RequestProxy:
        async with contextlib.AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    # no connection twice: the server may close it as the next request is sent
                    connector=aiohttp.TCPConnector(limit=0, force_close=True),
                    cookie_jar=aiohttp.DummyCookieJar(),  # a cookie is its client's alone
                    timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=SILENT_S),
                    skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
                    trust_env=False,  # no http_proxy or .netrc of the environment
                )
            )
            app = web.Application(client_max_size=math.ceil(self.max_body_mb * 2**20))
            app.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, logger=_log,
                keepalive_timeout=HEADER_S, lingering_time=LINGER_S, shutdown_timeout=ENDING_S,
            )  # fmt: skip
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            try:
                await web.TCPSite(runner, self.host, self.port).start()
            except (OSError, OverflowError) as error:
                raise UserError(
                    f"script.host={self.host}, script.port={self.port} cannot be opened ({error})"
                ) from error
            self.port = runner.addresses[0][1]
            self.bound = runner.addresses[0][0]
            request_file.prepare(self.log)
            if self.keep_days is not None:
                await self._delete_old(self.keep_days)
                sweeper = asyncio.create_task(self._sweep(self.keep_days))
                stack.callback(sweeper.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self._stack.aclose()
        if self.lost:
            _say(f"{self.lost} answers are missing in {self.log}")

    @property
    def address(self) -> str:
        return f"http://{f'[{self.bound}]' if ':' in self.bound else self.bound}:{self.port}"

    # --- what was logged -------------------------------------------------------------------------

    async def _sweep(self, keep_days: float) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._delete_old(keep_days)

    async def _delete_old(self, keep_days: float) -> None:
        moment = time.time() - keep_days * DAY_S
        try:
            await asyncio.to_thread(request_file.delete_before, self.log, moment)
        except OSError as error:
            _say(f"old lines of {self.log} cannot be deleted ({error.strerror})")

    def _log_answer(self, asked: Mapping[str, object], content: bytes) -> None:
        """Log an exchange, without `await`: a client that has its answer may close the connection,
        which cancels a task that awaits."""
        try:
            answer = joined(content.split(b"\n")) if asked.get("stream") else _parsed(content)
            if answer is None or not _is_whole(answer):
                return
            answer["created"] = int(time.time())  # `keep_days` counts from here
            request_file.append(self.log, {"request": asked, "response": answer})
        except UNUSABLE:
            return
        except OSError as error:
            if not self.lost:
                _say(
                    f"{self.log} cannot be written ({error.strerror}): answers are passed on and "
                    "not logged"
                )
            self.lost += 1
            return
        if self.lost:
            _say(f"{self.log} can be written again, {self.lost} answers are missing in it")
            self.lost = 0

    def _name_unlogged(self, path: str) -> None:
        """Say once that the answers of an endpoint are not logged."""
        if path in self._unlogged or len(self._unlogged) == MOST_NAMED:
            return
        self._unlogged.add(path)
        _say(
            f"answers of {excerpt(path, 80)} are passed on and not logged: only those of "
            "/v1/completions and /v1/chat/completions are"
        )

    # --- an exchange -----------------------------------------------------------------------------

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            body = await asyncio.wait_for(request.read(), BODY_S)
        except asyncio.TimeoutError:
            return _refuse(408, f"the body did not arrive within {BODY_S} s")
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"the body is larger than script.max_body_mb={self.max_body_mb}")
        except (web.RequestPayloadError, ConnectionError):  # or its client has disconnected
            return _refuse(400, "the body is malformed")
        asked, body = self._asked(request, body)
        # not compressed: the answer is read here too
        headers = _passed(request.headers, "host", "content-length", "expect", "accept-encoding")
        headers["Accept-Encoding"] = "identity"
        try:
            answer = await self._session.request(
                request.method, URL(self.upstream + request.raw_path, encoded=True),
                headers=headers, data=body or None, allow_redirects=False,
            )  # fmt: skip
        except asyncio.TimeoutError:
            return _refuse(504, f"{self.upstream} does not answer")
        except aiohttp.ClientError as error:
            return _refuse(502, f"{self.upstream} cannot be reached ({error})")
        async with answer:
            return await self._pass_on(request, answer, asked)

    def _asked(
        self, request: web.Request, body: bytes
    ) -> tuple[Mapping[str, object] | None, bytes]:
        """The request for a completion, None for any other one, and the body to pass on."""
        asked = _parsed(body) if request.path.endswith(LOGGED) else None
        if asked is None or not self.token_ids:
            return asked, body
        try:
            return asked, json.dumps({**asked, "return_token_ids": True}).encode()
        except RecursionError:
            return None, body

    def _refusal(self, request: web.Request) -> web.Response | None:
        """The answer to a request that is malformed, for another host or of a web page, or None."""
        if not request.raw_path.startswith("/"):  # it is appended to the server's address
            return _refuse(400, "the target of a request must begin with /")
        given = request.headers.get("Host", "")
        try:
            name = (URL(f"http://{given}").host or "").lower()
        except ValueError:
            name = ""
        if name not in self.allowed_hosts and not _is_own(request, name):
            return _refuse(
                403, f"the host {given!r} is not known here: call {self.address}, or start the "
                f"proxy with script.allowed_hosts=[{name}]"
            )  # fmt: skip
        for origin in request.headers.getall("Origin", ()):
            if origin.partition("://")[2].lower() != given.lower():
                return _refuse(
                    403, f"requests of web pages of another origin are refused ({origin})"
                )
        for site in request.headers.getall("Sec-Fetch-Site", ()):  # also without an Origin
            if site.strip().lower() == "cross-site":
                return _refuse(403, f"requests of web pages of another site are refused ({site})")
        return None

    async def _pass_on(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        asked: Mapping[str, object] | None,
    ) -> web.StreamResponse:
        """Pass the server's answer on as it comes, and log it if it is a completion."""
        logged = asked is not None and answer.status == 200
        if request.method == "POST" and answer.status == 200 and asked is None:
            self._name_unlogged(request.path)
        # without a length the client sees the end only after the line is written
        headers = _passed(answer.headers, *(["content-length"] if logged else ()))
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        content = bytearray()
        try:
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                if logged:
                    content += chunk
                await response.write(chunk)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:  # of the server or the client
            if request.transport is not None and not request.transport.is_closing():
                _say(f"{self.upstream} ended an answer early ({error or type(error).__name__})")
            request.protocol.force_close()  # its client must not take it for complete
            return response
        finally:  # also where the client disconnects at the end
            if asked is not None and content:
                self._log_answer(asked, bytes(content))
        await response.write_eof()
        return response


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=f"{reason}\n")


def _is_own(request: web.Request, name: str) -> bool:
    """Whether `name` is the address that the client has connected to."""
    try:
        own = request.protocol.sockname
        return own is not None and ipaddress.ip_address(name) == ipaddress.ip_address(own[0])
    except ValueError:
        return False


def _passed(headers: CIMultiDictProxy[str], *without: str) -> CIMultiDict[str]:
    """The headers to pass on: not those of the connection, of a compression that is already undone,
    or in `without`."""
    dropped = {*HOP_BY_HOP, *without}
    for value in headers.getall("Connection", ()):
        dropped |= {name.strip().lower() for name in value.split(",")}
    if headers.get("Content-Encoding", "").lower() in DECODED:
        dropped |= {"content-encoding", "content-length"}
    return CIMultiDict((name, v) for name, v in headers.items() if name.lower() not in dropped)


def _parsed(text: bytes) -> dict[str, Any] | None:
    """A JSON table; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # of a request: the server reports it
        return None
    return found if isinstance(found, dict) else None


def _is_whole(answer: Mapping[str, Any]) -> bool:
    """Whether there are choices and none ended early; servers send errors with status 200, too."""
    choices = answer.get("choices") or ()
    ended = all(one.get("finish_reason") not in INCOMPLETE for one in choices)
    return bool(choices) and ended and not answer.get("error")


def joined(lines: Iterable[bytes]) -> dict[str, object] | None:
    """The answer that a stream of server-sent events adds up to; None where it is not complete."""
    found: dict[str, object] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in lines:
        chunk = _parsed(line[5:]) if line.startswith(b"data:") else None
        if chunk is None:
            continue
        if chunk.get("error"):
            return None
        for key in ("id", "model", "prompt_token_ids", "usage"):
            if chunk.get(key) is not None:
                found[key] = chunk[key]
        for part in chunk.get("choices") or []:
            one = choices.setdefault(part.get("index", 0), {"text": ""})
            delta = part.get("delta") or {}
            one["text"] += part.get("text") or delta.get("content") or ""
            if part.get("token_ids") is not None:
                one["token_ids"] = one.get("token_ids", []) + part["token_ids"]
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought:
                message = one.setdefault("message", {})
                message["reasoning"] = message.get("reasoning", "") + thought
            calls = delta.get("tool_calls") or delta.get("function_call")
            if calls:
                one.setdefault("message", {})["tool_calls"] = calls
            for key in ("finish_reason", "prompt_token_ids"):
                if part.get(key) is not None:
                    one[key] = part[key]
            if part.get("finish_reason"):  # null is said too: an EOS ended it, not a stop string
                one |= {k: part[k] for k in ("stop_reason", "matched_stop") if k in part}
    if not choices or not all(one.get("finish_reason") for one in choices.values()):
        return None
    return {**found, "choices": [choices[i] for i in sorted(choices)]}
