"""Progress of a phase of a run: a bar with rate and time left on a terminal, plain lines elsewhere,
so that a log file stays readable. Work that prints nothing for a while is named by a heartbeat.

Work advances between two steps of it, where the number of threads is judged too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO, TypedDict

from tqdm import tqdm

from trainer.errors import one_line
from trainer.threads import settle_threads

EVERY_S = 10.0  # at least, between two plain lines
SILENT_S = 30.0  # at most, between two lines of work that goes on


class Heartbeat:
    """Prints what a process works on, and for how long, where it has printed nothing for
    SILENT_S. Of works inside each other the innermost is printed."""

    def __init__(self) -> None:
        self.works: list[tuple[Callable[[], str | None], float]] = []  # None: it was dropped
        self.last = time.monotonic()  # when a line was printed
        self._thread: threading.Thread | None = None

    def begin(self, status: Callable[[], str | None]) -> None:
        now = time.monotonic()
        if not self.works:
            self.last = now
        self.works.append((status, now))
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def end(self, status: Callable[[], str | None]) -> None:
        self.works = [work for work in self.works if work[0] is not status]

    def beat(self) -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if now - self.last < SILENT_S:
            return
        works = ((status(), began) for status, began in reversed(self.works))
        text, began = next((work for work in works if work[0] is not None), (None, now))
        if text is not None:
            tqdm.write(f"{text}: {_clock(now - began)} so far", file=sys.stderr)
            sys.stderr.flush()
            self.last = now

    def _run(self) -> None:
        while True:
            time.sleep(1)
            self.beat()


heartbeat = Heartbeat()


@contextmanager
def working(text: str) -> Iterator[None]:
    """Inside the block, the heartbeat of the first process names `text`."""

    def status() -> str:
        return text

    if os.environ.get("RANK", "0") == "0":
        heartbeat.begin(status)
    try:
        yield
    finally:
        heartbeat.end(status)


class MetricsRow(TypedDict):
    """A row of a training in `metrics.jsonl`; the metrics of the objective are further keys."""

    step: int
    loss: float | None  # None where no step since the last row had a batch
    lr: float
    grad_norm: float | None
    num_tokens: int  # supervised tokens so far, all ranks
    tokens_per_s: float


class Progress:
    """Counts `unit`s up to `total`; None where it is unknown or estimated later."""

    def __init__(
        self,
        total: int | None,
        start: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        unit: str = "step",
        label: str | None = None,
    ) -> None:
        self.total, self.start, self.enabled = total, start, enabled
        # not left to the stream: tqdm puts a colour's end behind one that it takes for a colour
        self.done, self.unit, self.label = start, unit, label and one_line(label)
        self.stream = stream or sys.stderr
        self._began = time.perf_counter()
        self._last_row = -EVERY_S  # when a line about a row was printed, counted from `_began`
        own = weakref.ref(self)  # one that an error left open is no work any more

        def status() -> str | None:
            progress = own()
            return None if progress is None else progress.status()

        self._status = status
        if enabled:
            heartbeat.begin(status)
        self._bar: tqdm | None = None
        if enabled and self.stream.isatty():
            self._bar = tqdm(
                total=total, initial=start, desc=self.label, file=self.stream, unit=unit,
                dynamic_ncols=True, leave=unit == "step",
            )  # fmt: skip

    def status(self) -> str:
        """How far it is."""
        of = "" if self.total is None else f" of {self.total:,}"
        return f"{f'{self.label}: ' if self.label else ''}{self.done:,}{of} {self.unit}s"

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        settle_threads()

    def estimate(self, total: int, text: str) -> None:
        """Set a new `total` and the text behind the bar."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(text, refresh=False)

    def report(self, row: MetricsRow) -> None:
        """Print a line about the training, unless the last one is younger than EVERY_S; one about
        the last step always. `row`: made by `trainer.tracking.Window.row`."""
        step, loss = row["step"], row["loss"]
        text = "no tokens" if loss is None else f"loss {loss:.4f}"
        text += f"  lr {row['lr']:.2e}  {row['tokens_per_s']:.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif self.enabled and self.total is not None:
            seconds = time.perf_counter() - self._began
            if seconds - self._last_row < EVERY_S and step < self.total:
                return
            self._last_row = seconds
            left = seconds * (self.total - step) / max(1, step - self.start)
            self.note(f"step {step}/{self.total}  {text}  {_clock(left)} left")

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        elif self.enabled:
            print(text, file=self.stream, flush=True)
        heartbeat.last = time.monotonic()

    @property
    def is_bar(self) -> bool:
        return self._bar is not None

    def close(self) -> None:
        heartbeat.end(self._status)
        if self._bar is not None:
            self._bar.close()


class TokenProgress:
    """Progress of a phase that processes text in parts. It counts tokens as they come, not finished
    answers: on a large model the first answer takes minutes.

    The total of a part is its number of tokens if that is known. For answers that are still to be
    generated, the mean length is estimated as the tokens so far over the answers finished so far
    (the maximum-likelihood estimate where unfinished answers are censored and lengths are
    exponential), at most the longest length allowed.
    """

    def __init__(self, name: str, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.name, self.enabled, self.stream = name, enabled, stream
        self.began = self.last = time.monotonic()
        self.all_tokens = 0
        self._progress: Progress | None = None

    def part(
        self, label: str, *, total: int | None = None, rows: int = 0, longest: int = 0
    ) -> None:
        """Begin the next part: `total` tokens, or `rows` answers of at most `longest` tokens."""
        self._end()
        self.label, self.rows, self.longest = label, rows, longest
        self.known, self.tokens, self.finished = total, 0, 0
        self.part_began = time.monotonic()
        self._progress = Progress(
            self.total, enabled=self.enabled, stream=self.stream, unit="token",
            label=f"{self.name}: {label}" if label else self.name,
        )  # fmt: skip
        self._line_if_due()

    @property
    def total(self) -> int:
        """Tokens of this part, known or estimated."""
        if self.known is not None:
            return self.known
        most = self.rows * self.longest
        if not self.finished:
            return most
        return min(most, round(self.rows * self.tokens / self.finished))

    def advance(self, tokens: int) -> None:
        """Count `tokens` more."""
        self.tokens += tokens
        self.all_tokens += tokens
        if self._progress is not None:
            self._progress.advance(tokens)
        self._line_if_due()

    def finish_row(self) -> None:
        """Count an answer as finished; its tokens were counted before."""
        self.finished += 1
        if self._progress is not None:
            self._progress.estimate(self.total, self._rows())
        self._line_if_due()

    def close(self) -> None:
        """Print the number of tokens, the time and the rate; nothing where there were no tokens."""
        self._end()
        if self.enabled and self.all_tokens:
            spent = max(1e-9, time.monotonic() - self.began)
            rate = f"{self.all_tokens / spent:,.0f} tokens/s"
            text = f"{self.name}: {self.all_tokens:,} tokens in {_clock(spent)}, {rate}"
            print(text, file=self.stream or sys.stderr, flush=True)

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _rows(self) -> str:
        return f"{self.finished}/{self.rows} answers" if self.rows else ""

    def _line_if_due(self) -> None:
        now, progress = time.monotonic(), self._progress
        if progress is None or progress.is_bar or now - self.last < EVERY_S:
            return
        self.last = now
        rate = self.tokens / max(1e-9, now - self.part_began)
        exact = self.known is not None or self.finished == self.rows
        parts = [f"{self.tokens:,} of {'' if exact else 'about '}{self.total:,} tokens"]
        if self.rows:
            parts.append(self._rows())
        if rate:
            left = max(0, self.total - self.tokens) / rate
            parts += [f"{rate:,.0f} tokens/s", f"{_clock(left)} left"]
        label = f"{self.name}: {self.label}" if self.label else self.name
        progress.note(f"{label}: {', '.join(parts)}")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
