"""Kinds of drafters in llama.cpp, on each of a target's files: tokens per round and per second.

    python -m benchmarks.llamacpp_kinds target=<folder> files=<file.gguf>,... drafters=<folder>,...
        out=<results.json> [key=value of scripts.evaluate ...]

Each drafter is measured by `scripts.evaluate ... eval.engine=llamacpp` on each file, at temperature
0; `ngram_simple:<size>` is a drafter, too. A line says whether the answers with the drafter are
those without, on how many prompts, the tokens per round of llama.cpp and of our own decoding (equal
where the file holds the target's own float32), and the tokens per second of llama.cpp alone and
with the drafter, with the interval of their ratio. `eval.tree=copy:2` adds llama.cpp's copies.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from drafters.training_free.table import is_training_free
from phases.exits import fail
from phases.run import provenance
from scripts import evaluate
from trainer.config import asks_for_help
from trainer.errors import RunFault, require
from trainer.files import write_json

OWN = ("target", "files", "drafters", "out")
KEPT = (
    "drafter", "K", "tokens_per_round", "tokens_per_round_ci95", "identical_to_plain",
    "num_compared", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "speedup_ci95",
    "round_cost", "draft_time_share", "seconds_by_rows",
)  # fmt: skip


def measured(target: str, file: str, drafter: str, more: list[str]) -> list[dict[str, Any]]:
    """The rows of llama.cpp, with our own decoding's tokens per round of the same chain."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [
            f"eval.drafter={drafter}", f"model.target={target}", f"model.target_gguf={file}",
            "eval.engine=llamacpp", "eval.temperatures=0", f"script.out={scratch}/report",
        ]  # fmt: skip
        if code := evaluate.main([*words, *more]):
            raise RunFault(f"scripts.evaluate ended with {code} for {drafter} on {file}")
        report = json.loads((Path(scratch) / "report" / "report.json").read_text())
    rows = [row for row in report["results"] if row["measured_by"] == "llamacpp"]
    (ours,) = [
        row for row in report["results"]
        if row["measured_by"] == "decoding" and row["tree"] is None and row["role"] == "measured"
    ]  # fmt: skip
    kind = report["drafter"]["kind"]
    return [
        {"kind": kind, "file": Path(file).name, "ours": ours["tokens_per_round"]}
        | {key: row[key] for key in KEPT}
        for row in rows
    ]


def line(row: dict[str, Any]) -> str:
    low, high = row["speedup_ci95"] or (0, 0)
    return (
        f"| {row['kind']}, {row['drafter'].rpartition('/')[2]} | {row['file']} | "
        f"{row['identical_to_plain']:.0%} of {row['num_compared']} | {row['ours']:.3f} | "
        f"{row['tokens_per_round']:.3f} | {row['plain_tokens_per_s']:.1f} | "
        f"{row['speculative_tokens_per_s']:.1f} | {row['speedup']:.2f} [{low:.2f}, {high:.2f}] |"
    )


def main(arguments: list[str]) -> int:
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        given = dict(word.split("=", 1) for word in arguments if word.split("=", 1)[0] in OWN)
        for key in OWN:
            require(bool(given.get(key)), key, "be given", None)
        more = [word for word in arguments if word.split("=", 1)[0] not in OWN]
        result = {**provenance(["benchmarks.llamacpp_kinds", *arguments]), "rows": []}
        for file in given["files"].split(","):
            for drafter in given["drafters"].split(","):
                plain = [word for word in more if not word.startswith("eval.tree=")]
                words = plain if is_training_free(drafter) else more
                found = measured(given["target"], file, drafter, words)
                result["rows"] += found
                print("\n".join(map(line, found)), flush=True)
                write_json(Path(given["out"]), result)
    except Exception as error:
        return fail(error, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
