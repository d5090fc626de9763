"""README.md and docs/: their commands run, their keys exist, their links lead somewhere.

Every block of ```bash is run, on little text and for few steps, unless the line above it says why
it cannot be: `<!-- not run: <reason> -->`, for what needs the network, a GPU, a server or minutes.
The keys in all blocks, run or not, and in the text are known to the configuration.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import train
from phases import pipeline
from phases.check import check_words
from phases.help import composed
from recipes import base
from recipes.common.config import Config, compose
from scripts import (
    cache,
    compare,
    evaluate,
    export,
    generate,
    get_smollm2,
    import_traces,
    push_to_hub,
    request_log,
    serve,
)
from tests.helpers.commands import ROOT, finish, start
from tests.helpers.heads import eagle3_word
from tests.helpers.shrunk import HEAD, shrunk, words_of
from trainer.config import known_keys, parse_overrides, sections

pytestmark = pytest.mark.tools

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
REASON = re.compile(r"<!-- not run: (.*\b(?:network|GPU|server|minutes).*) -->")
VARIABLE = re.compile(r"[A-Z_]+=")  # set for one command
SCRIPT_KEYS = {
    "scripts.cache": cache.KEYS,
    "scripts.export": export.KEYS,
    "scripts.import_traces": [f"script.{key}" for key in import_traces.KEYS],
    "scripts.push_to_hub": push_to_hub.KEYS,
    "scripts.serve": serve.KEYS,
    "scripts.request_log": [f"script.{key}" for key in request_log.KEYS],
}
# what else a block may start; keys of ours stand in none of them
OTHERS = (
    "bash", "export", "head", ".venv/bin/pip", "$DRAFTSMITH_VLLM_PYTHON", "llama-server", "python3",
    "source",
    "sglang.launch_server", "srun", "vllm",
)  # fmt: skip


@dataclass
class Block:
    page: str
    line: int
    reason: str | None  # why it is not run
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command; of one that a shell is given in quotes, those too."""
        found: list[list[str]] = []
        for line in logical_lines(self.text.replace("\\\n", " ")):
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), "&&"]:
                if not words and VARIABLE.match(word):
                    continue
                if word in ("&&", ";", "|"):
                    found += [words] if words else []
                    words = []
                else:
                    words.append(word)
                if " train.py " in word:
                    found.append(shlex.split(word))
        return found

    @property
    def cheap(self) -> bool:
        """Whether nothing is loaded by it."""
        return all(
            entry == "train.py" and (not words or {"help=true", "dry_run=true"} & {*words})
            for entry, words in map(entry_of, self.commands)
        )


def logical_lines(text: str) -> Iterator[str]:
    """The lines of a shell block, those together that a quoted text joins."""
    line = ""
    for part in text.splitlines():
        line += part
        try:
            shlex.split(line, comments=True)
        except ValueError:  # no closing quotation yet
            line += "\n"
        else:
            yield line
            line = ""
    assert not line, f"no closing quotation: {line}"


def entry_of(command: list[str]) -> tuple[str | None, list[str]]:
    if command[:2] == ["bash", "scripts/quickstart.sh"]:
        return "train.py", ["recipe=distillspec", *command[2:]]
    if command[:2] == ["bash", "scripts/real.sh"]:
        return "train.py", ["recipe=eagle3", "preset=laptop", *command[2:]]
    entry, begin = words_of(command)
    return entry, command[begin:]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    opened: int | None = None
    for at, line in enumerate(lines):
        if opened is None and line.startswith("```bash"):
            opened = at
        elif opened is not None and line.startswith("```"):
            marked = lines[opened - 1].startswith("<!--")
            reason = REASON.fullmatch(lines[opened - 1])
            assert not marked or reason, f"{page}, line {opened}: name the network, a GPU, .."
            text = "\n".join(lines[opened + 1 : at])
            name = str(page.relative_to(ROOT))
            yield Block(name, opened + 1, reason[1] if reason else None, text)
            opened = None
    assert opened is None, f"{page} ends inside of a block"


BLOCKS = [block for page in PAGES for block in blocks(page)]


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_the_words_of_a_block_are_taken_by_its_command(block):
    for command in block.commands:
        entry, words = entry_of(command)
        words = [word for word in words if word != "help=true"]
        if entry is None:
            name = command[2] if command[:2] == ["python", "-m"] else command[0]
            assert name in OTHERS, f"{name}: add it to OTHERS, or mend the block"
        elif entry == "train.py" and words:
            pipeline.resolve(words)
            pipeline.resolve(shrunk(["train.py", *words])[1:])  # as the slow tests run it
        elif entry == "scripts.generate":
            compose("generate", base.NoMethod, (), words)
            check_words(words, generate.READS, entry)
        elif entry == "scripts.evaluate":
            evaluate.resolve(words)
            check_words(words, evaluate.READS, entry)
        elif entry == "scripts.import_traces":
            import_traces.resolve(words)
        elif entry == "scripts.get_smollm2":
            get_smollm2.parse(words)
        elif entry == "scripts.serve":
            serve.resolve(words)
        elif entry == "scripts.compare":
            compare.parse(words)
        else:
            parse_overrides(words, SCRIPT_KEYS.get(entry, []))


def test_a_block_with_an_unknown_key_is_noticed():
    block = Block("x", 1, None, "python train.py recipe=medusa \\\n    method.number_of_heads=3")
    with pytest.raises(ValueError, match=r"unknown key 'method\.number_of_heads'"):
        test_the_words_of_a_block_are_taken_by_its_command(block)


def known(page: str) -> set[str]:
    """Every key that a page may name: of a page of one recipe, of that recipe."""
    recipe = re.fullmatch(r"docs/recipes/(\w+)\.md", page)
    keys = {key for keys in SCRIPT_KEYS.values() for key in keys} | {*compare.KEYS}
    for name in [recipe[1]] if recipe else base.names():
        method = type(composed(name).method)
        keys |= {*known_keys({**sections(Config), "method": method})}
    return keys


@pytest.mark.parametrize("page", NAMES)
def test_the_keys_in_the_text_are_known(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    spelled = re.compile(r"\b(?:run|model|data|trainer|eval|method|script)\.[A-Za-z_]\w*\*?(?!\()")
    keys, unknown = known(page), []
    for code in re.findall(r"`([^`]+)`", text):
        for key in spelled.findall(code):
            starts = key.endswith("*") and any(one.startswith(key[:-1]) for one in keys)
            if key not in keys and not starts and not key.endswith((".py", ".json", ".md")):
                unknown.append(key)
    assert unknown == []


# --- links ---------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        place = (ROOT / page).parent / name if name else ROOT / page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


def test_every_page_is_linked_from_the_readme_or_a_page_that_is():
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in found or page.suffix != ".md" or not page.exists():
            continue
        found.add(page)
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
            waiting.append(page.parent / link)
    assert [name for name, page in zip(NAMES, PAGES, strict=True) if page not in found] == []


def test_every_recipe_has_its_page_and_a_line_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name in base.names():
        assert (ROOT / "docs" / "recipes" / f"{name}.md").exists()
        assert f"(docs/recipes/{name}.md)" in readme
    pages = {page.stem for page in (ROOT / "docs" / "recipes").glob("*.md")}
    assert pages == {*base.names()}


def test_the_readme_is_short_and_its_first_screen_holds_the_recipes():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    first = "\n".join(lines[:40])
    assert "bash scripts/quickstart.sh" in first
    for name in base.names():
        assert f"(docs/recipes/{name}.md)" in first


# --- runs ----------------------------------------------------------------------------------------

CHEAP = [block for block in BLOCKS if block.reason is None and block.cheap]


@pytest.mark.parametrize("block", CHEAP, ids=name_of)
def test_what_is_cheap_runs(block, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for command in block.commands:
        assert train.main(shrunk(["train.py", *entry_of(command)[1]])[1:]) == 0
        assert capsys.readouterr().out


COSTLY = [page for page in NAMES if any(
    block.page == page and block.reason is None and not block.cheap for block in BLOCKS
)]  # fmt: skip


@pytest.fixture
def workspace(tmp_path):
    """The repository without what it has written."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", "wandb", ".git"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", COSTLY)
def test_the_blocks_of_a_page_run_one_after_another(page, workspace):
    """Without a launcher, which starts the same in one process (tests/test_train.py)."""
    for block in BLOCKS:
        if block.page != page or block.reason is not None:
            continue
        for command in map(shrunk, block.commands):
            entry, begin = words_of(command)
            assert entry, f"{name_of(block)}: {command}"
            if f"model.drafter={HEAD}" in command:
                eagle3_word((workspace / HEAD).parent, workspace / "assets/toy/target")
            program = ("-m", entry) if command[begin - 2] == "-m" else (entry,)
            code, out, err = finish(start(*program, *command[begin:], folder=workspace))
            assert code == 0, f"{name_of(block)}\n{out}\n{err}"[-4000:]
