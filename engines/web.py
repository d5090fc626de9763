"""HTTP to servers: this machine's own without the environment's proxy, none with redirects, and
each answer within limits.

A proxy for the outside world cannot reach this machine's own servers, and would see the prompts and
the key. A redirect would take the key to any host that a server names. An answer without an end
would hold the run for ever, or fill the memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import ipaddress
import os
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp

from trainer.checks import require_address
from trainer.errors import RunFault
from trainer.redaction import MARK

OWN = ("127.0.0.1", "localhost", "::1")
SILENT_S = 600.0  # without a byte, and at least for a whole answer
# of an answer, for each token: in all, and without a byte, since an answer that is not streamed
# comes after its last token
TOKEN_S, SILENT_TOKEN_S = 1.0, 0.1
TOKEN_BYTES = 64
PAGE_BYTES = 2**20  # of an answer besides its tokens
ERROR_BYTES = 2**16
SHOWN = 300  # characters of what a server says
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)


class ServerError(RunFault):
    """A request to a server that failed; `transient`: another try may succeed."""

    def __init__(self, address: str, said: str, transient: bool):
        line = " ".join("".join(c if c.isprintable() else " " for c in said).split())
        super().__init__(f"{address} failed ({line[:SHOWN]})")
        self.said, self.transient = line[:SHOWN], transient


class Limits(NamedTuple):
    """Seconds and bytes that a whole answer may take, and seconds without a byte; None: as many as
    in all."""

    total_s: float
    num_bytes: int
    silent_s: float | None = None


def answer_limits(new_tokens: int = 0, prompt_tokens: int = 0) -> Limits:
    """The limits of an answer of `new_tokens` to a prompt, which some servers repeat."""
    num_bytes = PAGE_BYTES + TOKEN_BYTES * (new_tokens + prompt_tokens)
    silent_s = max(SILENT_S, SILENT_TOKEN_S * new_tokens)
    return Limits(max(SILENT_S, TOKEN_S * new_tokens), num_bytes, silent_s)


def fetch(
    address: str,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> bytes:
    """The body of a server's answer to `data`, or to a GET request without. Raises UserError where
    `address` is not an address, and ServerError where the exchange fails: one that would pass with
    a server that comes back is transient, an answer past its limits is not."""
    require_address("the address of a server", address)
    limits = limits or answer_limits()
    silent_s = limits.total_s if limits.silent_s is None else limits.silent_s
    exchange = _exchange(address, data, headers or {}, limits.num_bytes, silent_s)
    future = asyncio.run_coroutine_threadsafe(exchange, _loop(os.getpid()))
    try:
        return future.result(limits.total_s)
    except concurrent.futures.TimeoutError:
        future.cancel()
        said = f"its answer was not whole after {limits.total_s:g} s"
        raise ServerError(address, said, False) from None


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process's exchanges, in a thread of its own: a fork takes none along, and
    a process that ends does not wait for it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _exchange(
    address: str, data: bytes | None, headers: Mapping[str, str], most: int, silent_s: float
) -> bytes:
    """The body of an answer, of at most `most` bytes. Raises ServerError."""
    times = aiohttp.ClientTimeout(total=None, sock_read=silent_s)
    try:
        async with (
            aiohttp.ClientSession(
                timeout=times, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            ) as session,
            session.request(
                "GET" if data is None else "POST", address, data=data,
                headers={"Accept-Encoding": "identity", **headers},
                allow_redirects=False, proxy=_proxy(address),
            ) as answer,
        ):  # fmt: skip
            if 200 <= answer.status < 300:
                return await _body(address, answer, most)
            raise await _refusal(address, answer)
    except ServerError:
        raise
    except aiohttp.SocketTimeoutError:
        raise ServerError(address, f"it sent nothing for {silent_s:g} s", False) from None
    except Exception as error:  # refused, cut short, or what a parser raises of wrong HTTP
        raise ServerError(address, _failure(error), True) from error


def _failure(error: Exception) -> str:
    """What is said of an exchange that failed."""
    if isinstance(error, aiohttp.ServerDisconnectedError):  # its text may be a half-read head
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientResponseError):  # of the parser, not a status
        return f"its answer is no HTTP: {error.message}"
    return str(error) or type(error).__name__


def _proxy(address: str) -> str | None:
    """The proxy that the environment names for a server; None for this machine's own."""
    parts = urllib.parse.urlsplit(address)
    if is_own(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc):
        return None
    found = urllib.request.getproxies().get(parts.scheme)
    return f"http://{found}" if found and "://" not in found else found


async def _body(address: str, answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises ServerError where it has more than `most` bytes, or says it has."""
    content, size = bytearray(), answer.content_length or 0
    while size <= most:
        some = await answer.content.readany()
        if not some:
            return bytes(content)
        content += some
        size = max(size, len(content))
    raise ServerError(address, f"its answer has over {most} bytes", False)


async def _refusal(address: str, answer: aiohttp.ClientResponse) -> ServerError:
    """What a server says with another status than success."""
    place = answer.headers.get("Location")
    said = f"it redirects to {place}, which is not followed: name that server"
    if answer.status not in REDIRECTS:
        content = b""
        with contextlib.suppress(aiohttp.ClientPayloadError, aiohttp.ClientOSError):  # it may die
            content = await _body(address, answer, ERROR_BYTES)
        said = f"{answer.reason} {content.decode(errors='replace')}"
    if key := answer.request_info.headers.get("Authorization", "").removeprefix("Bearer "):
        said = said.replace(key, MARK)  # of a server that repeats what it refuses
    return ServerError(address, f"{answer.status} {said}", answer.status in TRANSIENT)


def server_root(address: str) -> str:
    """The address before /v1 and the other paths of a server. Clients of OpenAI's interface are
    given it with /v1 at its end."""
    return address.rstrip("/").removesuffix("/v1").rstrip("/")


def is_own(host: str) -> bool:
    """Whether `host` is this machine: localhost, 127.0.0.0/8, ::1, or 0.0.0.0 and ::, which servers
    print as theirs when they listen on every interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return address.is_loopback or address.is_unspecified


def past_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a child process, too, call this machine's servers without a proxy.
    Hosts that the environment excludes stay excluded."""
    both = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        given = environment.get(name) or environment.get(other) or ""
        hosts = [host for host in map(str.strip, given.split(",")) if host]
        # an asterisk excludes every host only where it stands alone
        both[name] = "*" if hosts == ["*"] else ",".join(dict.fromkeys([*hosts, *OWN]))
    return both
