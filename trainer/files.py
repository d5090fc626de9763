"""Atomic writing of files and folders, and JSON that is validated when it is read.

After a power loss a file may be empty that was renamed before its bytes were on the disk, and a
name may be lost whose folder was not synced. Both are synced before a writer returns.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar, overload

from trainer.checks import is_file
from trainer.errors import RunFault, UserError
from trainer.lock import lock

T = TypeVar("T")
MARKER = ".draftsmith.json"  # in a folder written here: size and SHA-256 of every file
MOST_BYTES = 1 << 28  # of a JSON file; the largest are tokenizers and reports
MOST_DEEP = 100  # tables and lists inside each other
UNUSABLE = (FileExistsError, NotADirectoryError, IsADirectoryError)  # the path must change


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file in one step: a reader sees the old content or the new one, also after a power
    loss. Raises RunFault where the disk is full or read-only, UserError where a part of the path is
    not a folder."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = error.strerror or error
        if isinstance(error, UNUSABLE):
            raise UserError(f"cannot write {path} ({reason}): choose another folder") from error
        raise RunFault(
            f"cannot write {path}: {reason}; finished work is saved: remove the cause and "
            "run the same command again"
        ) from error


def write_json(path: Path, content: object) -> None:
    """Write JSON with `write_atomic`. Keys must be text and numbers finite: ValueError."""
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


@overload
def read_json(path: Path, remedy: str) -> dict[str, Any]: ...
@overload
def read_json(path: Path, remedy: str, kind: type[T]) -> T: ...
def read_json(path: Path, remedy: str, kind: type[object] = dict) -> object:
    """The content of a JSON file, a table unless another `kind` is requested.

    Raises UserError, which ends with `remedy`, where the file is missing, damaged or holds
    something else."""
    try:
        content = load_json(path)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise damaged(path, " ".join(str(error).split())[:200], remedy) from error
    if not isinstance(content, kind):
        what = f"it must hold a {kind.__name__}, got a {type(content).__name__}"
        raise damaged(path, what, remedy)
    return content


def load_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """The content of a JSON file of anyone's. Raises UserError where it is a pipe or a device,
    OSError where it cannot be read, and ValueError where it is no JSON, too large or too deep."""
    is_file("the file", path)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"it is nested too deep: {error}") from error
    level = [content]
    for _ in range(MOST_DEEP):
        level = [
            inner
            for one in level if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]  # fmt: skip
        if not level:
            return content
    raise ValueError("it is nested too deep")


def damaged(path: Path | str, what: str, remedy: str) -> UserError:
    """The error for a file whose content cannot be used."""
    return UserError(f"{path} is damaged ({what}); {remedy}")


class FileDigest(TypedDict):
    """Size and checksum of a file."""

    bytes: int
    sha256: str  # hexadecimal


def fingerprint(path: Path) -> FileDigest:
    """Size and SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def whole_folder(folder: str | Path, ours: bool = False) -> Iterator[Path]:
    """A temporary folder, which becomes `folder` if the block ends without an error.

    An existing `folder` is replaced at the end if it was written here and has not been changed
    since. Any other folder is refused, with the name of a file that is foreign to it. `ours`: the
    folder belongs to a run of this command; one without a marker was made by an earlier version
    and is moved aside. Raises RunFault on a full disk, and UserError where the folder is foreign,
    its path cannot be a folder, or another process writes it."""
    folder = Path(os.path.realpath(folder))  # a link stays a link
    foreign = _foreign(folder)
    if foreign is not None and not ours:
        raise UserError(f"{folder} holds {foreign}: choose a new folder, or move this one away")
    said = f"{folder} is being written by another process: wait for it, or choose another folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        held = folder.with_name(f".{folder.name}.lock")
        with lock(held, said):
            partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
            try:
                _recover(folder)
                partial.mkdir()
                yield partial
                write_json(partial / MARKER, {"files": _content(partial)})
                for path in (*partial.rglob("*"), partial):
                    sync(path)
                _replace(folder, partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                held.unlink(missing_ok=True)
    except UNUSABLE as error:
        raise UserError(
            f"cannot write {folder} ({error.strerror}): choose another folder"
        ) from error


def rewrite(folder: Path, changed: Mapping[str, str], ours: bool = False) -> None:
    """Replace text files (name -> content) in a folder that `whole_folder` wrote."""
    with whole_folder(folder, ours) as partial:
        for source in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = source.relative_to(folder).as_posix()
            if name == MARKER or name in changed:
                continue
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, partial / name)
            except OSError:  # a file system without links
                shutil.copy2(source, partial / name)
        for name, text in changed.items():
            (partial / name).write_text(text, encoding="utf-8")


def _replace(folder: Path, partial: Path) -> None:
    """Rename `partial` to `folder`; a crash in between leaves the old folder or the new one."""
    replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    foreign = _foreign(folder)  # another program may have written to it meanwhile
    if foreign is not None:
        replaced = _aside(folder)
        print(f"{folder} holds {foreign}: moved to {replaced}")
    try:
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    except OSError:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        raise
    sync(folder.parent)
    if foreign is None:
        shutil.rmtree(replaced, ignore_errors=True)


def _aside(folder: Path) -> Path:
    number = 1
    while (place := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    return place


def _recover(folder: Path) -> None:
    """Clean up after processes that died while they wrote; the caller holds the lock."""
    for stale in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.replaced-*")):
        if not folder.exists():  # the process died between its two renames
            stale.rename(folder)
        shutil.rmtree(stale, ignore_errors=True)
    for stale in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)


def _content(folder: Path) -> dict[str, FileDigest]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): fingerprint(path) for path in files}


def _foreign(folder: Path) -> str | None:
    """The reason, in words, why a folder must not be replaced; None where it may be."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return "no files: it is a file itself"
    entries = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    if not entries:
        return None
    if MARKER not in entries:
        return f"files that were not exported here ({next(iter(entries))})"
    try:
        written = read_json(folder / MARKER, "")["files"]
        for name, path in entries.items():
            if path.is_symlink() or not (path.is_dir() or name == MARKER or name in written):
                return f"a file that was not exported here ({name})"
            if path.is_file() and name != MARKER and fingerprint(path) != written[name]:
                return f"a file that was changed since it was exported ({name})"
    except (UserError, KeyError, TypeError) as error:
        return f"a damaged {MARKER} ({error})"
    return None
