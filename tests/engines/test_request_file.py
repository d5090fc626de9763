"""The file of the request proxy: private, whole lines, and deletion under whoever follows it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.request_log import RequestLog
from engines import request_file
from tests.helpers.commands import ROOT, read_jsonl, write_jsonl
from trainer.errors import UserError

NOW = 1_000_000.0


def row(prompt, created=NOW, **request):
    choice = {"text": "M", "token_ids": [50], "prompt_token_ids": [prompt], "finish_reason": "stop"}
    response = (
        {"choices": [choice]} if created is None else {"choices": [choice], "created": created}
    )
    return {"request": {"prompt": f"word{prompt}", **request}, "response": response}


def lines_left(path):
    return [
        json.loads(line)["request"]["prompt"]
        for line in path.read_text().split("\n")
        if line.strip()
    ]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def free_mask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_its_owner_may_read_it(tmp_path, free_mask):
    path = tmp_path / "a" / "b" / "log.jsonl"
    request_file.prepare(path)
    assert mode(path) == 0o600
    assert [mode(folder) for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]
    path.unlink()
    request_file.append(path, {"a": 1})  # also where it was moved away
    assert mode(path) == 0o600


def test_an_older_log_becomes_private_and_its_folder_stays_as_it_is(tmp_path):
    path = write_jsonl(tmp_path / "log.jsonl", [{"a": 1}])
    tmp_path.chmod(0o755)
    path.chmod(0o644)
    request_file.prepare(path)
    assert (mode(path), mode(tmp_path)) == (0o600, 0o755)
    assert read_jsonl(path) == [{"a": 1}]


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"script\.log .* is a folder: name a regular file"):
        request_file.prepare(tmp_path)
    with pytest.raises(UserError, match="is a device: name a regular file"):
        request_file.prepare(Path(os.devnull))
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path):
    path = write_jsonl(tmp_path / "log.jsonl", [{"a": 1}])
    before = path.read_bytes()
    code = (
        "import errno, pathlib, resource, sys\n"
        "from engines import request_file\n"
        f"size = {len(before) + 50}, resource.RLIM_INFINITY\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, size)\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    request_file.append(path, {'a': 'b' * 100})\n"
        "except OSError as error:\n"
        "    assert error.errno == errno.EFBIG\n"
        "    request_file.append(path, {'a': 2})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]


def test_half_a_line_of_a_machine_that_went_down_spoils_no_other(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"half')
    request_file.append(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n{"half\n{"a": 2}\n'


# --- deletion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "left"),
    [
        ([1, 2, 8, 9], [2, 3]),
        ([8, 9], [0, 1]),
        ([1, None, 2, None, 8, None], [4, 5, 3]),
        ([1, 8, 2, 9], [1, 2, 3]),  # a clock was set back
        ([1, 2], []),
        ([], []),
    ],
)
def test_lines_go_by_their_age(tmp_path, times, left):
    path = write_jsonl(tmp_path / "log.jsonl", [row(i, t) for i, t in enumerate(times)])
    size = path.stat().st_size
    assert request_file.delete_before(path, 5.0) == len(times) - len(left)
    assert sorted(lines_left(path)) == [f"word{i}" for i in sorted(left)]
    assert path.stat().st_size == size
    assert request_file.delete_before(path, 5.0) == 0


def test_lines_without_a_time_are_as_old_as_the_file(tmp_path):
    path = write_jsonl(tmp_path / "log.jsonl", [row(1, None), row(2, 1.0), row(3, None)])
    path.write_text(path.read_text() + "no JSON\n")
    os.utime(path, (7.0, 7.0))
    assert request_file.delete_before(path, 5.0) == 2
    os.utime(path, (4.0, 4.0))
    assert request_file.delete_before(path, 5.0) == 2
    assert not path.read_text().strip()


def test_a_text_is_found_wherever_it_stands(tmp_path):
    rows = [
        row(0), row(1, user="Älice"), row(2, messages=[{"content": [{"text": "I am Älice."}]}]),
        row(3, metadata={"Älice": 1}), row(4), row(5),
    ]  # fmt: skip
    rows[4]["response"]["id"] = "cmpl-Älice"
    path = write_jsonl(tmp_path / "log.jsonl", rows)
    path.write_text(path.read_text() + 'half of Älice\n{"Älice still being written')
    assert request_file.delete_with(path, "Älice") == 5
    assert path.read_text().endswith(
        "\n" + " " * len("half of Älice".encode()) + '\n{"Älice still being written'
    )
    assert lines_left(write_jsonl(tmp_path / "b", [])) == []
    whole = path.read_text().rpartition("\n")[0]
    path.write_text(whole + "\n")
    assert lines_left(path) == ["word0", "word5"]


def test_who_follows_the_log_goes_on_when_lines_are_deleted(tmp_path, tiny_target):
    """Those before its place, the last one that it has read, and those to come."""
    target = tiny_target("llama")
    path = write_jsonl(tmp_path / "log.jsonl", [row(i) for i in range(10, 18)])
    follower = RequestLog(path, target, 256)
    assert [one.prompt_ids for one in follower.read(3)] == [[10], [11], [12]]
    state = follower.state_dict()
    for gone in (11, 12, 14):
        assert request_file.delete_with(path, f"word{gone}") == 1
    request_file.append(path, row(18))
    resumed = RequestLog(path, target, 256)
    resumed.load_state_dict(state)
    for log in (follower, resumed):
        assert [one.prompt_ids for one in log.read(9)] == [[13], [15], [16], [17], [18]]
        assert log.num_bad == 0
    assert [one.prompt_ids for one in RequestLog(path, target, 256).read(2)] == [[10], [13]]
    assert request_file.delete_before(path, NOW + 1) == 6
    assert resumed.read(1) == []
    request_file.append(path, row(19))
    assert [one.prompt_ids for one in resumed.read(9)] == [[19]]


def test_a_log_that_was_emptied_is_no_log_with_deleted_lines(tmp_path, tiny_target, capsys):
    target = tiny_target("llama")
    path = write_jsonl(tmp_path / "log.jsonl", [row(10), row(11)])
    follower = RequestLog(path, target, 256)
    follower.read(2)
    for content in ("", "\n", " " * 20 + "\n"):
        path.write_text(content)
        assert follower.read(1) == []
        assert "was replaced" in capsys.readouterr().out
        request_file.append(path, row(12))
        assert [one.prompt_ids for one in follower.read(9)] == [[12]]


def test_a_line_that_is_being_deleted_is_looked_at_again(tmp_path, tiny_target, monkeypatch):
    path = write_jsonl(tmp_path / "log.jsonl", [row(10), row(11)])
    follower = RequestLog(path, tiny_target("llama"), 256)
    follower.read(1)
    whole = path.read_bytes()
    path.write_bytes(b" " * 40 + whole[40:])  # half of it is gone
    monkeypatch.setattr(time, "sleep", lambda _: request_file.delete_before(path, NOW + 1))
    assert follower.read(1) == []
