"""Every command that reads prompts says what it drops of them."""

from __future__ import annotations

import pytest

from scripts import evaluate, generate
from tests.helpers.commands import command, finish, only, start, write_jsonl

ROWS = [{"prompt": text} for text in ("One? ", "Two? ", "Two?", "", "Three? ")]
COMMANDS = {
    "train.py": lambda words: ("train.py", *words),
    "generate": lambda words: ("-m", "scripts.generate", *only(words, *generate.READS)),
    "evaluate": lambda words: (
        "-m", "scripts.evaluate", "eval.drafter=lookup:3", *only(words, *evaluate.READS),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_drops_of_the_prompts(tmp_path, tiny_folder, name):
    prompts = write_jsonl(tmp_path / "own.jsonl", ROWS)
    words = command(tmp_path, tiny_folder("llama"), f"data.prompts={prompts}", "dry_run=true")
    code, _, err = finish(start(*COMMANDS[name](words)))
    assert code == 0, err
    line = "3 prompts taken of 3; 1 duplicates and 1 empty ones dropped"
    assert f"{prompts}: {line}" in err.splitlines()
