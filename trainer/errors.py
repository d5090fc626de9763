"""The two errors of a run, and the rule that most checks are: no other module is below this one."""

from __future__ import annotations


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
        super().__init__(f"{line}; {remedy}" if remedy else line)


class RunFault(RuntimeError):
    """A fault while running (NaN, damaged device, full disk): cause named, state saved. Exit 3."""


def require(condition: bool, key: str, rule: str, value: object) -> None:
    """Raise UserError "<key> must <rule>, got <value>" unless `condition` holds."""
    if not condition:
        raise UserError(f"must {rule}", key=key, value=value)


def excerpt(value: object, width: int = 200) -> str:
    """`repr(value)`, cut to `width` characters so that it fits into one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print a number of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= width else f"{text[: width - 3]}..."
