"""Plain batched decoding on the slot cache: sorted by length, rows refilled as they finish.

It is used for the target (traces) and for a drafter (on-policy text). The tokens drawn depend only
on the model, the prompt and the row's key, never on batch size, order or process count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from target.cache import CachedModel
from target.sampling import Sampling, inverse_cdf, keyed_uniform, warp


@dataclass
class Request:
    """One continuation to be generated. `key`: see `target.sampling.row_key`; `tag`: anything that
    the caller wants back with the continuation."""

    prompt_ids: list[int]
    key: int
    sampling: Sampling
    tag: Any = None


@dataclass
class Continuation:
    """The answer to a request."""

    request: Request
    response_ids: list[int]  # the ending EOS included
    finish_reason: str  # eos | stop | length
    lookahead_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # in nats, of a server that was asked


@dataclass
class _Decoding:
    """A continuation under way."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    end: int | None = None  # length of the response once it has ended; look-ahead follows
    reason: str = ""


def decode(
    model: CachedModel,
    requests: Iterable[Request],
    *,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    batch_size: int,
    lookahead: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: tuple[str, ...] = (),
    vocab_size: int | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[Continuation]:
    """Yield continuations as they finish (not in order).

    `requests` may be a list, to which the consumer may append while it iterates (later turns of a
    conversation); the list is emptied.
    `lookahead`: tokens to decode past the end of each answer, as engines do inside a round.
    `tokenizer`: needed for `stop_strings`.
    `vocab_size`: ids from this on (padding of a drafter's head) are never produced.
    `on_tokens` is called after each step with the number of tokens that it produced.
    """
    with torch.inference_mode():
        yield from _Decoder(
            model,
            requests,
            max_new_tokens,
            eos_ids,
            batch_size,
            lookahead,
            tokenizer,
            stop_strings,
            vocab_size,
            on_tokens,
        ).run()


class _Decoder:
    def __init__(
        self,
        model: CachedModel,
        requests: Iterable[Request],
        max_new_tokens: int,
        eos_ids: tuple[int, ...],
        batch_size: int,
        lookahead: int,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_strings: tuple[str, ...],
        vocab_size: int | None,
        on_tokens: Callable[[int], None],
    ):
        self.on_tokens = on_tokens
        self.model, self.max_new_tokens, self.lookahead = model, max_new_tokens, lookahead
        self.eos, self.tokenizer, self.stop_strings = set(eos_ids), tokenizer, stop_strings
        self.vocab_size = vocab_size
        # longest first: the batch then shrinks on short rows, and memory peaks early
        self.waiting = requests if isinstance(requests, list) else list(requests)
        self.waiting.sort(key=lambda r: len(r.prompt_ids))
        self.batch_size = batch_size
        self.rows: list[_Decoding | None] = []

    def run(self) -> Iterator[Continuation]:
        device = self.model.device
        while self.waiting:
            size = min(self.batch_size, len(self.waiting))
            self._begin(size, device)
            yield from self._fill()
            while any(self.rows):
                yield from self._step()
                free = self.rows.count(None)
                if self.waiting and free >= max(1, size // 8):
                    longest = max(len(r.prompt_ids) for r in self.waiting[-free:])
                    if longest + self._room() > self.model.capacity:
                        if free < len(self.rows):
                            # a longer prompt arrived (a later turn): drain, then make room
                            continue
                        break
                    yield from self._fill()
                elif not self.waiting and len(self.rows) > 1 and free >= len(self.rows) / 2:
                    self._compact()

    def _room(self) -> int:
        return self.max_new_tokens + self.lookahead

    def _begin(self, size: int, device: torch.device) -> None:
        longest = max(len(r.prompt_ids) for r in self.waiting)
        self.model.begin(size, longest + self._room())
        self.rows = [None] * size
        self.last = torch.zeros(size, 1, dtype=torch.long, device=device)  # token to feed
        self.position = torch.zeros(size, 1, dtype=torch.long, device=device)  # its slot
        self.keys = torch.zeros(size, dtype=torch.long, device=device)
        self.temperature = torch.ones(size, 1, device=device)
        self.used = 0

    def _fill(self) -> Iterator[Continuation]:
        free = [i for i, row in enumerate(self.rows) if row is None][: len(self.waiting)]
        if not free:
            return
        device = self.last.device
        taken = [self.waiting.pop() for _ in free]
        lengths = [len(r.prompt_ids) for r in taken]
        ids = torch.zeros(len(taken), max(lengths), dtype=torch.long)
        for i, request in enumerate(taken):
            self.rows[free[i]] = _Decoding(request)
            ids[i, : lengths[i]] = torch.tensor(request.prompt_ids)
        rows = torch.tensor(free, device=device)
        ends = torch.tensor(lengths, device=device)
        logits = self.model.forward(
            ids.to(device),
            torch.arange(max(lengths), device=device).expand(len(taken), -1),
            used=max(lengths),
            rows=None if len(taken) == len(self.rows) else rows,
            first=0,
            logits_to_keep=ends - 1,
        )[:, 0]
        self.keys[rows] = torch.tensor([r.key for r in taken], device=device)
        self.temperature[rows, 0] = torch.tensor(
            [r.sampling.temperature for r in taken], device=device
        )
        self.position[rows, 0] = ends
        chosen = self._choose(logits, rows, taken[0].sampling)
        self.last[rows, 0] = chosen
        yield from self._take(free, chosen.tolist())

    def _step(self) -> Iterator[Continuation]:
        lengths = [len(r.request.prompt_ids) + len(r.tokens) if r else 0 for r in self.rows]
        logits = self.model.forward(
            self.last,
            self.position,
            used=max(lengths),
            first=lengths[0] - 1 if len(lengths) == 1 else None,
        )[:, -1]
        live = [i for i, row in enumerate(self.rows) if row is not None]
        sampling = self.rows[live[0]].request.sampling  # type: ignore[union-attr]
        self.position += 1
        chosen = self._choose(logits, None, sampling)
        self.last = chosen.unsqueeze(1)
        tokens = chosen.tolist()
        yield from self._take(live, [tokens[i] for i in live])

    def _choose(
        self, logits: torch.Tensor, rows: torch.Tensor | None, sampling: Sampling
    ) -> torch.Tensor:
        """Rows may differ in temperature; top-k and top-p are one setting of the whole run."""
        if self.vocab_size is not None:
            logits = logits[:, : self.vocab_size]
        temperature = self.temperature if rows is None else self.temperature[rows]
        greedy = logits.argmax(-1)
        # as the host knows them: to ask the device would wait for the forward
        if not any(row.request.sampling.temperature > 0 for row in self.rows if row is not None):
            return greedy
        keys = self.keys if rows is None else self.keys[rows]
        position = (self.position if rows is None else self.position[rows])[:, 0]
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)
        probs = warp(scaled, Sampling(1.0, sampling.top_k, sampling.top_p))
        drawn = inverse_cdf(probs, keyed_uniform(keys, position, "target"))
        return torch.where(temperature[:, 0] > 0, drawn, greedy)

    def _take(self, indices: list[int], tokens: list[int]) -> Iterator[Continuation]:
        self.on_tokens(len(tokens))
        for index, token in zip(indices, tokens, strict=True):
            row = self.rows[index]
            assert row is not None
            row.tokens.append(token)
            if row.end is None:
                if token in self.eos:
                    row.end, row.reason = len(row.tokens), "eos"
                elif self.stop_strings and self._stopped(row.tokens):
                    row.end, row.reason = len(row.tokens), "stop"
                elif len(row.tokens) == self.max_new_tokens:
                    row.end, row.reason = len(row.tokens), "length"
            if row.end is not None and len(row.tokens) >= row.end + self.lookahead:
                self.rows[index] = None
                # a free row goes on computing from the start of its buffer, so that it always sees
                # a slot: a row that sees none may compute NaN and leave it for the next prompt
                self.position[index] = 0
                yield Continuation(
                    row.request, row.tokens[: row.end], row.reason, row.tokens[row.end :]
                )

    def _stopped(self, tokens: list[int]) -> bool:
        # a stop string spans at most as many tokens as it has bytes, plus one cut in the middle
        longest = max(len(stop.encode()) for stop in self.stop_strings)
        assert self.tokenizer is not None
        tail = self.tokenizer.decode(tokens[-(longest + 1) :], skip_special_tokens=False)
        before = self.tokenizer.decode(tokens[-(longest + 1) : -1], skip_special_tokens=False)
        return any(stop in tail and stop not in before for stop in self.stop_strings)

    def _compact(self) -> None:
        live = [i for i, row in enumerate(self.rows) if row is not None]
        if not live:
            return
        index = torch.tensor(live, device=self.last.device)
        self.model.keep(index)
        self.rows = [self.rows[i] for i in live]
        self.last, self.position = self.last[index], self.position[index]
        self.keys, self.temperature = self.keys[index], self.temperature[index]
