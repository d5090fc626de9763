"""Every script explains itself where nothing is requested of it."""

from __future__ import annotations

import importlib

import pytest

SCRIPTS = (
    "compare", "evaluate", "export", "generate", "import_traces", "push_to_hub", "request_log",
)  # fmt: skip


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help=true"]], ids=str)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_what_it_does(capsys, tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(f"scripts.{name}")
    assert not script.main(words)
    out = capsys.readouterr().out
    assert out.strip() == script.__doc__.strip()
    assert f"python -m scripts.{name}" in out
    assert list(tmp_path.iterdir()) == []
