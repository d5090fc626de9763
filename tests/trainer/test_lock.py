"""One process works on something at a time, and a file system without locks is named."""

from __future__ import annotations

import errno
import fcntl

import pytest

from trainer.errors import UserError
from trainer.lock import lock


def test_a_lock_is_held_until_it_is_closed(tmp_path):
    with lock(tmp_path / "x", "wait"), pytest.raises(UserError, match=r"^wait$"):
        lock(tmp_path / "x", "wait")
    lock(tmp_path / "x", "wait").close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_its_mount_option(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"without file locks \(no locks\).*-o flock.*localflock"):
        lock(tmp_path / "x", "wait")


def test_another_fault_of_the_disk_is_not_taken_for_missing_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken"):
        lock(tmp_path / "x", "wait")


def test_a_lock_on_a_file_that_its_holder_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    path, plain, calls = tmp_path / "x", fcntl.flock, []

    def flock(*given):
        calls.append(given)
        if len(calls) == 1:
            path.unlink()
        plain(*given)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(path, "wait"), pytest.raises(UserError, match=r"^wait$"):
        lock(path, "wait")
