"""Prompts: from the toy, a local file or the Hub to token ids the target is shown.

Three steps. `load_prompts` reads rows of any usual form into `Prompt`s; `split_by_hash` and
`refuse_overlap` keep evaluation apart from training; `user_turns`, `with_answers` and `render`
turn one prompt into the token ids of each assistant turn. Nothing is decided silently: a row that
cannot be read stops the run with its number, and what is dropped (duplicates, empty prompts) is
counted and logged. The file is long because most of it is what users get wrong, each mistake with
its own sentence.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import inspect
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from data import toy
from trainer.checks import excerpt, is_file
from trainer.config import UserError, suggest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, str]  # {"role": system | user | assistant, "content": text}
Turn: TypeAlias = (
    str | list[Message]
)  # what the target answers: plain text or a conversation so far
Row: TypeAlias = tuple[str, dict[str, Any]]  # where it stands ("x.jsonl line 3") and its columns

PROMPT_COLUMNS = ("messages", "conversations", "prompt", "instruction", "question", "text", "turns")
RESPONSE_COLUMNS = ("response", "answer", "output", "completion", "canonical_solution", "code")
FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".txt")
TOY_PROMPTS = 100_000  # its sums never end
_DOMAIN_COLUMNS = ("domain", "category")
_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One row of a source: `text` (used as it is) or `messages` (a conversation), never both.

    `response` is the source's own answer ("human" text); of a conversation its last assistant
    message, the earlier ones stay in `messages`. `source` says where the row stands.
    """

    text: str | None
    messages: tuple[Message, ...] | None
    response: str | None
    domain: str
    source: str
    conversation_id: str

    @cached_property
    def hash(self) -> str:
        """Identity of what the target is shown: system and user messages, never an answer."""
        return _shown_hash(self.messages or self.text or "")


def _shown_hash(content: str | Sequence[Message]) -> str:
    # plain text hashes as its one user message: the two forms of a prompt must not pass for two
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    shown = [[m["role"], m["content"]] for m in content if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def load_prompts(
    source: str,
    *,
    count: int,
    config: str | None = None,
    split: str = "train",
    column: str | None = None,
    response_column: str | None = None,
    seed: int = 0,
    toy_split: str = "train",
) -> list[Prompt]:
    """At most `count` distinct prompts, in the order of the source; all where it has fewer.

    `source`: `toy`, `toy:code+math`, a file (.jsonl .json .parquet .csv .txt, each also .gz) or a
    Hub data set id, to which alone `config` and `split` apply. Rows are chosen by a hash keyed
    with `seed`, so a source that grows keeps most of an earlier choice. The domain of a row is its
    `domain` or `category`, else the name of the file or data set.
    """
    if source == "toy" or source.startswith("toy:"):
        prompts, num_empty = _toy_prompts(source, count, seed, toy_split), 0
    else:
        prompts, num_empty = _row_prompts(source, config, split, column, response_column)
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.hash, prompt)
    if not distinct:
        raise UserError(f"{source} holds no prompt that is not empty; name another file or column")
    chosen = take(list(distinct.values()), count, seed)
    _log.info(
        "%s: %d prompts taken of %d; %d duplicates and %d empty ones dropped",
        source, len(chosen), len(distinct), len(prompts) - len(distinct), num_empty,
    )  # fmt: skip
    return chosen


def take(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` of these, in their order, chosen by a hash keyed with `seed`."""
    taken = set(sorted((p.hash for p in prompts), key=lambda one: _key(seed, one))[:count])
    return [prompt for prompt in prompts if prompt.hash in taken]


def _key(seed: int, identity: str) -> str:
    return hashlib.sha256(f"{seed}:{identity}".encode()).hexdigest()


def _toy_prompts(source: str, count: int, seed: int, split: str) -> list[Prompt]:
    domains = tuple(dict.fromkeys(source[4:].split("+"))) if source != "toy" else toy.DOMAINS
    for domain in domains:
        if domain not in toy.DOMAINS:
            known = ", ".join(toy.DOMAINS)
            raise UserError(f"unknown toy domain {domain!r} in {source!r}; available: {known}")
    if count > TOY_PROMPTS:
        raise UserError(
            f"the toy gives at most {TOY_PROMPTS} prompts, got {count}: lower data.num_prompts or "
            "eval.num_prompts"
        )
    documents = toy.sample(domains, split, count, seed)
    return [
        Prompt(
            text=document.prompt,
            messages=None,
            response=document.response,
            domain=document.domain,
            source=f"toy:{document.domain} {split} row {number}",
            conversation_id=_shown_hash(document.prompt),
        )
        for number, document in enumerate(documents, 1)
    ]


# --- tables: the columns there are, and a reader of the rows with the columns that are needed ----


@dataclass(frozen=True)
class _Table:
    columns: list[str]
    rows: Callable[[list[str]], Iterable[Row]]


def _table(source: str, config: str | None, split: str) -> _Table:
    path = Path(os.path.expanduser(source))
    kind = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if kind not in FILE_KINDS and os.path.isdir(path):
        return _hub_table(source, config, split)
    there = is_file("prompts file", path)
    if kind not in FILE_KINDS and there:
        known = " ".join(FILE_KINDS)
        raise UserError(f"prompts file {source} must end in one of {known}, or in one and .gz")
    if not there and (kind in FILE_KINDS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)):
        raise UserError(f"prompts file {source} does not exist")
    if not there:
        return _hub_table(source, config, split)
    return (_parquet_table if kind == ".parquet" else _text_table)(source, path, kind)


def _read_bytes(source: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"prompts file {source} cannot be read ({_one_line(error)})") from error
    if not content.strip():
        raise UserError(f"prompts file {source} is empty")
    return content


def _text_table(source: str, path: Path, kind: str) -> _Table:
    try:
        # some editors put a byte-order mark before the first line
        text = _read_bytes(source, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"({_one_line(error)}); convert it first"
        raise UserError(f"prompts file {source} is not UTF-8 {reason}") from error
    if kind == ".csv":
        return _csv_table(source, text)
    if kind == ".json":
        rows = _json_rows(source, text)
    else:
        rows = []
        # not splitlines(): it would also split at the line separators of Unicode, inside a prompt
        for number, line in enumerate(io.StringIO(text, newline=None), 1):
            if line.strip():
                where, line = f"{source} line {number}", line.removesuffix("\n")
                rows.append(
                    (where, _json_line(where, line) if kind == ".jsonl" else {"text": line})
                )
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    return _Table(columns, lambda _: rows)


def _json_line(where: str, line: str) -> dict[str, Any]:
    return _object(where, _json(where, line, lambda error: f"{error.msg}: column {error.colno}"))


def _json_rows(source: str, text: str) -> list[Row]:
    remedy = "if each line holds one object, name the file .jsonl"
    loaded = _json(source, text, lambda error: f"{error.msg}: line {error.lineno}", f"; {remedy}")
    if not isinstance(loaded, list):
        raise UserError(f"{source} must hold one JSON list of objects, got {_kind(loaded)}")
    numbered = [(f"{source} row {number}", row) for number, row in enumerate(loaded, 1)]
    return [(where, _object(where, row)) for where, row in numbered]


def _json(
    where: str, text: str, place: Callable[[json.JSONDecodeError], str], remedy: str = ""
) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({place(error)}){remedy}") from error
    except (RecursionError, ValueError) as error:
        long = "holds a whole number of thousands of digits"
        what = "is nested too deep" if isinstance(error, RecursionError) else long
        raise UserError(f"{where} {what}; repair or drop it") from error


def _object(where: str, row: object) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where} must be an object with named columns, got {_kind(row)}")
    return row


def _csv_table(source: str, text: str) -> _Table:
    csv.field_size_limit(2**31 - 1)  # the default refuses prompts beyond 131072 characters
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        for number, row in enumerate(reader, 1):
            if None in row:
                remedy = "quote fields that hold commas"
                raise UserError(f"{source} row {number} has more fields than the header; {remedy}")
            rows.append((f"{source} row {number}", row))
    except csv.Error as error:
        raise UserError(f"{source} row {len(rows) + 1} is not CSV ({error})") from error
    return _Table(list(reader.fieldnames or []), lambda _: rows)


def _parquet_table(source: str, path: Path, kind: str) -> _Table:
    import pyarrow
    import pyarrow.parquet

    # a damaged file shows itself anywhere, and not only by Arrow's own errors
    faults = (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)

    def damaged(error: Exception) -> UserError:
        return UserError(f"{source} is not a Parquet file, or damaged ({_one_line(error)})")

    content = _read_bytes(source, path)
    try:
        file = pyarrow.parquet.ParquetFile(
            pyarrow.BufferReader(content), page_checksum_verification=True
        )
        names = list(file.schema_arrow.names)
    except faults as error:
        raise damaged(error) from error

    def rows(columns: list[str]) -> Iterator[Row]:
        number = 0
        try:
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source} row {number}", row
        except faults as error:
            raise damaged(error) from error

    return _Table(names, rows)


def _hub_table(source: str, config: str | None, split: str) -> _Table:
    import datasets

    try:
        dataset = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # whatever the network layers below raise, the remedy is the same
        raise UserError(
            f"prompts {source!r} are neither toy, nor a file ({' '.join(FILE_KINDS)}), nor a Hub"
            f" data set that loads with config={config} split={split} ({type(error).__name__}:"
            f" {_one_line(error)}); check id, config and split, or download it and name the file"
        ) from error

    def rows(columns: list[str]) -> Iterator[Row]:
        for number, row in enumerate(dataset.select_columns(columns), 1):
            yield f"{source} {split} row {number}", dict(row)

    return _Table(dataset.column_names, rows)


# --- rows to prompts -----------------------------------------------------------------------------


def _row_prompts(
    source: str, config: str | None, split: str, column: str | None, response_column: str | None
) -> tuple[list[Prompt], int]:
    table = _table(source, config, split)
    there = table.columns
    for name in (column, response_column):
        if name is not None and name not in there:
            known = _listed(there) + suggest(name, there)
            raise UserError(f"{source} has no column {excerpt(name)}; columns: {known}")
    column = column or next((name for name in PROMPT_COLUMNS if name in there), None)
    if column is None:
        usual, found = ", ".join(PROMPT_COLUMNS), _listed(there)
        known = f"({usual}); columns: {found}"
        raise UserError(f"{source} has none of the usual columns {known}; set prompts_column")
    guess = next((name for name in RESPONSE_COLUMNS if name in there and name != column), None)
    answer_column = response_column or guess
    also = ("input", "conversation_id", *_DOMAIN_COLUMNS)
    needed = dict.fromkeys(name for name in (column, answer_column, *also) if name in there)
    file_domain = Path(source).name.split(".")[0]
    prompts, num_empty = [], 0
    for where, row in table.rows(list(needed)):
        content = _content(where, row, column)
        if content is None:
            num_empty += 1
            continue
        plain = isinstance(content, str)
        response = _response(where, row, answer_column, required=response_column is not None)
        if not plain and response_column is None and content[-1]["role"] == "assistant":
            response = content[-1]["content"]
        domains = [
            _text(where, repr(name), row[name])
            for name in _DOMAIN_COLUMNS if isinstance(row.get(name), str)
        ]  # fmt: skip
        conversation_id = _shown_hash(content)
        if row.get("conversation_id") is not None:
            conversation_id = _text(where, "'conversation_id'", str(row["conversation_id"]))
        prompts.append(
            Prompt(
                text=content if plain else None,
                messages=None if plain else tuple(content),
                response=response if response and response.strip() else None,
                domain=next(filter(None, domains), file_domain),
                source=where,
                conversation_id=conversation_id,
            )
        )
    return prompts, num_empty


def _content(where: str, row: dict[str, Any], column: str) -> str | list[Message] | None:
    """Plain text or a conversation, told by the form of the value; None where it is empty."""
    if column not in row:
        raise UserError(f"{where} has no column {column!r}; columns: {_listed(row)}")
    value = row[column]
    if isinstance(value, str):
        text = _text(where, repr(column), value)
        if column == "instruction" and row.get("input") is not None:  # as in Alpaca
            extra = _text(where, "'input'", row["input"])
            text = f"{text}\n\n{extra}" if extra.strip() else text
        return text if text.strip() else None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):  # as in MT-bench
        messages = [{"role": "user", "content": _text(where, repr(column), item)} for item in value]
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        messages = _messages(where, value)
    else:
        rule = "text, a list of user turns or a list of messages"
        raise UserError(f"{where}: column {column!r} must hold {rule}, got {_kind(value)}")
    users = [message["content"] for message in messages if message["role"] == "user"]
    return messages if users and all(text.strip() for text in users) else None


def _messages(where: str, items: list[dict[str, Any]]) -> list[Message]:
    """OpenAI's role and content, or ShareGPT's from and value; a blank system message is none."""
    messages: list[Message] = []
    for number, item in enumerate(items, 1):
        role_key, text_key = ("from", "value") if "from" in item else ("role", "content")
        name = item.get(role_key)
        here = f"{where}: message {number}"
        if not isinstance(name, str) or name not in _ROLES:
            known = ", ".join(_ROLES)
            raise UserError(f"{here} has the unknown {role_key} {excerpt(name)}; known: {known}")
        role, text = _ROLES[name], _text(here, repr(text_key), item.get(text_key))
        if role == "system" and number > 1:
            raise UserError(f"{here} is a system message; only the first message may be one")
        if role == "assistant" and not any(message["role"] == "user" for message in messages):
            raise UserError(f"{where}: the first turn must be the user's, got {name!r}; drop it")
        if role != "system" or text.strip():
            messages.append({"role": role, "content": text})
    if items and not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: the conversation has no user turn; drop that row")
    return messages


def _response(where: str, row: dict[str, Any], column: str | None, required: bool) -> str | None:
    value = row.get(column) if column else None
    if isinstance(value, str) or required:
        return _text(where, repr(column), value)
    return None  # a column that only looked like the answers, e.g. a choice number


def _text(where: str, what: str, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {what} must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half an emoji; no tokenizer takes it
        rule = f"holds half of a surrogate pair at character {error.start + 1}"
        raise UserError(f"{where}: {what} {rule}; repair or drop the row") from error
    return value


def _kind(value: object) -> str:
    return f"{type(value).__name__} {_excerpt(repr(value))}" if value is not None else "nothing"


def _listed(names: Iterable[str]) -> str:
    return _excerpt(", ".join(names), 300) or "none"


def _excerpt(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _one_line(error: Exception) -> str:
    return _excerpt(str(error), 200)


# --- training apart from evaluation --------------------------------------------------------------


def split_by_hash(
    prompts: Sequence[Prompt], eval_share: float, seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, eval); about `eval_share` of the conversations are held out, each whole.

    A conversation's side depends on `seed` and its id alone, not on its neighbours.
    """
    limit = eval_share * 2**256
    held_out = [int(_key(seed, prompt.conversation_id), 16) < limit for prompt in prompts]
    if eval_share > 0 and (all(held_out) or not any(held_out)):
        side = "evaluation" if not any(held_out) else "training"
        raise UserError(
            f"data.eval_share={eval_share} of {len(prompts)} prompts leaves none for {side};"
            " give more prompts, another share, or a set of its own as eval.prompts"
        )
    pairs = list(zip(prompts, held_out, strict=True))
    return [p for p, out in pairs if not out], [p for p, out in pairs if out]


def refuse_overlap(train: Iterable[Prompt], evaluation: Iterable[Prompt]) -> None:
    """Stop if any evaluation prompt, whatever its file or form, is also a training prompt."""
    # every turn is a context of its own: a conversation may begin with another's whole prompt
    trained = {_shown_hash(turn): prompt for prompt in train for turn in user_turns(prompt)}
    shared = {
        identity: prompt
        for prompt in evaluation
        for identity in map(_shown_hash, user_turns(prompt))
        if identity in trained
    }
    if shared:
        identity, first = next(iter(shared.items()))
        turn = next(user_turns(first))
        shown = turn if isinstance(turn, str) else turn[-1]["content"]
        raise UserError(
            f"DataLeakError: {len({p.hash for p in shared.values()})} evaluation prompts are "
            "also training prompts, first:"
            f" {_excerpt(shown)!r} ({first.source} and {trained[identity].source});"
            " remove them from one side or name another eval.prompts"
        )


# --- prompts to token ids ------------------------------------------------------------------------


def user_turns(prompt: Prompt) -> Iterator[Turn]:
    """What the target answers, turn by turn: the text, or the conversation up to each user message.

    The source's assistant messages are left out: the target's own answers take their place
    (`with_answers`), since a drafter must learn the contexts that the target really produces.
    """
    if prompt.messages is None:
        yield prompt.text or ""
        return
    so_far: list[Message] = []
    for message in prompt.messages:
        if message["role"] == "assistant":
            continue
        so_far.append(dict(message))
        if message["role"] == "user":
            yield [dict(kept) for kept in so_far]


def with_answers(turn: Turn, answers: Sequence[str]) -> Turn:
    """`turn` of `user_turns` with the target's answers to its earlier user messages put between."""
    if isinstance(turn, str):
        if answers:
            raise ValueError(f"plain text has no earlier turn, got {len(answers)} answers")
        return turn
    if sum(message["role"] == "user" for message in turn) != len(answers) + 1:
        raise ValueError(f"need one answer per user message but the last, got {len(answers)}")
    remaining = iter(answers)
    woven: list[Message] = []
    for message in turn:
        if woven and woven[-1]["role"] == "user":
            woven.append({"role": "assistant", "content": next(remaining)})
        woven.append(dict(message))
    return woven


def render(
    turn: Turn,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids the target is shown before it answers.

    With a chat template: the conversation (plain text is one user message) up to the start of the
    answer; `system_prompt` goes first unless the conversation brings its own. Without one: plain
    text as the tokenizer encodes it; a conversation and options of a template are refused.
    """
    options = chat_template_kwargs or {}
    if not tokenizer.chat_template:
        return _render_plain(turn, tokenizer, system_prompt, options)
    messages = [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
    system = system_prompt if messages[0]["role"] != "system" else None
    return _render_chat(messages, tokenizer, system, options)


def _render_plain(
    turn: Turn, tokenizer: Any, system_prompt: str | None, options: dict[str, Any]
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
    ids = tokenizer(turn).input_ids
    # a text that spells its BOS out, from a tokenizer that adds one
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _render_chat(
    messages: list[Message], tokenizer: Any, system_prompt: str | None, options: dict[str, Any]
) -> list[int]:
    import jinja2

    _check_template_options(tokenizer, options)
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    options = {**options, "add_generation_prompt": True}
    try:
        if system_prompt:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            if system_prompt.strip() not in text:
                rule = "the target's chat template drops the system message"
                raise UserError(f"{rule}; remedy: remove data.system_prompt")
        # return_dict: transformers 5 returns a dictionary by default. The template writes the
        # special tokens itself and none are added after it, so there is no second BOS.
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    except jinja2.TemplateError as error:
        roles = " ".join(message["role"] for message in messages)
        raise UserError(
            f"the target's chat template refuses the conversation [{roles}] ({_one_line(error)});"
            " remedy: prompts or data.system_prompt that it accepts"
        ) from error


def _check_template_options(tokenizer: Any, options: dict[str, Any]) -> None:
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


def fixed_response_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The source's own answer as token ids, EOS at the end; None where a single turn has none.

    None also for several turns: there the answer belongs to a context the target never wrote.
    """
    if prompt.response is None or sum(1 for _ in user_turns(prompt)) > 1:
        return None
    eos: Any = tokenizer.eos_token_id
    if eos is None:
        raise UserError(
            "the target's tokenizer has no EOS token, in which fixed responses must end;"
            " remedy: set its eos_token"
        )
    ids: Any = tokenizer(prompt.response, add_special_tokens=False).input_ids
    return [*ids, eos]
