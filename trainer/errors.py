"""The two errors of a run, the rule that most checks are, and text of anyone's in a message: no
other module is below this one."""

from __future__ import annotations

import re

# control characters but for tabs and line ends, marks that reorder a line, halves of characters
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_ESCAPE = re.compile(r"\\(?:\\|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")  # of `repr`


class UserError(ValueError):
    """A user's mistake: one readable line with key, value, rule and remedy. Exit code 2.

    `key`: the setting, or what else the user gave, such as a file. `value`: what it holds, shown
    where it is given. `rule`: what is wrong, beginning with "must" where it is a rule that the
    value breaks; without a `key`, a whole sentence. `remedy`: what to do instead.
    """

    def __init__(self, rule: str, *, key: str = "", value: object = ..., remedy: str = ""):
        self.key, self.value, self.rule, self.remedy = key, value, rule, remedy
        if not key:
            line = rule
        elif rule.startswith("must "):
            line = f"{key} {rule}" + ("" if value is ... else f", got {excerpt(value)}")
        else:
            given = value if isinstance(value, str) else excerpt(value)
            line = (key if value is ... else f"{key}={given}") + f": {rule}"
        super().__init__(one_line(f"{line}; {remedy}" if remedy else line))


class RunFault(RuntimeError):
    """A fault while running (NaN, damaged device, full disk): cause named, state saved. Exit 3."""


def require(condition: bool, key: str, rule: str, value: object) -> None:
    """Raise UserError "<key> must <rule>, got <value>" unless `condition` holds."""
    if not condition:
        raise UserError(f"must {rule}", key=key, value=value)


def printable(text: str) -> str:
    """`text` with escapes such as `\\x1b` and `\\u202e` for what would steer a terminal or hide a
    part of the text there. All other characters of any script stay."""
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """`printable(text)` without tabs and line ends."""
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def excerpt(value: object, width: int = 200) -> str:
    """`repr(value)` in `printable` characters, cut to `width` so that it fits into one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print a number of more than 4300 digits
        text = "a number of thousands of digits"
    text = _ESCAPE.sub(_unescaped, text)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _unescaped(found: re.Match[str]) -> str:
    """The character behind an escape of `repr`, which has one for joiners and wide blanks too."""
    if found[0] == r"\\":
        return found[0]
    character = chr(int(found[0][2:], 16))
    return found[0] if HIDDEN.match(character) else character
