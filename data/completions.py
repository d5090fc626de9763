"""Continuations from servers: OpenAI-compatible ones that answer with token ids.

vLLM does from 0.11 on, SGLang since July 2026. Prompts are sent as token ids and answers come back
as such (`return_token_ids`), so that nothing is tokenised twice and the boundary of prompt and
response is exact. What a server would take from the model's generation_config.json is said in every
request: a repetition penalty there would change the law.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from data.batches import collate
from data.decode import Continuation, Request
from data.sampling import Sampling, surprise, warp
from data.target import Target
from trainer.config import RunFault, UserError

KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 600
PATIENCE_S = 300.0  # without a single answer
DELAYS_S = (0.5, 1, 2, 4, 8, 15)  # before a request that failed is sent again
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
BROKEN_OFF = ("abort", "error")  # why vLLM ended an answer early, as when it is shut down
CHECKED = 8  # answers held back until they are seen to be the target's
UNLIKE, SURPRISE = 0.1, 0.5  # share of greedy tokens that differ; nats beyond the entropy


class ServerError(RunFault):
    """What went wrong at a server; `transient`: worth another try."""

    def __init__(self, address: str, said: str, transient: bool):
        super().__init__(f"{address} failed ({said})")
        self.transient = transient


def ask(address: str, content: dict[str, Any] | None = None) -> Any:
    """One exchange of JSON. The key of the service, if the environment holds one, is sent along and
    never shown. Raises ServerError."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
    data = None if content is None else json.dumps(content).encode()
    try:
        request = urllib.request.Request(address, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        content_read = b""
        with contextlib.suppress(OSError, http.client.HTTPException):  # it may die meanwhile
            content_read = error.read()
        said = f"{error} {content_read.decode(errors='replace')[:300]}".rstrip()
        raise ServerError(address, said, error.code in TRANSIENT) from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # refused, cut short, no JSON
        raise ServerError(address, f"{error or type(error).__name__}", True) from error


def served_model(root: str) -> str:
    answer = ask(f"{root}/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:  # a router whose servers are not there yet
        raise ServerError(root, "its /v1/models names no model", True) from error


def continuation(
    root: str,
    model: str,
    prompt_ids: list[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    seed: int,
    stop_strings: Sequence[str] = (),
) -> list[int]:
    """The server's answer, its EOS included, as token ids."""
    content: dict[str, Any] = {
        "model": model, "prompt": prompt_ids, "max_tokens": max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": seed & 0x7FFFFFFF,
        "stop_token_ids": list(eos_ids), "ignore_eos": True, "add_special_tokens": False,
        "skip_special_tokens": False, "return_token_ids": True,
    }  # fmt: skip
    if stop_strings:
        content["stop"] = list(stop_strings)
    answer = ask(f"{root}/v1/completions", content)
    try:
        choice = dict(answer["choices"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        choice = {}
    if choice.get("finish_reason") in BROKEN_OFF:
        raise ServerError(root, f"it broke an answer off, {choice['finish_reason']}", True)
    tokens = choice.get("token_ids")
    if not tokens:
        said = "no token ids in the answer: vLLM 0.11 and a recent SGLang give them"
        raise ServerError(root, said, False)
    return tokens


def complete(
    addresses: Sequence[str],
    requests: list[Request],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    concurrency: int,
    stop_strings: Sequence[str] = (),
) -> Iterator[Continuation]:
    """Yield continuations as they come; `requests` is emptied, and may be appended to meanwhile.

    `concurrency` requests are under way at each server. One that fails is sent again, to whichever
    server is free; RunFault where no server answers for PATIENCE_S, or one refuses.
    """
    roots = [address.rstrip("/").removesuffix("/v1") for address in addresses]
    # a place is held for the pause after a failure, so that a dead server slows no other down
    places: queue.SimpleQueue[str] = queue.SimpleQueue()
    for root in roots * concurrency:
        places.put(root)
    names: dict[str, str] = {}
    todo: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Continuation | Exception] = queue.SimpleQueue()
    stopped, answered = threading.Event(), [time.monotonic()]

    def answer(request: Request) -> Continuation | ServerError:
        for delay in itertools.chain(DELAYS_S, itertools.repeat(DELAYS_S[-1])):
            root = places.get()
            try:
                if root not in names:
                    names[root] = served_model(root)
                tokens = continuation(
                    root, names[root], request.prompt_ids, request.sampling, seed=request.key,
                    max_new_tokens=max_new_tokens, eos_ids=eos_ids, stop_strings=stop_strings,
                )  # fmt: skip
                answered[0] = time.monotonic()
                return _ended(root, request, tokens, eos_ids, max_new_tokens, stop_strings)
            except ServerError as error:
                late = time.monotonic() - answered[0] > PATIENCE_S
                if late or not error.transient or stopped.wait(delay):
                    return error
            finally:
                places.put(root)
        raise AssertionError

    def work() -> None:
        while (request := todo.get()) is not None:
            try:
                done.put(answer(request))
            except Exception as error:  # else its request would be waited for, for ever
                done.put(error)

    # daemons: a process that is told to end does not wait for their answers
    threads = [threading.Thread(target=work, daemon=True) for _ in range(len(roots) * concurrency)]
    for thread in threads:
        thread.start()
    flying = 0
    try:
        while requests or flying:
            while requests and flying < len(threads):
                todo.put(requests.pop())
                flying += 1
            found = done.get()
            flying -= 1
            if isinstance(found, ServerError):
                raise RunFault(f"{found}; finished rows are kept, the same command goes on")
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        stopped.set()
        for _ in threads:
            todo.put(None)


def _ended(
    root: str,
    request: Request,
    tokens: list[int],
    eos_ids: Sequence[int],
    max_new_tokens: int,
    stop_strings: Sequence[str],
) -> Continuation:
    ends = [i for i, token in enumerate(tokens) if token in eos_ids]
    tokens = tokens[: ends[0] + 1] if ends else tokens
    if ends:
        return Continuation(request, tokens, "eos")
    if len(tokens) == max_new_tokens:
        return Continuation(request, tokens, "length")
    if stop_strings:
        return Continuation(request, tokens, "stop")
    said = (
        f"an answer of {len(tokens)} tokens without EOS, {max_new_tokens} were asked for: give the "
        "server more room (--max-model-len)"
    )
    raise ServerError(root, said, False)


def seen_to_be(target: Target, rows: Iterator[Continuation], count: int) -> Iterator[Continuation]:
    """`rows`, of which there are at least `count`, once the first of them are seen to be the
    target's: another model behind the address would train a drafter for that one."""
    held = [next(rows) for _ in range(min(CHECKED, count))]
    check_law(target, held)
    yield from held
    yield from rows


def check_law(target: Target, rows: Sequence[Continuation]) -> None:
    """Raises UserError where a server's answers are not the target's."""
    if said := unlike(target, rows):
        raise UserError(
            f"data.engine: the answers are not those of {target.name} ({said}): "
            "serve this very model, with its own tokenizer and without penalties"
        )


@torch.inference_mode()
def unlike(target: Target, rows: Sequence[Continuation]) -> str | None:
    """In what the answers differ from the target's law. Greedy tokens must be its own, drawn ones
    as likely as its entropy says (a difference of numbers is allowed for: the server computes in
    another order, maybe in another precision)."""
    if not rows:
        return None
    prompts, responses = zip(*[(r.request.prompt_ids, r.response_ids) for r in rows], strict=True)
    batch = collate(list(prompts), list(responses), ["target"] * len(rows), 0)
    ids = batch.input_ids.to(target.device)
    logits = target.outputs(ids, batch.position_ids.to(target.device)).logits
    assert logits is not None
    differing, beyond = list[float](), list[float]()
    for i, row in enumerate(rows):
        first, count = len(row.request.prompt_ids) - 1, len(row.response_ids)
        own = logits[i, first : first + count, : target.vocab_size].float()
        tokens = ids[i, first + 1 : first + 1 + count, None]
        if row.request.sampling.temperature == 0:
            differing += (own.argmax(-1, keepdim=True) != tokens).float().flatten().tolist()
        else:
            law = warp(own, row.request.sampling)
            beyond += surprise(law, tokens[:, 0])[0].tolist()
    for values, limit, what in (
        (differing, UNLIKE, "of the greedy tokens differ"),
        (beyond, SURPRISE, "nats beyond its entropy is what the drawn tokens cost"),
    ):
        mean = sum(values) / max(1, len(values))
        if mean > limit:
            return f"{mean:.2f} {what}"
    return None
