"""Files are whole or never there; a folder is replaced only where all in it was written here."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.helpers.commands import pipe
from trainer import files
from trainer.errors import RunFault, UserError
from trainer.files import MARKER, read_json, rewrite, whole_folder, write_atomic, write_json


def make(folder, text="new", **options):
    with whole_folder(folder, **options) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "weights").write_text(text)
        (partial / "config.json").write_text("{}")
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def synced(monkeypatch):
    """What was synced and renamed, in order: ("fsync", path) and ("replace", new path)."""
    found = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def count(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append(("fsync", path.name, stat.S_ISDIR(os.fstat(descriptor).st_mode)))
        fsync(descriptor)

    def replaced(source, target):
        found.append(("replace", Path(target).name, False))
        replace(source, target)

    def renamed(source, target):
        found.append(("replace", Path(target).name, False))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", count)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    return found


# one file


def test_a_file_and_its_name_are_on_the_disk_when_the_writer_returns(tmp_path, synced):
    write_atomic(tmp_path / "x", "text")
    (first, second, third) = synced
    assert first[0] == "fsync"
    assert first[1].startswith(".x.")
    assert second == ("replace", "x", False)
    assert third == ("fsync", tmp_path.name, True)
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_trace(tmp_path, monkeypatch, call):
    write_atomic(tmp_path / "x", "old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunFault, match=r"cannot write .*x: No space left on device; .* again"):
        write_atomic(tmp_path / "x", "new")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(UserError, match=r"cannot write .*choose another folder"):
        write_atomic(tmp_path / "x" / "y", "text")


def test_numbers_that_json_has_not_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x", {"a": float("nan")})
    assert names(tmp_path) == []


def test_a_json_file_is_neither_waited_for_nor_read_without_end(tmp_path):
    with pytest.raises(UserError, match=r"the file .*x.json is a pipe: name a regular file"):
        read_json(pipe(tmp_path / "x.json"), "do this")
    (tmp_path / "y.json").touch()
    os.truncate(tmp_path / "y.json", 1 << 40)
    with pytest.raises(UserError, match=r"y.json is damaged \(it has more than 268435456 bytes\)"):
        read_json(tmp_path / "y.json", "do this")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Expecting value"),
        (b'{"a": ', "Expecting value"),
        (b"[1]", "must hold a dict, got a list"),
        (b"\xff\xfe", "decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "nested too deep"),
        (None, "No such file"),
    ],
)
def test_a_json_file_that_cannot_be_used_is_named_with_its_remedy(tmp_path, content, says):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"x.json is damaged .*{says}.*; do this"):
        read_json(path, "do this")


# a folder


def test_our_own_folder_is_replaced_again_and_again(tmp_path):
    for text in ("one", "two"):
        make(tmp_path / "out", text)
        assert (tmp_path / "out" / "deep" / "weights").read_text() == text
        assert names(tmp_path) == ["out"]
        assert names(tmp_path / "out") == sorted([MARKER, "config.json", "deep"])


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    assert (make(tmp_path / "out") / MARKER).exists()


def put(path, text="precious"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


FOREIGN = {
    "a model": (lambda out: put(out / "config.json"), "config.json"),
    "a fine-tune with its history": (lambda out: put(out / ".git" / "HEAD"), ".git"),
    "a file beside an export": (lambda out: (make(out), put(out / "optimizer.pt")), "optimizer.pt"),
    "a file deep in an export": (lambda out: (make(out), put(out / "deep" / "x")), "deep/x"),
    "a changed export": (lambda out: (make(out), put(out / "config.json")), "config.json"),
    "a damaged marker": (lambda out: (make(out), put(out / MARKER, "{")), MARKER),
    "a marker of nothing": (lambda out: (make(out), put(out / MARKER, "{}")), MARKER),
    "a link to elsewhere": (lambda out: (make(out), os.symlink("x", out / "link")), "link"),
    "a file": (lambda out: put(out), "is a file itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_we_have_not_written_is_never_replaced(tmp_path, name):
    prepare, named = FOREIGN[name]
    prepare(tmp_path / "out")
    before = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=rf"out holds .*{named}.*: choose a new folder"):
        make(tmp_path / "out")
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_in_our_own_run_what_has_no_marker_is_moved_aside(tmp_path, capsys):
    for _ in range(2):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        put(tmp_path / "out" / "config.json")
        make(tmp_path / "out", ours=True)
    assert names(tmp_path) == ["out", "out-before-1", "out-before-2"]
    assert (tmp_path / "out-before-2" / "config.json").read_text() == "precious"
    assert "config.json): moved to" in capsys.readouterr().out


def test_what_comes_while_we_write_is_moved_aside(tmp_path):
    with whole_folder(tmp_path / "out") as partial:
        (partial / "x").write_text("new")
        put(tmp_path / "out" / "thesis")
    assert names(tmp_path) == ["out", "out-before-1"]
    assert (tmp_path / "out-before-1" / "thesis").read_text() == "precious"


def test_a_block_that_fails_leaves_the_old_folder(tmp_path):
    make(tmp_path / "out", "old")

    def failing():
        with whole_folder(tmp_path / "out") as partial:
            (partial / "x").write_text("new")
            raise RunFault("no")

    with pytest.raises(RunFault):
        failing()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "deep" / "weights").read_text() == "old"


def test_the_old_folder_is_there_until_the_new_one_stands(tmp_path, monkeypatch):
    make(tmp_path / "out", "old")
    plain = Path.rename

    def rename(source, target):
        if ".partial-" in source.name:
            held = [p / "deep" / "weights" for p in tmp_path.iterdir() if ".replaced-" in p.name]
            assert [path.read_text() for path in held] == ["old"]
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(source, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        make(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "deep" / "weights").read_text() == "old"


def test_all_of_a_folder_is_on_the_disk_before_it_gets_its_name(tmp_path, synced):
    make(tmp_path / "out")
    before = [name for call, name, _ in synced[: synced.index(("replace", "out", False))]]
    assert {MARKER, "config.json", "deep", "weights"} <= set(before)
    assert synced[-1] == ("fsync", tmp_path.name, True)


def test_two_that_write_one_folder_at_a_time(tmp_path):
    with whole_folder(tmp_path / "out") as partial:
        (partial / "x").write_text("first")
        with pytest.raises(UserError, match="is being written by another process"):
            make(tmp_path / "out")
    assert (tmp_path / "out" / "x").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_what_the_dead_have_left_is_swept_whatever_their_process_id(tmp_path):
    put(tmp_path / f".out.partial-{os.getpid()}" / "half")
    put(tmp_path / ".out.partial-1" / "half")
    put(tmp_path / ".other.partial-1" / "half")
    make(tmp_path / "out")
    assert names(tmp_path) == [".other.partial-1", "out"]


def test_one_that_died_between_its_two_renames_has_lost_nothing(tmp_path):
    make(tmp_path / "out", "old").rename(tmp_path / ".out.replaced-77")

    def failing():
        with whole_folder(tmp_path / "out"):
            raise RunFault("no")

    with pytest.raises(RunFault):
        failing()
    assert (tmp_path / "out" / "deep" / "weights").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    make(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / MARKER).exists()


@pytest.mark.parametrize("links", [True, False])
def test_one_file_is_rewritten_and_all_others_stay(tmp_path, monkeypatch, links):
    """Large files are linked into the new folder, and copied where a file system has no links."""

    def refused(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    out, other = make(tmp_path / "out"), tmp_path / "other"
    os.link(out / "config.json", other)
    before = (out / "deep" / "weights").stat().st_ino
    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(os, "link", refused)
        rewrite(out, {"config.json": "{1}"})
    assert (out / "config.json").read_text() == "{1}"
    assert (out / "deep" / "weights").read_text() == "new"
    assert ((out / "deep" / "weights").stat().st_ino == before) == links
    assert other.read_text() == "{}"  # nothing is written into the old file
    assert names(tmp_path) == ["other", "out"]
    make(out, "again")  # the folder counts as unchanged


def test_the_marker_holds_what_was_written(tmp_path):
    make(tmp_path / "out")
    written = read_json(tmp_path / "out" / MARKER, "")["files"]
    assert written["deep/weights"] == files.fingerprint(tmp_path / "out" / "deep" / "weights")
    assert sorted(written) == ["config.json", "deep/weights"]
