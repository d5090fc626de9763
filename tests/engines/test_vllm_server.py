"""A real vLLM server over HTTP: its counters are those of our own decoding, prompt by prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time

import pytest
import torch

from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.imported import reread
from data.prompts import load_prompts
from data.request_log import RequestLog
from drafters.causal_lm import CausalLMDrafter
from drafters.export.hf import export
from drafters.round import Budget
from engines.completions import served_model
from engines.distribution_check import judged
from engines.request_proxy import RequestProxy
from engines.vllm_server import free_port, vllm_server
from engines.web import fetch, server_root
from engines.witnesses import TOPS, scored
from eval.config import EvalConfig
from eval.costs import Cost
from eval.measure import Bench
from eval.offline import OfflineEvaluator
from eval.server import check_server, server_row
from recipes.common.online import Served, expected_rounds, target_logits
from target.model import Target
from target.outline import outline
from target.sampling import Sampling
from tests.helpers.proxy import running

pytestmark = pytest.mark.engine

K = 4
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
    options = {
        "max_model_len": 256, "max_num_seqs": 4, "enable_prefix_caching": False,
        "speculative_config": speculative,
    }  # fmt: skip
    with vllm_server(target, options) as (url, _):
        yield url


@pytest.fixture(scope="module")
def plain(target, vllm_python):
    """The address of a server without a drafter."""
    with vllm_server(target, {"max_model_len": 256, "max_num_seqs": 4}) as (url, _):
        yield url


def test_a_running_server_counts_as_our_own_decoding(target, address, tmp_path):
    check_server(address, K)
    prompts = load_prompts("toy", count=CONFIG.num_prompts, seed=21, toy_split="eval")
    plan = GenerationPlan("toy eval", tuple(prompts), (0.0,), max_new_tokens=32, lookahead=K)
    traces = list(generate_traces(target, plan, tmp_path, batch_size=8, rows_per_shard=64))
    bench = Bench(target, traces, Sampling(0.0), CONFIG, {"name": "toy", "hash": ""})
    drafter = CausalLMDrafter.from_pretrained("assets/toy/draft", target)
    ours = bench.decoded("draft", drafter, COST).counters
    began = time.perf_counter()
    theirs = server_row(bench, "draft", address, COST)
    took = time.perf_counter() - began
    assert theirs.row.lossless
    same = ("rounds", "truncated_rounds", "emitted", "submitted", "accepted", "engine_drafts",
            "engine_drafted", "engine_accepted", "engine_accepted_per_position")  # fmt: skip
    for one, other in zip(theirs.counters, ours, strict=True):
        assert one.identical
        assert {name: getattr(one, name) for name in same} == {
            name: getattr(other, name) for name in same
        }
    assert theirs.row.engine_accepted > CONFIG.num_prompts
    assert 0.05 * took < sum(one.speculative_s for one in theirs.counters) < took
    low, median, high = theirs.row.round_s
    assert 0 < low <= median <= high < 1  # of one round, not of an answer
    assert theirs.row.modelled_speedup is None


def test_a_reports_text_and_what_follows_its_end_are_those_of_transformers(target, plain, tmp_path):
    """At T=0, to the token unless two are equally likely; drawn look-ahead is not the beginning of
    its answer again."""
    prompts = load_prompts("toy", count=12, seed=21, toy_split="eval")
    plan = GenerationPlan("toy eval", tuple(prompts), (0.0,), max_new_tokens=32, lookahead=K)
    sizes = {"batch_size": 4, "rows_per_shard": 64}
    own = generate_traces(target, plan, tmp_path / "own", **sizes)
    sizes["servers"] = lambda: contextlib.nullcontext([plain])
    plan = dataclasses.replace(plan, served="vllm")
    served = generate_traces(target, plan, tmp_path / "served", **sizes)
    plan = dataclasses.replace(plan, temperatures=(1.0,))
    drawn = generate_traces(target, plan, tmp_path / "drawn", **sizes)
    same = 0
    for one, other in zip(own, served, strict=True):
        same += one == other
        texts = [[*t.response_ids, *t.lookahead_ids] for t in (one, other)]
        parted = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), None)
        if parted is not None:
            ids = torch.tensor([one.prompt_ids + texts[0][:parted]])
            first, second = target.outputs(ids).logits[0, -1].topk(2).values.tolist()
            assert first - second < 1e-4
    assert same >= 10
    assert {t.finish_reason for t in own} == {"eos", "length"}
    assert sum(t.lookahead_ids == t.response_ids[:K] for t in drawn) < 3
    for traces, sampling in ((served, Sampling(0.0)), (drawn, Sampling(1.0))):
        drafter = CausalLMDrafter.from_pretrained("assets/toy/draft", target)
        found = OfflineEvaluator(target, list(traces), sampling, Budget(K))(drafter)
        assert sum(one.engine_accepted for one in found.counters) > len(prompts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_servers_vouch_for_text_that_no_target_has_read(target, plain, tmp_path, temperature):
    """One server by two names; a speculative one of vLLM 0.32 on a CPU draws other text at T=1."""
    both = [plain, plain.replace("127.0.0.1", "localhost")]
    prompts = tuple(load_prompts("toy", count=12, seed=23))
    plan = GenerationPlan("toy", prompts, (temperature,), max_new_tokens=24, served=True)
    traces = generate_traces(
        outline(target.name), plan, tmp_path, batch_size=4, rows_per_shard=64,
        servers=lambda: contextlib.nullcontext(both),
    )  # fmt: skip
    assert judged(reread(target, traces)) is None
    for trace in traces[:4]:
        ids, start = [*trace.prompt_ids, *trace.response_ids], len(trace.prompt_ids)
        law = target.outputs(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
        wanted = law.gather(-1, torch.tensor(ids[start:])[:, None])[:, 0], law.topk(TOPS).values
        root = server_root(plain)
        found = scored(root, served_model(root), ids, start)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


def answers(target, address, log):
    """Of 12 requests through the proxy, the log's rows and the target's logits of each: whole
    answers and a stream, greedy and sampled (by what the server takes where nothing is said), with
    prompts as ids and as text."""
    prompts = load_prompts("toy", count=12, seed=22, toy_split="eval")
    asked = [target.tokenizer(p.text).input_ids for p in prompts]
    with running(RequestProxy(address, 0, log)) as proxy:
        for i, ids in enumerate(asked):
            content = {"model": served_model(address), "prompt": ids, "max_tokens": 48, "seed": i}
            if i % 3 == 0:
                content["temperature"] = 0.0
            if i == 1:
                content |= {"stream": True, "prompt": target.tokenizer.decode(ids)}
            data, kind = json.dumps(content).encode(), {"Content-Type": "application/json"}
            fetch(f"{proxy.address}/v1/completions", data, kind)
    read = RequestLog(log, target, 256).read(99)
    assert [one.prompt_ids for one in read] == asked
    assert not any(one.retokenised for one in read)
    assert [one.sampling.temperature for one in read] == [0.0, 1.0, 1.0] * 4
    rows = [
        Served(i, one.prompt_ids, one.response_ids, one.sampling, "", 0, 0)
        for i, one in enumerate(read)
    ]
    return rows, target_logits(target, rows)


def test_what_it_answers_to_others_comes_as_it_was_drawn(target, plain, tmp_path):
    rows, laws = answers(target, plain, tmp_path / "log.jsonl")
    for row, law in zip(rows, laws, strict=True):
        assert not expected_rounds(row, law, law, K).foreign
        if row.sampling.temperature == 0:
            assert law.argmax(-1).tolist() == row.response_ids


def test_served_traces_are_those_of_transformers_though_the_server_is_killed_in_the_middle(
    target, vllm_python, tmp_path
):
    """200 prompts; another server comes up at the same address while the client waits."""
    prompts = tuple(load_prompts("toy", count=200, seed=5))
    plan = GenerationPlan("toy", prompts, (0.0,), max_new_tokens=24)
    sizes = {"batch_size": 16, "rows_per_shard": 32}
    own = generate_traces(target, plan, tmp_path / "own", **sizes)
    options = {"max_model_len": 256, "max_num_seqs": 16, "port": free_port()}
    ended, killed = threading.Event(), threading.Event()
    with contextlib.ExitStack() as first:
        url, _ = first.enter_context(vllm_server(target, options))

        def kill_and_start_again():
            while len(list((tmp_path / "served").glob("*.parquet"))) < 2:
                if ended.wait(0.05):
                    return
            first.close()
            killed.set()
            with vllm_server(target, options):
                ended.wait()

        other = threading.Thread(target=kill_and_start_again)
        other.start()
        try:
            served = generate_traces(
                target, dataclasses.replace(plan, served=True), tmp_path / "served", **sizes,
                servers=lambda: contextlib.nullcontext([url]),
            )  # fmt: skip
        finally:
            ended.set()
            other.join()
    assert killed.is_set()
    assert len(served) == len({t.key for t in served}) == 200
    assert served == own
