"""What must be opened and edited in order to add something: counted on a copy of the tree. And what
must be read in order to follow a training step.

A verifier, a length policy, a tree shape or a training-free drafter is one new file, and one row of
its folder's table; the command line then takes it by name, and reports measure with it.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import train
from scripts import evaluate
from tests.helpers.commands import ROOT, command, only
from trainer.loop import Fit

ROOMS = ("trainer", "target", "drafters", "engines", "data", "eval", "recipes", "phases", "scripts")


@dataclass
class Dummy:
    """`path`: of the new file; `name`: of the class in it; `word`: of the command line; `key` and
    `value`: what a row of the report says of it."""

    path: str
    name: str
    word: str
    key: str
    value: str
    content: str

    @property
    def table(self) -> str:
        return f"{Path(self.path).parent}/table.py"

    def add(self, root: Path) -> None:
        (root / self.path).write_text(self.content)
        table = root / self.table
        module = self.path.removesuffix(".py").replace("/", ".")
        text, rows = re.subn(
            r"for one in \(([^)]*?),?\s*\)", rf"for one in (\1, {self.name})", table.read_text()
        )
        assert rows == 1
        table.write_text(
            text.replace("from trainer", f"from {module} import {self.name}\nfrom trainer", 1)
        )


HEAD = """from dataclasses import dataclass, field
from typing import ClassVar

import torch
"""
DUMMIES = {
    "verifier": Dummy(
        "eval/verifiers/warm.py", "Warm", "eval.verifier=warm:2", "verifier", "warm:2",
        HEAD.replace("field", "replace") + '''
from eval.verifiers.token import Token


@dataclass(frozen=True)
class Warm(Token):
    """Verifies against the target at a higher temperature."""

    name: ClassVar[str] = "warm"
    factor: float

    def lossless(self, sampling):
        return sampling.temperature == 0

    def replayable(self, sampling):
        return sampling.temperature == 0

    def __call__(self, round):
        return super().__call__(replace(round, logits=round.logits / self.factor))
''',
    ),
    "policy": Dummy(
        "eval/policies/at_most.py", "AtMost", "eval.policy=at_most:2", "policy", "at_most:2",
        HEAD + '''
from eval.policies.base import Policy


@dataclass
class AtMost(Policy):
    """Stops after so many tokens."""

    name: ClassVar[str] = "at_most"
    count: int

    def stops(self, signals, depth):
        return torch.full_like(signals.confidence, depth >= self.count, dtype=torch.bool)
''',
    ),
    "tree shape": Dummy(
        "drafters/trees/comb.py", "Comb", "eval.tree=comb:2", "tree", "comb, 4 nodes, depth 2",
        HEAD + '''
from drafters.trees.static import Ranks, StaticTree


@dataclass(frozen=True)
class Comb(StaticTree):
    """The likeliest path, and the second choice beside each of its nodes."""

    name: ClassVar[str] = "comb"
    paths: tuple[Ranks, ...] = field(init=False)
    title: str = field(init=False, default="comb")
    length: int

    def __post_init__(self):
        paths = [(0,) * depth + (rank,) for depth in range(self.length) for rank in (0, 1)]
        object.__setattr__(self, "paths", tuple(paths))
        super().__post_init__()
''',
    ),
    "training-free drafter": Dummy(
        "drafters/training_free/repeat.py", "Repeat", "eval.baselines=[repeat]", "drafter",
        "repeat",
        HEAD + '''
from drafters.training_free.base import TrainingFree


@dataclass
class Repeat(TrainingFree):
    """The last token again."""

    name: ClassVar[str] = "repeat"

    def continuation(self, context, count):
        return [int(context[-1])] * count
''',
    ),
}  # fmt: skip


def copied(folder: Path) -> Path:
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / room, folder / room, ignore=ignored)
    shutil.copy(ROOT / "train.py", folder)
    return folder


def files(root: Path) -> dict[str, str]:
    """The text of every file of the copy."""
    places = sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in places}


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_folder):
    """The rows of one report that is measured with all dummies, by the commands of a copy."""
    folder = tmp_path_factory.mktemp("copy")
    root = copied(folder / "tree")
    for dummy in DUMMIES.values():
        dummy.add(root)
    words = command(folder, tiny_folder("llama"), "eval.temperatures=1")
    words = only(words, *evaluate.READS)
    words += [dummy.word for dummy in DUMMIES.values()]
    words += [f"eval.drafter={tiny_folder('gpt2', layers=1, width=16)}"]
    given = [sys.executable, "-m", "scripts.evaluate", *words, f"script.out={folder / 'out'}"]
    done = subprocess.run(given, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out" / "report.json").read_text())["results"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DUMMIES)
def test_one_new_file_and_a_row_of_its_table_add_it(kind, tmp_path, results):
    dummy, root = DUMMIES[kind], copied(tmp_path)
    before = files(root)
    dummy.add(root)
    after = files(root)
    assert after.keys() - before.keys() == {dummy.path}
    assert {name for name in before if before[name] != after[name]} == {dummy.table}
    lines = [set(text[dummy.table].splitlines()) for text in (before, after)]
    assert len(lines[1] - lines[0]) <= 2  # its import and its row
    rows = [row for row in results if row.get(dummy.key) == dummy.value]
    assert {row["measured_by"] for row in rows} & {"decoding", "offline"}
    assert all(row["tokens_per_round"] >= 1 for row in rows)


@pytest.mark.slow
def test_a_lossy_verifier_says_so_and_is_not_replayed(results):
    rows = [row for row in results if row["verifier"] == "warm:2"]
    assert {row["measured_by"] for row in rows} == {"decoding"}
    assert {row["tree"] for row in rows} == {None, DUMMIES["tree shape"].value}
    assert not any(row["lossless"] for row in rows)
    assert all(row["lossless"] for row in results if row["verifier"] == "token")


@pytest.mark.slow
def test_a_row_says_what_its_drafter_is_there_for(results):
    roles = {row["drafter"]: row["role"] for row in results}
    assert (roles["repeat"], roles["gpt2"]) == ("baseline", "measured")


# --- a method, by the page that explains it -----------------------------------------------------

PAGE = ROOT / "docs" / "add_a_method.md"
KINDS = "drafters/kinds.py"


def add_the_method_of_the_page(root: Path) -> None:
    """Its complete files, the row of step 2 with its import, and the verifier's row."""
    text = PAGE.read_text()
    for path, content in re.findall(
        r"^`([\w/.]+)`[^\n]*:\n\n```(?:python|yaml)\n(.*?)```", text, flags=re.S | re.M
    ):
        (root / path).write_text(content)
    top = "eval/verifiers/top.py"
    Dummy(top, "Top", "eval.verifier=top:2", "verifier", "top:2", (root / top).read_text()).add(
        root
    )
    (row,) = re.findall(r"^Kind\(LinearDrafter,.*$", text, flags=re.M)
    table = root / KINDS
    kinds = table.read_text().replace(
        "        Kind(HydraDrafter,", f"        {row},\n        Kind(HydraDrafter,"
    )
    line = "from drafters.linear import LinearDrafter\n"
    table.write_text(
        kinds.replace("from drafters.medusa import", f"{line}from drafters.medusa import")
    )


@pytest.mark.slow
def test_a_head_without_an_engine_is_three_files_and_a_row(tmp_path, tiny_folder):
    """As docs/add_a_method.md adds it; then its recipe is trained, measured and loaded again."""
    root = copied(tmp_path / "tree")
    before = files(root)
    add_the_method_of_the_page(root)
    after = files(root)
    new = {"drafters/linear.py", "recipes/linear.py", "eval/verifiers/top.py"}
    assert (after.keys() - before.keys(), (root / "recipes/linear.yaml").exists()) == (new, True)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {KINDS, "eval/verifiers/table.py"}
    for name in changed:
        lines = [set(text[name].splitlines()) for text in (before, after)]
        assert len(lines[1] - lines[0]) == 2  # its import and its row

    words = [word for word in command(tmp_path, tiny_folder("llama")) if "method." not in word]
    words = [word for word in words if not word.startswith(("recipe=", "eval.K="))]
    given = [sys.executable, "train.py", *words, "recipe=linear"]
    done = subprocess.run(given, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no engine serves a drafter of kind 'linear'" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    rows = [row for row in report["results"] if row["drafter"] == "after"]
    # rounds follow the unroll: what is decoded is what replay found without decoding
    counters = {(row["num_rounds"], row["tokens_per_round"]) for row in rows if not row["tree"]}
    assert len(rows) >= 2
    assert len(counters) == 1

    # the saved head is loaded and measured again, by the verifier of the page too
    words = only(command(tmp_path, tiny_folder("llama")), *evaluate.READS)
    words = [word for word in words if not word.startswith(("eval.K=", "eval.temperatures="))]
    words += ["eval.K=3", "eval.temperatures=0", "eval.verifier=top:2"]
    words += [f"eval.drafter={tmp_path / 'run' / 'drafter'}", f"script.out={tmp_path / 'again'}"]
    given = [sys.executable, "-m", "scripts.evaluate", *words]
    done = subprocess.run(given, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "again" / "report.json").read_text())["results"]
    again = [row for row in again if row["role"] == "measured"]
    exact = {(r["num_rounds"], r["tokens_per_round"]) for r in again if r["verifier"] == "token"}
    assert exact == counters
    (lossy,) = [row for row in again if row["verifier"] == "top"]  # :2 is its default
    assert not lossy["lossless"]
    assert lossy["tokens_per_round"] >= counters.pop()[1]


@pytest.mark.slow
def test_a_recipe_on_a_network_that_is_there_is_two_files(tmp_path):
    root = copied(tmp_path)
    before = files(root)
    (root / "recipes/two_heads.py").write_text(
        '"""Two Medusa heads."""\n\nfrom recipes.medusa import Config as Config\n'
        "from recipes.medusa import Recipe as Recipe\n"
    )
    (root / "recipes/two_heads.yaml").write_text("method:\n  num_heads: 2\neval:\n  K: 2\n")
    assert files(root).keys() - before.keys() == {"recipes/two_heads.py"}
    given = [sys.executable, "train.py", "recipe=two_heads", "dry_run=true", "data.num_prompts=4"]
    given += ["eval.num_prompts=2", f"data.cache_dir={tmp_path / 'cache'}"]
    (root / "assets").symlink_to(ROOT / "assets")
    done = subprocess.run(given, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "num_heads: 2" in done.stdout
    listed = subprocess.run([sys.executable, "train.py"], cwd=root, capture_output=True, text=True)
    assert "two_heads      Two Medusa heads." in listed.stdout + listed.stderr


@pytest.mark.slow
def test_what_few_runs_need_is_imported_by_those_alone():
    """Every command waits for what the entry points import."""
    script = "import sys, train, scripts.evaluate, recipes.eagle3; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    slow = {"peft", "bitsandbytes", "datasets", "wandb", "deepspeed", "gguf", "vllm"}
    assert not slow & set(done.stdout.split())


# of one step, between its batch and its optimiser: files, and lines of the functions that run: 26
# and 807, 31 and 1,001. What only reduced vocabularies, compressed teachers, noise and the further
# terms of block drafters need lies in functions that do not run here
STEPS = {"medusa": (26, 810), "eagle3": (31, 1005)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", STEPS)
def test_a_step_runs_so_much_of_the_code(recipe, tmp_path, tiny_folder, monkeypatch):
    update, functions = Fit.update, {}

    def note(frame, event, arg):
        code = frame.f_code
        path = Path(code.co_filename)
        named = not code.co_name.startswith("<")  # not a comprehension or lambda inside of one
        if event == "call" and named and path.parts[: len(ROOT.parts)] == ROOT.parts:
            place = path.relative_to(ROOT)
            if place.parts[0] in ROOMS:
                functions[place, code.co_firstlineno] = len(inspect.getsourcelines(code)[0])

    def traced(self, *given):
        sys.setprofile(note)
        try:
            update(self, *given)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Fit, "update", traced)
    words = command(
        tmp_path, tiny_folder("llama"), f"recipe={recipe}", "trainer.max_steps=1",
        "eval.temperatures=0", "eval.num_prompts=1", "eval.timing_prompts=0",
    )  # fmt: skip
    words = [word for word in words if not word.startswith("method.")]
    assert train.main([*words, *["method.layers=[0,1]"] * (recipe == "eagle3")]) == 0
    files = sorted({str(path) for path, _ in functions})
    print(len(files), "files,", sum(functions.values()), "lines:", *files)
    most_files, most_lines = STEPS[recipe]
    assert len(files) <= most_files
    assert sum(functions.values()) <= most_lines
