"""HTTP to servers: this machine's own without the environment's proxy, and none with redirects.

A proxy for the outside world cannot reach this machine's own servers, and would see the prompts and
the key. urllib follows a redirect with all headers, so the key would be sent to any host that a
server names.
"""

from __future__ import annotations

import http.client
import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import IO, NoReturn

from trainer.errors import UserError

OWN = ("127.0.0.1", "localhost", "::1")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def http_error_302(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
    ) -> NoReturn:
        said = f"it redirects to {headers.get('Location')}, which is not followed: name that server"
        raise urllib.error.HTTPError(req.full_url, code, said, headers, fp)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def urlopen(
    address: str,
    timeout: float,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> http.client.HTTPResponse:
    """The server's answer; the caller closes it. Raises UserError where `address` is not an
    address, OSError or http.client.HTTPException where the exchange fails."""
    try:
        parts = urllib.parse.urlsplit(address)
        if not parts.hostname or parts.port == 0:  # reading `port` checks it
            raise ValueError("it has no host, or port 0")
        request = urllib.request.Request(address, data, dict(headers or {}))
        proxy = urllib.request.ProxyHandler({} if is_own(parts.hostname) else None)
        opener = urllib.request.build_opener(proxy, _NoRedirect)
        return opener.open(request, timeout=timeout)
    except (ValueError, http.client.InvalidURL) as error:
        raise UserError(f"{address} is not the address of a server ({error})") from error


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
