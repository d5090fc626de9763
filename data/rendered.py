"""Prompts of text that a chat template has rendered already.

Such a text is no message of a user: the target would see a conversation inside a message. One that
the target's own template wrote is used as it is, up to the start of its last answer; one of another
template is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from data.tables import shorten
from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# how the templates in use begin a user's turn and an answer; one text holds both, or begins a turn
FORMS = (
    ("[INST]", "[/INST]"),
    ("<|im_start|>user", "<|im_start|>assistant"),
    ("<|start_header_id|>user", "<|start_header_id|>assistant"),
    ("<start_of_turn>user", "<start_of_turn>model"),
    ("<|start|>user", "<|start|>assistant"),
    ("<|turn>user", "<|turn>model"),
    ("<|user|>", "<|assistant|>"),
    ("<|User|>", "<|Assistant|>"),
    ("<｜User｜>", "<｜Assistant｜>"),
    ("<|USER|>", "<|ASSISTANT|>"),
    ("### Human:", "### Assistant:"),
    ("### User:", "### Assistant:"),
    ("### Instruction:", "### Response:"),
    ("\nHuman:", "\nAssistant:"),
    ("USER:", "ASSISTANT:"),
)
TURNS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<s>[INST]",
         "<s> [INST]", "<bos><start_of_turn>", "<|begin_of_text|><|start_header_id|>",
         "### Human:", "<|system|>", "<|user|>")  # fmt: skip


def is_rendered(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template, of this target or another, seems to have written `text`."""
    if not tokenizer.chat_template:
        return False
    if text.lstrip().startswith(TURNS):
        return True
    if any(user in text and answer in text for user, answer in FORMS):
        return True
    special = [token for token in _special_tokens(tokenizer) if token in text]
    if sum(map(text.count, special)) < 2:
        return False
    own = _probe(tokenizer, {})
    return sum(text.count(token) for token in special if token in own) > 1


def up_to_answer(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
) -> str:
    """A rendered `text` up to the start of its last answer, as the target's template writes it.

    `options`: further variables of the template. Raises UserError where the text has no such start.
    """
    start = _answer_start(tokenizer, str(tokenizer.chat_template), json.dumps(options))
    mark = start.strip()
    if not mark or mark not in text:
        raise UserError(
            "is rendered already, and not by the target's chat template, which starts an answer "
            f"with {start!r}",
            key="prompts",
            value=shorten(text),
            remedy="name a column of messages, or convert the text to messages",
        )
    return text[: text.rindex(mark)] + mark + start[len(start.rstrip()) :]


def describe_rendered(
    texts: Sequence[str | None], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """A line that says how many of the prompts are rendered already; None where none is."""
    count = sum(is_rendered(text, tokenizer) for text in texts if text is not None)
    if not count:
        return None
    return (
        f"{count} of {len(texts)} prompts are rendered already: each is used as it is, up to the "
        "start of its last answer"
    )


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens that may stand around a message: without those around a whole text."""
    ends = [tokenizer.bos_token, tokenizer.eos_token]
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(token for token in added if token not in ends)


@lru_cache(maxsize=8)
def _answer_start(tokenizer: PreTrainedTokenizerBase, template: str, options: str) -> str:
    """What the target's template writes between a user's text and an answer."""
    return _probe(tokenizer, json.loads(options)).rpartition(_PROBE)[2]


_PROBE = "a text of the user"


def _probe(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    message = [{"role": "user", "content": _PROBE}]
    return str(
        tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, **options
        )
    )
