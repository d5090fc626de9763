"""The checks that hold for a value whatever its key is.

Each section of the configuration checks its own keys. Rules for every number, text, address, file
or folder that a user names are here.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from trainer.errors import UserError, excerpt, require


def whole_number(key: str, text: str) -> int:
    """The whole number above 0 that `text` is. UserError for anything else."""
    require(text.isdecimal() and int(text) > 0, key, "be a whole number above 0", text)
    return int(text)


def require_one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """UserError unless `value` is one of `allowed`."""
    require(value in allowed, key, f"be one of {', '.join(allowed)}", value)


def require_read(method: object, name: str, condition: bool, remedy: str) -> None:
    """UserError where a key of the section `method` differs from its default, which is no list,
    while nothing reads it unless `condition` holds; `remedy`: the setting with which it is read."""
    value = getattr(method, name)
    if not condition and value != getattr(type(method), name):
        raise UserError(
            f"method.{name}={excerpt(value)} changes nothing here: leave it out, or set {remedy}"
        )


# --- values --------------------------------------------------------------------------------------

SEEDS = 2**31  # numpy takes 32 bits, each process adds its number, and servers read signed ones
SMALLEST, LARGEST = 1.2e-38, 3.4e38  # of float32, in which models and optimisers compute
LARGEST_WHOLE = 10**12  # more than any count, size or number of parameters here
SIDE_BY_SIDE = 10**6  # the most that is held in memory of what a key counts
GREEDY_BELOW = 1e-5  # vLLM's own bound of a temperature that is as good as 0


def check_values(key: str, value: object) -> None:
    """Refuse values that no key can hold, in `value` and below it. UserError for numbers that
    float32 cannot represent, for counts that are too large, for text that is not UTF-8 and for
    mappings whose keys are not text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if type(name) is not int or key != "model.max_memory":  # the number of a GPU
                require(isinstance(name, str), key, "have text as its keys", name)
            check_values(key, name)
            check_values(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_values(key, inner)
    elif isinstance(value, float):
        rule = f"be a number of float32: 0, or of magnitude {SMALLEST} to {LARGEST}"
        require(value == 0 or SMALLEST <= abs(value) <= LARGEST, key, rule, value)
        if key.endswith(("temperature", "temperatures")):
            rule = f"be 0 or >= {GREEDY_BELOW:g}: logits divided by less overflow"
            require(value == 0 or value >= GREEDY_BELOW, key, rule, value)
    elif isinstance(value, int):
        require(abs(value) < LARGEST_WHOLE, key, f"be below {LARGEST_WHOLE}", value)
    elif isinstance(value, str):
        rule = "be text in UTF-8 without NUL characters"
        require("\0" not in value and _encodes(value), key, rule, value)
    else:
        require(value is None, key, "hold text, numbers, lists and mappings alone", value)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, or a byte of a command line
        return False
    return True


# --- addresses, folders and files ----------------------------------------------------------------


def is_address(text: object) -> bool:
    """Whether `text` begins with http:// or https://."""
    return str(text).startswith(("http://", "https://"))


def addresses_of(text: str) -> list[str]:
    """The addresses in a text such as http://a:8000,http://b:8000; none in another one."""
    return [one.strip() for one in text.split(",")] if is_address(text) else []


def require_address(key: str, address: str) -> None:
    """UserError unless `address` is one that a request can be sent to."""
    if "@" in address:  # not shown: a password may stand before it
        raise UserError(
            f"{key} must hold no user name or password: give http://host:port alone, and put the "
            "key of the service into OPENAI_API_KEY"
        )
    try:
        parts = urlsplit(address)
        (parts.hostname or "").encode("idna")  # of parts that are not empty and not too long
        good = bool(parts.hostname) and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:
        good = False
    good = good and is_address(address) and re.fullmatch(r"[!-~]+", address) is not None
    require(good, key, "be http://host:port or https://host:port", address)


NAME_BYTES, PATH_BYTES = 255, 4096 - 512  # of one name; of a path, less what is put below it


def require_folder(key: str, folder: str | Path) -> None:
    """UserError unless `folder` exists or can be created: no file has its path or a parent's, and
    what it would be created in can be written to."""
    if str(folder).startswith("~"):
        raise UserError(f"{key}={folder}: a shell has not replaced the ~, write the path out")
    place = Path(folder).absolute()
    name = os.fsencode(place)
    rule = f"be a path of at most {PATH_BYTES} bytes, {NAME_BYTES} between two slashes"
    short = len(name) <= PATH_BYTES and max(map(len, name.split(b"/"))) <= NAME_BYTES
    require(short and b"\0" not in name, key, f"{rule}, without NUL characters", str(folder))
    there = next(p for p in (place, *place.parents) if os.path.lexists(p))
    if not there.is_dir():
        raise UserError(
            f"{key}={folder} cannot be a folder, {there} is a file: choose another path"
        )
    if there != place and not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{key}={folder} cannot be created, {there} is not writable: choose another path"
        )


def is_file(what: str, path: str | Path) -> bool:
    """Whether a regular file exists at `path`. UserError where `path` is something else, such as a
    folder, a pipe or a device; `what` names it in the message."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{what} {excerpt(str(path))} cannot be read ({reason})") from error
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    found = next((name for test, name in kinds.items() if test(mode)), "a device")
    if not stat.S_ISREG(mode):
        raise UserError(f"{what} {path} is {found}: name a regular file")
    return True


def is_path(name: str) -> bool:
    """Whether `name`, of a model or a data set, is a path here and no name on the Hub: it starts
    with . / or ~, has more than one slash, or exists at least up to its first slash."""
    first = name.partition("/")[0]
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.lexists(first)


def require_there(key: str, name: str) -> None:
    """UserError where `name` is a path at which nothing is: the Hub is not asked for it."""
    if is_path(name) and not os.path.exists(name):
        remedy = "check the path"
        if name.startswith("~"):
            remedy = "a shell has not replaced the ~, write the path out"
        elif not name.startswith((".", "/")) and name.count("/") == 1:
            here = name.partition("/")[0]
            remedy += f"; {here} is here, so this is no name on the Hub"
        raise UserError("there is no such file or folder", key=key, value=name, remedy=remedy)


def require_files(key: str, name: str | Path) -> None:
    """UserError where `name` is a path at which nothing is, a pipe or a device, or a folder with
    one in it or in a folder of it: reading would not end."""
    require_there(key, str(name))
    if os.path.lexists(name) and not os.path.isdir(name):
        is_file(key, name)
    elif os.path.isdir(name):
        for path in (*Path(name).glob("*"), *Path(name).glob("*/*")):
            if not path.is_dir():
                is_file(f"{key}: the file", path)
