"""Prompts from the toy, a local file or the Hub.

`load_prompts` turns rows of any usual form into `Prompt`s (`data/tables.py` reads the rows);
`data/split.py` keeps evaluation apart from training; `data/render.py` turns a prompt into the token
ids of each assistant turn. Nothing is decided silently: which columns are read is logged, rows that
cannot be read follow one rule (`data/bad_rows.py`), and what is dropped (duplicates, empty prompts)
is counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from data import questions, toy
from data.bad_rows import FEW, NONE, BadRow, BadRows
from data.columns import answer_in, prompt_in
from data.messages import Conversation as Conversation
from data.messages import Message as Message
from data.messages import whole
from data.prompt_tables import PromptTable, open_tables
from data.tools import Tools, first_call
from data.trace_rows import Trace
from trainer.errors import UserError


class Rendered(tuple[int, ...]):
    """Token ids of a prompt that was rendered already, as a log of requests holds them."""


# what the target answers: plain text, a conversation up to a user message, or token ids
Turn: TypeAlias = str | list[Message] | Rendered

TOY_PROMPTS = 100_000  # the toy's problems never end

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
    tools: Tools = ()  # that the conversation may call
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
        return shown_hash(self.content)

    @property
    def content(self) -> Turn:
        """What the row holds, whole."""
        if self.messages is not None:
            return Conversation(self.messages, self.tools)
        return self.ids or self.text or ""


def shown_hash(content: Turn) -> str:
    """`Prompt.hash` of a text, a conversation or token ids."""
    if isinstance(content, Rendered):
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
    # plain text hashes as one user message, so that both forms of a prompt have the same hash
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    calls = first_call(content)
    shown: list[object] = [
        [m["role"], m["content"]] for m in content[:calls] if m["role"] != "assistant"
    ]
    shown += [sorted(m.items()) for m in content[calls:]]
    if isinstance(content, Conversation) and content.tools:
        shown.append(content.tools)
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def trimmed_hash(content: Turn) -> str:
    """`shown_hash` without the white space around each text, which most chat templates drop."""
    if isinstance(content, str):
        content = content.strip()
    elif isinstance(content, list):
        tools = content.tools if isinstance(content, Conversation) else ()
        trimmed = [{**m, "content": m["content"].strip()} for m in content]
        content = Conversation(trimmed, tools)
    return shown_hash(content)


def load_prompts(
    source: str,
    *,
    count: int,
    config: str | None = None,
    split: str = "train",
    column: Sequence[str] = (),
    response_column: str | None = None,
    seed: int = 0,
    toy_split: str = "train",
    key: str = "data.prompts",
    bad_rows: str = FEW,
    left_out: dict[str, object] | None = None,
) -> list[Prompt]:
    """Read at most `count` distinct prompts, in the order of the source; all where it has fewer.

    `source`: `toy`, `questions`, either with domains (`toy:code+math`), a file (.jsonl .json
    .parquet .csv .txt, each also .gz or .zst), a Hub data set id or a folder of one, to which alone
    `config` and `split` apply, or a folder of several data sets. `column`: those of the prompt, in
    the order in which their texts are joined; empty: the usual ones (`data/columns.py`). Rows are
    chosen by a hash keyed with `seed`, so a source that grows keeps most of an earlier choice. The
    domain of a row is its `domain` or `category`, else the name of the file or data set. Prompts
    that differ only in the white space around their texts are one, the first. `bad_rows`: how many
    unreadable rows may be left out (`data/bad_rows.py`); `left_out` receives what a report says of
    them, below `key`, the setting that names the source. Raises UserError where more cannot be
    read or no prompt is left.
    """
    if is_made_here(source):
        prompts, num_empty = _toy_prompts(source, count, seed, toy_split), 0
    else:
        prompts, num_empty, bad = list[Prompt](), 0, BadRows()
        tables = open_tables(source, config, split, column, response_column, key)
        for table in tables:
            more, empty = _row_prompts(table, response_column is not None, bad)
            if len(tables) > 1:
                _log.info("%s: %d prompts of domain %s", table.source, len(more), table.domain)
            prompts, num_empty = prompts + more, num_empty + empty
        bad.check(key, source, bad_rows if prompts else NONE)
        if bad.count and left_out is not None:
            left_out[key] = bad.facts()
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(trimmed_hash(prompt.content), prompt)
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


def _row_prompts(table: PromptTable, required: bool, bad: BadRows) -> tuple[list[Prompt], int]:
    """The prompts of a table, and how many were empty. `required`: its column of answers is; `bad`
    receives the rows that cannot be read."""
    prompts, num_empty = list[Prompt](), 0
    notes, filled = Counter[str](), Counter[str]()
    for where, row in table.rows():
        bad.num_rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            name, content = prompt_in(table.source, row, table.columns, notes)
            filled[name] += 1
            if content is None:
                num_empty += 1
                continue
            prompts.append(_prompt(table, where, row, content, required))
        except BadRow as error:
            bad.add(where, error)
    _log.info("%s: %s", table.source, table.columns.line(filled))
    for note, count in notes.items():
        _log.info("%s: %d conversations %s", table.source, count, note)
    return prompts, num_empty


def _prompt(
    table: PromptTable,
    where: str,
    row: Mapping[str, object],
    content: str | Conversation,
    required: bool,
) -> Prompt:
    columns, response = table.columns, answer_in(row, table.columns, required)
    text, messages = (content, None) if isinstance(content, str) else (None, tuple(content))
    if messages and not required and messages[-1]["role"] == "assistant":
        response = messages[-1]["content"]
    named = [row.get(name) for name in columns.domains]
    domains = [whole(name, "domain") for name in named if isinstance(name, str)]
    conversation_id = shown_hash(content)
    if columns.conversation_id and row.get(columns.conversation_id) is not None:
        conversation_id = whole(str(row[columns.conversation_id]), columns.conversation_id)
    return Prompt(
        text=text,
        messages=messages,
        response=response if response and response.strip() else None,
        domain=next(filter(None, domains), table.domain),
        source=where,
        conversation_id=conversation_id,
        tools=content.tools if isinstance(content, Conversation) else (),
    )


# --- turns ---------------------------------------------------------------------------------------


def user_turns(prompt: Prompt) -> Iterator[Turn]:
    """Yield what the target answers: the text, or the conversation up to each user message.

    The source's assistant messages are left out: the target's own answers take their place
    (`with_answers`), since a drafter must learn the contexts that the target really produces. From
    the first tool call on they stay, since what a tool returned belongs to the call that was made:
    there the target answers wherever the assistant did, and where the conversation ends.
    """
    if prompt.messages is None:
        yield prompt.ids or prompt.text or ""
        return
    calls, so_far = first_call(prompt.messages), Conversation([], prompt.tools)
    for place, message in enumerate(prompt.messages):
        if place >= calls:
            answers = message["role"] == "assistant"
            if answers and place > calls and so_far[-1]["role"] in ("user", "tool"):
                yield _copy(so_far)
            so_far.append(message)
        elif message["role"] != "assistant":
            so_far.append(message)
            if message["role"] == "user":
                yield _copy(so_far)
    if calls < len(prompt.messages) and so_far[-1]["role"] in ("user", "tool"):
        yield _copy(so_far)


def _copy(messages: Conversation) -> Conversation:
    return Conversation([dict(message) for message in messages], messages.tools)
