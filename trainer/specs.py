"""Named specs: `name[:value...][,key=value...]`, such as `dynamic:60:7` or `typical,delta=0.4`.

Tree shapes, verifiers, length policies and training-free drafters are named this way. Each folder
of them has a table from names to dataclasses. The values are the fields of the dataclass, in their
order or by name, of the types int, float, bool or str; its `__post_init__` checks their ranges.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeVar

from trainer.config import suggest
from trainer.errors import UserError, excerpt, require


class Named(Protocol):
    """A dataclass with a name, which is its key in a table."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]
    name: ClassVar[str]


T = TypeVar("T", bound=Named)


def parse(key: str, text: str, table: Mapping[str, type[T]]) -> T:
    """The object that `text`, the value of `key`, names. Raises UserError with key, value, rule and
    the names in `table`."""
    head, *by_name = text.split(",")
    name, *by_place = head.split(":")
    kind = table.get(name)
    if kind is None:
        close = suggest(name, list(table))
        raise UserError(f"{key} must {choices(table)}, got {excerpt(text)}{close}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    places = [name for name, field in fields.items() if not field.kw_only]
    given = dict(zip(places, by_place, strict=False))
    for word in by_name:
        parameter, equals, value = word.partition("=")
        twice = parameter in given
        require(bool(equals) and not twice, key, f"be {form(kind)}, each value once", text)
        given[parameter] = value
    missing = [name for name, one in fields.items() if _required(one) and name not in given]
    good = len(by_place) <= len(places) and given.keys() <= fields.keys() and not missing
    require(good, key, f"be {form(kind)}", text)
    try:
        return kind(**{name: _read(fields[name], value) for name, value in given.items()})
    except UserError as error:
        raise UserError(f"{key}={excerpt(text)}: {error}") from error


def spelled(named: Named) -> str:
    """The shortest text that `parse` reads as this object."""
    fields = [field for field in dataclasses.fields(named) if field.init]
    values = {field.name: getattr(named, field.name) for field in fields}
    places = [field for field in fields if not field.kw_only]
    while places and values[places[-1].name] == places[-1].default:
        places.pop()
    by_place = [_written(values[field.name]) for field in places]
    if any(":" in value for value in by_place):  # a path, say
        by_place, places = [], []
    text = ":".join([named.name, *by_place])
    for field in fields:
        if field not in places and values[field.name] != field.default:
            text += f",{field.name}={_written(values[field.name])}"
    return text


def choices(table: Mapping[str, type[T]]) -> str:
    """The rule of a spec of this table: "be one of" the forms."""
    return f"be one of {', '.join(map(form, table.values()))}"


def form(kind: type[Named]) -> str:
    """The form of a spec of this class with its parameters, such as `dynamic:<size>[:<top>]`."""
    text = kind.name
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.kw_only is True):
        if field.init and field.kw_only:
            text += f"[,{field.name}=<{field.name}>]"
        elif field.init:
            text += f":<{field.name}>" if _required(field) else f"[:<{field.name}>]"
    return text


def _required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING


def _read(field: dataclasses.Field[object], text: str) -> bool | float | str:
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    if kind == "int":
        good = re.fullmatch(r"-?\d{1,12}", text) is not None
        require(good, field.name, "be a whole number of at most twelve digits", text)
        return int(text)
    if kind == "float":
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        require(math.isfinite(value), field.name, "be a number", text)
        return value
    if kind == "bool":
        require(text in ("true", "false"), field.name, "be true or false", text)
        return text == "true"
    assert kind == "str", f"specs hold int, float, bool and str, {field.name} is declared {kind}"
    return text


def _written(value: bool | float | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
