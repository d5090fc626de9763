"""A vLLM server under load: the same requests with some of them under way at a time, and what its
own counters say of them. No other client may use the server meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engines.completions import continuation, served_model
from engines.vllm_run import EngineCounters, scrape
from engines.web import ServerError, server_root
from target.decode import Request
from target.model import Target
from trainer.errors import RunFault

PATIENCE_S = 10.0  # the counters may come after the last answer
LEAST = 2  # times as many requests as are under way, so that most are answered at that load


@dataclass(frozen=True)
class LoadRun:
    """What a server did with `concurrency` requests under way: how many it answered in how many
    seconds, their tokens, and its counters of them, which have no rounds without a drafter."""

    concurrency: int
    requests: int
    tokens: int
    seconds: float
    counters: EngineCounters

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def token_s(self) -> float:
        """Mean seconds of a token behind the first of its answer, as whoever reads it waits."""
        return self.counters.decode_s / max(1, self.tokens - self.requests)

    @property
    def round_s(self) -> float:
        """Mean seconds of a round, or without a drafter of a step."""
        return self.counters.decode_s / max(1, self.counters.drafts or self.tokens - self.requests)


def under_load(
    address: str,
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    *,
    max_new_tokens: int,
    drafting: bool,
) -> LoadRun:
    """Ask a server for the answers to `requests`, from the first on again where they are fewer than
    LEAST times `concurrency`. `drafting`: whether it has a drafter. Raises RunFault where it does
    not answer, or counts the answers of others."""
    root, name = server_root(address), ""

    def ask(request: Request) -> int:
        row = continuation(
            root, name, request, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids,
            vocab_size=target.vocab_size,
        )  # fmt: skip
        return len(row.response_ids)

    count = max(len(requests), LEAST * concurrency)
    asked = [requests[i % len(requests)] for i in range(count)]
    try:
        name, before = served_model(root), scrape(root, drafting)
        with ThreadPoolExecutor(concurrency) as pool:
            began = time.monotonic()
            tokens = sum(pool.map(ask, asked))
            seconds = time.monotonic() - began
    except ServerError as error:
        raise RunFault(f"eval.concurrency={concurrency}: {error}") from error
    return LoadRun(concurrency, count, tokens, seconds, _settled(root, before, count, drafting))


def _settled(root: str, before: EngineCounters, answers: int, drafting: bool) -> EngineCounters:
    """What the counters have grown by, once they account for all answers."""
    deadline = time.monotonic() + PATIENCE_S
    while (new := scrape(root, drafting) - before).answers < answers:
        if time.monotonic() > deadline:
            raise RunFault(f"{root} counts {new.answers} of {answers} answers in its metrics")
        time.sleep(0.02)
    if new.answers > answers:
        raise RunFault(
            f"{root} counted {new.answers} answers, {answers} were asked for: another client uses "
            "it; measure on a server of your own"
        )
    return new
