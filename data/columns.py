"""The columns of a table of prompts: which hold the prompt, which belong to it, and its answer.

What no name and no convention decides is refused, with the key that decides it. Names count
without regard to their case.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from data.bad_rows import BadRow
from data.messages import CHATS, ROLES, Conversation, Message, chat_of, read_messages, whole
from data.tables import Table, kind_of, listed
from data.tools import tools_of
from trainer.config import suggest
from trainer.errors import UserError, excerpt

PROMPT_COLUMNS = (*CHATS, "prompt", "instruction", "question", "text", "turns")
RESPONSE_COLUMNS = ("response", "answer", "output", "completion", "canonical_solution", "code")
DOMAIN_COLUMNS = ("domain", "category")
TOOL_COLUMNS = ("tools", "functions")
ID_COLUMN, ROLE_COLUMN = "conversation_id", "role"
TURN_COLUMNS = ("turns", "prompt")  # whose lists of texts are what a user says in turn
SYSTEM_COLUMNS = ("system_prompt", "system")  # of OpenOrca; of conversations in ShareGPT's form
# by column: the one that the data sets of this form put behind it (Alpaca; Dolly)
JOINED = {"instruction": ("input", "context")}
# what the prompt may be about: nobody knows whether, and on which side, it belongs to the prompt
DOUBTFUL = (
    "input", "context", "contexts", "article", "document", "documents", "passage", "paragraph",
    "story", "dialogue", "dialog", "background", "choices", "options", "prompt", "instruction",
    "question", "text",
)  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are read. A row's prompt is in the first of `prompts` that it fills,
    with the texts of `joined` behind it; `doubtful` ones stop the run where they hold more."""

    key: str  # of the setting that names the prompts, for messages
    prompts: tuple[str, ...]
    joined: tuple[str, ...] = ()
    system: str | None = None
    tools: str | None = None
    answers: str | None = None
    domains: tuple[str, ...] = ()
    conversation_id: str | None = None
    doubtful: tuple[str, ...] = ()
    role: str | None = None  # of tables that have one message a row
    named: bool = False  # by the user
    unread: tuple[str, ...] = ()  # columns of text

    @property
    def read(self) -> tuple[str, ...]:
        one = (self.system, self.tools, self.answers, self.conversation_id, self.role)
        found = (*self.prompts, *self.joined, *self.domains, *self.doubtful, *filter(None, one))
        return tuple(dict.fromkeys(found))

    def line(self, filled: Mapping[str, int]) -> str:
        """Which columns were read, and which columns of text were not. `filled`: by column, how
        many prompts it holds."""
        several = len(filled) > 1
        found = [f"{name} ({filled[name]} rows)" if several else name for name in filled]
        if self.joined and filled.keys() & set(self.prompts[:1]):
            found = [" + ".join((*found, *self.joined))]
        line = f"prompts from {', '.join(found) or 'no column'}"
        if self.system:
            line += f", system message from {self.system}"
        if self.tools:
            line += f", tools from {self.tools}"
        if self.answers:
            line += f", answers from {self.answers}"
        unread = [name for name in self.unread if name not in filled]
        return f"{line}; columns of text that are not read: {listed(unread)}"


def choose_columns(
    source: str, table: Table, column: Sequence[str], response_column: str | None, key: str
) -> Columns:
    """The columns to read. `column`: those that the user names, in the order in which their texts
    are joined. Raises UserError where one is missing, or none has a usual name."""
    columns = table.columns
    for name in (*column, *([response_column] if response_column else [])):
        if name not in columns:
            known = listed(columns) + suggest(name, columns)
            raise UserError(f"{source} has no column {excerpt(name)}; columns: {known}")
    by_name = {name.strip().casefold(): name for name in reversed(columns)}

    def there(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(by_name[name] for name in names if name in by_name)

    def first(names: Sequence[str]) -> str | None:
        return next(iter(there(names)), None)

    joined, doubtful, system = tuple(column[1:]), (), None
    prompts = tuple(column[:1])
    if not column:
        prompts = there(PROMPT_COLUMNS)
        if not prompts:
            if not columns:  # no row could be read
                return Columns(key, PROMPT_COLUMNS[:1])
            if {ROLE_COLUMN, "content"} <= by_name.keys():
                raise _one_message_a_row(key, source, by_name[ROLE_COLUMN], by_name["content"])
            known = f"({', '.join(PROMPT_COLUMNS)}); columns: {listed(columns)}"
            raise UserError(f"{source} has none of the usual columns {known}; set {key}_column")
        joined = there(JOINED.get(prompts[0].strip().casefold(), ()))[:1]
        doubtful = tuple(n for n in there(DOUBTFUL) if n not in (prompts[0], *joined))
        system = first(SYSTEM_COLUMNS)
    answers = response_column or next(
        (n for n in there(RESPONSE_COLUMNS) if n not in (*prompts, *joined)), None
    )
    found = Columns(
        key, prompts, joined, system, first(TOOL_COLUMNS), answers, there(DOMAIN_COLUMNS),
        first([ID_COLUMN]), doubtful, None if column else first([ROLE_COLUMN]), bool(column),
    )  # fmt: skip
    one = (system, found.tools, answers, found.conversation_id)
    read = {*prompts[:1], *joined, *found.domains, *one}
    return dataclasses.replace(found, unread=tuple(n for n in table.texts if n not in read))


def _one_message_a_row(key: str, source: str, role: str, column: str) -> UserError:
    return UserError(
        f"one message a row, whose role is in the column {role!r}",
        key=key,
        value=source,
        remedy="write the messages of a conversation to one row, as a list in the column messages, "
        f"or set {key}_column={column} to ask the text of every row",
    )


def prompt_in(
    source: str, row: Mapping[str, object], columns: Columns, notes: Counter[str]
) -> tuple[str, str | Conversation | None]:
    """(column, prompt) of a row: text, or a conversation; None where it is empty.

    Raises BadRow where the row cannot be read, UserError where another column may belong to it.
    """
    name = next((name for name in columns.prompts if row.get(name) is not None), None)
    if name is None:
        raise BadRow(f"nothing in the column {' or '.join(columns.prompts)}", f"has {listed(row)}")
    value = row[name]
    messages = chat_of(value)
    if messages is None and isinstance(value, list):
        if not all(isinstance(item, str) for item in value) or not (
            value == [] or name.strip().casefold() in TURN_COLUMNS
        ):
            raise BadRow(f"a list in {name!r} that is no list of messages", kind_of(value))
        messages = [{"role": "user", "content": text} for text in value]
    if messages is None:
        text = _text(source, row, name, columns)
        system = _system(row, columns)
        if system and text.strip():
            return name, Conversation([*system, {"role": "user", "content": text}])
        return name, text if text.strip() else None
    if columns.named and columns.joined:
        raise BadRow(f"messages in {name!r}, which no other column can be joined to")
    found = read_messages(messages, notes)
    if found and found[0]["role"] not in ("system", "developer"):
        found = [*_system(row, columns), *found]
    tools = tools_of(row.get(columns.tools)) if columns.tools else ()
    return name, Conversation(found, tools) if found else None


def _system(row: Mapping[str, object], columns: Columns) -> list[Message]:
    """The system message in a column of its own; none where it is blank."""
    text = _joinable(row, columns.system) if columns.system else ""
    return [{"role": "system", "content": text}] if text.strip() else []


def _text(source: str, row: Mapping[str, object], name: str, columns: Columns) -> str:
    """The text of a prompt, with the columns behind it that belong to it."""
    if columns.role is not None and str(row.get(columns.role)).strip().casefold() in ROLES:
        raise _one_message_a_row(columns.key, source, columns.role, name)
    joined = columns.joined if name == columns.prompts[0] else ()
    parts = [_joinable(row, one) for one in (name, *joined)]
    text = "\n\n".join(part for part in parts if part.strip())
    for other in columns.doubtful:
        around = other.strip().casefold() == "text"  # as in Alpaca, which holds all of it once more
        for inner in () if other == name else _texts(row.get(other)):
            if inner not in text and not (around and all(p.strip() in inner for p in parts)):
                raise UserError(
                    f"the columns {name!r} and {other!r} may both belong to the prompt",
                    key=columns.key,
                    value=source,
                    remedy=f"set {columns.key}_column=[{other},{name}] to join them in that order, "
                    f"or {columns.key}_column={name}",
                )
    return text


def _joinable(row: Mapping[str, object], name: str) -> str:
    """The text in a column, a list of texts as lines."""
    value = row.get(name)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "\n".join(value)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"no text in the column {name!r}", kind_of(value))
    return whole(value or "", repr(name))


def _texts(value: object) -> Iterator[str]:
    """The texts in a value, at any depth, that are not blank."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def answer_in(row: Mapping[str, object], columns: Columns, required: bool) -> str | None:
    """The answer in the column of answers, a text or the last message of a list. None where it
    holds something else, such as the number of a choice; BadRow where it is `required`."""
    value = row.get(columns.answers) if columns.answers else None
    try:
        messages = chat_of(value)
        if messages is not None and isinstance(messages[-1], dict):
            value = messages[-1].get("content", messages[-1].get("value"))
        if isinstance(value, str):
            return whole(value, repr(columns.answers))
        if required:
            raise BadRow(f"no text in the column {columns.answers!r}", kind_of(value))
    except BadRow:
        if required:
            raise
    return None
