"""Tool calls of a conversation, and the tools that it may call, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from data.bad_rows import BadRow

Message: TypeAlias = dict[str, Any]
Tools: TypeAlias = tuple[dict[str, Any], ...]  # functions in OpenAI's form


def calls_of(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of an assistant's message, with arguments as objects where they are JSON.
    Raises BadRow for calls that name no function."""
    found = _loaded(item.get("tool_calls"))
    if found is None and "function_call" in item:  # OpenAI's first form
        found = [_loaded(item["function_call"])]
    if not found:
        return []
    if not isinstance(found, list):
        raise BadRow("tool calls that are no list")
    return [_call(call) for call in found]


def _call(call: object) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call that names no function")
    assert isinstance(call, dict)
    arguments = _loaded(function.get("arguments", {}))
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return ({"id": call["id"]} if "id" in call else {}) | made


def tools_of(value: object) -> Tools:
    """The tools in a column: a list of functions, or its JSON text; none where it is blank. Raises
    BadRow for anything else."""
    found = _loaded(value) if not isinstance(value, str) or value.strip() else None
    if not found:
        return ()
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadRow("tools that are no list of functions")
    return tuple(
        one if "function" in one else {"type": "function", "function": one} for one in found
    )


def _loaded(value: object) -> object:
    """A value, or the one that its text is as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def first_call(messages: Sequence[Message]) -> int:
    """The place of the first message of a tool call, their number where there is none."""
    for place, message in enumerate(messages):
        if message.get("tool_calls"):
            return place
        if message["role"] == "tool":  # of a call that is text
            return place - (messages[place - 1]["role"] == "assistant" and place > 0)
    return len(messages)


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of their calls as JSON text."""
    found: list[Message] = []
    for message in messages:
        if "tool_calls" in message:
            message = {**message, "tool_calls": [*map(_with_text, message["tool_calls"])]}
        found.append(message)
    return found


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def prints_objects(text: str, messages: Sequence[Message]) -> bool:
    """Whether a template wrote the arguments of a call as Python spells them: it expects text."""
    calls = [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", ())]
    for arguments in calls:
        spelled = str(arguments)
        if isinstance(arguments, dict) and spelled != json.dumps(arguments) and spelled in text:
            return True
    return False
