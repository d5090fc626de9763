"""A real vLLM server over HTTP: its counters are those of our own decoding, prompt by prompt."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request

import pytest

from data.generate import GenerationPlan, generate_traces
from data.prompts import load_prompts
from data.sampling import Sampling
from data.target import Target
from drafters.causal_lm import CausalLMDrafter
from drafters.export.hf import export
from eval.measure import Bench, Cost
from eval.served import DEFAULTS
from eval.server import check_server, server_row
from trainer.config import EvalConfig

pytestmark = pytest.mark.engine

K, START_S = 4, 300
COST = Cost(0.0, 1.0, 0.0, 0.0)
CONFIG = EvalConfig(
    num_prompts=8, max_new_tokens=32, temperatures=[0.0], K=K, timing_prompts=0, bootstrap_draws=20
)


@pytest.fixture(scope="module")
def target():
    return Target.load("assets/toy/target", dtype="float32")


@pytest.fixture(scope="module")
def address(target, vllm_python, tmp_path_factory):
    """A server with the shipped drafter, up and healthy."""
    folder = tmp_path_factory.mktemp("server")
    drafter = CausalLMDrafter.from_pretrained("assets/toy/draft", target)
    export(
        drafter.model, target.tokenizer, target.model.config.vocab_size, folder / "draft",
        num_assistant_tokens=K, card="", eos_ids=target.eos_ids,
    )  # fmt: skip
    speculative = {
        "method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": K
    }  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", "assets/toy/target",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4",
        "--host", "127.0.0.1", "--port", port, "--no-enable-prefix-caching",
        "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    environment = DEFAULTS | dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                said = (folder / "log").read_text()[-3000:]
                assert process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_a_running_server_counts_as_our_own_decoding(target, address, tmp_path):
    check_server(address, K)
    prompts = load_prompts("toy", count=CONFIG.num_prompts, seed=21, toy_split="eval")
    plan = GenerationPlan("toy eval", tuple(prompts), (0.0,), max_new_tokens=32, lookahead=K)
    traces = list(generate_traces(target, plan, tmp_path, batch_size=8, rows_per_shard=64))
    bench = Bench(target, traces, Sampling(0.0), CONFIG, {"name": "toy", "hash": ""})
    drafter = CausalLMDrafter.from_pretrained("assets/toy/draft", target)
    ours = bench.decoded("draft", drafter, COST).counters
    theirs = server_row(bench, "draft", address, COST)
    assert theirs.row["lossless"]
    same = ("rounds", "truncated_rounds", "emitted", "submitted", "accepted", "engine_drafts",
            "engine_drafted", "engine_accepted", "engine_accepted_per_position")  # fmt: skip
    for one, other in zip(theirs.counters, ours, strict=True):
        assert one.identical
        assert {name: getattr(one, name) for name in same} == {
            name: getattr(other, name) for name in same
        }
    assert theirs.row["engine_accepted"] > CONFIG.num_prompts
