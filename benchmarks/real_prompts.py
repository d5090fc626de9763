"""Prompts of the tables on a real chat model, as one file of chat messages.

    python -m benchmarks.real_prompts <folder of the data> [count=16] [out=runs/real/prompts.jsonl]
    python -m benchmarks.real_prompts <folder of the data> use=training count=1200 \\
        out=runs/real/training.jsonl

The folder holds gsm8k/, humaneval/, mbpp/, arena_hard/, self_instruct/ and alpaca/. Those held out
are of other files than those to train on, but for `use=dialogue`, which holds out for drafters of
other text what `use=training` has of Arena-Hard; `count` of each source at most, the ones whose
text has the smallest SHA-256. The data stays where it is. Alpaca is for research alone (CC BY-NC
4.0): a drafter trained on answers to it is measured here and not published.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phases.exits import fail
from trainer.checks import require_one_of, whole_number
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import UserError, require
from trainer.files import write_atomic

DEFAULTS = {"count": "16", "out": "runs/real/prompts.jsonl", "use": "evaluation"}


def math(row: dict[str, Any]) -> str:
    return row["question"]


def code(row: dict[str, Any]) -> str:
    return f"Complete this Python function:\n\n{row['prompt']}"


def instructions(row: dict[str, Any]) -> str:
    return instruction({**row, "input": row["instances"][0]["input"]})


def instruction(row: dict[str, Any]) -> str:
    given = row["input"]
    return f"{row['instruction']}\n\n{given}" if given else row["instruction"]


def problem(row: dict[str, Any]) -> str | None:
    """Of MBPP the part that its authors train on."""
    return row["text"] if 511 <= row["task_id"] <= 974 else None


def chat(row: dict[str, Any]) -> str:
    return row["prompt"]


SOURCES: dict[str, list[tuple[str, str, Callable[[dict[str, Any]], str | None]]]] = {
    "evaluation": [
        ("math", "gsm8k/test_first_half.jsonl", math),
        ("code", "humaneval/HumanEval.jsonl.gz", code),
        ("instructions", "self_instruct/user_oriented_instructions.jsonl", instructions),
    ],
    "dialogue": [("dialogue", "arena_hard/question_dev.jsonl", chat)],
    "training": [
        ("math", "gsm8k/train.jsonl", math),
        ("code", "mbpp/mbpp.jsonl", problem),
        ("instructions", "arena_hard/question_dev.jsonl", chat),
        ("instructions", "self_instruct/seed_tasks.jsonl", instructions),
        ("instructions", "alpaca/alpaca_en_demo.json", instruction),
    ],
}


def rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise UserError(f"{path} is missing: name the folder that holds it")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        yield from json.load(file) if path.suffix == ".json" else map(json.loads, file)


def parse(arguments: list[str]) -> tuple[Path, dict[str, str]]:
    """The folder of the data, and the settings."""
    folders = [a for a in arguments if "=" not in a]
    given = DEFAULTS | parse_overrides([a for a in arguments if "=" in a], [*DEFAULTS], DEFAULTS)
    if len(folders) != 1:
        raise UserError("name the folder of the data: python -m benchmarks.real_prompts <folder>")
    for key, value in given.items():
        require(bool(value), key, "have a value", value)
    require_one_of("use", given["use"], tuple(SOURCES))
    whole_number("count", given["count"])
    return Path(folders[0]), given


def prompts(folder: Path, use: str, count: int) -> list[str]:
    """The lines of the file: `count` prompts of each source at most."""
    lines = []
    for domain, file, text_of in SOURCES[use]:
        texts = sorted(
            filter(None, {text_of(row) for row in rows(folder / file)}),
            key=lambda text: hashlib.sha256(text.encode()).hexdigest(),
        )
        for text in texts[:count]:
            row = {"domain": domain, "messages": [{"role": "user", "content": text}]}
            lines.append(json.dumps(row) + "\n")
    return lines


def main(arguments: list[str]) -> int:
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        folder, given = parse(arguments)
        lines = prompts(folder, given["use"], int(given["count"]))
        write_atomic(Path(given["out"]), "".join(lines))
    except Exception as error:
        return fail(error, arguments)
    print(f"{given['out']}: {len(lines)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
