"""Rules of settings, which stand at their fields: `lr: float = key(1e-3, gt=0)`.

The comment at a field says what the key means. Rules about several keys are in the `__post_init__`
of their section.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """What a value must do. `words` follow "must"; `holds`: whether a value does so, None where
    the section's `__post_init__` checks it; `names`: those that it may be one of."""

    words: str
    holds: Callable[[Any], bool] | None = None
    names: Collection[str | None] = ()


def key(
    default: T,
    *rules: Rule,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    one_of: Collection[str | None] = (),
    note: str = "",
) -> T:
    """The field of a setting, with its default and rules. Bounds hold for each item of a list; null
    is allowed where the field's type has it. `note`: stands behind the bounds, in brackets."""
    found = [*rules]
    if one_of:
        words = ", ".join(one or "null" for one in one_of)
        found.append(Rule(f"be one of {words}", one_of.__contains__, one_of))
    bounds = Bounds(gt, ge, lt, le)
    if bounds != Bounds():
        words = bounds.words(whole=not isinstance(default, float))
        found.append(Rule(f"{words} ({note})" if note else words, bounds.hold))
    metadata = {"rules": tuple(found)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return dataclasses.field(default=default, metadata=metadata)


def rules_of(kind: type[DataclassInstance]) -> dict[str, tuple[Rule, ...]]:
    """The rules of each field. A field with another default than its parent's keeps its rules."""
    found: dict[str, tuple[Rule, ...]] = {}
    for cls in reversed(kind.__mro__):
        for name, field in cls.__dict__.get("__dataclass_fields__", {}).items():
            if rules := field.metadata.get("rules"):
                found[name] = rules
    return found


def check_rules(section: str, settings: DataclassInstance) -> None:
    """UserError for the first value that breaks a rule of its field."""
    for name, rules in rules_of(type(settings)).items():
        value = getattr(settings, name)
        for rule in rules if value is not None else ():
            if rule.holds is None or rule.holds(value):
                continue
            close = difflib.get_close_matches(str(value), [*filter(None, rule.names)], n=1)
            remedy = f"did you mean {close[0]!r}?" if close else ""
            raise UserError(
                f"must {rule.words}", key=f"{section}.{name}", value=value, remedy=remedy
            )


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, or of each number of a list."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def hold(self, value: float | list[float]) -> bool:
        return all(
            (self.gt is None or one > self.gt) and (self.ge is None or one >= self.ge)
            and (self.lt is None or one < self.lt) and (self.le is None or one <= self.le)
            for one in (value if isinstance(value, list) else [value])
        )  # fmt: skip

    def words(self, whole: bool) -> str:
        """The rule in words; `whole`: of whole numbers."""
        upper = self.lt if self.le is None else self.le
        if upper is None or upper == math.inf:
            lower = f"be >= {self.ge}" if self.gt is None else f"be > {self.gt}"
            return lower if upper is None else f"{lower} and finite"
        if whole and self.ge is not None and self.le is not None:
            return f"lie in {self.ge}..{self.le}"
        lower = f"[{self.ge}" if self.gt is None else f"({self.gt}"
        return f"lie in {lower}, {upper}{')' if self.le is None else ']'}"
