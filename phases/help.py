"""The meaning of every key of the configuration, for `help=true` and for docs/config.md.

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

from eval.report.render import escape_markdown
from eval.row import Acceptance, Row, Timing
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
        found.append(KeyHelp(f"{section}.{field.name}", _shown(value), rules, meaning))
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


def _shown(value: object) -> str:
    """Write a value as on a command line, where one text or number is a list of one."""
    match value:
        case [str() | float() as only]:
            return _shown(only)
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


# --- pages ---------------------------------------------------------------------------------------


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
    lines = [f"recipe={config.recipe}: {_first_line(module)}"]
    for section, settings in sections(config):
        for key in keys_of(section, settings):
            lines += ["", f"{key.name}={key.default}"]
            text = f"{key.meaning} ({key.allowed})"
            lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)


def config_page() -> str:
    """Write the text of docs/config.md."""
    parts = [PREFACE]
    names = base.names()
    for section, settings in sections(composed(names[0])):
        if section != "method":
            parts += [f"## {section}", _table(keys_of(section, type(settings)()))]
    for name in names:
        module, _ = base.load(name)
        config = composed(name)
        parts += [
            f"## recipe={name}",
            f"{escape_markdown(_first_line(module))} See [recipes/{name}.md](recipes/{name}.md).",
        ]
        if changed := _changed(config):
            parts.append(f"`recipes/{name}.yaml` sets {', '.join(changed)}.")
        for preset in base.presets(name):
            changed = _changed(composed(name, preset), config)
            parts.append(f"`preset={preset}` sets {', '.join(changed)}.")
        parts.append(_table(keys_of("method", type(config.method)())))
    return "\n\n".join(parts) + "\n"


def rows_page() -> str:
    """Write the text of docs/rows.md."""
    parts, meanings = [ROWS_PREFACE], comments(Row)
    for kind, words in ROW_PARTS.items():
        own = [f for f in dataclasses.fields(kind) if f.name in kind.__annotations__]
        lines = [
            f"| `{field.name}` | {_type_words(str(field.type))} | "
            f"{escape_markdown(meanings.get(field.name, ''))} |"
            for field in own
            if not field.name.endswith("_ci95")
        ]
        parts += [f"## {words}", "\n".join(["| key | type | meaning |", RULE, *lines])]
    return "\n\n".join(parts) + "\n"


def _type_words(declared: str) -> str:
    """`list[float | None] | None` in words: what JSON holds."""
    kind, null = declared.removesuffix(" | None"), "; or null" * declared.endswith(" | None")
    if kind.startswith("Literal"):
        return " or ".join(re.findall(r"\w+", kind)[1:]) + null
    if kind == "int | float":
        kind = "float"
    outer, _, inner = kind.partition("[")
    words = TYPES.get(outer, "mapping")
    if outer in ("list", "Sequence"):
        numbers = "int" in inner or "float" in inner
        words = f"list of {'numbers' if numbers else 'mappings'}"
    return words + null


def _changed(config: Config, base: Config | None = None) -> list[str]:
    """List `key=value` of the keys that differ from `base`, else from the schema's defaults."""
    words = []
    for section, settings in sections(config):
        plain = getattr(base, section) if base else type(settings)()
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if value != getattr(plain, field.name):
                words.append(f"`{section}.{field.name}={_shown(value)}`")
    return words


def _table(keys: list[KeyHelp]) -> str:
    rows = [
        f"| `{key.name}` | `{key.default}` | {escape_markdown(key.allowed)} | "
        f"{escape_markdown(key.meaning)} |"
        for key in keys
    ]
    return "\n".join(["| key | default | allowed | meaning |", "| --- | --- | --- | --- |", *rows])


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


RULE = "| --- | --- | --- |"
ROW_PARTS = {Row: "The measurement and its cost", Acceptance: "Acceptance", Timing: "Timing"}
ROWS_PREFACE = """\
# Rows of a report

<!-- written by `python -m scripts.config_page`: edit the comments at the fields instead -->

`results` of `report.json` is a list of rows, each a mapping of the keys below: a drafter on a set
of prompts at one temperature, with one shape of draft. A value is null where it was not measured or
has no meaning. `tokens_per_round`, `accepted_per_round`, `draft_acceptance_rate`, `alpha`,
`alpha_hat`, `greedy_match` and `speedup` each have an interval beside them, `<key>_ci95`: [lower,
upper], 95 %, bootstrapped over prompts, null below two of them. [metrics.md](metrics.md) defines
the numbers. A reader should pass over keys that it does not know: later versions may add some."""
PREFACE = """\
# Configuration

<!-- written by `python -m scripts.config_page`: edit the comments at the fields instead -->

Every command takes `section.key=value` words. A value comes from the first of these places that has
one: the command line, the preset, `recipes/<name>.yaml`, the defaults below. An unknown key is
refused with the closest known one, and so is a key that the command does not read. `python train.py
recipe=eagle3 help=true` prints the keys of one recipe with the values that the recipe gives them.

A value is written as in YAML: `trainer.lr=5e-5`, `eval.temperatures=[0,1]`, `model.drafter=null`,
`'method.data_mix={target: 0.5, draft: 0.5}'`. Numbers must fit into float32. Five keys stand
outside of the sections: `recipe` names the method, `preset=published` takes the setting of its
paper, for targets of several billion parameters (name your own target and prompts beside it),
`config=runs/x/config.yaml` takes both from a run ([reports.md](reports.md)), `dry_run=true` prints
the resolved configuration with the size of the text that the run would write and stops, `help=true`
prints the keys of the recipe. The keys of a script, `script.*`, are explained by the script itself:
run it without arguments or see the top of its file.

A batch is `trainer.batch_size` rows times `trainer.gradient_accumulation_steps` times the number of
processes. Most published settings are for 4 or 8 GPUs, which `recipes/<name>.published.yaml` says
beside its batch size: on fewer, raise the accumulation by as much. `preset=laptop` is for
SmolLM2-135M-Instruct on two cores: run `python -m scripts.get_smollm2` first, and name chat
prompts, since its own are the toy's (`data.prompts=questions` needs no download). The states that
heads are trained on take more disk than the text; the run prints how much before it writes them."""
