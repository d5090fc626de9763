"""Prompts to token ids: the chat template of the target, and the answers of earlier turns."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.answers import AnswerFormat
from data.messages import THOUGHTS
from data.prompts import Conversation, Message, Prompt, Rendered, Turn, user_turns
from data.rendered import is_rendered, up_to_answer
from data.tables import one_line
from data.tools import Tools, first_call, prints_objects, with_text_arguments
from trainer.errors import UserError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_answers(turn: Turn, answers: Sequence[Message]) -> Turn:
    """A turn of `user_turns` with the target's answers put after its earlier user messages.

    `answers`: as many messages as `num_answers` says. Raises ValueError for another number.
    """
    needed = num_answers(turn)
    if needed != len(answers):
        raise ValueError(f"need {needed} answers to earlier user messages, got {len(answers)}")
    if not isinstance(turn, list):
        return turn
    remaining = iter(answers)
    woven = Conversation([], turn.tools if isinstance(turn, Conversation) else ())
    for place, message in enumerate(turn):
        if place < first_call(turn) and woven and woven[-1]["role"] == "user":
            woven.append(dict(next(remaining)))
        woven.append(dict(message))
    return woven


def num_answers(turn: Turn) -> int:
    """How many of the target's answers stand in a turn of `user_turns`: one per user message but
    the last before the first tool call, whose answer is that call."""
    own = turn[: first_call(turn)] if isinstance(turn, list) else []
    return max(0, sum(message["role"] == "user" for message in own) - 1)


def render(
    turn: Turn,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that the target is shown before it answers.

    With a chat template: the conversation (plain text is one user message) up to the start of the
    answer; `system_prompt` goes first unless the conversation brings its own. Text that the
    template has rendered already is not rendered again (`data/rendered.py`). Without a template:
    plain text as the tokenizer encodes it; a conversation and options of a template raise
    UserError. Token ids stay as they are, and those options raise UserError.
    """
    options = chat_template_kwargs or {}
    if isinstance(turn, Rendered):
        for key, value in (("system_prompt", system_prompt), ("chat_template_kwargs", options)):
            if value:
                rule = "must be empty for prompts that are token ids, which were rendered already"
                raise UserError(f"data.{key} {rule}, got {value!r}")
        return list(turn)
    if not tokenizer.chat_template:
        return _render_plain(turn, tokenizer, system_prompt, options)
    if isinstance(turn, str) and is_rendered(turn, tokenizer):
        rule = "be empty for prompts that are rendered already"
        require(not system_prompt, "data.system_prompt", rule, system_prompt)
        return _encoded(up_to_answer(turn, tokenizer, options), tokenizer)
    messages = [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
    system = system_prompt if messages[0]["role"] not in ("system", "developer") else None
    return _render_chat(messages, tokenizer, system, options, _tools(turn))


def _tools(turn: Turn) -> Tools:
    return turn.tools if isinstance(turn, Conversation) else ()


def question(
    turn: Turn,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The end of `render`, from the token before the last user message on: without a system message
    or a date in front of it, which other runs have otherwise. All of what is no conversation."""
    ids = render(turn, tokenizer, system_prompt, chat_template_kwargs)
    if isinstance(turn, Rendered) or not tokenizer.chat_template:
        return ids
    *before, last = [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
    begins = len(ids)
    for text in ("?", "0"):  # the message may begin like one of them
        other = Conversation([*before, {**last, "content": text}], _tools(turn))
        alike = zip(
            ids, render(other, tokenizer, system_prompt, chat_template_kwargs), strict=False
        )
        begins = min(begins, next((i for i, (a, b) in enumerate(alike) if a != b), begins))
    return ids[max(0, begins - 1) :]


def _render_plain(
    turn: Turn,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    options: Mapping[str, object],
) -> list[int]:
    remedy = "use an instruction-tuned target"
    if not isinstance(turn, str):
        raise UserError(
            "the target has no chat template but the prompts are conversations;"
            f" remedy: {remedy}, or a column of plain text (data.prompts_column)"
        )
    for key, value in (("system_prompt", system_prompt), ("chat_template_kwargs", options)):
        if value:
            rule = "must be empty for a target without a chat template"
            raise UserError(f"data.{key} {rule}, got {value!r}; remedy: remove it, or {remedy}")
    return _encoded(turn, tokenizer)


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text).input_ids
    # a text that spells its BOS out, from a tokenizer that adds one
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _render_chat(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    options: Mapping[str, Any],
    tools: Tools,
) -> list[int]:
    import jinja2

    _check_template_options(tokenizer, options)
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    template = str(tokenizer.get_chat_template(tools=list(tools) or None))
    messages = [_as_named(template, message) for message in messages]
    options = {**options, "add_generation_prompt": True}
    if tools:
        options["tools"] = list(tools)
    try:
        messages = _with_arguments(messages, tokenizer, options)
        if system_prompt:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            if system_prompt.strip() not in text:
                rule = "the target's chat template drops the system message"
                raise UserError(f"{rule}; remedy: remove data.system_prompt")
        # return_dict: transformers 5 returns a dictionary by default. The template writes the
        # special tokens itself and none are added after it, so there is no second BOS.
        ids: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, **options
        )
        return ids
    except jinja2.TemplateError as error:
        roles = " ".join(message["role"] for message in messages)
        raise UserError(
            f"the target's chat template refuses the conversation [{roles}] ({one_line(error)});"
            " remedy: prompts or data.system_prompt that it accepts"
        ) from error


def reads_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the target's chat template writes the tools that a conversation may call."""
    return re.search(r"\btools\b", str(tokenizer.chat_template or "")) is not None


def _as_named(template: str, message: Message) -> Message:
    """A message with the names that a chat template reads: `developer` is OpenAI's later name of
    the system, and thoughts have several."""
    message = dict(message)
    if message["role"] == "developer" and "developer" not in template:
        message["role"] = "system"
    if "reasoning_content" in message and "reasoning_content" not in template:
        field = next((name for name in THOUGHTS if name in template), "reasoning_content")
        message[field] = message.pop("reasoning_content")
    return message


def _with_arguments(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> list[Message]:
    """The messages with the arguments of tool calls as the template takes them, as objects or as
    JSON text. UserError where it leaves out a call, or what it
    returned."""
    if first_call(messages) == len(messages):
        return messages
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TypeError:  # an object in the place of text
        text = None
    if text is None or prints_objects(text, messages):
        messages = with_text_arguments(messages)
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    for message in messages:
        texts = [call["function"]["name"] for call in message.get("tool_calls", ())]
        texts += [message["content"]] if message["role"] == "tool" else []
        if not all(_stands_in(one, text) for one in texts):
            rule = "the target's chat template leaves out a tool call, or what it returned"
            raise UserError(rule, remedy="name a target whose template has tools")
    return messages


def _stands_in(content: str, text: str) -> bool:
    """Whether a text stands in a rendered one, as it is or as JSON spells it."""
    spelled = content.strip()
    in_ascii = json.dumps(spelled)[1:-1]
    as_it_is = json.dumps(spelled, ensure_ascii=False)[1:-1]
    return spelled in text or in_ascii in text or as_it_is in text


def _check_template_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    if not options:
        return
    parameters = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    ours = {"messages", *parameters} - {"tools", "documents"}
    template = tokenizer.get_chat_template(tools=options.get("tools"))
    for key in options:
        rule = None
        if key in ours:
            rule = "is set by this program"
        # Jinja ignores a variable that the template does not read: a misspelt one would do nothing
        elif not re.search(rf"\b{re.escape(key)}\b", template):
            rule = "is not read by the target's chat template"
        if rule:
            raise UserError(f"data.chat_template_kwargs: {key!r} {rule}; remove or correct it")


def fixed_response_ids(prompt: Prompt, answers: AnswerFormat) -> list[int] | None:
    """The source's own answer as token ids, ended as the target's chat template ends a turn; None
    where the prompt has none.

    None also for several turns: there the answer belongs to a context that the target never wrote.
    Raises UserError where no token ends it.
    """
    if prompt.response is None or sum(1 for _ in user_turns(prompt)) > 1:
        return None
    ids = answers.tokenizer(prompt.response, add_special_tokens=False).input_ids
    return [*ids, *answers.end_ids]
