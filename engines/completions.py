"""Continuations from OpenAI-compatible servers that answer with token ids.

vLLM does from 0.11 on, SGLang since July 2026. Prompts are sent as token ids and answers come back
as token ids (`return_token_ids`), so that nothing is tokenised twice and the boundary of prompt and
response is exact. Every request sets what a server would read from the model's
generation_config.json: a repetition penalty there would change the distribution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engines.distribution_check import Evidence, UncheckedRows, measured
from engines.web import Limits, ServerError, answer_limits, fetch, server_root
from target.decode import Continuation, Request
from target.model import Target
from trainer.errors import RunFault, UserError

KEY_VARIABLE = "OPENAI_API_KEY"
PATIENCE_S = 300.0  # without a single answer
DELAYS_S = (0.5, 1, 2, 4, 8, 15)  # before a request that failed is sent again
DIFFER = "of the tokens have other probabilities at another server"
LOGPROB_TOKENS = 4  # an answer with log-probabilities has the bytes of so many without
# what other servers, those in use, say of a server's rows (`engines.witnesses`)
Witness = Callable[[str, Collection[str], Sequence[Continuation]], list[Evidence]]
RESUME = "finished rows are saved, run the same command again to resume"


def ask(
    address: str, content: Mapping[str, object] | None = None, limits: Limits | None = None
) -> dict[str, Any]:
    """Send JSON and return the JSON object of the answer; None sends a GET request. The key of the
    service is sent if the environment holds one, and never printed. Raises ServerError, and
    UserError where `address` is not an address."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"{KEY_VARIABLE} holds a character that no HTTP header can hold: set it again"
            )
        headers["Authorization"] = f"Bearer {key}"
    data = None if content is None else json.dumps(content).encode()
    text = fetch(address, data, headers, limits)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON: a page of a router that is starting
        raise ServerError(address, str(error), True) from error
    if not isinstance(answer, dict):
        raise ServerError(address, "its answer is no JSON object", True)
    return answer


def served_model(root: str, limits: Limits | None = None) -> str:
    """The name of the model that a server serves. Raises ServerError."""
    answer = ask(f"{root}/v1/models", limits=limits)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        name = answer["data"][0]["id"]
        if isinstance(name, str):
            return name
    # a router whose servers have not started yet
    raise ServerError(root, "its /v1/models names no model", True)


def continuation(
    root: str,
    model: str,
    request: Request,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    vocab_size: int,
    stop_strings: Sequence[str] = (),
    logprobs: bool = False,
) -> Continuation:
    """The server's answer: 1 to `max_new_tokens` token ids below `vocab_size`, the EOS included,
    with the log-probability of each if `logprobs` is set. Raises ServerError, also for any other
    answer."""
    wanted: dict[str, object] = {"stop_token_ids": list(eos_ids)}
    if stop_strings:
        wanted["stop"] = list(stop_strings)
    if logprobs:
        wanted["logprobs"] = 1
    tokens, reason, found = _generated(root, model, request, max_new_tokens, vocab_size, wanted)
    ends = [i for i, token in enumerate(tokens) if token in eos_ids]
    if ends:
        stop = ends[0] + 1
        return Continuation(request, tokens[:stop], "eos", logprobs=found[:stop])
    if len(tokens) == max_new_tokens:
        return Continuation(request, tokens, "length", logprobs=found)
    if stop_strings and reason != "length":
        return Continuation(request, tokens, "stop", logprobs=found)
    raise ServerError(root, _too_short(tokens, max_new_tokens), False)


def looked_ahead(
    root: str, model: str, row: Continuation, *, lookahead: int, vocab_size: int
) -> Continuation:
    """`row` with the `lookahead` tokens that the server writes behind its end, whatever they are.
    Raises ServerError."""
    before = row.request
    # another stream of random numbers than the answer's, which would begin again
    ids = [*before.prompt_ids, *row.response_ids]
    request = dataclasses.replace(before, prompt_ids=ids, key=before.key + 1)
    tokens, _, _ = _generated(root, model, request, lookahead, vocab_size, {})
    if len(tokens) < lookahead:
        raise ServerError(root, _too_short(tokens, lookahead), False)
    return dataclasses.replace(row, lookahead_ids=tokens)


def _too_short(tokens: Sequence[int], requested: int) -> str:
    return (
        f"an answer of {len(tokens)} tokens without EOS, {requested} were requested: allow the "
        "server longer texts (--max-model-len)"
    )


def _brief(value: object) -> str:
    """A value of an answer in quotes, a list or an object by its kind alone."""
    return repr(type(value).__name__ if isinstance(value, list | dict) else str(value)[:40])


def _generated(
    root: str,
    model: str,
    request: Request,
    max_new_tokens: int,
    vocab_size: int,
    wanted: Mapping[str, object],
) -> tuple[list[int], object, list[float]]:
    """Token ids that the server generates, why it stopped, and the log-probabilities of the tokens
    where they are asked for. `wanted`: what ends the text before `max_new_tokens`, which an EOS
    does not, and what is returned, in the server's words. Raises ServerError."""
    sampling = request.sampling
    content: dict[str, object] = {
        "model": model, "prompt": request.prompt_ids, "max_tokens": max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": request.key & 0x7FFFFFFF,
        "ignore_eos": True, "add_special_tokens": False, "skip_special_tokens": False,
        "return_token_ids": True, **wanted,
    }  # fmt: skip
    sized = LOGPROB_TOKENS * max_new_tokens if "logprobs" in wanted else max_new_tokens
    limits = answer_limits(sized, len(request.prompt_ids))
    answer, choice = ask(f"{root}/v1/completions", content, limits), {}
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
        choice = dict(answer["choices"][0])
    reason, tokens = choice.get("finish_reason"), choice.get("token_ids")
    if reason in ("abort", "error"):  # of vLLM, as when it is shut down
        raise ServerError(root, f"it ended an answer early: {reason}", True)
    if not isinstance(tokens, list) or not tokens:
        said = "no token ids in the answer: vLLM 0.11 and a recent SGLang give them"
        raise ServerError(root, said, False)
    if odd := [t for t in tokens if type(t) is not int or not 0 <= t < vocab_size]:
        last = vocab_size - 1
        said = f"{_brief(odd[0])} in an answer is not a token id of the target, 0 to {last}"
        raise ServerError(root, said, False)
    if len(tokens) > max_new_tokens:
        said = f"an answer of {len(tokens)} tokens, {max_new_tokens} were requested"
        raise ServerError(root, said, False)
    if choice.get("prompt_token_ids") not in (None, request.prompt_ids):
        raise ServerError(root, "an answer to a prompt other than the one sent", False)
    if reason not in (None, "stop", "length"):
        said = f"an answer whose finish_reason is {_brief(reason)}, neither stop nor length"
        raise ServerError(root, said, False)
    return tokens, reason, _logprobs(root, choice, len(tokens)) if "logprobs" in wanted else []


def _logprobs(root: str, choice: Mapping[str, Any], count: int) -> list[float]:
    """The log-probabilities of the `count` tokens of an answer, in nats. Raises ServerError."""
    try:
        found = [float(one) for one in choice["logprobs"]["token_logprobs"]]
    except (KeyError, TypeError, ValueError):
        found = []
    if len(found) != count:
        said = "an answer without the log-probabilities of its tokens, which were asked for"
        raise ServerError(root, said, False)
    return found


# --- many requests ---------------------------------------------------------------------------


def complete(
    target: Target,
    addresses: Sequence[str],
    requests: list[Request],
    *,
    max_new_tokens: int,
    concurrency: int,
    stop_strings: Sequence[str] = (),
    lookahead: int = 0,
    witness: Witness | None = None,
) -> Iterator[Continuation]:
    """Yield continuations, not in order, once they are validated as the target's
    (`engines.distribution_check`), or of two servers or more by `witness` as those of one model.
    `requests` is emptied; the caller may append to it meanwhile. `lookahead`: tokens to generate
    past the end of each answer, by a request of their own.

    Each server has `concurrency` requests under way. A request that fails is sent again to any free
    server. A server that gives an invalid answer, one past its limits (`engines.web`) or those of
    another model is named and not used any more; its unchecked rows are requested from the others.
    Raises RunFault where no server answers for PATIENCE_S or none remains, UserError where no
    server ever served the target.
    """
    names: dict[str, str] = {}

    def generate(root: str, request: Request) -> Continuation:
        if root not in names:
            names[root] = served_model(root)
        row = continuation(
            root, names[root], request, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids,
            vocab_size=target.vocab_size, stop_strings=stop_strings, logprobs=asked,
        )  # fmt: skip
        more = {"lookahead": lookahead, "vocab_size": target.vocab_size}
        return looked_ahead(root, names[root], row, **more) if lookahead else row

    roots = [server_root(address) for address in addresses]
    asked = witness is not None and len({*roots}) > 1  # with log-probabilities, for the others
    rows = _Rows(target, roots, requests, witness)
    with contextlib.closing(_Askers(roots * concurrency, rows.windows, generate)) as askers:
        while requests or askers.flying or rows.held:
            if due := rows.due(askers.flying):
                for root in due:
                    yield from rows.settle(root)
                continue  # the caller may have appended requests
            while requests and askers.flying < askers.count:
                askers.ask(requests.pop())
            yield from rows.take(askers.answer())


class _Answer(NamedTuple):
    """What came of one request."""

    root: str
    request: Request
    number: int  # in the order of asking
    row: Continuation | ServerError


class _Askers:
    """Threads that ask servers, one for each of `places`, which names a server as often as it may
    be asked at once. `in_use`: by the servers that still are; `generate`: what is asked of one."""

    def __init__(
        self,
        places: Sequence[str],
        in_use: dict[str, UncheckedRows],
        generate: Callable[[str, Request], Continuation],
    ):
        self.count, self.in_use, self.generate = len(places), in_use, generate
        self.flying = 0  # requests that have no answer yet
        # a place is held for the pause after a failure, so that a dead server slows no other down
        self._places: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for root in places:
            self._places.put(root)
        self._todo: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Answer | Exception | None] = queue.SimpleQueue()
        self._closed, self._answered = threading.Event(), time.monotonic()
        self._order = itertools.count()
        for _ in places:  # daemons: a process that ends does not wait for their answers
            threading.Thread(target=self._work, daemon=True).start()

    def ask(self, request: Request) -> None:
        """Send a request as soon as a server is free."""
        self._todo.put(request)
        self.flying += 1

    def answer(self) -> _Answer:
        """Wait for the next answer, which may be a fault of its server. Other errors are raised."""
        found = self._done.get()
        self.flying -= 1
        if isinstance(found, Exception):
            raise found
        assert found is not None, "None ends a thread after the run"
        return found

    def close(self) -> None:
        """End the threads, and wait for none."""
        self._closed.set()
        for _ in range(self.count):
            self._todo.put(None)
            self._places.put(None)

    def _work(self) -> None:
        while (request := self._todo.get()) is not None:
            try:
                self._done.put(self._asked(request))
            except Exception as error:  # else the run would wait for it for ever
                self._done.put(error)

    def _asked(self, request: Request) -> _Answer | None:
        for delay in itertools.chain(DELAYS_S, itertools.repeat(DELAYS_S[-1])):
            while (root := self._places.get()) not in self.in_use:
                if root is None:
                    return None  # the run has ended
            number = next(self._order)
            try:
                row = self.generate(root, request)
                self._answered = time.monotonic()
                return _Answer(root, request, number, row)
            except ServerError as error:
                late = time.monotonic() - self._answered > PATIENCE_S
                if late or not error.transient or self._closed.wait(delay):
                    return _Answer(root, request, number, error)
            finally:
                self._places.put(root)
        raise AssertionError


class _Rows:
    """The rows of servers until they are checked. `windows`: by server, those in use alone;
    `requests`: those to be sent, to which the ones of a server that is not used any more return."""

    def __init__(
        self,
        target: Target,
        roots: Sequence[str],
        requests: list[Request],
        witness: Witness | None,
    ):
        self.target, self.requests, self.witness = target, requests, witness
        self.windows: dict[str, UncheckedRows] = {}
        for root in roots:
            self.windows[root] = (
                UncheckedRows(functools.partial(measured, target))
                if witness is None
                else UncheckedRows(functools.partial(witness, root, self.windows), DIFFER)
            )
        self._released = False  # whether any row has passed its check

    @property
    def held(self) -> int:
        """The number of rows that wait for their check."""
        return sum(len(window.rows) for window in self.windows.values())

    def due(self, flying: int) -> list[str]:
        """The servers whose rows are to be checked now. `flying`: requests without an answer."""
        found, held = [], self.held
        for root, one in self.windows.items():
            # without other requests, a conversation may wait for the unchecked rows; a server's
            # first check has as many rows as possible
            spare = not flying or (bool(one.passed) and held >= flying)
            if one.rows and (one.due() or (spare and not self.requests)):
                found.append(root)
        return found

    def take(self, answer: _Answer) -> Iterator[Continuation]:
        """Keep a row for its check, or a request to be sent again; where a server fails for good,
        yield the finished rows first, then drop it or raise RunFault."""
        root, request, number, row = answer
        if root in self.windows and isinstance(row, Continuation):
            self.windows[root].add(number, row)
            return
        self.requests.append(request)
        if root not in self.windows or isinstance(row, Continuation):
            return  # this server's answers are not used any more
        # those of all servers where none answers
        for other in list(self.windows) if row.transient else [root]:
            yield from self.settle(other)
        if row.transient:
            raise RunFault(f"{row}; {RESUME}")
        if root in self.windows:
            self._drop(root, str(row))

    def settle(self, root: str) -> Iterator[Continuation]:
        """The rows of a server that pass the check; else the server is not used any more."""
        if not (said := self.windows[root].check()):
            rows = self.windows[root].release()
            self._released = self._released or bool(rows)
            yield from rows
            return
        kind = RunFault if self._released else UserError
        others = [other for other in self.windows if other != root]
        if self.witness is not None and len(others) < 2:
            raise kind(
                f"data.servers: {' and '.join([root, *others])} serve different models ({said}): "
                f"serve {self.target.name} at each, with its own tokenizer and without penalties"
            )
        said = (
            f"data.engine: the answers of {root} are not those of {self.target.name} ({said}): "
            "serve this model, with its own tokenizer and without penalties"
        )
        self._drop(root, said, kind)

    def _drop(self, root: str, said: str, kind: type[Exception] = RunFault) -> None:
        again = [row.request for row in self.windows.pop(root).release()]
        self.requests.extend(again)
        if not self.windows:
            raise kind(f"{said}; {RESUME}" if kind is RunFault else said)
        print(
            f"{said}; it is not used any more, {len(again)} of its rows are requested again",
            flush=True,
        )
