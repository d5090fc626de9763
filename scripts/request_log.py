"""Log the requests to an OpenAI-compatible server (vLLM), for `recipe=osd method.log=...`.

    python -m scripts.request_log script.server=http://127.0.0.1:8000 script.port=8001 \\
        script.log=requests.jsonl

Clients then use port 8001 in place of 8000. `script.token_ids=false` for a server that refuses
`return_token_ids`; its text is tokenised again when the log is read. `script.host` is where it
listens (127.0.0.1), `script.allowed_hosts=[gpu-box]` are further names by which clients may call
it, `script.max_body_mb` is the largest request (64).

Only its owner may read the log. `script.keep_days=30` deletes what is older while the proxy runs,
and, without `script.server`, at once: `script.keep_days=0` deletes all. `script.forget=TEXT`
deletes at once every exchange that holds TEXT in its request or answer, such as a user's name, a
sentence or the id of an answer; a prompt that was sent as token ids is found by its answer only. A
proxy that writes and a run that reads are not disturbed: deleted lines become blank. Requests that
a run has read before stay in its checkpoints.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engines import request_file
from engines.request_proxy import DAY_S, RequestProxy
from trainer.checks import is_file
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import RunFault, UserError, require
from trainer.redaction import hide
from trainer.terminal import guard_terminal

KEYS = ("server", "port", "log", "host", "token_ids", "allowed_hosts", "max_body_mb", "keep_days",
        "forget")  # fmt: skip
TEXTS = ("script.server", "script.log", "script.host", "script.forget")


def main(arguments: list[str]) -> int:
    guard_terminal()
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        words = parse_overrides(arguments, [f"script.{key}" for key in KEYS], TEXTS)
        given = {key.removeprefix("script."): v for key, v in words.items() if v is not None}
        _check(given)
        if "server" in given:
            asyncio.run(serve(RequestProxy(**{"port": 8001, **given})))
        else:
            delete(Path(given["log"]), given.get("keep_days"), given.get("forget"))
    except (UserError, RunFault) as error:
        print(f"error: {hide(str(error), arguments)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3
    return 0


def _check(given: dict[str, object]) -> None:
    """Refuse values of script.* that are missing or of the wrong type."""
    deletes = "keep_days" in given or "forget" in given
    require("server" in given or deletes, "script.server", "be given", None)
    require("log" in given, "script.log", "be given", None)
    if "forget" in given and "server" in given:
        raise UserError("script.forget deletes lines and starts no proxy: leave script.server out")
    if isinstance(given.get("allowed_hosts"), str):
        given["allowed_hosts"] = [given["allowed_hosts"]]

    def number(value: object) -> float:
        """The value of a finite number; nan, which no rule allows, for anything else."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return math.nan
        return value if math.isfinite(value) else math.nan

    rules: dict[str, tuple[str, Callable[[object], bool]]] = {
        "port": ("be a number", lambda v: type(v) is int),
        "token_ids": ("be true or false", lambda v: isinstance(v, bool)),
        "allowed_hosts": (
            "be a list of names",
            lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
        ),
        "max_body_mb": ("be a number > 0", lambda v: number(v) > 0),
        "keep_days": ("be a number >= 0", lambda v: number(v) >= 0),
    }
    for key, (rule, holds) in rules.items():
        require(key not in given or holds(given[key]), f"script.{key}", rule, given.get(key))


async def serve(proxy: RequestProxy) -> None:
    """Run the proxy until SIGINT or SIGTERM."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with proxy:
        if not ipaddress.ip_address(proxy.bound).is_loopback:
            print(
                f"warning: script.host={proxy.host} is open to other machines: whoever reaches it "
                "can ask the server, and adds to the log",
                file=sys.stderr,
            )
        how_long = "for ever" if proxy.keep_days is None else f"for {proxy.keep_days:g} days"
        print(
            f"{proxy.address} answers for {proxy.upstream}; answers go to {proxy.log} and are "
            f"stored {how_long}",
            flush=True,
        )
        await ended.wait()


def delete(log: Path, keep_days: float | None, text: str | None) -> None:
    """Delete the lines of a log that are older than `keep_days` or hold `text`."""
    if not is_file("script.log", log):
        raise UserError(f"script.log={log} does not exist: name the file that was written")
    count = 0
    try:
        if keep_days is not None:
            count += request_file.delete_before(log, time.time() - keep_days * DAY_S)
        if text is not None:
            count += request_file.delete_with(log, text)
    except OSError as error:
        raise RunFault(
            f"{log} cannot be written ({error.strerror}): fix that and rerun the same command"
        ) from error
    print(f"{count} lines of {log} were deleted")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
