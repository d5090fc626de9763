"""Progress of a phase of a run: a bar with rate and time left on a terminal, plain lines elsewhere,
so that a log file stays readable."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TextIO, TypedDict

from tqdm import tqdm

EVERY_S = 10.0  # between two plain lines about tokens


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
        self.stream = stream or sys.stderr
        self._began = time.perf_counter()
        self._bar: tqdm | None = None
        if enabled and self.stream.isatty():
            self._bar = tqdm(
                total=total, initial=start, desc=label, file=self.stream, unit=unit,
                dynamic_ncols=True, leave=unit == "step",
            )  # fmt: skip

    def advance(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def estimate(self, total: int, text: str) -> None:
        """Set a new `total` and the text behind the bar."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(text, refresh=False)

    def report(self, row: MetricsRow) -> None:
        """Print a line about the training. `row`: made by `trainer.tracking.Window.row`."""
        step, loss = row["step"], row["loss"]
        text = "no tokens" if loss is None else f"loss {loss:.4f}"
        text += f"  lr {row['lr']:.2e}  {row['tokens_per_s']:.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif self.enabled and self.total is not None:
            seconds = time.perf_counter() - self._began
            left = seconds * (self.total - step) / max(1, step - self.start)
            self.note(f"step {step}/{self.total}  {text}  {_clock(left)} left")

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        elif self.enabled:
            print(text, file=self.stream, flush=True)

    @property
    def is_bar(self) -> bool:
        return self._bar is not None

    def close(self) -> None:
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
