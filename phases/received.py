"""The config.yaml of a run as the start of a new command: `train.py config=<run>/config.yaml`.

The folder may come from somebody else. Numbers and names are taken from it. What belongs to the
machine that it was written on is not, nor is permission to run code: `Section.HERE` and
`Section.NAMES` say which keys those are, and they are printed as the words to add.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from recipes import base
from recipes.common.config import Config, compose
from trainer.checks import is_path
from trainer.config import (
    flattened,
    json_value,
    known_keys,
    load_yaml,
    sections,
    suggest,
)
from trainer.errors import UserError
from trainer.redaction import redacted
from trainer.sections import Section

WORD_CHARACTERS = 2000  # of the longest word that is printed


def resolve(arguments: Sequence[str]) -> tuple[Config, ModuleType]:
    """Compose the configuration of a command with `config=<file>`; return it with the recipe's
    module. Prints the keys of the file that are not taken; UserError where the command would do
    something else without them, or where the file is no configuration of a run."""
    given = [word.partition("=") for word in arguments]
    paths = [Path(value) for key, _, value in given if key == "config"]
    if len(paths) > 1:
        raise UserError("is given twice", key="config", remedy="name one file")
    for word in arguments:
        if word.startswith(("recipe=", "preset=")):
            raise UserError(
                "names the recipe and its settings",
                key="config",
                value=str(paths[0]),
                remedy=f"leave out {word}, or config=",
            )
    path, words = paths[0], [word for word in arguments if not word.startswith("config=")]
    recipe, module, files, stored = read(path)
    keys = {key for key, _, _ in given}
    usual = json_value(compose(recipe, module.Config, files, []).to_dict())
    schema = {**sections(Config), "method": module.Config}
    taken, left = divided(stored, usual, schema, keys)
    needed = [key for key in left if key in _of(schema, "NEEDED")]
    listed = " ".join(_word(key, left[key]) for key in sorted(left, key=lambda k: k not in needed))
    if needed:
        raise UserError(
            f"its {', '.join(needed)} {'is' if len(needed) == 1 else 'are'} of the machine that it "
            "was written on, and not taken from it",
            key="config",
            value=str(path),
            remedy=f"add {listed}, or other values of these keys",
        )
    if left and os.environ.get("RANK", "0") == "0":
        print(f"config={path}: not taken from it, add these words to use them: {listed}")
    return compose(recipe, module.Config, files, words, stored=taken), module


def read(path: Path) -> tuple[str, ModuleType, list[Path], dict[str, object]]:
    """Read a stored configuration: its recipe, with module and YAML files, and its settings by key.
    UserError for another recipe or key than those of this version."""
    table = load_yaml(path)
    recipe = table.pop("recipe", None)
    if not isinstance(recipe, str):
        raise UserError(
            "names no recipe: it is damaged, or no configuration of a run",
            key="config",
            value=str(path),
            remedy="name the config.yaml in the folder of a run",
        )
    module, files = base.load(recipe)
    schema = {**sections(Config), "method": module.Config}
    for name in schema.keys() & table.keys():
        if not isinstance(table[name], dict):
            raise UserError("must be a table of settings", key=f"{path}: {name}", value=table[name])
    known = known_keys(schema)
    stored = flattened(table, known)
    for key in stored:
        if key not in known or key == "dry_run":
            raise UserError(
                f"holds the unknown key {key!r}{suggest(key, known)}",
                key="config",
                value=str(path),
                remedy="remove that line",
            )
    return recipe, module, files, stored


def divided(
    stored: Mapping[str, object],
    usual: Mapping[str, Mapping[str, object]],
    schema: Mapping[str, type],
    given: set[str],
) -> tuple[dict[str, object], dict[str, object]]:
    """(values that are taken, values that are not and would change something), by key. `usual`: the
    recipe's values by section, `given`: the keys of the command line."""
    here, names = (_of(schema, kind) for kind in ("HERE", "NAMES"))
    taken, left = dict[str, object](), dict[str, object]()
    for key, value in stored.items():
        section, _, name = key.partition(".")
        if key in given or any(key.startswith(f"{one}_") for one in names & given):
            continue  # such as the revision of another target
        if key not in here and not (key in names and names_place(value)):
            taken[key] = value
        elif value != usual[section][name]:
            left[key] = value
    return taken, left


def names_place(value: object) -> bool:
    """Whether a value holds a path or an address, also one behind a `=`, as in `static,file=x`."""
    if isinstance(value, Mapping | list):
        return any(map(names_place, value))
    if not isinstance(value, str):
        return False
    name = value.partition("#")[0]  # of a corpus with options
    return "://" in name or "file=" in name or is_path(name) or os.path.lexists(name)


def _of(schema: Mapping[str, type], kind: str) -> set[str]:
    found: set[str] = set()
    for name, section in schema.items():
        if issubclass(section, Section):
            found |= {f"{name}.{key}" for key in getattr(section, kind)}
    return found


def _word(key: str, value: object) -> str:
    """`key=value`, quoted for a shell."""
    value = redacted({key: value})[key]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > WORD_CHARACTERS or not text.isprintable():
        return f"{key}=..."
    return shlex.quote(f"{key}={text}")
