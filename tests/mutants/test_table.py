"""The table of mutants fits the code, and the runner tells killed from survived."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.mutants.__main__ import ROOT, main, outcome, read_table

TABLE = read_table(ROOT)


def test_names_are_unique():
    names = [mutant.name for mutant in TABLE]
    assert len(set(names)) == len(names)


@pytest.mark.tools
def test_mutants_fit_the_code_and_their_tests_are_there():
    for mutant in TABLE:
        assert mutant.search != mutant.replacement, mutant.name
        content = mutant.mutated(ROOT)
        if mutant.file.endswith(".py"):
            compile(content, f"{mutant.name}: {mutant.file}", "exec")
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, *names = test.partition("[")[0].split("::")
            assert (ROOT / path).exists(), f"{mutant.name}: {test}"
            text = (ROOT / path).read_text() if names else ""
            assert all(f"def {name}(" in text for name in names), f"{mutant.name}: {test}"


MODULE = """def larger(a, b):
    return a if a > b else b
"""
TESTS = """from module import larger

def test_first():
    assert larger(2, 1) == 2

def test_broken():
    assert larger(1, 1) == 2
"""
MUTANT = """
[[mutant]]
name = "{name}"
file = "module.py"
search = "a > b"
replacement = "{replacement}"
tests = ["test_module.py::{test}"]
"""
MUTANTS = (
    ("killed", "a < b", "test_first"),
    ("survived", "a >= b", "test_first"),
    ("broken before", "a < b", "test_broken"),
    ("no test", "a < b", "test_third"),
)


@pytest.fixture
def repository(tmp_path):
    """With mutants of its own."""
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    table = "".join(MUTANT.format(name=n, replacement=r, test=t) for n, r, t in MUTANTS)
    files = {"module.py": MODULE, "test_module.py": TESTS, "tests/mutants/table.toml": table}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run("git init -q . && git add .", shell=True, cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.tools
def test_killed_survived_and_errors_are_told_apart(repository, capsys):
    out = repository / "results.json"
    assert main(["--out", str(out)], repository) == 1
    rows = json.loads(out.read_text())
    assert {name: row["result"] for name, row in rows.items()} == {
        "killed": "killed", "survived": "SURVIVED", "broken before": "error", "no test": "error",
    }  # fmt: skip
    assert rows["killed"]["by"] == "test_module.py::test_first"
    assert rows["broken before"]["by"] == "without the mistake: test_module.py::test_broken"
    assert "ended with 4" in rows["no test"]["by"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| killed | module.py | killed | test_module.py::test_first | ")
    assert len(lines) == 6
    assert (repository / "module.py").read_text() == MODULE
    # what is known is not run again until it changes
    rows["killed"]["seconds"] = 12345
    out.write_text(json.dumps(rows))
    assert main(["--only", "killed", "--out", str(out)], repository) == 0
    assert "| 12345 |" in capsys.readouterr().out
    (repository / "test_module.py").write_text("")
    assert main(["--only", "killed", "--out", str(out)], repository) == 1
    assert "| error | without the mistake: " in capsys.readouterr().out


@pytest.mark.tools
def test_a_mutant_that_hangs_is_killed(repository):
    mutant = read_table(repository)[0]
    (repository / "test_module.py").write_text("import time; time.sleep(1000)")
    assert outcome(repository, mutant, True, 0.5) == ("killed", "timed out after 0.5 s")


@pytest.mark.tools
def test_mutants_are_listed_and_unknown_ones_refused(repository, capsys):
    assert main(["--list"], repository) == 0
    assert capsys.readouterr().out.startswith("killed: module.py, test_module.py::test_first\n")
    with pytest.raises(SystemExit):
        main(["--only", "kiled"], repository)
    assert "no mutant is called kiled" in capsys.readouterr().err
