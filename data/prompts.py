"""Prompts from the toy, a local file or the Hub.

`load_prompts` turns rows of any usual form into `Prompt`s (`data/tables.py` reads the rows);
`data/split.py` keeps evaluation apart from training; `data/render.py` turns a prompt into the token
ids of each assistant turn. Nothing is decided silently: a row that cannot be read stops the run
with its number, and what is dropped (duplicates, empty prompts) is counted and logged.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from data import questions, toy
from data.prompt_tables import PromptTable, open_tables
from data.tables import kind_of, listed
from data.trace_rows import Trace
from trainer.errors import UserError, excerpt

Message: TypeAlias = dict[str, str]  # {"role": system | user | assistant, "content": text}


class Rendered(tuple[int, ...]):
    """Token ids of a prompt that was rendered already, as a log of requests holds them."""


# what the target answers: plain text, a conversation up to a user message, or token ids
Turn: TypeAlias = str | list[Message] | Rendered

TOY_PROMPTS = 100_000  # the toy's problems never end
_DOMAIN_COLUMNS = ("domain", "category")
_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One row of a source: `text` (used as it is), `messages` (a conversation) or rendered `ids`,
    which the trace of this index in `stored` holds and which are read there at each use.

    `response` is the source's own answer ("human" text); of a conversation its last assistant
    message, the earlier ones stay in `messages`. `source` says where the row stands.
    """

    text: str | None
    messages: tuple[Message, ...] | None
    response: str | None
    domain: str
    source: str
    conversation_id: str
    stored: tuple[Sequence[Trace], int] | None = field(default=None, repr=False, compare=False)

    @property
    def ids(self) -> Rendered | None:
        if self.stored is None:
            return None
        traces, index = self.stored
        return Rendered(traces[index].prompt_ids)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what the target is shown: system and user messages, never an answer."""
        return shown_hash(self.ids or self.messages or self.text or "")


def shown_hash(content: str | Sequence[Message] | Rendered) -> str:
    """`Prompt.hash` of a text, a conversation or token ids."""
    if isinstance(content, Rendered):
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
    # plain text hashes as one user message, so that both forms of a prompt have the same hash
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    shown = [[m["role"], m["content"]] for m in content if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def trimmed_hash(content: str | Sequence[Message] | Rendered) -> str:
    """`shown_hash` without the white space around each text, which most chat templates drop."""
    if isinstance(content, str):
        content = content.strip()
    elif not isinstance(content, Rendered):
        content = [{**m, "content": m["content"].strip()} for m in content]
    return shown_hash(content)


def load_prompts(
    source: str,
    *,
    count: int,
    config: str | None = None,
    split: str = "train",
    column: str | None = None,
    response_column: str | None = None,
    seed: int = 0,
    toy_split: str = "train",
) -> list[Prompt]:
    """Read at most `count` distinct prompts, in the order of the source; all where it has fewer.

    `source`: `toy`, `questions`, either with domains (`toy:code+math`), a file (.jsonl .json
    .parquet .csv .txt, each also .gz), a Hub data set id or a folder of one, to which alone
    `config` and `split` apply, or a folder of several data sets. Rows are chosen by a hash keyed
    with `seed`, so a source that grows keeps most of an earlier choice. The domain of a row is its
    `domain` or `category`, else the name of the file or data set. Prompts that differ only in the
    white space around their texts are one, the first. Raises UserError where a row cannot be read
    or no prompt is left.
    """
    if is_made_here(source):
        prompts, num_empty = _toy_prompts(source, count, seed, toy_split), 0
    else:
        prompts, num_empty = [], 0
        tables = open_tables(source, config, split, column, response_column)
        for table in tables:
            more, empty = _row_prompts(table, required=response_column is not None)
            if len(tables) > 1:
                _log.info("%s: %d prompts of domain %s", table.source, len(more), table.domain)
            prompts, num_empty = prompts + more, num_empty + empty
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(trimmed_hash(prompt.messages or prompt.text or ""), prompt)
    if not distinct:
        raise UserError(f"{source} holds no prompt that is not empty; name another file or column")
    chosen = take(list(distinct.values()), count, seed)
    _log.info(
        "%s: %d prompts taken of %d; %d duplicates and %d empty ones dropped",
        source, len(chosen), len(distinct), len(prompts) - len(distinct), num_empty,
    )  # fmt: skip
    return chosen


def take(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Choose `count` of these by a hash keyed with `seed`, and return them in their order."""
    taken = set(sorted((p.hash for p in prompts), key=lambda one: keyed_hash(seed, one))[:count])
    return [prompt for prompt in prompts if prompt.hash in taken]


def keyed_hash(seed: int, identity: str) -> str:
    """SHA-256 that orders or splits prompts, another one for each seed."""
    return hashlib.sha256(f"{seed}:{identity}".encode()).hexdigest()


MADE_HERE = {"toy": toy.sample, "questions": questions.sample}


def is_made_here(source: str) -> bool:
    """Whether the prompts are made of the embedded domains, whose evaluation prompts lie apart."""
    return source.partition(":")[0] in MADE_HERE


def _toy_prompts(source: str, count: int, seed: int, split: str) -> list[Prompt]:
    kind, colon, named = source.partition(":")
    domains = tuple(dict.fromkeys(named.split("+"))) if colon else toy.DOMAINS
    for domain in domains:
        if domain not in toy.DOMAINS:
            known = ", ".join(toy.DOMAINS)
            raise UserError(f"unknown {kind} domain {domain!r} in {source!r}; available: {known}")
    if count > TOY_PROMPTS:
        raise UserError(
            f"the prompts of {kind} are at most {TOY_PROMPTS}, got {count}: lower "
            "data.num_prompts or eval.num_prompts"
        )
    documents = MADE_HERE[kind](domains, split, count, seed)
    return [
        Prompt(
            text=document.prompt,
            messages=None,
            response=document.response or None,
            domain=document.domain,
            source=f"{kind}:{document.domain} {split} row {number}",
            conversation_id=shown_hash(document.prompt),
        )
        for number, document in enumerate(documents, 1)
    ]


# --- rows to prompts -----------------------------------------------------------------------------


def _row_prompts(table: PromptTable, required: bool) -> tuple[list[Prompt], int]:
    """The prompts of a table, and how many were empty. `required`: its column of answers is."""
    column, also = table.column, ("input", "conversation_id", *_DOMAIN_COLUMNS)
    prompts, num_empty = [], 0
    for where, row in table.rows(also):
        content = _content(where, row, column)
        if content is None:
            num_empty += 1
            continue
        plain = isinstance(content, str)
        response = _response(where, row, table.answers, required)
        if not plain and not required and content[-1]["role"] == "assistant":
            response = content[-1]["content"]
        domains = [
            _text(where, repr(name), row[name])
            for name in _DOMAIN_COLUMNS if isinstance(row.get(name), str)
        ]  # fmt: skip
        conversation_id = shown_hash(content)
        if row.get("conversation_id") is not None:
            conversation_id = _text(where, "'conversation_id'", str(row["conversation_id"]))
        prompts.append(
            Prompt(
                text=content if plain else None,
                messages=None if plain else tuple(content),
                response=response if response and response.strip() else None,
                domain=next(filter(None, domains), table.domain),
                source=where,
                conversation_id=conversation_id,
            )
        )
    return prompts, num_empty


def _content(where: str, row: Mapping[str, object], column: str) -> str | list[Message] | None:
    """Plain text or a conversation, as the value's form says; None where it is empty."""
    if column not in row:
        raise UserError(f"{where} has no column {column!r}; columns: {listed(row)}")
    value = row[column]
    if isinstance(value, str):
        text = _text(where, repr(column), value)
        if column == "instruction" and row.get("input") is not None:  # as in Alpaca
            extra = _text(where, "'input'", row["input"])
            text = f"{text}\n\n{extra}" if extra.strip() else text
        return text if text.strip() else None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):  # as in MT-bench
        messages = [{"role": "user", "content": _text(where, repr(column), item)} for item in value]
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        messages = _messages(where, value)
    else:
        rule = "text, a list of user turns or a list of messages"
        raise UserError(f"{where}: column {column!r} must hold {rule}, got {kind_of(value)}")
    users = [message["content"] for message in messages if message["role"] == "user"]
    return messages if users and all(text.strip() for text in users) else None


def _messages(where: str, items: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages with OpenAI's role and content, or ShareGPT's from and value.

    A blank system message is left out.
    """
    messages: list[Message] = []
    for number, item in enumerate(items, 1):
        role_key, text_key = ("from", "value") if "from" in item else ("role", "content")
        name = item.get(role_key)
        here = f"{where}: message {number}"
        if not isinstance(name, str) or name not in _ROLES:
            known = ", ".join(_ROLES)
            raise UserError(f"{here} has the unknown {role_key} {excerpt(name)}; known: {known}")
        role, text = _ROLES[name], _text(here, repr(text_key), item.get(text_key))
        if role == "system" and number > 1:
            raise UserError(f"{here} is a system message; only the first message may be one")
        if role == "assistant" and not any(message["role"] == "user" for message in messages):
            raise UserError(f"{where}: the first turn must be the user's, got {name!r}; drop it")
        if role != "system" or text.strip():
            messages.append({"role": role, "content": text})
    if items and not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: the conversation has no user turn; drop that row")
    return messages


def _response(
    where: str, row: Mapping[str, object], column: str | None, required: bool
) -> str | None:
    value = row.get(column) if column else None
    if isinstance(value, str) or required:
        return _text(where, repr(column), value)
    return None  # a column that only looked like the answers, e.g. a choice number


def _text(where: str, what: str, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {what} must be text, got {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half an emoji; no tokenizer takes it
        rule = f"holds half of a surrogate pair at character {error.start + 1}"
        raise UserError(f"{where}: {what} {rule}; repair or drop the row") from error
    return value


# --- turns ---------------------------------------------------------------------------------------


def user_turns(prompt: Prompt) -> Iterator[Turn]:
    """Yield what the target answers: the text, or the conversation up to each user message.

    The source's assistant messages are left out: the target's own answers take their place
    (`with_answers`), since a drafter must learn the contexts that the target really produces.
    """
    if prompt.messages is None:
        yield prompt.ids or prompt.text or ""
        return
    so_far: list[Message] = []
    for message in prompt.messages:
        if message["role"] == "assistant":
            continue
        so_far.append(dict(message))
        if message["role"] == "user":
            yield [dict(earlier) for earlier in so_far]
