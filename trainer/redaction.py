"""Redaction: text that is stored or printed holds no secret and no absolute path of this machine.

A value is a secret if the last word of its key says so (`hf_token`, `api-key`, but not
`max_new_tokens`), or if it has the form of a known token. Every place that stores or prints a
configuration, a command or an error calls these functions, so that all follow the same rules.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar, overload

import yaml

from trainer.yaml_text import parse

K = TypeVar("K")
V = TypeVar("V")

MARK = "<redacted: pass it again>"
REPOSITORY = Path(__file__).resolve().parents[1]
NUMBER_DIGITS = 8  # a number under such a key is a secret if it is too long for an id or a count

_WORDS = ("token", "key", "secret", "password", "credential", "credentials", "authorization")
_NAME = (
    rf"(?:(?<![A-Za-z0-9])(?i:{'|'.join(_WORDS)}|passwd|apikey)"
    rf"|(?<=[a-z0-9])(?:{'|'.join(word.capitalize() for word in _WORDS)}))"
)
_SECRET_KEY = re.compile(_NAME + r"\Z")
_USER = re.compile(r"""(?<=\w:)[^\s/@:"',]+(?=@\w)""")  # me:password@host
_VALUE = (
    r"""(?![\[({\s]*<redacted|(?:value|null|None)\b|\.\.\.)"""
    r"""(?:"[^"]*"?|'[^']*'?|(?:(?:Bearer|Basic)\s+)?[^\s,;&}\])"']+)"""
)
# `api_key: x`, `'api_key': ['x']`, `token=x`; `--api-key x`, as an engine's log has them
_PAIR = re.compile(rf"""({_NAME}["']?\s*[:=]\s*[\[({{]?\s*|--[\w-]*{_NAME}\s+)({_VALUE})""")

# what it is -> its form; the first group, where there is one, stays
TOKENS = {
    "a Hugging Face token": r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,}",
    "an API key of a language model's service": (
        r"(?<![\w-])sk-(?:(?:ant|proj)-[\w-]{8,}|(?=[\w-]*\d)[\w-]{16,})"
    ),
    "a GitHub token": r"\b(?:gh[opusr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a GitLab token": r"\bglpat-[\w-]{16,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Google API key": r"\bAIza[\w-]{35}",
    "a Slack token": r"\bxox[a-z]-[\w-]{10,}",
    "a W&B key": r"\bwandb_v1_\w{20,}",
    "an authorization header": r"\b(Bearer\s+)(?=\S*[\d._~+/=-])[\w.~+/=-]{8,}",
    "a JSON web token": r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",
    "a private key": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\w+/=\\\s]*(?:-----END [A-Z ]*KEY-----)?"
    ),
    "a user's name and password in an address": r"(://)(?!<redacted)[^/\s\"']+(?=@)",
    "a secret in an address": (
        rf"([?&#](?:[\w.-]*{_NAME}|[\w-]*(?i:sig|signature))=)(?!<redacted)[^\s&#\"']+"
    ),
}
_FORMS = {what: re.compile(form) for what, form in TOKENS.items()}


def is_secret_key(name: str) -> bool:
    """Whether the last word of a key says that its value is a secret."""
    return bool(_SECRET_KEY.search(name))


@overload
def redacted(value: str, secret: bool = False) -> str: ...
@overload
def redacted(value: dict[K, V], secret: bool = False) -> dict[K, V]: ...
@overload
def redacted(value: object, secret: bool = False) -> object: ...
def redacted(value: object, secret: bool = False) -> object:
    """Replace each secret in `value`, a tree as YAML holds it, by MARK. `secret`: all text in it is
    secret, because of its key."""
    if isinstance(value, dict):
        return {
            redacted(k): redacted(v, secret or (isinstance(k, str) and is_secret_key(k)))
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(redacted(one, secret) for one in value)
    if secret and _can_be_secret(value):
        return MARK
    return _without_tokens(value) if isinstance(value, str) else value


def _can_be_secret(value: object) -> bool:
    if isinstance(value, bool | None):
        return False
    return bool(value) if isinstance(value, str) else len(str(value)) >= NUMBER_DIGITS


def _without_tokens(text: str) -> str:
    for form in _FORMS.values():
        text = form.sub(lambda found: (found[1] if found.re.groups else "") + MARK, text)
    return text


def hide(text: str, words: Sequence[str] = (), pairs: bool = True) -> str:
    """Redact text for the terminal, such as an error: what looks like a secret, the values of the
    environment's secret variables, and the secrets in `words`, those of the command line. `pairs`:
    also what follows a secret's key in the text, which would spoil lines of a program."""
    known = {value for _, value in environment_secrets()}
    for word in words:
        key, _, value = word.partition("=")
        known |= set(_secrets(_parsed(value), is_secret_key(key)))
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, MARK)
    text = _USER.sub(MARK, _without_tokens(text))
    return _PAIR.sub(lambda found: found[1] + MARK, text) if pairs else text


def _secrets(value: object, secret: bool) -> Iterator[str]:
    """The values whose key is that of a secret, if they are long enough to search a text for."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secrets(inner, secret or is_secret_key(str(key)))
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets(inner, secret)
    elif secret and _can_be_secret(value) and len(str(value)) >= 4:
        yield str(value)


def _parsed(value: str) -> object:
    """`value` as YAML, or as it is where it is not YAML."""
    try:
        tree = parse(value)
        json.dumps(tree, default=str)  # keys that JSON has not
        return tree
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return value


def environment_secrets() -> list[tuple[str, str]]:
    """(name, value) of the variables whose name says that they are secret."""
    return [(k, v) for k, v in os.environ.items() if is_secret_key(k) and len(v) >= 8]


@overload
def shown(value: str, folder: Path | None = None) -> str: ...
@overload
def shown(value: dict[K, V], folder: Path | None = None) -> dict[K, V]: ...
@overload
def shown(value: object, folder: Path | None = None) -> object: ...
def shown(value: object, folder: Path | None = None) -> object:
    """`value`, a tree, as it may leave this machine. Secrets are redacted. Absolute paths become
    relative to the repository, to `folder`, or to the home folder as `~`; of any other path the
    last part remains."""
    if isinstance(value, dict):
        return {shown(k, folder): shown(v, folder) for k, v in redacted(value).items()}
    if isinstance(value, list | tuple):
        return type(value)(shown(one, folder) for one in value)
    if not isinstance(value, str):
        return value
    home = Path.home()
    bases = [(REPOSITORY, ""), (folder, ""), (home if home != Path("/") else None, "~/")]
    return _without_paths(redacted(value), bases)


def shell_command(words: Sequence[str]) -> str:
    """A command, given as its words, as a shell runs it again. Its secrets alone are left out."""
    return shlex.join(map(_without_secrets, words))


def shown_command(words: Sequence[str]) -> str:
    """A command, given as its words, as it may leave this machine: as `shell_command`, with paths
    relative to the working folder or the repository; of any other path the last part remains."""
    return shlex.join(_without_places(_without_secrets(word)) for word in words)


def _without_secrets(word: str) -> str:
    key, equals, value = word.partition("=")
    tree = _parsed(value)
    if isinstance(tree, dict | list):
        clean = redacted(tree, is_secret_key(key))
        if clean != tree:
            flow = yaml.safe_dump(clean, default_flow_style=True, sort_keys=False, width=1 << 20)
            value = flow.strip()
    elif value and is_secret_key(key):
        value = MARK
    elif value.startswith(("{", "[")):  # no YAML
        value = hide(value)
    return f"{redacted(key)}{equals}{redacted(value)}"


def _without_places(word: str) -> str:
    key, equals, value = word.partition("=")
    bases = [(Path.cwd(), ""), (REPOSITORY, "")]
    return f"{_without_paths(key, bases)}{equals}{_without_paths(value, bases)}"


_PATH = re.compile(r"""(?<![\w./~<-])(?:file://)?(/[\w.@+-][^\s"'`,;:|(){}\[\]<>=&]*)""")


Bases = Sequence[tuple[Path | None, str]]  # folders, and what stands for each of them


def _without_paths(text: str, bases: Bases) -> str:
    if text.startswith("/") and os.path.lexists(text):  # it may hold spaces
        return _short(text, bases)
    return _PATH.sub(lambda found: _short(found[1], bases), text)


def _short(path: str, bases: Bases) -> str:
    if Path(path) == Path.home() != Path("/"):
        return "~"
    for base, before in bases:
        for known in {base and base.absolute(), base and base.resolve()}:
            if known and Path(path).is_relative_to(known):
                rest = Path(path).relative_to(known).as_posix()
                return before + rest if rest != "." else before.rstrip("/") or known.name
    return Path(path).name


def leaks(text: str) -> Iterator[tuple[str, int]]:
    """What must not be published in `text`, each with its offset: tokens by their form, values of
    the environment's secret variables, the home folder."""
    for what, form in _FORMS.items():
        for found in form.finditer(text):
            if MARK not in found[0]:
                yield f"what looks like {what}", found.start()
    for name, value in environment_secrets():
        if value in text:
            yield f"the value of {name}", text.index(value)
    home = str(Path.home())
    if home != "/" and (found := re.search(rf"(?<![\w./-]){re.escape(home)}/[\w.]", text)):
        yield "the path of the home folder", found.start()
