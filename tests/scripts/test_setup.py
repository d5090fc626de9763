"""The set-up scripts and the project file."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phases import pipeline
from target.model import Target
from tests.helpers.gguf_files import write_gguf

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    ".ci/run",
    "scripts/chromium.sh",
    "scripts/deepspeed.sh",
    "scripts/engine_env.sh",
    "scripts/env.sh",
    "scripts/quickstart.sh",
    "scripts/real.sh",
    "scripts/test.sh",
]
ROOMS = [
    "trainer", "target", "drafters", "engines", "data", "eval", "recipes", "phases", "scripts",
]  # fmt: skip


def bash(command, folder, **environment):
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


@pytest.fixture
def copy(tmp_path):
    """A copy of the files that setting up needs, without a .venv."""
    copy = tmp_path / "copy"
    (copy / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "LICENSE", *SCRIPTS):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


def fake_python(path, version="3.12", log=None):
    """An interpreter that claims a version and records its pip calls; PIP_FAILS makes pip fail."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""#!/usr/bin/env bash
case "$*" in
    *version_info*) echo {version} ;;
    *sha256*) exec {sys.executable} "$@" ;;
    *"pip --version"*) ;;
    *"-m venv"* | *"pip install"*) echo "$*" >>{log}; [[ -z ${{PIP_FAILS:-}} ]] ;;
esac
""")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("python", "complaint"),
    [
        ("no-such-python", "no Python runs as 'no-such-python'"),
        (None, "Python 3.10 or later is needed"),
    ],
)
def test_missing_and_old_pythons_are_refused(copy, tmp_path, python, complaint):
    python = python or str(fake_python(tmp_path / "bin" / "python3.9", version="3.9"))
    done = bash("set -eu; source scripts/env.sh; set_up; echo unreached", copy, PYTHON=python)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "unreached" not in done.stdout
    assert not (copy / ".venv").exists()


def test_installs_only_what_changed_and_takes_up_an_interrupted_installation(copy, tmp_path):
    log = tmp_path / "log"
    fake_python(copy / ".venv" / "bin" / "python", log=log)

    def calls(command, **environment):
        log.write_text("")
        done = bash(f"set -euo pipefail; source scripts/env.sh; {command}", copy, **environment)
        return done, [line.rsplit("-e ")[1] for line in log.read_text().splitlines()]

    done, installed = calls("set_up", PIP_FAILS="1")
    assert done.returncode == 1
    assert "installation:" not in done.stdout
    assert installed == ["."]
    done, installed = calls("set_up")  # the failure left no stamp
    assert done.returncode == 0
    assert re.search(r"^installation: \d+ s$", done.stdout, re.M)
    assert installed == ["."]
    assert calls("set_up")[1] == []
    assert calls("set_up dev")[1] == [".[dev]"]
    assert calls("set_up dev; set_up")[1] == []
    with (copy / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert calls("set_up")[1] == ["."]
    assert calls("set_up dev")[1] == [".[dev]"]


def test_an_environment_that_was_moved_is_made_again(copy, tmp_path):
    """The commands in its bin/ hold the path at which it was made."""
    log = tmp_path / "log"
    fake_python(copy / ".venv" / "bin" / "python", log=log)
    command = "set -euo pipefail; source scripts/env.sh; set_up"
    assert bash(command, copy).returncode == 0
    log.write_text("")
    shutil.copytree(copy, tmp_path / "other", ignore=shutil.ignore_patterns(".venv"))
    (tmp_path / "other" / ".venv").symlink_to(copy / ".venv")  # two clones share one
    assert bash(command, tmp_path / "other").returncode == 0
    assert log.read_text() == ""
    moved = copy.rename(tmp_path / "a name of two")
    for _ in range(2):
        done = bash(command, moved)
        assert done.returncode == 0, done.stderr
    made, installed = log.read_text().splitlines()
    assert made == "-m venv --clear .venv"
    assert installed.endswith("-e .")


def test_an_old_python_of_an_environment_is_not_to_be_chosen_by_PYTHON_alone(copy, tmp_path):
    fake_python(copy / ".venv" / "bin" / "python", version="3.9")
    done = bash("set -eu; source scripts/env.sh; set_up", copy)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "'.venv/bin/python' is 3.9; remove .venv and set PYTHON to a newer one\n"
    )
    engine = fake_python(tmp_path / "engine" / "bin" / "python", version="3.10").parents[1]
    done = bash(f"bash scripts/engine_env.sh {engine}", copy)
    assert done.returncode == 2
    assert done.stderr.endswith(f"is another: remove {engine} and set PYTHON to one\n")


def test_no_script_chooses_a_package_index():
    for name in (*SCRIPTS, "pyproject.toml", "constraints.txt"):
        text = (ROOT / name).read_text()
        assert not re.search(r"--(extra-)?index-url|--find-links|https?://(?!www\.apache)", text), (
            name
        )


def test_project_declares_no_packages_and_pins_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"] == {"packages": [], "py-modules": []}
    pins = re.findall(
        r"^([\w.-]+)==[\w.]+(?:; (.+))?$", (ROOT / "constraints.txt").read_text(), re.M
    )
    names = {name.lower().replace("_", "-") for name, _ in pins}
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    for requirement in wanted:
        assert re.match(r"[\w-]+", requirement).group().replace("_", "-") in names
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"
    ]
    assert len(lines) == len(pins)
    markers = {marker for _, marker in pins}
    assert markers == {"", 'python_version < "3.11"', 'python_version >= "3.11"'}


def imports(folder, **files):
    """lint-imports on a tree of the rooms, with one import placed in some of them."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for room in ROOMS:
        (folder / room).mkdir(exist_ok=True)
        (folder / room / "module.py").write_text(files.get(room, ""))
    (folder / "train.py").write_text("import recipes.module\n")
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([tool, "--no-cache"], cwd=folder, capture_output=True, text=True)


@pytest.mark.tools
def test_arrows_may_run_down(tmp_path):
    done = imports(
        tmp_path,
        scripts="import phases.module",
        phases="import recipes.module",
        eval="import data.module",
        data="import drafters.module, engines.module",
        drafters="import target.module",
        target="import trainer.module",
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.tools
@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("trainer", "import data.module"),
        ("target", "import drafters.module"),
        ("drafters", "from data import module"),
        ("drafters", "import engines.module"),
        ("engines", "import drafters.module"),
        ("data", "import eval.module"),
        ("eval", "def f():\n    import recipes.module"),
        ("recipes", "import phases.module"),
        ("phases", "import scripts.module"),
        ("recipes", "import train"),
    ],
)
def test_an_arrow_that_runs_back_is_refused(tmp_path, room, line):
    done = imports(tmp_path, **{room: line})
    assert done.returncode == 1
    assert (
        f"{room} is not allowed to import {line.split()[1] if line == 'import train' else ''}"
        in done.stdout
    )


def test_a_circle_inside_a_room_is_refused(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/other.py").write_text("import eval.module")
    done = imports(tmp_path, eval="import eval.other")
    assert done.returncode == 1
    assert "No cycles are allowed in eval." in done.stdout


FAKE_TRAIN = """import os, pathlib, sys
print("arguments", sys.argv[1:], "threads", os.environ.get("OMP_NUM_THREADS"))
folder = pathlib.Path("runs/distillspec-0123456789")
folder.mkdir(parents=True)
(folder / "report.html").write_text("")
"""


@pytest.fixture
def installed(copy):
    """The copy with this environment in place of a fresh one, which the slow test makes."""
    (copy / ".venv" / "bin").mkdir(parents=True)
    here = Path(sys.executable).parent
    for name in ("python", "accelerate"):
        (copy / ".venv" / "bin" / name).write_text(
            f'#!/usr/bin/env bash\nexec {here}/{name} "$@"\n'
        )
        (copy / ".venv" / "bin" / name).chmod(0o755)
    pins = (copy / "pyproject.toml").read_bytes() + (copy / "constraints.txt").read_bytes()
    digest = hashlib.sha256(pins).hexdigest()
    (copy / ".venv" / ".set-up").write_text(f"base {digest}\n{(copy / '.venv').resolve()}\n")
    return copy


@pytest.mark.slow
def test_quickstart_launches_the_main_job_without_warnings(installed, tmp_path):
    (installed / "train.py").write_text(FAKE_TRAIN)
    environment = {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = bash("bash scripts/quickstart.sh trainer.max_steps=2", installed, **environment)
    assert done.returncode == 0, done.stderr
    words = ["recipe=distillspec", "method.control=false", "trainer.max_steps=2"]
    assert f"arguments {words} threads 1" in done.stdout
    assert re.search(r"^installation: \d+ s$", done.stdout, re.M)
    _, _, after = done.stdout.partition("main job: ")
    assert re.match(r"\d+ s\n\nAnswers are cut .*\nOpen the report.html named above", after)
    assert len(after.splitlines()) < 12
    assert done.stderr == ""
    done = bash("bash scripts/quickstart.sh method.control=true", installed, **environment)
    assert "arguments ['recipe=distillspec', 'method.control=true'] threads 1" in done.stdout
    (installed / "train.py").write_text("import sys; sys.exit(3)")
    done = bash("bash scripts/quickstart.sh", installed, **environment)
    assert done.returncode != 0
    assert "main job" not in done.stdout


FAKE_GET = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(parents=True); print('got it')"


@pytest.mark.slow
def test_real_says_its_times_first_and_its_words_are_valid(installed, tmp_path):
    (installed / "train.py").write_text(FAKE_TRAIN)
    (installed / "scripts" / "get_smollm2.py").write_text(FAKE_GET)
    environment = {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = "bash scripts/real.sh prompts=openai/gsm8k data.prompts_config=main"
    done = bash(command, installed, **environment)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("got it\n")
    times = re.findall(r"^    (\w+).*: about (\d+) min$", before, re.M)
    assert times[0] == ("the", "2")
    assert [phase for phase, _ in times[1:]] == ["text", "states", "training", "report"]
    assert sum(int(minutes) for _, minutes in times) <= 30
    assert "real target: " in after
    words = ast.literal_eval(re.search(r"^arguments (\[.*\]) threads 1$", after, re.M)[1])
    config, _ = pipeline.resolve(words)
    assert config.recipe == "eagle3"
    assert (config.data.prompts, config.data.prompts_config) == ("openai/gsm8k", "main")
    assert config.model.target == "runs/smollm2"
    assert config.model.target_gguf == "runs/smollm2.gguf"
    (installed / "runs" / "smollm2" / "config.json").write_text("{}")
    (installed / "runs" / "smollm2.gguf").touch()
    done = bash("bash scripts/real.sh", installed, **environment)
    assert "the target, 540 MB in float32, runs/smollm2: is there\n" in done.stdout
    assert "got it" not in done.stdout
    words = ast.literal_eval(re.search(r"^arguments (\[.*\]) threads 1$", done.stdout, re.M)[1])
    assert pipeline.resolve(words)[0].data.prompts == "questions"
    done = bash("bash scripts/real.sh trainer.max_steps=1200 eval.K=3", installed, **environment)
    assert int(re.search(r"training, 1200 steps of 8 rows: about (\d+) min", done.stdout)[1]) > 40
    words = ast.literal_eval(re.search(r"^arguments (\[.*\]) threads 1$", done.stdout, re.M)[1])
    config, _ = pipeline.resolve(words)
    assert (config.trainer.max_steps, config.trainer.eval_every, config.eval.K) == (1200, 60, 3)
    toy = Target.load(str(ROOT / "assets" / "toy" / "target"))
    write_gguf(tmp_path / "toy.gguf", toy.model, ROOT / "assets" / "toy" / "target")
    words = f"target={tmp_path / 'toy.gguf'} data.num_prompts=26000"
    done = bash(f"bash scripts/real.sh {words}", installed, **environment)
    assert f"the target, 16 MB in float32, {tmp_path / 'toy.gguf'}: is there\n" in done.stdout
    assert int(re.search(r"text, 26000 answers of the target: about (\d+) min", done.stdout)[1]) < 9
    words = ast.literal_eval(re.search(r"^arguments (\[.*\]) threads 1$", done.stdout, re.M)[1])
    config, _ = pipeline.resolve(words)
    assert (config.model.target, config.model.target_gguf) == (str(tmp_path / "toy.gguf"), None)
    done = bash("bash scripts/real.sh target=runs/none.gguf", installed, **environment)
    assert done.returncode == 2
    rule = "error: target must be the path of a GGUF file, got 'runs/none.gguf' (from "
    assert done.stderr.startswith(rule)
    done = bash("bash scripts/real.sh data.num_prompts=all", installed, **environment)
    assert done.returncode == 2
    assert done.stderr == "error: data.num_prompts must be a whole number, got 'all'\n"
