"""Answers to read: a few held-out prompts, and what each round of decoding drafted and emitted.

A report holds them as text, decoded once, so that its page needs no tokenizer:

    "readings": [{"prompt", "prompt_hash", "domain", "answers": [
        {"drafter", "temperature", "draft", "num_tokens", "num_rounds", "finish_reason", "first",
         "rounds": [{"tokens", "accepted", "last", "drafted", "rejected": [
             {"depth", "tokens"}]}]}]}]

`first` is the token of the prefill, which belongs to no round. The first `accepted` of a round's
`tokens` were drafted; `last` says what the token after them is: "correction" where a draft was
rejected, "bonus" where none was, null where the answer ended before it. `rejected` are the drafts
that were not accepted: of a chain all from the rejected one on, of a tree the siblings along the
accepted path. `num_tokens` and `num_rounds` are of the whole answer, of which `rounds` may hold the
beginning only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from eval.rounds import Round, RoundIds
from eval.row import Json
from trainer.errors import UserError
from trainer.redaction import leaks

NUM_PROMPTS = 3
MOST_TOKENS = 240  # of an answer, and about as many of its prompt
MOST_CHARACTERS = 1200
CONTEXT = 6  # tokens decoded before one, so that its spaces and bytes come out right
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4  # bytes of UTF-8, and so tokens
SHAPE = {"prompt": str, "prompt_hash": str, "domain": str, "answers": list}
ANSWER = {"drafter": str, "temperature": (int, float), "draft": str, "num_tokens": int,
          "num_rounds": int, "finish_reason": str, "first": str, "rounds": list}  # fmt: skip
ROUND = {"tokens": list, "accepted": int, "last": (str, type(None)), "drafted": int,
         "rejected": list}  # fmt: skip
BRANCH = {"depth": int, "tokens": list}


class Tokenizer(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


def token_texts(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """The text that each of `ids` adds to that of `before`.

    A character whose bytes are spread over several tokens is the text of the last of them; the text
    of the others is empty.
    """

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    window = list(before)[-CONTEXT:]
    known = text(window).rstrip(UNKNOWN)
    found, held = list[str](), 0
    for place, token in enumerate(ids, start=1):
        window.append(token)
        whole = text(window)
        if whole.endswith(UNKNOWN) and held < LONGEST_CHARACTER - 1 and place < len(ids):
            found.append("")
            held += 1
            continue
        found.append(whole[len(known) :] if whole.startswith(known) else text([token]))
        held, window = 0, window[-CONTEXT:]
        known = text(window)
    return found


def answer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    rounds: Sequence[Round],
    about: Json,
) -> Json:
    """An answer as the report stores it, from its rounds with token ids.

    `about`: drafter, temperature, draft and finish_reason.
    """
    texts = token_texts(tokenizer, response_ids[:MOST_TOKENS], prompt_ids)
    begin, shown = 1, list[Json]()
    for one in rounds:
        assert one.ids is not None, "the rounds of an answer that is shown keep their token ids"
        end = begin + one.emitted
        if end > len(texts):
            break
        before = [*prompt_ids, *response_ids[:begin]]
        shown.append(
            {
                "tokens": texts[begin:end],
                "accepted": one.accepted,
                "last": _last(one),
                "drafted": one.submitted,
                "rejected": _rejected(tokenizer, one, one.ids, before),
            }
        )
        begin = end
    return {
        **about,
        "num_tokens": len(response_ids),
        "num_rounds": len(rounds),
        "first": texts[0],
        "rounds": shown,
    }


def _last(one: Round) -> str | None:
    if one.accepted == one.emitted:
        return None
    return "correction" if one.rejected else "bonus"


def _rejected(tokenizer: Tokenizer, one: Round, ids: RoundIds, before: list[int]) -> list[Json]:
    accepted = ids.emitted[: one.accepted]
    if ids.parents is None or ids.path is None:
        rest = ids.drafted[one.accepted :] if one.rejected else []
        tokens = token_texts(tokenizer, rest, [*before, *accepted])
        return [{"depth": one.accepted + 1, "tokens": tokens}] if rest else []
    found: list[Json] = []
    path = [-1, *ids.path[: one.accepted]]
    # past the end of an answer that was cut nothing was decided
    for depth, node in enumerate(path if one.rejected else path[:-1], start=1):
        taken = path[depth] if depth < len(path) else None
        for child, parent in enumerate(ids.parents):
            if parent == node and child != taken:
                prefix = [*before, *accepted[: depth - 1]]
                tokens = token_texts(tokenizer, [ids.drafted[child]], prefix)
                found.append({"depth": depth, "tokens": tokens})
    return found


def reading(prompt: str, prompt_hash: str, domain: str, answers: list[Json]) -> Json | None:
    """A prompt with its answers; None where their text looks like a secret or a private path.

    Split into tokens, such text would pass every later check.
    """
    prompt = prompt.encode("utf-8", "replace").decode()  # lone surrogates cannot be written
    texts = [prompt]
    for one in answers:
        texts.append(one["first"] + "".join(t for r in one["rounds"] for t in r["tokens"]))
        texts += ["".join(b["tokens"]) for r in one["rounds"] for b in r["rejected"]]
    if any(True for text in texts for _ in leaks(text)):
        return None
    if len(prompt) > MOST_CHARACTERS:
        prompt = prompt[:MOST_CHARACTERS].rstrip() + " …"
    return {"prompt": prompt, "prompt_hash": prompt_hash, "domain": domain, "answers": answers}


def check_readings(readings: object, source: str) -> None:
    """Raise UserError unless `readings` have the form described at the top of this file."""
    for where, one in _each(readings, SHAPE, source, "readings"):
        for where_answer, of in _each(one["answers"], ANSWER, source, f"{where}.answers"):
            for place, turn in _each(of["rounds"], ROUND, source, f"{where_answer}.rounds"):
                _check_texts(turn["tokens"], source, f"{place}.tokens")
                accepted, emitted, last = turn["accepted"], len(turn["tokens"]), turn["last"]
                if not 0 <= accepted <= emitted or emitted - accepted != (last is not None):
                    raise UserError(
                        f"{source}: {place}: {accepted} accepted of {emitted} tokens and last "
                        f"{last!r} do not fit"
                    )
                if last not in ("correction", "bonus", None):
                    raise UserError(
                        f"{source}: {place}.last must be correction, bonus or null, got {last!r}"
                    )
                for branch_at, branch in _each(
                    turn["rejected"], BRANCH, source, f"{place}.rejected"
                ):
                    _check_texts(branch["tokens"], source, f"{branch_at}.tokens")


def _each(
    rows: object, shape: Mapping[str, type | tuple[type, ...]], source: str, where: str
) -> list[tuple[str, Json]]:
    """The place and content of each row; UserError where one lacks a key or has another type."""
    if not isinstance(rows, list):
        raise UserError(f"{source}: {where} must be a list, got {rows!r}")
    found = list[tuple[str, Json]]()
    for index, row in enumerate(rows):
        place = f"{where}[{index}]"
        if not isinstance(row, dict):
            raise UserError(f"{source}: {place} must be a dict, got {row!r}")
        for key, kinds in shape.items():
            if not isinstance(row.get(key), kinds) or isinstance(row.get(key), bool):
                raise UserError(f"{source}: {place}.{key} is missing or wrong: {row.get(key)!r}")
        found.append((place, row))
    return found


def _check_texts(texts: Sequence[object], source: str, where: str) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{source}: {where} must be texts, got {texts!r}")
