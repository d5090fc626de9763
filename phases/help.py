"""The meaning of every key of the configuration, for `help=true` and for its page.

All of it is read from the code that it describes: the meaning of a key is the comment at its field,
the default and the rules are the field's (`trainer/keys.py`).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from recipes import base
from recipes.common.config import Config, compose
from trainer.keys import rules_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ORDER = ("method", "run", "model", "data", "trainer", "eval")
TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false",
         "list": "list", "dict": "mapping"}  # fmt: skip


@dataclass(frozen=True)
class KeyHelp:
    """The help of one key. `name`: the key with its section; `default`, `allowed`, `meaning`: the
    words that are shown."""

    name: str
    default: str
    allowed: str
    meaning: str


def keys_of(section: str, settings: DataclassInstance) -> list[KeyHelp]:
    """List the keys of `settings`, a dataclass of that section. Where a recipe's YAML changes a
    default, its value is shown."""
    plain, found = type(settings)(), []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value == getattr(plain, field.name) and (default := _default(field)) != "":
            value = (
                default  # a check may have filled it in; an empty text stands for what it is then
            )
        meaning = comments(type(settings)).get(field.name, "")
        rules = _rules(type(settings), field)
        found.append(KeyHelp(f"{section}.{field.name}", shown(value), rules, meaning))
    return found


def comments(kind: type) -> dict[str, str]:
    """Read the comments at the fields of a dataclass, by field: the lines right above a field and
    the one behind it. A field without a comment has that of the class that it is inherited from."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(cls))
        lines: dict[int, str] = {}
        alone: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0]] = token.string.removeprefix("#").strip()
                if token.line.strip().startswith("#"):
                    alone.add(token.start[0])
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                last = node.end_lineno or node.lineno
                text = " ".join(lines[at] for at in range(first, last + 1) if at in lines)
                if text:
                    found[node.target.id] = text
    return found


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def shown(value: object) -> str:
    """Write a value as on a command line, where one text or number is a list of one."""
    match value:
        case [str() | float() as only]:
            return shown(only)
    return value if isinstance(value, str) else json.dumps(value)


def _rules(kind: type[DataclassInstance], field: dataclasses.Field[object]) -> str:
    """Describe the allowed values of a key: its type, and its rules."""
    declared = str(field.type)
    plain, optional = declared.removesuffix(" | None"), declared.endswith(" | None")
    rules = [rule.words for rule in rules_of(kind).get(field.name, ())]
    choices = [rule.removeprefix("be one of ") for rule in rules if rule.startswith("be one of ")]
    if choices:
        text = _shared_options_once(choices[0])
    else:
        words = TYPES.get(plain.partition("[")[0], "any")
        if "[" in plain:
            inner = re.findall(r"\w+", plain)[-1]
            words += f" of {TYPES.get(inner, 'any value')}" + "s" * (inner in ("int", "float"))
        rules = [rule.removeprefix("be ").removeprefix("lie ") for rule in rules]
        # a rule for a text implies that it is one
        text = "; ".join(rules if plain == "str" and rules else [words, *rules])
    return text if not optional or "null" in text else f"{text}; or null"


def _shared_options_once(choices: str) -> str:
    """Move the options that all `choices` have, such as `[,temperature=<t>]`, behind them."""
    options = re.findall(r"\[,[^]]*\]", choices)
    number = re.sub(r"\[,[^]]*\]", "", choices).count(", ") + 1
    shared = [one for one in dict.fromkeys(options) if options.count(one) == number > 1]
    for one in shared:
        choices = choices.replace(one, "")
    return f"{choices}; each with {''.join(shared)}" if shared else choices


def sections(config: Config) -> Iterator[tuple[str, DataclassInstance]]:
    """Yield (name, settings) of every section, the recipe's own first."""
    for name in ORDER:
        yield name, getattr(config, name)


def composed(recipe: str, preset: str | None = None) -> Config:
    """Compose the configuration of a recipe and a preset without any further word."""
    module, files = base.load(recipe, preset)
    return compose(recipe, module.Config, files, [])


def recipe_help(config: Config, width: int = 100) -> str:
    """List every key of one recipe, for a terminal: its value, its meaning, and what is allowed."""
    module, _ = base.load(config.recipe)
    lines = [f"recipe={config.recipe}: {first_line(module)}"]
    for section, settings in sections(config):
        for key in keys_of(section, settings):
            lines += ["", f"{key.name}={key.default}"]
            text = f"{key.meaning} ({key.allowed})"
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)


def first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]
