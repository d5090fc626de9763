"""The configuration of a command: its defaults, a recipe's YAML and the command line in one.

A later layer replaces an earlier one: the defaults of the sections, then the recipe's YAML and a
preset's, then `section.key=value` from the command line. OmegaConf is used only here; all other
code receives plain dataclasses. `method.*` is typed by the recipe's own `Config`, `data.*` and
`eval.*` by dataclasses of those rooms. The caller passes them in, so that this room names no method
and no key of another room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.checks import check_values, is_file
from trainer.errors import UserError, excerpt, require
from trainer.redaction import MARK, redacted
from trainer.sections import DEVICE_MAPS as DEVICE_MAPS
from trainer.sections import FREE_SETTINGS as FREE_SETTINGS
from trainer.sections import ModelConfig, RunConfig, Section, TrainerConfig
from trainer.yaml_text import parse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_BYTES = 1 << 18  # of a configuration file, which take seconds to read
FORMAT = 3  # of a run folder; raised when a key, a default or a file gets another meaning


@dataclass
class Config:
    """The resolved configuration of one command. `method` is the recipe's own dataclass; a subclass
    adds the sections of other rooms."""

    recipe: str
    method: Any
    dry_run: bool = False
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    script: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section, values in dataclasses.asdict(self).items():
            check_values(section, values)

    def to_dict(self) -> dict[str, object]:
        """The configuration without its secrets, to be stored, printed and compared."""
        return redacted(dataclasses.asdict(self))

    def settings(self) -> dict[str, object]:
        """The settings that can change a number: without the run folder, how often it saves, and
        secrets."""
        found = json_value(self.to_dict())
        for key in ("dry_run", "script"):
            found.pop(key)
        for name, section in sections(type(self)).items():
            for key in section.FREE:
                found[name].pop(key)
        return found

    def identity(self) -> dict[str, object]:
        """The settings that differ from the schema's defaults, and the schema's number: a new key
        with a default changes no identity."""
        found: dict[str, object] = {"format": FORMAT}
        for section, values in self.settings().items():
            if isinstance(values, dict):
                kind = type(getattr(self, section))
                defaults = json_value(dataclasses.asdict(kind()))
                values = {k: v for k, v in values.items() if v != defaults[k]}
            found[section] = values
        return found

    def hash(self) -> str:
        """The first ten hexadecimal digits of the SHA-256 of `identity()`."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def run_dir(self) -> Path:
        """`run.dir`, or a folder below `runs/` that the identity names."""
        return Path(self.run.dir) if self.run.dir else Path("runs") / f"{self.recipe}-{self.hash()}"


def asks_for_help(arguments: list[str]) -> bool:
    """Whether a command is to explain itself; `help=true` beside a recipe prints its keys."""
    return not arguments or arguments in (["-h"], ["--help"], ["help=true"])


def json_value(table: Mapping[str, object]) -> dict[str, Any]:
    """`table` as JSON reads it back: tuples as lists, keys as text."""
    return json.loads(json.dumps(table))


def suggest(word: str, known: list[str]) -> str:
    """The end of a message that names the closest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


C = TypeVar("C", bound=Config)
S = TypeVar("S", bound="DataclassInstance")


def sections(kind: type[Config]) -> dict[str, type[Section]]:
    """The dataclass of each section of a configuration, without `method`."""
    made = {f.name: f.default_factory for f in dataclasses.fields(kind)}
    return {
        name: section
        for name, section in made.items()
        if isinstance(section, type) and issubclass(section, Section)
    }


def known_keys(schema: Mapping[str, type], script_keys: tuple[str, ...] = ()) -> list[str]:
    """All keys of the command line. `schema`: the dataclass of each section."""
    keys = [f"{name}.{f.name}" for name, kind in schema.items() for f in dataclasses.fields(kind)]
    return ["recipe", "dry_run", *keys, *(f"script.{key}" for key in script_keys)]


def keys_of(schema: Mapping[str, type], declared: str) -> set[str]:
    """The keys whose declared type begins with `declared`."""
    return {
        f"{name}.{f.name}"
        for name, kind in schema.items()
        for f in dataclasses.fields(kind)
        if str(f.type).startswith(declared)
    }


def parse_overrides(
    arguments: list[str],
    known: list[str],
    texts: Collection[str] = (),
) -> dict[str, Any]:
    """Parse `key=value` words to a flat dict of YAML-typed values. `texts`: keys whose value is
    literal text. UserError for unknown keys."""
    flat: dict[str, Any] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"arguments have the form key=value, got {word!r}{suggest(word, known)}"
            )
        if key not in known:
            raise UserError(f"unknown key {key!r}{suggest(key, known)}")
        if key in flat:
            raise UserError(f"key {key!r} is given twice")
        if key in texts:  # as it stands: YAML would make `off` a boolean and `a: b` a mapping
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            flat[key] = None if value in ("", "null") else value[1:-1] if quoted else value
            continue
        flat[key] = _yaml_value(f"{key}: {excerpt(value)} is not a YAML value", value)
        if isinstance(flat[key], str):
            with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-4 as text
                flat[key] = float(flat[key])
    return flat


def _yaml_value(said: str, text: str, remedy: str = "") -> object:
    """`text` as YAML. UserError, which begins with `said`, where it cannot be read."""
    try:
        value = parse(text)
        json.dumps(value, default=str)  # keys that JSON has not
        return value
    except yaml.YAMLError as error:
        reason: object = error
    except RecursionError:
        reason = "nested too deep"
    # a day of no calendar, a number of thousands of digits, a key that is a date
    except (ValueError, TypeError) as error:
        reason = error
    line = f"{said} ({str(reason).splitlines()[0]})"
    raise UserError(f"{line}; {remedy}" if remedy else line)


def compose(
    kind: type[C],
    recipe: str,
    method: type,
    files: Sequence[Path],
    arguments: list[str],
    script_keys: tuple[str, ...] = (),
    reads: Collection[str] | None = None,
    stored: Mapping[str, object] | None = None,
) -> C:
    """The configuration of defaults, the YAML `files` in turn, the values of keys in `stored` and
    `arguments`, after every check that needs no model. UserError for a wrong key or value, and for
    a secret that a stored configuration leaves out; `reads`: the keys and sections whose secrets
    are needed, None for all."""
    schema: dict[str, type] = {**sections(kind), "method": method}
    known = known_keys(schema, script_keys)
    empty = {name: OmegaConf.structured(section) for name, section in schema.items()}
    tree = OmegaConf.create(
        {"recipe": recipe, "dry_run": False, "script": dict.fromkeys(script_keys), **empty}
    )
    OmegaConf.set_struct(tree, True)
    layers = [(str(path), flattened(load_yaml(path), known)) for path in files]
    layers.append(("the stored configuration", dict(stored or {})))
    layers.append(
        (
            "command line",
            parse_overrides(
                [a for a in arguments if not a.startswith("recipe=")],
                known,
                keys_of(schema, "str") | {f"script.{key}" for key in script_keys},
            ),
        )
    )
    texts = keys_of(schema, "list[str]")
    lists = texts | keys_of(schema, "list[float]") | keys_of(schema, "list[int]")
    tables = keys_of(schema, "dict[")
    mappings: dict[str, dict[object, object]] = {}
    for source, flat in layers:
        for key, value in flat.items():
            if key not in known:
                raise UserError(f"{source}: unknown key {key!r}{suggest(key, known)}")
            if key in tables:  # replaced as a whole: no shares of another mix remain
                if not isinstance(value, dict):
                    raise UserError(f"{key} must be a mapping like {{a: 1}}, got {excerpt(value)}")
                mappings[key] = value
                continue
            if key in lists:
                value = _as_list(key, value, key in texts)
            _put(tree, key, value, key)
    plain = _plain(tree)
    for key, mapping in mappings.items():
        section, _, name = key.partition(".")
        plain[section][name] = mapping
    _require_secrets(plain, schema, reads)
    filled = {name: section(**plain[name]) for name, section in schema.items()}
    require(isinstance(plain["dry_run"], bool), "dry_run", "be true or false", plain["dry_run"])
    return kind(recipe=recipe, dry_run=plain["dry_run"], script=plain["script"], **filled)


def _as_list(key: str, value: object, of_text: bool) -> list[object]:
    """`value` as a list, where one item stands for itself and null for none. UserError where it
    holds anything but text, or but numbers."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    if of_text:  # OmegaConf makes "False" of a `no`
        good = all(isinstance(item, str) for item in items)
        require(good, key, "hold text alone, a number in quotes", items)
    else:
        good = not any(isinstance(item, list | dict | bool | None) for item in items)
        require(good, key, "hold numbers alone", items)
    return items


def _put(tree: DictConfig, place: str, value: object, key: str) -> None:
    """Write `value` to its place in a tree, in the type that the tree declares. UserError, by
    `key`, where it has no such form."""
    try:
        OmegaConf.update(tree, place, _literal(value, "${", _DOLLAR))
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0].replace(_DOLLAR, "${")[:200]
        raise UserError(f"{key}: cannot take {excerpt(value)} ({reason})") from error


def _require_secrets(
    plain: Mapping[str, Any], names: Iterable[str], reads: Collection[str] | None
) -> None:
    """UserError for a secret of these sections that a stored configuration leaves out. `reads`: see
    `compose`."""
    for section in names:
        for name, value in plain[section].items():
            key = f"{section}.{name}"
            if MARK in str(value) and (reads is None or section in reads or key in reads):
                raise UserError(
                    f"{key} holds a secret, which a stored configuration leaves out: pass it again "
                    f"on the command line as {key}=..."
                )


def make_settings(kind: type[S], options: Mapping[str, object]) -> S:
    """`kind`, a dataclass of settings, with these values in the types that it declares. Raises
    UserError, by the name of the setting."""
    tree = OmegaConf.structured(kind)
    OmegaConf.set_struct(tree, True)
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in options.items():
        if name not in known:
            raise UserError(f"unknown key 'method.{name}'{suggest(name, known)}")
        _put(tree, name, value, f"method.{name}")
    return kind(**_plain(tree))


def _plain(tree: DictConfig) -> dict[str, Any]:
    """The content of an OmegaConf tree."""
    content = OmegaConf.to_container(tree)
    assert isinstance(content, dict)
    return {str(key): _literal(value, _DOLLAR, "${") for key, value in content.items()}


# in place of "${" while OmegaConf holds a value: it would look the rest up, in the environment too
_DOLLAR = "\ue000{"


def _literal(value: object, old: str, new: str) -> object:
    """`value` with `old` replaced by `new` in all its texts."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_literal(one, old, new) for one in value]
    if isinstance(value, dict):
        return {key: _literal(one, old, new) for key, one in value.items()}
    return value


def load_yaml(path: Path) -> dict[str, Any]:
    """The table in a YAML file. UserError where the file is missing or holds anything else."""
    if not is_file("configuration file", path):
        raise UserError(f"configuration file {path} does not exist")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        require(len(content) <= MOST_BYTES, str(path), f"have at most {MOST_BYTES} bytes", "more")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({str(error).splitlines()[0]})") from error
    loaded = _yaml_value(f"{path} is not YAML", text, "correct it, or name another file")
    if not isinstance(loaded, dict):
        raise UserError(
            f"{path} is damaged: it must hold a table of settings, got {excerpt(loaded)}"
        )
    return loaded


def flattened(
    nested: Mapping[str, object], known: list[str], prefix: str = ""
) -> dict[str, object]:
    """Nested tables as one, with dotted keys; a known key whose value is a table stays whole."""
    flat: dict[str, object] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in known:
            flat |= flattened(value, known, f"{name}.")
        else:
            flat[name] = value
    return flat


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML. `compose` reads it back to the same one if the command
    line gives the secrets again."""
    tree = config.to_dict()
    for key in ("dry_run", "script"):
        tree.pop(key)
    return yaml.safe_dump(tree, sort_keys=False)
