"""What CI and the test script make of steps that fail; small scripts play the steps."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST

pytestmark = pytest.mark.tools

ROOT = Path(__file__).resolve().parents[2]
PLAYED = r"""#!/usr/bin/env bash
# says what it was asked, then does what the variable of its name says: FAIL, HANG, FAIL_ONCE
asked="$(basename "$0") $*"
echo "$asked" >>asked
case "$asked" in
    *"-m engine"*) name=COSTS ;;
    *"slow or zero or engine"*) name=SLOW ;;
    *) name=$(basename "$0" .sh) name=${name//-/_} ;;
esac
case "${!name:-}" in
    FAIL) exit 1 ;;
    NONE) exit 5 ;;
    HANG) echo "$asked hangs" && exec sleep 1000 ;;
    TWICE) (($(grep -c "^$asked" asked) > 2)) ;;
esac
"""
STEPS = ["installation", "Chromium", "lint, default tests", "DeepSpeed", "vLLM's environment",
         "vLLM (costs)", "slow, two processes, vLLM"]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in (".ci/run", "scripts/test.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tools = ("python", "ruff", "pyright", "lint-imports")
    installs = ("engine_env", "deepspeed", "chromium")
    names = [*(f"scripts/{x}.sh" for x in installs), *(f".venv/bin/{x}" for x in tools)]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(PLAYED)
        path.chmod(0o755)
    (tmp_path / "scripts" / "env.sh").write_text('set_up() { bash scripts/installing.sh "$@"; }\n')
    (tmp_path / "scripts" / "installing.sh").write_text(PLAYED)
    return tmp_path


def began(folder, script=".ci/run", **environment):
    # tests that run in the background ignore SIGINT, and bash cannot trap what it finds ignored
    return subprocess.Popen(
        ["env", "--default-signal=INT", "bash", script],
        cwd=folder,
        env={**os.environ, "CI_PAUSE_S": "0.01", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder, script=".ci/run", **environment):
    """(exit status, output, what was asked of the played programs, results by step)"""
    process = began(folder, script, **environment)
    out, _ = process.communicate(timeout=60)
    asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    table = dict(re.findall(r"^(\S.*?) +\d+ s  (\S.*)$", out, re.M))
    return process.returncode, out, asked, table


def test_the_files_that_begin_first_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).exists()] == []


def test_every_step_is_run_and_stands_in_the_table(folder):
    code, out, asked, table = run(folder)
    assert code == 0, out
    assert list(table) == STEPS
    assert set(table.values()) == {"passed"}
    pytests = [words.partition("pytest ")[2] for words in asked if "pytest" in words]
    assert [re.search(r"-m \(?(\w+)|-n", words).group() for words in pytests] == [
        "-n", "-m engine", "-m (slow",
    ]  # fmt: skip
    assert asked.count("engine_env.sh ") == 1


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("ruff", "lint, default tests"),
        ("python", "lint, default tests"),
        ("COSTS", "vLLM (costs)"),
        ("SLOW", "slow, two processes, vLLM"),
    ],
)
def test_a_step_that_fails_hides_no_other(folder, name, step):
    code, out, asked, table = run(folder, **{name: "FAIL"})
    assert code == 1
    assert table == {one: "FAILED (1)" if one == step else "passed" for one in STEPS}
    assert f"=== {step}: FAILED (1), " in out
    assert len([words for words in asked if "pytest" in words]) == 3


@pytest.mark.parametrize("name", ["COSTS", "SLOW"])
def test_a_step_without_a_test_has_failed(folder, name):
    code, _, _, table = run(folder, **{name: "NONE"})
    assert code == 1
    assert list(table.values()).count("FAILED (no test was collected)") == 1


@pytest.mark.parametrize(
    ("name", "words", "step"),
    [
        ("installing", "installing.sh dev", "installation"),
        ("chromium", "chromium.sh ", "Chromium"),
        ("deepspeed", "deepspeed.sh ", "DeepSpeed"),
        ("engine_env", "engine_env.sh ", "vLLM's environment"),
    ],
)
def test_an_installation_is_tried_three_times_and_then_has_failed(folder, name, words, step):
    code, out, asked, table = run(folder, **{name: "TWICE"})
    assert code == 0, out
    assert asked.count(words) - (name == "installing") == 3  # test.sh sets up as well
    assert "try 2 of 3 ended with 1" in out
    assert "try 3 of 3" not in out
    (folder / "asked").unlink()
    code, out, asked, table = run(folder, **{name: "FAIL"})
    assert code == 1
    assert asked.count(words) - (name == "installing") == 3
    assert table[step] == "FAILED (1)"
    also = ["lint, default tests"] * (name == "installing")
    assert [one for one in STEPS if table[one] != "passed"] == [step, *also]


def test_time_that_is_spent_is_not_no_limit(folder):
    """A limit of 0 seconds would be none, and one below 0 a mistake."""
    for limit in ("0", "-5"):
        code, out, asked, table = run(folder, CI_LIMIT_S=limit, deepspeed="HANG")
        assert code == 1
        assert table == dict.fromkeys(STEPS, "NOT FINISHED")
        assert asked == []
        assert "timeout:" not in out


def test_a_step_that_hangs_is_ended_and_what_did_not_run_is_named(folder):
    code, out, asked, table = run(folder, CI_LIMIT_S="1", deepspeed="HANG")
    assert code == 1
    assert list(table) == STEPS
    for name in ("DeepSpeed", "vLLM (costs)", "slow, two processes, vLLM"):
        assert table[name] == "NOT FINISHED"
    assert not [words for words in asked if "slow or zero or engine" in words]
    assert "try 2 of 3" not in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_from_outside_it_ends_its_steps_and_shows_the_table(folder, number):
    process = began(folder, deepspeed="HANG", engine_env="HANG")
    seen = ""
    while "deepspeed.sh  hangs" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)  # all that held the pipe has ended
    assert process.returncode == 1
    table = dict(re.findall(r"^(\S.*?) +\d+ s  (\S.*)$", out, re.M))
    assert list(table.values()) == ["passed"] * 3 + ["NOT FINISHED"] * 4


def test_the_test_script_goes_on_after_a_linter_that_fails(folder):
    code, out, asked, _ = run(folder, "scripts/test.sh", pyright="FAIL", ruff="FAIL")
    assert code == 1
    assert out.splitlines()[-1] == "FAILED: ruff, ruff, pyright"
    names = [words.split()[0] for words in asked[1:]]  # the linters run beside the tests
    assert [name for name in names if name != "python"] == [
        "ruff", "ruff", "pyright", "lint-imports",
    ]  # fmt: skip
    assert names.count("python") == 2
    code, out, _, _ = run(folder, "scripts/test.sh", python="FAIL")
    assert code == 1
    assert out.splitlines()[-1] == "FAILED: python"
