"""The command: its words, what it deletes, how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from scripts import request_log
from tests.helpers import proxy as tools
from tests.helpers.commands import ROOT, read_jsonl, write_jsonl

BASE = ["script.server=http://h", "script.log=x"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["script.log=x"], "script.server must be given"),
        (["script.server=host", "script.log=x"], "script.server must be http://host:port"),
        (["script.server=http://h"], "script.log must be given"),
        (
            ["script.server=http://h:abc", "script.log=x"],
            "script.server must be http://host:port",
        ),
        (
            ["script.server=http://h:99999", "script.log=x"],
            "script.server must be http://host:port",
        ),
        (["script.server=http://", "script.log=x"], "script.server must be http://host:port"),
        (["script.server=http://h/?a=b", "script.log=x"], "script.server must be http://host:port"),
        (
            ["script.server=http://me:secret@h", "script.log=x"],
            "must hold no user name or password",
        ),
        (["script.server=http://h", "script.log=.", "script.port=0"], "script.log . is a folder"),
        ([*BASE, "script.port=high"], "script.port must be"),
        ([*BASE, "script.port=99999"], "cannot be opened"),
        ([*BASE, "script.host=203.0.113.1"], "script.host=203.0.113.1, script.port=8001 cannot be"),
        ([*BASE, "script.token_ids=3"], "true or false"),
        ([*BASE, "script.allowed_hosts=3"], "script.allowed_hosts must be a list of names"),
        ([*BASE, "script.max_body_mb=0"], "script.max_body_mb must be a number > 0"),
        ([*BASE, "script.max_body_mb=.inf"], "script.max_body_mb must be a number > 0"),
        ([*BASE, "script.keep_days=true"], "script.keep_days must be a number >= 0"),
        ([*BASE, "script.keep_days=-1"], "script.keep_days must be a number >= 0"),
        ([*BASE, "script.forget=me"], "script.forget deletes lines and starts no proxy"),
        (["script.log=x", "script.forget=me"], "script.log=x does not exist"),
        (["script.log=x", "script.forget="], "script.server must be given"),
        ([*BASE, "script.keep_day=3"], "unknown key 'script.keep_day'"),
    ],
)
def test_a_wrong_word_is_one_line(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert request_log.main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "secret" not in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_logged_prompts_are_deleted(tmp_path, capsys):
    now = time.time()
    rows = [
        {"request": {"prompt": f"I am {name}"}, "response": {"created": now - age * 86400}}
        for name, age in (("Al", 9), ("Bo", 3), ("Al", 2), ("yes", 1), ("Cy", 0))
    ]
    log = write_jsonl(tmp_path / "log", rows)

    def left(*words):
        assert request_log.main([f"script.log={log}", *words]) == 0
        said.append(capsys.readouterr().out)
        return [json.loads(line)["request"]["prompt"][5:] for line in log.open() if line.strip()]

    said: list[str] = []
    assert left("script.keep_days=5") == ["Bo", "Al", "yes", "Cy"]
    assert left("script.forget=I am Al") == ["Bo", "yes", "Cy"]
    assert left("script.forget=yes") == ["Bo", "Cy"]  # a text, not a boolean
    assert left("script.forget=nobody") == ["Bo", "Cy"]
    assert left("script.keep_days=0") == []
    assert said == [f"{count} lines of {log} were deleted\n" for count in (1, 1, 1, 0, 2)]


def test_a_proxy_that_other_machines_reach_is_warned_of(tmp_path, capsys, monkeypatch):
    async def end_at_once(event):
        return True

    monkeypatch.setattr(request_log.asyncio.Event, "wait", end_at_once)
    words = ["script.server=http://h", f"script.log={tmp_path / 'log'}", "script.port=0"]
    assert request_log.main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("http://127.0.0.1:")
    assert "stored for ever" in out
    assert err == ""
    assert request_log.main([*words, "script.host=0.0.0.0", "script.keep_days=2"]) == 0
    out, err = capsys.readouterr()
    assert "stored for 2 days" in out
    assert err.startswith("warning: script.host=0.0.0.0 is open to other machines")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_answers_under_way(tmp_path, number):
    with tools.upstream() as upstream:
        upstream.go_on.clear()
        words = [f"script.server={upstream.address}", f"script.log={tmp_path / 'log'}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.request_log", *words, "script.port=0"],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps({"stream": True}).encode()
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            process.send_signal(number)
            threading.Timer(0.1, upstream.go_on.set).start()
            assert answer.read() == b"".join(tools.EVENTS)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert len(read_jsonl(tmp_path / "log")) == 1
