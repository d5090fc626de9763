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
    """A vLLM that is killed after `KILLED_AFTER` answers, and started again where it is `revived`;
    `further`: options of its own."""

    def __init__(self, options, **further):
        self.options, self.lock, self.revived = options | further, threading.Lock(), True
        self.answers, self.kills, self.starters = 0, 0, []
        self.stack = contextlib.ExitStack()
        self.start()

    def start(self):
        target = Target.load("assets/toy/target", dtype="float32")
        before = children()
        self.url = self.stack.enter_context(vllm_server(target, self.options, PLUGIN)).url
        self.processes = children() - before

    def answered(self):
        with self.lock:
            self.answers += 1
            if self.answers != KILLED_AFTER:
                return
            self.kills += 1
            for process in self.processes:
                process.kill()
            self.stack.close()
            if self.revived:
                self.starters.append(threading.Thread(target=self.start))
                self.starters[-1].start()

    def close(self):
        for starter in self.starters:
            starter.join()
        self.stack.close()


def children():
    """The programs of vLLM's servers."""
    every = psutil.Process().children(recursive=True)
    return {process for process in every if SERVER in process.cmdline()}


@pytest.mark.engine
def test_kills_change_nothing_of_what_is_trained(vllm_python, tmp_path, monkeypatch, capsys):
    """`cached`: all states are written before, by one vLLM that is killed and comes back; `live`:
    the drafter trains while two serve, of which the first is killed for good."""
    words = ["recipe=eagle3", "data.num_prompts=200", "data.max_new_tokens=16",
             f"trainer.max_steps={STEPS}", "trainer.batch_size=8", "trainer.log_every=1",
             "eval.num_prompts=2", "run.stage=train", "data.features_dtype=fp32",
             f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip

    def losses(features, engine, name):
        folder = tmp_path / f"{name}-{features}"
        own = [f"data.features={features}", f"data.features_engine={engine}", f"run.dir={folder}"]
        assert train.main([*words, *own]) == 0
        found = [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]
        assert len(found) == STEPS
        return found

    own = {features: losses(features, "hf", "own") for features in ("cached", "live")}
    target = Target.load("assets/toy/target", dtype="float32")
    options, once = states_options(target, LAYERS, tmp_path / "states"), StatesClient._try
    servers = [Killed(options, port=free_port())]

    def counted(client, one, ids):
        found = once(client, one, ids)
        if one.root == servers[0].url:
            servers[0].answered()
        return found

    monkeypatch.setattr(StatesClient, "_try", counted)
    try:
        found = losses("cached", servers[0].url, "served")
        assert found == pytest.approx(own["cached"], rel=1e-4)
        assert servers[0].kills == 1
        servers.append(Killed(options, port=free_port()))
        servers[0].answers, servers[0].revived = 0, False
        found = losses("live", ",".join(server.url for server in servers), "served")
        assert found == pytest.approx(own["live"], rel=1e-4)
        assert servers[0].kills == 2
        assert f"{servers[0].url}/v1/completions failed" in capsys.readouterr().out
    finally:
        for server in servers:
            server.close()
