"""A growing log of requests that a server has answered: read line by line, never past its end.

One JSON object a line, in one of three forms:

    {"prompt_ids": [..], "response_ids": [..], "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    {"prompt": "..", "response": "..", "temperature": 1.0}   # as the target saw it, or "messages",
                                          # which get its chat template; tokenised here
    {"request": {..}, "response": {..}}   # an OpenAI-compatible exchange, as scripts.request_log
                                          # keeps it; vLLM adds its token ids when asked to

A sampling setting that an exchange leaves out is that of the target's generation_config.json, as
vLLM reads it, else OpenAI's default. `domain` is optional. Tokenising text again may give other
tokens than the server drew, so such rows are marked. What cannot be used is skipped, counted and
named; too much of it stops the run.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from data.render import render
from target.model import Target
from target.sampling import Sampling
from trainer.checks import GREEDY_BELOW, is_file
from trainer.errors import UserError

MAX_BAD_SHARE = 0.1
ENOUGH_LINES = 20  # of which that share may already stop a run that is under way
NAMED = 5  # lines that are named with their reason
POLL_S = 0.2
# settings of a request that change the server's distribution in a way `target.sampling.warp` does
# not, with the values that change nothing
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,),
    "logit_bias": ({},), "n": (1,), "best_of": (1,), "min_tokens": (0,), "bad_words": ([],),
    "allowed_token_ids": ([],), "use_beam_search": (False,), "structured_outputs": ({},),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
}  # fmt: skip
# keys of a request that a server fills from generation_config.json
FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
ENDED = ("stop", "eos")
# what unusual content raises here and in libraries: keys of another type, halves of an emoji, deep
# nesting
UNUSABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


@dataclass(frozen=True)
class LoggedRequest:
    """One answered request. `retokenised`: its ids were made from text here; `finish_reason`: as it
    was logged; `line`: its number."""

    prompt_ids: list[int]
    response_ids: list[int]
    sampling: Sampling
    domain: str
    retokenised: bool
    finish_reason: str | None = None
    seed: int = 0
    line: int = 0


class LogState(TypedDict):
    """State of a log in a checkpoint: the place in the file and what was skipped before it."""

    offset: int  # bytes that were read
    lines: int
    num_bad: int
    named: list[str]
    last: tuple[int, str]  # length and hash of the last line; earlier versions did not save it


class RequestLog:
    """Reader of a log. `limit`: tokens that prompt and response may have together; `key`: of the
    configuration, which names the file.

    Raises UserError where the file is missing or unreadable, was replaced, or holds too many lines
    that cannot be used.
    """

    def __init__(self, path: str | Path, target: Target, limit: int, key: str = "method.log"):
        self.path, self.target, self.limit, self.key = Path(path), target, limit, key
        self.offset = self.lines = self.num_bad = 0
        generation = target.model.generation_config
        values = {name: getattr(generation, name, None) for name in FROM_MODEL}
        self.defaults: dict[str, object] = {"temperature": 1.0}
        self.defaults |= {name: value for name, value in values.items() if value is not None}
        self.last = 0, ""  # length and hash of the line before `offset`
        self.named: list[str] = []  # the first few lines that were skipped, and why
        if not is_file(f"{key} file", self.path):
            raise UserError(f"{key}={path} does not exist: name the file the server writes")

    def read(
        self, count: int, wait_s: float = 0.0, stopped: Callable[[], bool] = lambda: False
    ) -> list[LoggedRequest]:
        """Read the next `count` usable requests.

        There are fewer where no complete line came for `wait_s` seconds, or `stopped()` is true.
        """
        found: list[LoggedRequest] = []
        waited = 0.0
        try:
            with self.path.open("rb") as file:
                self._seek(file)
                while len(found) < count:
                    line = file.readline()
                    if not line.endswith(b"\n"):  # the end, or a line that is still being written
                        file.seek(self.offset)
                        if waited >= wait_s or stopped():
                            break
                        time.sleep(POLL_S)
                        waited += POLL_S
                        continue
                    waited = 0.0
                    self.offset += len(line)
                    self.last = len(line), hashlib.sha256(line).hexdigest()
                    if line.strip():
                        found += self._take(line)
        except OSError as error:
            raise UserError(
                f"{self.key}={self.path} cannot be read ({error.strerror}): the same command goes "
                "on once it is back"
            ) from error
        return found

    def read_all(self) -> Iterator[LoggedRequest]:
        """Yield the requests of a finished log, which may be gzipped, from its beginning. UserError
        where its end is cut off."""
        try:
            with (gzip.open if self.path.suffix == ".gz" else open)(self.path, "rb") as file:
                for line in file:
                    if not line.endswith(b"\n") and not _is_json(line):
                        raise EOFError(f"line {self.lines + 1} is cut")
                    if line.strip():
                        yield from self._take(line)
        except (OSError, EOFError, zlib.error) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.key}={self.path} cannot be read to its end ({reason}): copy it again"
            ) from error
        self.check()

    def _seek(self, file: BinaryIO) -> None:
        """Go to where reading stopped.

        The line before it must be the one that was read, or blank: an exchange that was deleted
        (engines.request_file). Raises UserError otherwise.
        """
        length, known = self.last
        file.seek(self.offset)
        for another_look in (True, False):  # it may be deleted at this moment
            before = os.pread(file.fileno(), length, self.offset - length)
            blank = len(before) == length and not before.strip()  # also before the first line
            if blank or hashlib.sha256(before).hexdigest() == known:
                return
            if another_look:
                time.sleep(POLL_S)
        raise UserError(
            f"{self.key}={self.path} does not hold what was read of it ({self.offset} bytes): "
            "it was replaced; begin another run with another run.dir"
        )

    def _take(self, line: bytes) -> list[LoggedRequest]:
        self.lines += 1
        try:
            return [dataclasses.replace(self.parse(line), line=self.lines)]
        except UNUSABLE as error:
            self.skip(str(error), line=self.lines)
            return []

    def skip(self, reason: str, line: int | None = None) -> None:
        """Count a line that cannot be used; UserError where there are too many."""
        self.num_bad += 1
        if len(self.named) < NAMED:
            self.named.append(f"line {line or self.lines}: {reason}")
        if self.lines >= ENOUGH_LINES:
            self.check()

    def check(self) -> None:
        """Raise UserError where more than MAX_BAD_SHARE of the lines cannot be used."""
        if self.num_bad > MAX_BAD_SHARE * self.lines:
            raise UserError(
                f"{self.key}={self.path}: {self.num_bad} of {self.lines} lines cannot be used, "
                f"more than {MAX_BAD_SHARE:.0%} ({'; '.join(self.named)})"
            )

    def summary(self) -> str:
        """How many lines were skipped, and the first of them with the reason."""
        named = f" ({'; '.join(self.named)})" if self.named else ""
        return f"{self.path}: {self.num_bad} of {self.lines} lines skipped{named}"

    def parse(self, line: bytes) -> LoggedRequest:
        """The request of a line; ValueError with the reason where it cannot be used."""
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError("not JSON") from error
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        if isinstance(row.get("request"), dict):
            row = _exchange(row["request"], row, self.defaults)
        retokenised = row.get("response_ids") is None
        prompt = row.get("prompt_ids")
        if prompt is None:
            prompt, retokenised = self._render(row), True
        response = self._tokenise(row) if row.get("response_ids") is None else row["response_ids"]
        prompt = self._checked_ids("prompt_ids", prompt)
        response = self._checked_ids("response_ids", response)
        if len(prompt) + len(response) > self.limit:
            raise ValueError(f"{len(prompt) + len(response)} tokens, the context is {self.limit}")
        domain = str(row.get("domain") or "log")
        reason, seed = row.get("finish_reason"), row.get("seed")
        return LoggedRequest(
            prompt, response, _sampling(row), domain, retokenised,
            finish_reason=None if reason is None else str(reason),
            seed=seed if type(seed) is int else 0,
        )  # fmt: skip

    def _render(self, row: Mapping[str, object]) -> list[int]:
        prompt, messages = row.get("prompt"), row.get("messages")
        if isinstance(prompt, str):
            return self.target.tokenizer(prompt).input_ids
        if not isinstance(messages, list) or not messages:
            raise ValueError("no prompt_ids, messages or prompt")
        if row.get("tools"):
            raise ValueError("tools without the prompt's token ids")
        options: Any = row.get("chat_template_kwargs")  # what is wrong with it, rendering says
        try:
            return render(messages, self.target.tokenizer, chat_template_kwargs=options)
        except (UserError, TypeError, KeyError) as error:
            raise ValueError(f"its messages cannot be rendered ({error})") from error

    def _tokenise(self, row: Mapping[str, object]) -> list[int]:
        text = row.get("response")
        if not isinstance(text, str):
            raise ValueError("no response_ids and no response text")
        if row.get("reasoning"):
            raise ValueError("reasoning apart from the answer, without the response's token ids")
        ids = self.target.tokenizer(text, add_special_tokens=False).input_ids
        return [*ids, *self._end(row)]

    def _end(self, row: Mapping[str, object]) -> list[int]:
        """The EOS that ended a text and is not part of it; nothing where there was none."""
        stop, eos_ids = row.get("stop_reason"), self.target.eos_ids
        if row.get("finish_reason") not in ENDED or not eos_ids:
            return []
        if type(stop) is int and stop in eos_ids:  # vLLM names all but the tokenizer's own
            return [stop]
        # a stop string ends a text too, without an EOS
        if stop is not None or ("stop_reason" not in row and row.get("stop")):
            return []
        # of the set: a chat model's own is not the smallest, which may end documents
        own = self.target.tokenizer.eos_token_id
        return [own if own in eos_ids else eos_ids[0]]

    def _checked_ids(self, name: str, ids: object) -> list[int]:
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise ValueError(f"{name} is not a list of ids")
        outside = [i for i in ids if not 0 <= i < self.target.vocab_size]
        if outside:
            raise ValueError(
                f"{name}: {outside[0]} is outside the vocabulary of {self.target.vocab_size}"
            )
        return ids

    # --- its place in a checkpoint ---------------------------------------------------------------

    def state_dict(self) -> LogState:
        return {"offset": self.offset, "lines": self.lines, "num_bad": self.num_bad,
                "named": list(self.named), "last": self.last}  # fmt: skip

    def load_state_dict(self, state: LogState) -> None:
        self.offset, self.lines = state["offset"], state["lines"]
        self.num_bad, self.named = state["num_bad"], list(state["named"])
        length, digest = state.get("last", (0, ""))
        self.last = length, digest


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _sampling(row: Mapping[str, object]) -> Sampling:
    """The sampling of a row. `temperature` is required: its default differs between servers."""
    temperature = _number("temperature", row.get("temperature"))
    top_k = _number("top_k", 0 if row.get("top_k") is None else row["top_k"])
    top_p = _number("top_p", 1.0 if row.get("top_p") is None else row["top_p"])
    if not temperature >= 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature}, top_p {top_p} is no sampling")
    for name, neutral in NEUTRAL.items():
        if row.get(name) is not None and row[name] not in neutral:
            raise ValueError(
                f"{name}={row[name]} changes the server's distribution in an unknown way"
            )
    greedy = temperature < GREEDY_BELOW
    return Sampling(0.0 if greedy else float(temperature), max(0, int(top_k)), float(top_p))


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a number")
    return value


def _exchange(
    request: Mapping[str, object], row: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """An exchange with /v1/completions or /v1/chat/completions in the first or the second form.

    `row`: the exchange, with the answer and the domain; `defaults`: sampling of the server.
    """
    response = row.get("response")
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("an exchange without exactly one choice")
    choice = choices[0]
    assert isinstance(response, dict)
    prompt = request.get("prompt")
    ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
    message = choice.get("message") or {}
    return {
        **defaults,
        **{name: value for name, value in request.items() if value is not None},
        "prompt_ids": ids or (prompt if isinstance(prompt, list) else None),
        "response_ids": choice.get("token_ids"),
        "response": choice.get("text") or message.get("content"),
        "reasoning": message.get("reasoning") or message.get("reasoning_content"),
        **{name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice},
        "domain": row.get("domain"),
    }
