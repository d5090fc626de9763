"""A growing log of requests that a server has answered: read line by line, never past its end.

One JSON object a line, in one of three forms:

    {"prompt_ids": [..], "response_ids": [..], "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    {"prompt": "..", "response": "..", "temperature": 1.0}   # as the target saw it, or "messages",
                                          # which get its chat template; tokenised here
    {"request": {..}, "response": {..}}   # an OpenAI-compatible exchange, as scripts.request_log
                                          # keeps it; vLLM adds its token ids when asked to

A sampling setting that an exchange leaves out is that of the target's generation_config.json, as
vLLM reads it, else OpenAI's default. `domain` is optional. Tokenising text again may give other
tokens than the server drew, so such rows are marked. A line that is not learned from is skipped and
counted by its reason; none stops a run. Text that the target cannot have written does, where it is
too much: the log is another model's.
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

from data.exchanges import ENDED, FINISHED, Answer, answer_of, check_messages, check_whole
from data.prompts import Message
from data.render import render
from data.request_keys import Unusable, check_keys
from data.split import HeldOut
from data.tables import shorten
from target.model import Target
from target.sampling import Sampling
from trainer.checks import GREEDY_BELOW, is_file
from trainer.errors import UserError, excerpt

MAX_FOREIGN_SHARE = 0.1
ENOUGH_LINES = 20  # of which that share may already stop a run that is under way
FOREIGN = "not this target's"  # the kind of a line that another model, or tokenizer, wrote
HELD_OUT = "held out"  # the kind of a line that answers a prompt of the evaluation
NAMED, KINDS = 8, 50  # reasons that are printed, and counted
POLL_S = 0.2
# keys of a request that a server fills from generation_config.json
FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TEXT_ROLES = ("system", "developer", "user", "assistant")


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
    kinds: dict[str, tuple[int, str]]
    model: str | None
    last: tuple[int, str]  # length and hash of the last line


class RequestLog:
    """Reader of a log. `limit`: tokens that prompt and response may have together; `key`: of the
    configuration, which names the file; `held_out`: turns whose answers are not learned from.

    Raises UserError where the file is missing or unreadable, where another model wrote too much of
    it, and where more than half of it answers held-out turns.
    """

    def __init__(
        self,
        path: str | Path,
        target: Target,
        limit: int,
        key: str = "method.log",
        held_out: HeldOut | None = None,
    ):
        self.path, self.target, self.limit, self.key = Path(path), target, limit, key
        self.held_out = held_out
        self.offset = self.lines = self.num_bad = 0
        generation = target.model.generation_config
        values = {name: getattr(generation, name, None) for name in FROM_MODEL}
        self.defaults: dict[str, object] = {"temperature": 1.0}
        self.defaults |= {name: value for name, value in values.items() if value is not None}
        self.last = 0, ""  # length and hash of the line before `offset`
        # why lines were skipped: by kind how many, and the first of them
        self.kinds: dict[str, tuple[int, str]] = {}
        self.model: str | None = None  # the name under which the server has the target
        self._gone = False  # whether it was printed that the file is not there
        if not is_file(f"{key} file", self.path):
            raise UserError(f"{key}={path} does not exist: name the file the server writes")

    def read(
        self, count: int, wait_s: float = 0.0, stopped: Callable[[], bool] = lambda: False
    ) -> list[LoggedRequest]:
        """Read the next `count` usable requests.

        There are fewer where no complete line came for `wait_s` seconds, or `stopped()` is true. A
        file that was replaced, as logs are rotated, is read from its beginning.
        """
        found: list[LoggedRequest] = []
        waited = 0.0
        try:
            while True:
                before = self.offset
                found += self._read_on(count - len(found))
                waited = waited if self.offset == before else 0.0
                if len(found) == count or waited >= wait_s or stopped():
                    return found
                time.sleep(POLL_S)
                waited += POLL_S
        except OSError as error:
            raise UserError(
                f"cannot be read ({error.strerror})", key=self.key, value=str(self.path),
                remedy="the same command goes on once it is back",
            ) from error  # fmt: skip

    def _read_on(self, count: int) -> list[LoggedRequest]:
        """At most `count` usable requests of the lines that are complete by now."""
        found: list[LoggedRequest] = []
        try:
            file = self.path.open("rb")
        except FileNotFoundError:  # it is being rotated
            if not self._gone:
                print(f"{self.key}={self.path} is gone: its return is waited for", flush=True)
            self._gone = True
            return found
        with file:
            self._gone = False
            self._seek(file)
            while len(found) < count:
                line = file.readline()
                if not line.endswith(b"\n") and not _is_object(line):  # it is still being written
                    break
                self.offset += len(line)
                self.last = len(line), hashlib.sha256(line).hexdigest()
                if line.strip():
                    found += self._take(line)
        return found

    def read_all(self) -> Iterator[LoggedRequest]:
        """Yield the requests of a finished log, which may be gzipped, from its beginning. UserError
        where it cannot be unpacked to its end, or no line can be used."""
        try:
            with (gzip.open if self.path.suffix == ".gz" else open)(self.path, "rb") as file:
                for line in file:
                    if line.strip():
                        yield from self._take(line)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"cannot be read to its end ({' '.join(str(error).split())})", key=self.key,
                value=str(self.path), remedy="copy it again",
            ) from error  # fmt: skip
        self.check(over=True)

    def _seek(self, file: BinaryIO) -> None:
        """Go to where reading stopped.

        The line before it must be the one that was read, or blank: an exchange that was deleted
        (engines.request_file). Else the file was replaced, and is read from its beginning.
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
        print(
            f"{self.key}={self.path} was replaced: the new file is read from its beginning, what "
            f"the old one held behind byte {self.offset} is not",
            flush=True,
        )
        self.offset, self.last = file.seek(0), (0, "")

    def _take(self, line: bytes) -> list[LoggedRequest]:
        self.lines += 1
        try:
            return [dataclasses.replace(self.parse(line), line=self.lines)]
        except Unusable as error:
            self.skip(error.kind, str(error))
        except Exception as error:  # what libraries raise is as unforeseen as what clients send
            self.skip("odd content", f"{type(error).__name__}: {error}")
        return []

    def skip(self, kind: str, reason: str, line: int | None = None) -> None:
        """Count a line that is not learned from; UserError where another model wrote too much."""
        self.num_bad += 1
        kind = kind if kind in self.kinds or len(self.kinds) < KINDS else "other reasons"
        number, first = self.kinds.get(
            kind, (0, f"line {line or self.lines}: {shorten(reason, 200)}")
        )
        self.kinds[kind] = number + 1, first
        if self.lines >= ENOUGH_LINES:
            self.check()

    def check(self, over: bool = False) -> None:
        """Raise UserError where another model wrote more than MAX_FOREIGN_SHARE of the answers,
        where more than half are to held-out prompts, and where the log is over and no line could
        be used."""
        foreign = self.kinds.get(FOREIGN, (0, ""))[0]
        answers = self.lines - self.num_bad + foreign
        remedy = "docs/online.md says which lines are learned from"
        if foreign > MAX_FOREIGN_SHARE * answers:
            share = f", more than {MAX_FOREIGN_SHARE:.0%}"
            said = f"{foreign} of {answers} lines cannot be used{share}"
            remedy = "name the model that wrote them as model.target"
        elif 2 * (held_out := self.kinds.get(HELD_OUT, (0, ""))[0]) > answers + held_out:
            said = f"{held_out} of {answers + held_out} answers are to prompts that are held out"
            remedy = "name other prompts as eval.prompts"
        elif over and self.lines and self.num_bad == self.lines:
            said = f"{self.num_bad} of {self.lines} lines cannot be used"
        else:
            return
        raise UserError(
            f"{said} ({self._reasons()})", key=self.key, value=str(self.path), remedy=remedy
        )

    def _reasons(self) -> str:
        """Each reason with its number of lines and the first of them."""
        known = sorted(self.kinds.items(), key=lambda one: -one[1][0])
        parts = [f"{kind} {number}, first {first}" for kind, (number, first) in known[:NAMED]]
        return "; ".join([*parts, *(["..."] if len(known) > NAMED else [])])

    def summary(self) -> str:
        """How many lines were skipped, by reason, and the first of each."""
        reasons = f" ({self._reasons()})" if self.kinds else ""
        return f"{self.path}: {self.num_bad} of {self.lines} lines skipped{reasons}"

    def parse(self, line: bytes) -> LoggedRequest:
        """The request of a line; Unusable, or what a library raises, where it is not learned
        from."""
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Unusable("not JSON", "not JSON") from error
        if not isinstance(row, dict):
            raise Unusable("not JSON", "not a JSON object")
        answer = answer_of(row)
        has_ids = answer.prompt_ids is not None and answer.response_ids is not None
        given = {key: value for key, value in answer.keys.items() if value is not None}
        if isinstance(row.get("request"), dict):
            given = self.defaults | given
        check_keys(given, has_ids)
        check_messages(given.get("messages"))
        if answer.finish_reason not in FINISHED:
            reason = excerpt(answer.finish_reason, 40)
            raise Unusable("finish_reason", f"finish_reason is {reason}")
        sampling = _sampling(given, self.target.vocab_size)
        prompt = answer.prompt_ids if answer.prompt_ids is not None else self._render(given)
        prompt = self._checked_ids("prompt_ids", prompt)
        response = answer.response_ids if answer.response_ids is not None else self._text(answer)
        response = self._checked_ids("response_ids", response)
        check_whole(answer, response, self.target.tokenizer, self.target.eos_ids)
        if self.held_out and (asked := self.held_out.asked(prompt)) is not None:
            raise Unusable(HELD_OUT, f"{shorten(asked)!r} is held out for the evaluation")
        if len(prompt) + len(response) > self.limit:
            said = f"{len(prompt) + len(response)} tokens, the context is {self.limit}"
            raise Unusable("too long", said)
        domain = str(answer.domain or "log")
        domain.encode()  # half of an emoji could not be stored
        seed = given.get("seed")
        request = LoggedRequest(
            prompt, response, sampling, domain, not has_ids,
            finish_reason=str(answer.finish_reason) if answer.finish_reason else None,
            seed=seed if type(seed) is int and abs(seed) < 2**63 else 0,
        )  # fmt: skip
        self._check_model(given.get("model"))
        return request

    def _check_model(self, name: object) -> None:
        """Take one name for the target's: its own, else that of the first line. Another one is a
        LoRA's or another model's."""
        if name is None:
            return
        own = name in (self.target.name, Path(self.target.name).name)
        if not own and self.model is not None and name != self.model:
            said = f"model {excerpt(name, 40)}, lines before have {excerpt(self.model, 40)}"
            raise Unusable("model", f"{said}: a LoRA's, or another model's")
        self.model = str(name)

    def _render(self, keys: Mapping[str, object]) -> list[int]:
        """The token ids of a prompt or messages. Raises Unusable where a server may have others."""
        prompt, messages = keys.get("prompt"), keys.get("messages")
        if isinstance(prompt, str):
            return self.target.tokenizer(prompt).input_ids
        if not isinstance(messages, list) or not messages:
            raise Unusable("prompt", "no prompt_ids, messages or prompt")
        options: Any = keys.get("chat_template_kwargs")  # what is wrong with it, rendering says
        try:
            plain = [_plain(message) for message in messages]
            return render(plain, self.target.tokenizer, chat_template_kwargs=options)
        except (UserError, TypeError, KeyError) as error:
            raise Unusable("messages", f"its messages cannot be rendered ({error})") from error

    def _text(self, answer: Answer) -> list[int]:
        """The token ids of an answer that is logged as text alone."""
        if not isinstance(answer.text, str):
            raise Unusable("response", "no response_ids and no response text")
        if answer.thoughts or answer.calls:
            what = "thoughts apart from" if answer.thoughts else "tool calls beside"
            raise Unusable("response", f"{what} the answer, without its token ids")
        ids = self.target.tokenizer(answer.text, add_special_tokens=False).input_ids
        return [*ids, *self._end(answer)]

    def _end(self, answer: Answer) -> list[int]:
        """The EOS that ended a text and is not part of it; nothing where there was none."""
        stop, eos_ids = answer.stop_reason, self.target.eos_ids
        if answer.finish_reason not in ENDED or not eos_ids:
            return []
        if type(stop) is int and stop in eos_ids:  # vLLM names all but the tokenizer's own
            return [stop]
        # a stop string ends a text too, without an EOS
        if stop is ... and answer.keys.get("stop"):
            return []
        if stop is not ... and stop is not None:
            return []
        # of the set: a chat model's own is not the smallest, which may end documents
        own = self.target.tokenizer.eos_token_id
        return [own if own in eos_ids else eos_ids[0]]

    def _checked_ids(self, name: str, ids: object) -> list[int]:
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise Unusable(name, f"{name} is not a list of ids")
        outside = [i for i in ids if not 0 <= i < self.target.vocab_size]
        if outside:
            said = f"{name}: {excerpt(outside[0], 40)} is outside the vocabulary of"
            raise Unusable(name, f"{said} {self.target.vocab_size}")
        return ids

    # --- its place in a checkpoint ---------------------------------------------------------------

    def state_dict(self) -> LogState:
        return {"offset": self.offset, "lines": self.lines, "num_bad": self.num_bad,
                "kinds": dict(self.kinds), "model": self.model, "last": self.last}  # fmt: skip

    def load_state_dict(self, state: LogState) -> None:
        """Restore what `state_dict` returned."""
        self.offset, self.lines, self.num_bad = state["offset"], state["lines"], state["num_bad"]
        self.kinds, self.model = dict(state["kinds"]), state["model"]
        self.last = state["last"]


def _is_object(line: bytes) -> bool:
    """Whether a line without its end is complete: nothing can follow the end of a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _plain(message: Mapping[str, Any]) -> Message:
    """A message of a request as chat templates read it. Raises Unusable for what they may render
    otherwise than the server did."""
    role, content = message["role"], message["content"]
    further = [key for key, value in message.items() if value and key not in ("role", "content")]
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        content = content[0]["text"]
    if role not in TEXT_ROLES or further or not isinstance(content, str):
        what = further[0] if further else "parts" if role in TEXT_ROLES else f"role {role}"
        raise Unusable("messages", f"{excerpt(what, 40)} in its messages, without the prompt's ids")
    return {"role": role, "content": content}


def _sampling(keys: Mapping[str, object], vocab_size: int) -> Sampling:
    """The sampling of a request. `temperature` is required: its default differs between servers."""
    temperature = _number("temperature", keys.get("temperature"))
    top_k = _number("top_k", 0 if keys.get("top_k") is None else keys["top_k"])
    top_p = _number("top_p", 1.0 if keys.get("top_p") is None else keys["top_p"])
    if not temperature >= 0 or not 0 < top_p <= 1 or top_k != int(top_k):
        said = f"temperature {temperature}, top_k {top_k}, top_p {top_p} is no sampling"
        raise Unusable("sampling", said)
    greedy = temperature < GREEDY_BELOW
    cuts = 0 < top_k < vocab_size
    return Sampling(0.0 if greedy else float(temperature), int(top_k) if cuts else 0, float(top_p))


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Unusable("sampling", f"{name} is {excerpt(value, 40)}, not a number")
    return value
