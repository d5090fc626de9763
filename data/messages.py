"""Messages of a conversation in the forms that logs and data sets have.

OpenAI's `role` and `content`, also as parts, or ShareGPT's `from` and `value`; as objects, or as
JSON or Python text in a column of text. What cannot be read raises `BadRow`; what is decided is
counted in `notes`, by a sentence each, for the reader to log.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from data.bad_rows import BadRow
from data.tables import kind_of, shorten
from data.tools import Tools, calls_of, first_call

# {"role": system | developer | user | assistant | tool, "content": text}; of the assistant also
# "tool_calls", and "reasoning_content", its thought; of a tool "tool_call_id" and "name"
Message: TypeAlias = dict[str, Any]


class Conversation(list[Message]):
    """The messages of a conversation, and the `tools` that its assistant may call."""

    def __init__(self, messages: Iterable[Message], tools: Tools = ()):
        super().__init__(messages)
        self.tools = tools


ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "function": "tool", "ipython": "tool", "observation": "tool",
    "tool_response": "tool",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")  # of OpenAI's two interfaces for chats
CHATS = ("messages", "conversations", "conversation")  # keys and columns that hold one
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of an assistant's message
_KNOWN_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", *THOUGHTS}
_OF_A_TOOL = {"tool_call_id", "name"}
# how the text of a list of messages begins, or of an object that holds one
_LOOKS_LIKE_MESSAGES = re.compile(
    r"""\s*(\{\s*["'](messages|conversations?)["']\s*:\s*)?\[\s*\{\s*["'](role|from|content|value)["']\s*:"""
)


def chat_of(value: object) -> list[Any] | None:
    """The list of messages that a value holds, by itself, below one of the keys `CHATS` or as the
    text of either; None where it holds none. Raises BadRow for a text that begins like one and
    cannot be read."""
    is_text = isinstance(value, str)
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict):
        value = next((value[key] for key in CHATS if value.get(key) is not None), None)
    if not isinstance(value, list) or not value:
        return None
    good = all(
        # other lists as text are what a user wrote
        isinstance(item, dict) and (not is_text or item.keys() & {"role", "from"})
        for item in value
    )
    return value if good else None


def _parsed(text: str) -> object:
    """A text of JSON; of messages also one of Python, which is how pandas writes lists to CSV."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not _LOOKS_LIKE_MESSAGES.match(text):
            return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise BadRow("messages as text that is neither JSON nor Python") from error


def read_messages(items: Sequence[Mapping[str, Any]], notes: Counter[str]) -> list[Message]:
    """The messages of a conversation, from the user's first turn on but for what precedes it of
    the system; empty where the user says nothing.

    The target answers each user message itself, so what the assistant says is no reason to refuse
    a conversation; but from its first tool call on, what it says and what tools return are context
    of what follows, and are read whole. Messages of the user that follow each other are one where
    the conversation has answers: that is what they answered. An empty user message ends the
    conversation. Raises BadRow for an unknown role, a content that is no text and a conversation
    without a user message.
    """
    found, said = list[Message](), Counter[str]()
    faults: dict[int, BadRow] = {}  # by the number of an assistant's message
    for number, item in enumerate(items, 1):
        message = _message(number, item, said, faults)
        is_system = message["role"] in ("system", "developer")
        if is_system and not message["content"].strip():
            continue
        if not is_system and message["role"] != "user" and not _asks(found):
            said["begin with the assistant; what it says first is left out"] = 1
            continue
        found.append(message)
    if items and not _asks(found):
        raise BadRow("a conversation without a user message")
    if any(message["role"] == "assistant" for message in found):
        found = _joined(found, said)
    blank = (i for i, m in enumerate(found) if m["role"] == "user" and not m["content"].strip())
    if (end := next(blank, None)) is not None:
        found = found[:end]
        if not _asks(found):
            return []
        said["hold an empty user message; it and what follows are left out"] = 1
    if (calls := first_call(found)) < len(found):
        said["call tools: from the first call on, the data set's own turns are the context"] = 1
        for message in found[calls:-1]:
            if (fault := faults.get(id(message))) is not None:
                raise fault
    notes.update(said)
    return found


def _asks(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "user" for message in messages)


def _message(
    number: int, item: Mapping[str, Any], said: Counter[str], faults: dict[int, BadRow]
) -> Message:
    """A message in OpenAI's form. `faults` receives why an assistant's cannot be read, by `id`."""
    item, where = present(item), f"message {number}"
    name = item.get("role", item.get("from"))
    name = name.strip().casefold() if isinstance(name, str) else name
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(
            f"the unknown role {shorten(repr(name))}", f"{where}; known: {', '.join(ROLES)}"
        )
    for key in item.keys() - _KNOWN_KEYS - (_OF_A_TOOL if role == "tool" else set()):
        said[f"have messages with the key {key!r}, which is not read"] = 1
    value = item.get("content", item.get("value"))
    if role != "assistant":
        message: Message = {"role": role, "content": text_of(value, where)}
        if role == "tool":
            message |= {key: item[key] for key in sorted(_OF_A_TOOL & item.keys())}
        return message
    message = {"role": role, "content": ""}
    try:
        if name in ("function_call", "tool_call"):  # whose text is the call
            item, value = item | {"function_call": value}, None
        if calls := calls_of(item):
            message["tool_calls"] = calls
        thought = next((item[key] for key in THOUGHTS if key in item), None)
        if thought is not None:
            message["reasoning_content"] = text_of(thought, where)
        if value is not None or not calls:
            message["content"] = text_of(value, where)
    except BadRow as error:
        faults[id(message)] = error
    return message


def text_of(value: object, where: str) -> str:
    """The text of a content: parts of text are joined by line breaks, as vLLM joins them. Raises
    BadRow for anything else."""
    if isinstance(value, list):
        texts = []
        for part in value:
            if isinstance(part, dict):
                part = present(part)
                kind = part.get("type", "text")
                if kind not in TEXT_PARTS:
                    raise BadRow(f"a part of type {shorten(repr(kind))}, which is no text", where)
                part = part.get("text")
            texts.append(text_of(part, where))
        return "\n".join(texts)
    if not isinstance(value, str):
        raise BadRow("a content that is no text", f"{where}, got {kind_of(value)}")
    return whole(value, where)


def whole(text: str, where: str) -> str:
    """`text`. Raises BadRow where it holds half of a surrogate pair: JSON can spell half an emoji,
    and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"{where}, character {error.start + 1}"
        raise BadRow("half of a surrogate pair", where) from error
    return text


def present(item: Mapping[str, object]) -> dict[str, Any]:
    """An object without the keys that hold nothing, at any depth: a table whose rows differ in
    their keys has all of them in every row."""
    return {key: _present(value) for key, value in item.items() if value is not None}


def _present(value: object) -> object:
    if isinstance(value, Mapping):
        return present(value)
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def _joined(messages: list[Message], said: Counter[str]) -> list[Message]:
    """The messages with neighbouring ones of the user as one, a blank line between them."""
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] == "user" and message["content"].strip():
            said["hold user messages without an answer between them, which are joined"] = 1
            content = f"{found[-1]['content']}\n\n{message['content']}"
            found[-1] = {"role": "user", "content": content}
        else:
            found.append(message)
    return found
