"""What the project computes, number by number, to show that a change of its form changes none.

    OMP_NUM_THREADS=1 python -m tests.freeze OUT               # in this tree and in one of before
    python -m tests.freeze BEFORE AFTER                        # what differs, by name; exit code 1

One JSON of names and values. Every recipe trains four steps in seven ways: losses, gradient norms,
a hash of the weights and of each export, or the line that refuses it. Each goes on from its
second step. Every stored drafter of tests/fixtures/frozen is measured with chains, trees and
policies, by replay and by decoding. Every wrong word of tests/helpers/wrong_words.py is refused in
its line. Floats are hexadecimal; what depends on the clock is left out. Two trees are compared on
one machine, as processors add in different orders.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

import train
from recipes import base
from scripts import evaluate
from tests.helpers.commands import command, own_words, read_jsonl
from tests.helpers.heads import eagle3_word
from tests.helpers.tiny import save_tiny
from tests.helpers.wrong_words import HEADS, MALFORMED, WORDS, WORDS_OF_TARGET
from tests.offline import sitecustomize  # noqa: F401

FROZEN = Path("tests/fixtures/frozen")
WAYS = {
    "default": (),
    "muon": ("trainer.optimizer=muon",),
    "packed": ("trainer.pack_tokens=64", "trainer.batch_size=2"),
    "reduced vocabulary": ("method.draft_vocab_size=40",),
    "sequence mean": ("method.reduction=sequence",),
    "fp8 states": ("data.features=cached", "data.features_dtype=fp8"),
    "accumulation": ("trainer.batch_size=2", "trainer.gradient_accumulation_steps=2"),
}
SHAPES = {
    "dynamic tree": ("eval.tree=dynamic:9:2:3",),
    "calibrated trees": (
        "eval.tree=[calibrated:6,'calibrated:6,siblings=top']",
        "eval.baselines=[]",
    ),
    "policy": ("eval.policy=product:0.3", "eval.baselines=[]"),
    "head": ("eval.policy=head:0.5", "eval.baselines=[]"),
}
QUICK = (
    "method.control=true", "trainer.max_steps=4", "trainer.log_every=1", "eval.temperatures=0",
    "eval.num_prompts=1", "eval.max_new_tokens=4", "eval.K=2", "eval.tree=[]", "eval.baselines=[]",
    "eval.timing_prompts=0", "eval.bootstrap_draws=1",
)  # fmt: skip
CLOCK = {"draft_s", "verify_s", "cost_ratio", "verify_cost", "draft_time_share", "modelled_speedup",
         "speedup", "plain_tokens_per_s", "speculative_tokens_per_s", "tokens_per_s", "step_s",
         "cost_source", "serve_s_per_request", "update_s_per_request"}  # fmt: skip


def exact(value: object) -> object:
    """`value` with hexadecimal floats, without what depends on the clock."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {k: exact(v) for k, v in value.items() if k not in CLOCK and not k.startswith("t_")}
    return [exact(one) for one in value] if isinstance(value, list) else value


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(exact(value), sort_keys=True).encode()).hexdigest()[:16]


def tensors(file: Path) -> str:
    """A hash of the tensors, whatever the file's header says of them."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def called(main, words: list[str], folder: Path) -> str | None:
    """The line that refuses the command, without the folder's name; None where it runs."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    if not code:
        return None
    line = errors.getvalue().splitlines()[-1].replace(str(folder), "<folder>")
    return f"{code}: {line}"


def words_of(recipe: str, folder: Path, target: Path, *given: str) -> list[str]:
    words = command(folder, target, f"recipe={recipe}", *QUICK, *given)
    if recipe != "distillspec":
        words = [word for word in words if not word.startswith("method.") or word in given]
    own = own_words(recipe, folder)
    if recipe == "eagle3":  # the defaults collide on two layers
        own.append("method.layers=[0,1]")
    if recipe == "gto":
        own += [eagle3_word(folder, target), "method.group_size=2", "trainer.lr_warmup_steps=1"]
    if recipe == "fastdraft":
        own += ["method.pretrain_steps=2", "method.continue_steps=2"]
    last = dict(word.split("=", 1) for word in [*words, *own, *given])
    return [f"{key}={value}" for key, value in last.items()]


def of_run(run: Path) -> dict[str, object]:
    """The numbers of a training, and what it wrote."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    files = sorted([*run.glob("drafter/**/*.safetensors"), *run.glob("export/**/*.safetensors")])
    return {
        "losses": [[r["stage"], r["step"], exact(r["loss"]), exact(r["grad_norm"])] for r in rows],
        "metrics": digest(rows),
        "results": digest(rows_of(run)),
        **{str(file.relative_to(run)): tensors(file) for file in files},
        **{
            str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            for file in sorted(run.glob("export/**/config.json"))
        },
    }


def rows_of(run: Path) -> list[dict[str, object]]:
    """The rows of a report, without what they do not know."""
    rows = json.loads((run / "report.json").read_text())["results"]
    return [{key: row[key] for key in sorted(row) if row[key] is not None} for row in rows]


def training(folder: Path, target: Path) -> Iterator[tuple[str, object]]:
    # the first run of a process may round otherwise where other programs use the cores
    first = words_of("distillspec", folder, target, f"run.dir={folder / 'first'}")
    called(train.main, first, folder)
    for recipe in base.names():
        for way, words in WAYS.items():
            run = folder / "run"
            given = words_of(recipe, folder, target, f"run.dir={run}", *words)
            line = called(train.main, given, folder)
            yield f"train {recipe}, {way}", line or of_run(run)
            shutil.rmtree(run, ignore_errors=True)


def resumed(folder: Path, target: Path) -> Iterator[tuple[str, object]]:
    """As if it had been killed after the second step."""
    for recipe in base.names():
        run = folder / "run"
        given = words_of(recipe, folder, target, f"run.dir={run}", "trainer.save_every=1")
        called(train.main, given, folder)
        *_, last = sorted(run.glob("stages/*"))
        for checkpoint in last.glob("checkpoints/step-*"):
            if int(checkpoint.name.removeprefix("step-")) > 2:
                shutil.rmtree(checkpoint)
        for name in ("report.json", "drafter", f"{last.relative_to(run)}/finished.json"):
            left = run / name
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield f"resume {recipe}", called(train.main, given, folder) or of_run(run)
        shutil.rmtree(run)


def measured(folder: Path, target: Path) -> Iterator[tuple[str, object]]:
    """Rows and rounds of the stored drafters, by replay and by decoding."""
    cache = folder / "frozen"
    shutil.copytree(FROZEN / "cache", cache)
    for place in sorted(FROZEN.glob("*/drafter")):
        for shape, words in SHAPES.items():
            out = folder / "found"
            given = [
                f"eval.drafter={place}", f"model.target={FROZEN}/target", f"data.cache_dir={cache}",
                f"eval.prompts={FROZEN}/eval.jsonl", "eval.num_prompts=4", "eval.K=2",
                "eval.max_new_tokens=11", "eval.timing_prompts=0", "eval.bootstrap_draws=20",
                f"script.out={out}", *words,
            ]  # fmt: skip
            name = f"measure {place.parent.name}, {shape}"
            if line := called(evaluate.main, given, folder):
                yield name, line
                continue
            for row in rows_of(out):
                key = (
                    row["drafter"],
                    row["measured_by"],
                    row.get("tree"),
                    f"T={row['temperature']:g}",
                )
                yield f"{name}, {', '.join(str(one) for one in key if one)}", exact(row)
            yield f"{name}, rounds", digest(read_jsonl(out / "rounds.jsonl"))
            shutil.rmtree(out)


def refused(folder: Path, target: Path) -> Iterator[tuple[str, object]]:
    for words, _ in MALFORMED:
        yield f"refuse {' '.join(words)}", called(train.main, words, folder)
    for word, _ in WORDS + WORDS_OF_TARGET:
        given = command(folder, target, "method.control=true", word)
        yield f"refuse {word}", called(train.main, given, folder)
    for recipe, words, _ in HEADS:
        given = command(folder, target, f"recipe={recipe}", *words)
        given = [word for word in given if not word.startswith("method.") or word in words]
        yield f"refuse recipe={recipe} {' '.join(words)}", called(train.main, given, folder)


PARTS = (training, resumed, measured, refused)


def freeze(out: Path) -> None:
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        target = save_tiny(Path(scratch) / "llama", "llama")
        for part in PARTS:
            folder = Path(scratch) / part.__name__
            folder.mkdir()
            for name, value in part(folder, target):
                assert name not in found, name
                found[name] = value
                print(name, flush=True)
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def differences(before: object, after: object, name: str = "") -> Iterator[str]:
    """Name what differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{name} / {key}".strip(" /"))
    elif before != after:
        yield f"{name}: {before} -> {after}"


def main(arguments: list[str]) -> int:
    if len(arguments) == 1:
        freeze(Path(arguments[0]))
        return 0
    before, after = (json.loads(Path(name).read_text()) for name in arguments)
    found = list(differences(before, after))
    print("\n".join(found) or f"{len(before)} values, all equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
