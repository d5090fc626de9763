"""Names of models and data sets: which are paths here, and which are asked of the Hub."""

from __future__ import annotations

import pytest

from trainer.checks import is_path, require_there
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt2", False), ("Qwen/Qwen3-8B", False), ("there", True), ("there/gone", True),
     ("./gone", True), ("../gone", True), ("/gone", True), ("~/gone", True), ("a/b/c", True)],
)  # fmt: skip
def test_what_looks_like_a_path_is_one(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert is_path(name) == expected


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("./gone", "check the path"), ("a/b/c", "check the path"),
     ("~/gone", "a shell has not replaced the ~, write the path out"),
     ("there/gone", "check the path; there is here, so this is no name on the Hub")],
)  # fmt: skip
def test_a_path_at_which_nothing_is_is_refused(name, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError) as caught:
        require_there("model.target", name)
    assert (caught.value.key, caught.value.value) == ("model.target", name)
    assert caught.value.rule == "there is no such file or folder"
    assert caught.value.remedy == remedy


def test_what_is_there_and_names_on_the_hub_pass(tmp_path):
    require_there("model.target", str(tmp_path))
    require_there("model.target", "Qwen/Qwen3-8B")
