"""A training on the states of a vLLM that is killed while it serves."""

from __future__ import annotations

import contextlib
import threading

import psutil
import pytest

import train
from engines.states import PLUGIN, StatesClient, states_options
from engines.vllm_server import SERVER, free_port, vllm_server
from target.model import Target
from tests.helpers.commands import read_jsonl

LAYERS, STEPS = (1, 3, 4, "final_norm"), 8  # the layers that EAGLE-3 reads of the toy
KILLED_AFTER = 10  # answers


class Killed:
    """A vLLM at one address, which is killed after `KILLED_AFTER` answers of each training and
    started again."""

    def __init__(self, options):
        self.options, self.lock = options, threading.Lock()
        self.answers, self.kills, self.starters = 0, 0, []
        self.stack = contextlib.ExitStack()
        self.start()

    def start(self):
        target = Target.load("assets/toy/target", dtype="float32")
        self.url = self.stack.enter_context(vllm_server(target, self.options, PLUGIN)).url

    def answered(self):
        with self.lock:
            self.answers += 1
            if self.answers != KILLED_AFTER:
                return
            self.kills += 1
            for child in psutil.Process().children(recursive=True):
                if SERVER in child.cmdline():
                    child.kill()
            self.stack.close()
            self.starters.append(threading.Thread(target=self.start))
            self.starters[-1].start()

    def close(self):
        for starter in self.starters:
            starter.join()
        self.stack.close()


@pytest.mark.engine
def test_it_outlives_two_kills_and_loses_what_transformers_does(vllm_python, tmp_path, monkeypatch):
    """One in each training. `cached`: all states are written before; `live`: the drafter trains
    while vLLM serves."""
    words = ["recipe=eagle3", "data.num_prompts=200", "data.max_new_tokens=16",
             f"trainer.max_steps={STEPS}", "trainer.batch_size=8", "trainer.log_every=1",
             "eval.num_prompts=2", "run.stage=train", "data.features_dtype=fp32",
             f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip

    def losses(features, engine, name):
        folder = tmp_path / f"{name}-{features}"
        own = [f"data.features={features}", f"data.features_engine={engine}", f"run.dir={folder}"]
        assert train.main([*words, *own]) == 0
        return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]

    own = {features: losses(features, "hf", "own") for features in ("cached", "live")}
    target = Target.load("assets/toy/target", dtype="float32")
    states, once = tmp_path / "states", StatesClient._try
    server = Killed(states_options(target, LAYERS, states) | {"port": free_port()})

    def counted(client, one, ids):
        found = once(client, one, ids)
        server.answered()
        return found

    monkeypatch.setattr(StatesClient, "_try", counted)
    try:
        for kills, (features, expected) in enumerate(own.items(), start=1):
            server.answers = 0
            assert losses(features, server.url, "served") == pytest.approx(expected, rel=1e-4)
            assert server.kills == kills
            assert len(expected) == STEPS
    finally:
        server.close()
