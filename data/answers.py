"""A target's answer as a message of its conversation: what a chat server would send back.

A server keeps the final text of an answer, and the thought before it where the chat template has a
field for thoughts. Which part of the text that is depends on the model, and the chat template
says it: probes are rendered as an assistant message, and what the template writes around them is
how such a message begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from data.prompts import Message, Prompt, user_turns
from data.trace_rows import Trace, column
from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of an assistant message
_FINAL, _THOUGHT, _NEXT = "final0probe", "thought0probe", "next0probe"
_USER: Message = {"role": "user", "content": "0"}
_ABOUT_THOUGHT = re.compile("think|thought|reason|channel|analysis", re.IGNORECASE)


class _Layout(NamedTuple):
    """What the template writes around an answer: `opening`, its thought and `between` where it has
    one, the final text, `end`."""

    opening: str
    between: str
    end: str


class AnswerFormat:
    """How the answers of a target stand in its conversations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        options: Mapping[str, Any] | None = None,
    ):
        """`options`: further variables of the chat template."""
        self.tokenizer, self.eos_ids, self.options = tokenizer, set(eos_ids), options or {}
        added = list(tokenizer.added_tokens_decoder.values())
        self.special = {token.content for token in added if token.special}
        self.special |= set(tokenizer.all_special_tokens)
        names, known = {token.content for token in added}, tokenizer.get_vocab()
        self.special_ids = {known[token] for token in self.special if token in known}
        if "</think>" in (tokenizer.chat_template or ""):
            names |= {"<think>", "</think>"}  # which some vocabularies spell with several tokens
        self.thoughts = _thought_marks(names)
        self._mark_ids = [(known.get(a), known.get(b)) for a, b in self.thoughts]

    # --- what the template writes ----------------------------------------------------------------

    def _rendered(self, *messages: Message, prompt: bool = False) -> str | None:
        """The conversation as text, with `prompt` up to the start of an answer; None where the
        template refuses it or there is none."""
        import jinja2

        if not self.tokenizer.chat_template:
            return None
        try:
            text: Any = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **self.options
            )
        except (jinja2.TemplateError, TypeError):  # TypeError: of a filter on what is no text
            return None
        return text

    @cached_property
    def _before(self) -> str:
        return self._rendered(_USER) or ""

    @cached_property
    def _prompt(self) -> str:
        """What the template writes before an answer that is still to come."""
        return _behind(self._before, self._rendered(_USER, prompt=True) or "")

    def _layout(self, *following: Message, field: str = "") -> _Layout | None:
        """The layout of an answer with the messages `following` behind it. `field`: of its thought.
        None where the template does not write both texts as they are."""
        message = {"role": "assistant", "content": _FINAL} | ({field: _THOUGHT} if field else {})
        text = self._rendered(_USER, message, *following) or ""
        if text.count(_FINAL) != 1 or text.count(_THOUGHT) != bool(field):
            return None
        opening, end = _behind(self._before, text).split(_FINAL)
        between = ""
        if field:
            opening, between = opening.split(_THOUGHT)
        return _Layout(opening, between, end.partition(_NEXT)[0])

    @cached_property
    def _layouts(self) -> list[_Layout]:
        """That of the last answer of a conversation and that of an earlier one; [] where the
        template writes none."""
        found = self._layout(), self._layout({"role": "user", "content": _NEXT})
        return [layout for layout in found if layout]

    @cached_property
    def _thinking(self) -> tuple[str, _Layout] | None:
        """The field for thoughts, and the layout of an answer that has one."""
        for field in THOUGHT_FIELDS:
            if (layout := self._layout(field=field)) and layout.between.strip():
                return field, layout
        return None

    # --- where an answer ends --------------------------------------------------------------------

    @cached_property
    def end_ids(self) -> list[int]:
        """The token ids with which the template ends an answer: up to the first EOS, else to the
        first special token; where it writes neither, the tokenizer's EOS. UserError without one."""
        written = [self._ids(layout.end.lstrip()) for layout in self._layouts]
        for ends, texts in ((self.eos_ids, written), (self.special_ids, written[:1])):
            for ids in texts:
                for i, token in enumerate(ids):
                    if token in ends:
                        return ids[: i + 1]
        eos: Any = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(
                "the target's tokenizer has no EOS token, in which fixed responses must end",
                remedy="set its eos_token",
            )
        return [eos]

    @cached_property
    def foreign_end(self) -> int | None:
        """The token with which the template ends a turn where it is no EOS. None also for a format
        of several messages in an answer, each of which it ends."""
        if not self._layouts or self.end_ids[-1] in self.eos_ids:
            return None
        header = self._layouts[0].opening.replace(self._prompt.strip(), "")
        return None if self._has_marks(header) else self.end_ids[-1]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    # --- an answer in later turns ----------------------------------------------------------------

    def is_cut(self, response_ids: Sequence[int], finish_reason: str) -> bool:
        """Whether an answer ends at the limit of its length, or inside a thought."""
        return finish_reason == "length" or self.thought_is_open(response_ids)

    def thought_is_open(self, response_ids: Sequence[int]) -> bool:
        """Whether an answer ends inside a thought that it or its prompt has begun."""
        for (begin, end), ids in zip(self.thoughts, self._mark_ids, strict=True):
            at_start = self._prompt.rfind(begin) > self._prompt.rfind(end)
            if None in ids:
                text = begin * at_start + self._text(response_ids)
                if text.rfind(begin) > text.rfind(end):
                    return True
            else:
                marks = [token for token in response_ids if token in ids]
                if (marks[-1] == ids[0]) if marks else at_start:
                    return True
        return False

    def message(self, response_ids: Sequence[int]) -> Message | None:
        """The assistant's message that stands for an answer in later turns. None where it holds
        special tokens, or a thought, that the chat template has no place for."""
        text, plain = self._text(response_ids), self._text(response_ids, skip_special_tokens=True)
        specials = self.special_ids.intersection(response_ids) - self.eos_ids
        if not specials and not any(end in text for _, end in self.thoughts):
            return {"role": "assistant", "content": plain}
        for fields, final in self._readings(text, None if specials else plain):
            if not final.strip() or self._has_marks(final):
                continue
            message: Message = {"role": "assistant", **fields}
            shown = self._rendered(_USER, message, {"role": "user", "content": _NEXT})
            if shown is not None and final.strip() in shown:
                return message
        return None

    def _readings(self, text: str, plain: str | None) -> Iterator[tuple[Message, str]]:
        """Ways to read an answer, each as fields of a message and the final text in them. `plain`:
        the answer where no special token is in it."""
        whole = self._prompt + text
        if self._thinking:
            field, layout = self._thinking
            begin = layout.opening.rstrip()
            thought, mark, final = whole.removeprefix(begin).rpartition(layout.between.strip())
            if mark and whole.startswith(begin) and not self._has_marks(thought):
                final = self._closed(final)
                yield {"content": final, field: thought.strip("\n")}, final
        if plain is not None:  # a template that names the end of thoughts takes them out itself
            for _, end in self.thoughts:
                if end in text and end in self.tokenizer.chat_template:
                    yield {"content": plain}, text.rpartition(end)[2]
        bare = self._without_thoughts(whole)
        for layout in self._layouts:
            header = self._without_thoughts(layout.opening).strip()
            if bare.startswith(header):
                final = self._closed(bare.removeprefix(header))
                yield {"content": final}, final
            before, found, final = bare.rpartition(header or "\0")
            # what stands before it must be whole messages
            if found and before.rstrip().endswith(self._closers):
                final = self._closed(final)
                yield {"content": final}, final

    @cached_property
    def _closers(self) -> tuple[str, ...]:
        """The special tokens that the template writes right behind an answer."""
        ends = [layout.end.lstrip() for layout in self._layouts]
        return tuple(mark for mark in self.special if any(end.startswith(mark) for end in ends))

    def _closed(self, text: str) -> str:
        for mark in self._closers:
            text = text.removesuffix(mark)
        return text.lstrip("\n")

    def _without_thoughts(self, text: str) -> str:
        for begin, end in self.thoughts:
            text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
        return text

    def _has_marks(self, text: str) -> bool:
        return any(mark in text for mark in (*self.special, *chain.from_iterable(self.thoughts)))

    def _text(self, response_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The answer without the EOS at its end."""
        ids = list(response_ids)
        if ids and ids[-1] in self.eos_ids:
            ids.pop()
        text: Any = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


class Cut(NamedTuple):
    """What of the answers in a text is cut: whose end is the limit of their length, or a thought.
    `turns`: later turns of their conversations, which are left out."""

    answers: int
    cut: int
    in_thoughts: int
    turns: int

    @classmethod
    def of(cls, traces: Sequence[Trace], answers: AnswerFormat, prompts: Sequence[Prompt]) -> Cut:
        """`prompts`: those that the traces' `index` counts, [] where no turn is left out."""
        at_limit = [reason == "length" for reason in column(traces, "finish_reason")]
        open_ones = [False] * len(traces)
        if answers.thoughts:
            open_ones = [answers.thought_is_open(trace.response_ids) for trace in traces]
        turns = 0
        if any(len(prompt.messages or ()) > 1 for prompt in prompts):
            places = column(traces, "index"), column(traces, "turn")
            for index, turn, *ends in zip(*places, at_limit, open_ones, strict=True):
                turns += any(ends) * (len(list(user_turns(prompts[index]))) - turn - 1)
        cut = sum(map(any, zip(at_limit, open_ones, strict=True)))
        return cls(len(traces), cut, sum(open_ones), turns)

    def __str__(self) -> str:
        share = self.cut / max(1, self.answers)
        return f"{self.cut} of {self.answers} answers ({share:.0%}) are cut"


def _thought_marks(names: set[str]) -> list[tuple[str, str]]:
    """Pairs of tokens that begin and end a thought, such as <think> and </think>, [THINK] and
    [/THINK], <|channel> and <channel|>, <|START_THINKING|> and <|END_THINKING|>."""
    found = []
    for begin in sorted(name for name in names if _ABOUT_THOUGHT.search(name)):
        inside = len(begin) - len(begin.lstrip("<|[({"))
        ends = {f"{begin[:1]}/{begin[1:]}", f"{begin[:inside]}/{begin[inside:]}"}
        ends |= {f"<{begin[2:-1]}|>"} if begin.startswith("<|") else set()
        for first, last in (("start", "end"), ("begin", "end"), ("START", "END"), ("BEGIN", "END")):
            ends.add(begin.replace(first, last))
        found += [(begin, end) for end in sorted(ends & names - {begin})]
    return found


def _behind(before: str, text: str) -> str:
    """`text` without what both begin with."""
    pairs = enumerate(zip(before, text, strict=False))
    alike = next((i for i, (a, b) in pairs if a != b), min(len(before), len(text)))
    return text[alike:]
