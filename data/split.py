"""The split of training from evaluation, and the training turns that are held out as well.

The context of a turn is what the target is shown before it answers, without its own earlier
answers: the system message and the user messages so far. Two contexts are equal whatever the white
space around their messages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from data.prompts import Prompt, Rendered, Turn, keyed_hash, trimmed_hash, user_turns
from data.render import num_answers, question, render, with_answers
from data.tables import shorten
from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = {"role": "assistant", "content": "?"}
NAMED = 3  # texts that a line names


def contexts(prompt: Prompt, system_prompt: str | None = None) -> Iterator[str]:
    """Yield the hash of the context of each turn.

    `system_prompt`: the system message of conversations that bring none.
    """
    for turn in user_turns(prompt):
        if system_prompt and not isinstance(turn, Rendered):
            messages = [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
            if messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system_prompt}, *messages]
            yield trimmed_hash(messages)
        else:
            yield trimmed_hash(turn)


def split_by_hash(
    prompts: Sequence[Prompt], eval_share: float, seed: int = 0, system_prompt: str | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, eval): about `eval_share` of the conversations are held out, each whole.

    Conversations that share a first turn stay on one side, also where a third one links them. The
    side depends on `seed` and the conversation's id alone, where a turn is shared on its text.
    Linked conversations that are more than `eval_share` of the prompts are trained on. If that
    leaves none for evaluation, they are split like the others, each by its id, and a line says so.
    Raises UserError where a side would be empty.
    """
    own = [prompt.conversation_id for prompt in prompts]
    names: list[str | None] = [*own]  # None: trained on
    for group in _linked(prompts, system_prompt):
        is_large = len(group) > eval_share * len(prompts)
        name = min(next(contexts(prompts[i], system_prompt)) for i in group)
        for i in group:
            names[i] = None if is_large else name
    limit = eval_share * 2**256
    held_out = [name is not None and int(keyed_hash(seed, name), 16) < limit for name in names]
    if None in names and eval_share > 0 and not any(held_out):
        held_out = [int(keyed_hash(seed, name), 16) < limit for name in own]
        print(
            f"{names.count(None)} of {len(prompts)} prompts are of conversations that share their "
            "first turns: these are held out one by one"
        )
    if eval_share > 0 and (all(held_out) or not any(held_out)):
        side = "evaluation" if not any(held_out) else "training"
        rule = f"leaves none of {len(prompts)} prompts for {side}"
        if len(prompts) > 1 and len(set(own)) == 1:
            rule += f", all of them have the conversation_id {own[0]!r}"
        remedy = "give more prompts, another share, or a set of its own as eval.prompts"
        raise UserError(rule, key="data.eval_share", value=eval_share, remedy=remedy)
    pairs = list(zip(prompts, held_out, strict=True))
    return [p for p, out in pairs if not out], [p for p, out in pairs if out]


def _linked(prompts: Sequence[Prompt], system_prompt: str | None) -> list[list[int]]:
    """The places of the prompts of each group of several conversations that first turns link."""
    parents: dict[str, str] = {}

    def root(node: str) -> str:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = node = parents[parent]
        return node

    for prompt in prompts:
        first = root(f"turn {next(contexts(prompt, system_prompt))}")
        parents[first] = root(f"conversation {prompt.conversation_id}")
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(root(f"conversation {prompt.conversation_id}"), []).append(i)
    return [
        group for group in groups.values() if len({prompts[i].conversation_id for i in group}) > 1
    ]


def held_out_turns(
    train: Sequence[Prompt], held_out: Sequence[Prompt], system_prompt: str | None = None
) -> list[list[bool]]:
    """For each training prompt, whether the context of each of its turns is held out as well."""
    known = {name for prompt in held_out for name in contexts(prompt, system_prompt)}
    return [[name in known for name in contexts(p, system_prompt)] for p in train]


def drop_held_out(
    train: Sequence[Prompt], held_out: Sequence[Prompt], system_prompt: str | None, key: str,
    value: object,
) -> list[Prompt]:  # fmt: skip
    """The training prompts that have a turn whose context is not held out.

    Counts and names the turns that are (`count_left_out`); held-out prompts all stay.
    """
    flags = held_out_turns(train, held_out, system_prompt)
    shared = [
        (question_of(turn), prompt.source)
        for prompt, turns in zip(train, flags, strict=True)
        if any(turns)
        for turn, is_shared in zip(user_turns(prompt), turns, strict=True)
        if is_shared
    ]
    if said := count_left_out(shared, sum(map(len, flags)), key, value):
        print(said)
    return [prompt for prompt, turns in zip(train, flags, strict=True) if not all(turns)]


def question_of(turn: Turn) -> str:
    """The last message of a turn; of token ids how many they are."""
    if isinstance(turn, Rendered):
        return f"{len(turn)} token ids"
    return turn if isinstance(turn, str) else turn[-1]["content"]


def count_left_out(shared: Sequence[tuple[str, str]], total: int, key: str, value: object) -> str:
    """The line that says how many of `total` training turns are left out because their contexts
    are held out as well, and names the commonest; "" where there are none.

    `shared`: the text of each such turn, and where it stands. Raises UserError, which names `key`
    and its `value`, where they are more than half.
    """
    if not shared:
        return ""
    common = Counter(shorten(text) for text, _ in shared).most_common()
    rule = f"{len(shared)} of {total} training turns have a context that is held out as well: "
    rule += ", ".join(f"{text!r} ({count})" for text, count in common[:NAMED])
    if len(common) > NAMED:
        rule += f" and {len(common) - NAMED} more texts"
    rule += f", first in {shared[0][1]}"
    if 2 * len(shared) > total:
        remedy = "remove them from one side, or name other prompts for training or evaluation"
        raise UserError(rule, key=key, value=value, remedy=remedy)
    return f"{rule}; these are not trained on"


# --- prompts that are token ids ------------------------------------------------------------------

Ids = tuple[int, ...]


class HeldOut:
    """Held-out turns, found in prompts that were rendered elsewhere, by their token ids."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None,
        chat_template_kwargs: Mapping[str, Any],
    ):
        self.prompts, self.tokenizer = prompts, tokenizer
        self._options = system_prompt, chat_template_kwargs

    @cached_property
    def _known(self) -> dict[Ids, list[tuple[str, list[Ids]]]]:
        """The turns by the ids in which they end: the text of each, and its earlier messages."""
        known: dict[Ids, list[tuple[str, list[Ids]]]] = {}
        for prompt in self.prompts:
            before, ids, begins = list[Ids](), list[int](), 0
            for number, turn in enumerate(user_turns(prompt)):
                earlier, asked = ids, with_answers(turn, [_ANSWER] * num_answers(turn))
                ids = render(asked, self.tokenizer, *self._options)
                end = question(asked, self.tokenizer, *self._options)
                if number:  # the message as it stands where its answer follows
                    alike = itertools.takewhile(
                        lambda ab: ab[0] == ab[1], zip(earlier, ids, strict=False)
                    )
                    before.append(tuple(a for a, _ in alike)[begins:])
                begins = len(ids) - len(end)
                known.setdefault(tuple(end), []).append((question_of(turn), list(before)))
        return known

    @cached_property
    def _ends(self) -> tuple[set[int], set[int]]:
        """Lengths of the ends, and their first tokens, which tell nearly all apart."""
        # a text that is no conversation may end like another one: ids[-0:] is all of it
        lengths = {len(ids) for ids in self._known} if self.tokenizer.chat_template else {0}
        return lengths, {ids[0] for ids in self._known}

    def asked(self, prompt_ids: Sequence[int]) -> str | None:
        """The last message of the held-out turn in which these ids end; None where it is no such
        turn.

        The system message and the answers before may be others than here. A text without a chat
        template must be the same as a whole.
        """
        ids, (lengths, begin) = tuple(prompt_ids), self._ends
        for length in lengths:
            if length <= len(ids) and ids[-length] in begin:
                for text, before in self._known.get(ids[-length:], ()):
                    if _in_order(before, ids[: len(ids) - length]):
                        return text
        return None


def _in_order(parts: Sequence[Ids], ids: Ids) -> bool:
    """Whether `parts` stand in `ids` one after another."""
    end = 0
    for part in parts:
        places = range(end, len(ids) - len(part) + 1)
        start = next((i for i in places if ids[i : i + len(part)] == part), None)
        if start is None:
            return False
        end = start + len(part)
    return True
