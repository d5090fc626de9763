"""A run that is killed anywhere and started again with the same command ends like a straight one:
the same traces, the same losses, the same weights bit for bit."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from data.traces import TraceStore
from tests.helpers.commands import command, finish, read_jsonl, start

MAX_KILLS = 16
TIMINGS = ("tokens_per_s", "t_draft", "t_verify", "t_other")
OPTIONS = {
    "default": (),
    "on_policy": ("method.data_mix={draft: 1}",),
    "per_example": (
        "method.data_mix={target: 0.5, draft: 0.5}",
        "method.mix_per=example",
        "data.temperature=[0, 1]",
    ),
    "accumulated": ("method.data_mix={draft: 1}", "trainer.gradient_accumulation_steps=3"),
}


def words_for(tmp_path, name, target, *given):
    """The same prompts for all runs below `tmp_path`: their path is part of a store's identity."""
    settings = (
        f"run.dir={tmp_path / name / 'run'}", f"data.cache_dir={tmp_path / name / 'cache'}",
        "data.rows_per_shard=1", "data.batch_size=2", "data.max_new_tokens=24",
        "trainer.max_steps=40", "trainer.save_every=2", "trainer.eval_every=5",
        "trainer.log_every=3", "eval.temperatures=1", "method.control=true",
    )  # fmt: skip
    return command(tmp_path, target, *settings, *given)


def outcome(folder: Path):
    """All that must not depend on kills, as one comparable value."""
    stores = {}
    for manifest in (folder / "cache").glob("traces/*/manifest.json"):
        rows = TraceStore.open(manifest.parent, None, create=False).load()
        assert len({row.key for row in rows}) == len(rows)
        stores[manifest.parent.name] = rows
    assert sorted(len(rows) for rows in stores.values()) == [4, 8]
    tables = {}
    for name in ("metrics.jsonl", "rounds.jsonl"):
        rows = read_jsonl(folder / "run" / name)
        tables[name] = [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]
    losses = [row["step"] for row in tables["metrics.jsonl"] if "loss" in row]
    assert losses == [*range(3, 40, 3), 40] * 2  # both stages, no row twice
    weights = (folder / "run" / "drafter" / "model.safetensors").read_bytes()
    return stores, tables, weights


def straight(tmp_path, target, *given):
    code, _, err = finish(start("train.py", *words_for(tmp_path, "straight", target, *given)))
    assert code == 0, err
    return outcome(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_kill_at_random_moments_changes_nothing(tmp_path, tiny_folder, options):
    target = tiny_folder("llama")
    expected = straight(tmp_path, target, *OPTIONS[options])
    words = words_for(tmp_path, "killed", target, *OPTIONS[options])
    code, out, err = finish(start("-m", "tests.test_resume", options, *words))
    assert code == 0, err
    kills = [line.removeprefix("killed in ") for line in out.splitlines() if "killed in" in line]
    assert kills.count("generation") >= 1
    assert kills.count("training") >= 4
    found = outcome(tmp_path / "killed")
    for one, other in zip(found, expected, strict=True):
        assert one == other


@pytest.mark.slow
def test_sigterm_saves_exits_75_and_the_same_command_goes_on(tmp_path, tiny_folder):
    target = tiny_folder("llama")
    expected = straight(tmp_path, target)
    words = words_for(tmp_path, "stopped", target)
    folder = tmp_path / "stopped"
    for stage in ("control", "distill"):
        with (tmp_path / "log").open("w") as log:
            process = start("train.py", *words, log=Path(log.name))
        metrics = folder / "run" / "metrics.jsonl"
        while not (metrics.exists() and f'"{stage}", "step": 3' in metrics.read_text()):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert "stopped and saved at step" in (tmp_path / "log").read_text()
        assert not (folder / "run" / "report.json").exists()
    code, _, err = finish(start("train.py", *words))
    assert code == 0, err
    found = outcome(folder)
    for one, other in zip(found, expected, strict=True):
        assert one == other


def crash(options: str, words: list[str]) -> None:
    """Run the command in children that are killed after a random while, until one comes through.
    The parent imports and computes nothing, so a child is quick to start and safe to fork."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import phases.report  # noqa: F401
    import train

    generator = random.Random(options)
    given = dict(word.split("=", 1) for word in words)
    metrics, cache = Path(given["run.dir"]) / "metrics.jsonl", Path(given["data.cache_dir"])
    for kill in range(MAX_KILLS + 1):
        child = os.fork()
        if child == 0:
            os._exit(train.main(words))
        generating = kill < 4
        seen = None
        # a while after something new is on the disk, now and then after a while alone
        while kill < MAX_KILLS and not os.waitpid(child, os.WNOHANG)[0]:
            shards = sorted(cache.glob("traces/*/*.parquet")) if generating else []
            now = shards, metrics.exists() and metrics.read_bytes()
            if seen is None:
                seen = now
            if now != seen or kill % 5 == 4:
                time.sleep(
                    generator.uniform(0, 1 if kill % 5 == 4 else 0.02 if generating else 0.1)
                )
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                print("killed in", "training" if metrics.exists() else "generation", flush=True)
                break
            time.sleep(0.001)
        else:
            if kill == MAX_KILLS:
                assert os.waitpid(child, 0)[1] == 0
            return


if __name__ == "__main__":
    crash(sys.argv[1], sys.argv[2:])
