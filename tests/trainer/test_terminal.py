"""Text of anyone's is shown on a terminal and does not steer it."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from tqdm import tqdm

import train
from phases import exits
from trainer.errors import UserError, excerpt, one_line, printable
from trainer.progress import Progress
from trainer.terminal import guard_terminal

MODULES = [
    import_module(".".join(path.with_suffix("").parts)) for path in Path("scripts").rglob("*.py")
]
WITH_WORDS = [one for one in MODULES if hasattr(one, "main") and signature(one.main).parameters]
COMMANDS = [train, *WITH_WORDS]
STEERS = [*map(chr, (*range(9), *range(11, 32), *range(127, 160))), "\u200e", "\u200f",
          *map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))), "\udcff"]  # fmt: skip
TEXT = (
    "a\u00e9 e\u0301 \u4e2d\u3000\u6587 \U0001f469\u200d\U0001f467 \u05d0\u0628 \u00a0\u00ad \\x1b"
)


def test_what_steers_a_terminal_is_shown_by_its_number():
    assert printable("\x1b[2J\x07\x9b1m") == r"\x1b[2J\x07\x9b1m"
    assert printable("safe\u202etxet\u2066\u200f") == r"safe\u202etxet\u2066\u200f"
    for character in STEERS:
        shown = printable(f"a{character}b")
        assert shown.isprintable(), hex(ord(character))
        assert shown.startswith("a\\")
        assert shown.endswith("b")
    assert one_line("a\tb\r\nc") == r"a\tb\r\nc"


def test_all_other_text_stays_as_it_is():
    assert printable(TEXT) == TEXT
    assert printable("a\tb\nc") == "a\tb\nc"
    assert excerpt(TEXT) == f"'{TEXT}'".replace("\\", "\\\\")
    assert excerpt({"a\x1b": "\u202e\n"}) == r"{'a\x1b': '\u202e\n'}"


def test_the_line_of_a_mistake_is_one_line():
    error = UserError("is not there", key="script.run", value="a\x1b[2J\nb", remedy="name\u202e it")
    assert str(error) == r"script.run=a\x1b[2J\nb: is not there; name\u202e it"


def test_what_is_printed_or_logged_is_shown(capsys):
    guard_terminal()
    guard_terminal()  # again in the same process
    print("out \x1b[31m", TEXT)
    print("err \u202e", file=sys.stderr)
    assert capsys.readouterr() == (f"out \\x1b[31m {TEXT}\n", "err \\u202e\n")


def test_the_label_of_a_bar_is_shown_without_what_tqdm_puts_behind_a_colour():
    screen = Screen()
    progress = Progress(2, stream=screen, unit="token", label="a\x1b[31mb\nc")
    progress.advance()
    assert progress.status() == r"a\x1b[31mb\nc: 1 of 2 tokens"
    progress.close()
    assert r"a\x1b[31mb\nc: " in screen.getvalue()
    assert "\x1b[0m" not in screen.getvalue()


def test_a_logged_line_is_one_line():
    record = logging.LogRecord("x", logging.INFO, "", 0, "domain %s", ("a\nb\x1b",), None)
    assert exits._OneLine().format(record) == r"domain a\nb\x1b"


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_progress_bar_is_drawn_as_before_and_what_it_names_is_shown(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    guard_terminal()
    with tqdm(total=2, desc="a\x1b[2Jb") as bar, tqdm(total=2, desc="inner") as inner:
        inner.update(1)
        bar.update(1)
    drawn = screen.getvalue()
    assert r"a\x1b[2Jb" in drawn
    assert "\x1b[2J" not in drawn
    assert drawn.startswith("\r")
    assert "\x1b[A" in drawn  # up to the other bar


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
def test_every_command_begins_with_it(command, capsys):
    with contextlib.suppress(UserError):  # scripts.compare catches its errors outside
        command.main(["x\x1b[2J=\u202e"])
    print("\x1b")
    said = capsys.readouterr()
    assert said.out == "\\x1b\n"
    assert not set("\x1b\u202e") & set(said.err)
