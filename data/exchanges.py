"""One answer of a request log, in each of its forms, and the proof that its token ids are whole.

Servers lose token ids of a stream where a parser of thoughts or tool calls holds a part of it back
(vLLM issue 27482), and some go on behind the EOS. What the server counted and the text it sent
prove the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.request_keys import OF_A_LINE, Unusable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED = ("stop", "eos", "eos_token")
TEXT_PARTS = ("text", "thinking", "reasoning", "refusal")
FINISHED = (*ENDED, "stop_sequence", "length", "tool_calls", "function_call", "", None)
# by how much text that is tokenised again may miss the server's count: its EOS, and other splits
RETOKENISED = 0.1


@dataclass(frozen=True)
class Answer:
    """A line of a log, its values not yet checked. `keys`: of the request; `text`: the visible
    answer, None where the line holds ids alone; `thoughts`: apart from it; `calls`: whether tools
    were called; `count`: tokens of the answer as the server counted them; `logprobs`: an entry for
    each token; `stop_reason`: ... where the server does not say."""

    keys: Mapping[str, object]
    prompt_ids: object
    response_ids: object
    text: object
    thoughts: object
    calls: bool
    count: object
    logprobs: object
    finish_reason: object
    stop_reason: object
    domain: object


def answer_of(row: Mapping[str, Any]) -> Answer:
    """The answer of a line. Raises Unusable for an exchange that has not one choice."""
    request = row.get("request")
    if isinstance(request, dict):
        return _exchange(request, row)
    keys = {key: value for key, value in row.items() if key not in OF_A_LINE}
    return Answer(
        keys=keys, prompt_ids=row.get("prompt_ids"), response_ids=row.get("response_ids"),
        text=row.get("response"), thoughts=row.get("reasoning"), calls=False, count=None,
        logprobs=None, finish_reason=row.get("finish_reason"),
        stop_reason=row.get("stop_reason", ...), domain=row.get("domain"),
    )  # fmt: skip


def _exchange(request: dict[str, Any], row: Mapping[str, Any]) -> Answer:
    """An exchange with /v1/completions or /v1/chat/completions."""
    response = row.get("response")
    response = response if isinstance(response, dict) else {}
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Unusable("choices", "an exchange without exactly one choice")
    (choice,) = choices
    message = choice.get("message") or {}
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt  # a batch of one
    given = prompt if isinstance(prompt, list) else None
    reason, logprobs = choice.get("finish_reason"), choice.get("logprobs") or {}
    called = bool(message.get("tool_calls") or message.get("function_call"))
    return Answer(
        keys={**request, "prompt": prompt},
        prompt_ids=choice.get("prompt_token_ids") or response.get("prompt_token_ids") or given,
        response_ids=choice.get("token_ids"),
        text=choice.get("text") or message.get("content") or "",
        thoughts=message.get("reasoning") or message.get("reasoning_content"),
        calls=called or reason in ("tool_calls", "function_call"),
        count=(response.get("usage") or {}).get("completion_tokens"),
        logprobs=logprobs.get("content") or logprobs.get("tokens"),
        finish_reason=reason,
        stop_reason=choice.get("stop_reason", choice.get("matched_stop", ...)),
        domain=row.get("domain"),
    )


def check_messages(messages: object) -> None:
    """Raise Unusable where a conversation holds an image or another part that is no text."""
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
                raise Unusable("messages", "a part of its messages is no text")


def check_whole(
    answer: Answer, ids: list[int], tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]
) -> None:
    """Raise Unusable unless `ids`, logged or tokenised from the text here, are the whole answer."""
    early = next((token for token in ids[:-1] if token in eos_ids), None)
    if early is not None:
        raise Unusable("past the EOS", f"the answer goes on after its EOS, id {early}")
    counted = type(answer.count) is int
    if answer.response_ids is None:
        if counted and abs(len(ids) - answer.count) > max(2, RETOKENISED * answer.count):
            said = f"its text has {len(ids)} tokens, the server counted {answer.count}"
            raise Unusable("tokens lost", said)
        return
    if counted and len(ids) != answer.count:
        said = f"{len(ids)} token ids, the server counted {answer.count}"
        raise Unusable("tokens lost", said)
    if isinstance(answer.logprobs, list) and len(answer.logprobs) != len(ids):
        said = f"{len(ids)} token ids, and logprobs of {len(answer.logprobs)}"
        raise Unusable("tokens lost", said)
    if answer.text is None:
        return
    if not counted and (answer.thoughts or answer.calls):
        said = "thoughts or tool calls, whose token ids only the server's count (usage) proves"
        raise Unusable("no usage", said)
    texts = [_letters(str(one)) for one in (answer.thoughts, answer.text) if one is not None]
    stops = bool(answer.keys.get("stop")) or isinstance(answer.stop_reason, str)
    for skip in (True, False):
        whole = _letters(str(tokenizer.decode(ids, skip_special_tokens=skip)))
        if counted:
            proven = all(text in whole for text in texts)
        else:
            proven = whole == texts[-1] or (stops and whole.startswith(texts[-1]))
        if proven:
            return
    raise Unusable("tokens lost", "its token ids do not spell its text")


def _letters(text: str) -> str:
    """A text without what servers strip or add: white space, and characters cut in two."""
    return "".join(text.split()).replace("\ufffd", "")
