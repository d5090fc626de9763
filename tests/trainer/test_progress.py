"""What a phase says of its way: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from types import SimpleNamespace

import pytest

from trainer import progress as module
from trainer.progress import Heartbeat, Progress, TokenProgress, working


def report(progress, step):
    progress.report({"step": step, "loss": 1.5, "lr": 0.001, "tokens_per_s": 1234.4})


def test_piped_progress_is_plain_lines_with_rate_and_time_left(monkeypatch):
    stream = io.StringIO()
    clock = iter([50.0, 150.0])  # ten steps took 100 s
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    progress = Progress(total=300, start=10, stream=stream)
    progress.advance()
    report(progress, 20)
    progress.close()
    assert stream.getvalue() == (
        "step 20/300  loss 1.5000  lr 1.00e-03  1234 tokens/s  0:46:40 left\n"
    )


def test_on_a_terminal_there_is_a_bar():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(total=4, stream=stream)
        progress.advance()
        progress.note("a note")
        report(progress, 1)
        progress.close()
        stream.flush()
        shown = ""  # a terminal hands over its output in pieces
        while "1234 tokens/s" not in shown:
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "1/4" in shown
    assert "a note" in shown
    assert "1234 tokens/s" in shown


def test_other_processes_show_nothing():
    stream = io.StringIO()
    progress = Progress(total=4, enabled=False, stream=stream)
    progress.advance()
    progress.note("hidden")
    report(progress, 1)
    assert stream.getvalue() == ""


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    return now


def test_tokens_are_counted_before_any_answer_is_finished(clock):
    stream = io.StringIO()
    progress = TokenProgress("training traces", stream=stream)
    progress.part("", rows=300, longest=96)
    for _ in range(20):  # twenty steps of a batch of 32, half a second each
        clock.s += 0.5
        progress.advance(32)
    assert stream.getvalue() == (
        "training traces: 640 of about 28,800 tokens, 0/300 answers, 64 tokens/s, 0:07:20 left\n"
    )


def test_time_left_follows_the_mean_length_of_the_answers(clock):
    stream = io.StringIO()
    progress = TokenProgress("report", stream=stream)
    progress.part("T=0, after, decoded", rows=10, longest=100)
    for _ in range(4):
        progress.advance(50)
        progress.finish_row()
    assert progress.total == 500
    clock.s += 20
    progress.advance(0)
    assert stream.getvalue() == (
        "report: T=0, after, decoded: 200 of about 500 tokens, 4/10 answers, 10 tokens/s, "
        "0:00:30 left\n"
    )
    # answers under way are longer than those that have ended: no estimate is above the limit
    progress.advance(700)
    assert progress.total == 1000


def test_a_known_total_is_said_without_about(clock):
    stream = io.StringIO()
    progress = TokenProgress("report", stream=stream)
    progress.part("T=0, before, replayed", total=4000)
    clock.s += 10
    progress.advance(1000)
    assert stream.getvalue() == (
        "report: T=0, before, replayed: 1,000 of 4,000 tokens, 100 tokens/s, 0:00:30 left\n"
    )


def test_lines_come_every_ten_seconds_over_all_parts_and_one_at_the_end(clock):
    stream = io.StringIO()
    progress = TokenProgress("report", stream=stream)
    for part in range(8):
        progress.part(f"part {part}", total=300)
        for _ in range(3):
            clock.s += 1
            progress.advance(100)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "report: part 3: 100 of 300 tokens",
        "report: part 6: 200 of 300 tokens",
        "report: 2",
    ]
    assert lines[-1] == "report: 2,400 tokens in 0:00:24, 100 tokens/s"


def test_a_part_with_nothing_to_do_prints_nothing(clock):
    stream = io.StringIO()
    progress = TokenProgress("training traces", stream=stream)
    progress.part("", rows=0, longest=96)
    clock.s += 60
    progress.close()
    assert stream.getvalue() == ""


def test_other_processes_say_nothing_about_tokens(clock):
    stream = io.StringIO()
    progress = TokenProgress("features", enabled=False, stream=stream)
    progress.part("", total=100)
    clock.s += 60
    progress.advance(100)
    progress.close()
    assert stream.getvalue() == ""


def test_tokens_move_a_bar_on_a_terminal():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        progress = TokenProgress("report", stream=stream)
        progress.part("decoded", rows=2, longest=50)
        progress.advance(30)
        progress.finish_row()
        progress.close()
        stream.flush()
        shown = ""
        while "tokens in" not in shown:
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "report: decoded" in shown
    assert "report: 30 tokens in" in shown


def test_piped_lines_about_steps_come_every_ten_seconds_and_one_at_the_end(monkeypatch):
    stream, now = io.StringIO(), SimpleNamespace(s=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.s)
    progress = Progress(total=25, stream=stream)
    for step in range(1, 26):
        now.s += 1
        progress.advance()
        report(progress, step)
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == [
        "1/25", "11/25", "21/25", "25/25"
    ]  # fmt: skip


@pytest.fixture
def heart(monkeypatch, clock):
    """A heartbeat that beats when a test says so."""
    made = Heartbeat()
    monkeypatch.setattr(made, "_run", lambda: None)
    monkeypatch.setattr(module, "heartbeat", made)
    return made


def test_work_that_prints_nothing_is_named_every_half_minute(heart, clock, capsys):
    with working("loading the target"):
        for _ in range(95):
            clock.s += 1
            heart.beat()
        with working("export"):
            clock.s += 30
            heart.beat()
    clock.s += 100
    heart.beat()
    assert capsys.readouterr().err.splitlines() == [
        "loading the target: 0:00:30 so far",
        "loading the target: 0:01:00 so far",
        "loading the target: 0:01:30 so far",
        "export: 0:00:30 so far",
    ]


def test_progress_that_stands_still_is_named_too_and_its_lines_count(heart, clock, capsys):
    stream = io.StringIO()
    progress = TokenProgress("report", stream=stream)
    progress.part("T=0, before, replayed", total=4000)
    clock.s += 20
    progress.advance(1000)
    assert stream.getvalue().count("\n") == 1
    for _ in range(59):
        clock.s += 1
        heart.beat()
    del progress  # an error has left it open
    clock.s += 60
    heart.beat()
    assert capsys.readouterr().err.splitlines() == [
        "report: T=0, before, replayed: 1,000 of 4,000 tokens: 0:00:50 so far"
    ]


def test_other_processes_have_no_heartbeat(heart, clock, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    Progress(total=4, enabled=False)
    with working("export"):
        clock.s += 60
        heart.beat()
    assert capsys.readouterr().err == ""
