"""Asking an engine, without one: a module named vllm stands in its place, or a plain web server."""

from __future__ import annotations

import ast
import copy
import dataclasses
import http.server
import json
import os
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from drafters.causal_lm import CausalLMDrafter
from engines import vllm_run, vllm_worker
from engines import vllm_server as vllm
from engines.vllm_run import (
    EngineCounters,
    EngineRun,
    Speculation,
    Timing,
    from_metrics,
    scrape,
    serve,
)
from eval.config import EvalConfig
from eval.costs import Cost
from eval.measure import Bench
from eval.report.schema import build_report
from eval.report.tables import notes
from eval.served import engine_row, prompt_counters, served_row
from target.sampling import Sampling
from tests.helpers.tiny import EOS, perturbed
from trainer.errors import RunFault, UserError

K, NEW = 3, 20
UNTIMED = {"round_cost": None}
SAMPLED = Sampling(0.7, top_k=5, top_p=0.9)

METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a {b} \\"c\\""} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a {b} \\"c\\""} 15.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 900.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 1.5e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="10"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="2"} 19.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="a",position="1"} 1.7e9
vllm:generation_tokens_total{engine="0",model_name="a"} 4000.0
vllm:request_decode_time_seconds_bucket{engine="0",le="0.3",model_name="a"} 5.0
vllm:request_decode_time_seconds_count{engine="0",model_name="a"} 8.0
vllm:request_decode_time_seconds_count{engine="1",model_name="a"} 1.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="a"} 2.5
vllm:request_decode_time_seconds_sum{engine="1",model_name="a"} 0.5
vllm:request_decode_time_seconds_created{engine="1",model_name="a"} 1.7e+09
"""
EARLIER = METRICS.replace(" 60.0", " 40.0").replace(" 90.0", " 50.0").replace(" 900.0", " 700.0")
EARLIER = EARLIER.replace(" 8.0", " 7.0").replace(" 2.5", " 2.25")

# Answers each prompt with its own ids and rounds of one drafted token, or as FAKE_VLLM says.
FAKE_VLLM = """
import os, sys
from types import SimpleNamespace as Box
__version__ = "0"
how = os.environ.get("FAKE_VLLM", "")
class SamplingParams:
    def __init__(self, **given): self.given = given
class LLM:
    def __init__(self, **given):
        print("loading", *given)
        if how == "die": raise RuntimeError("Model architectures ['X'] are not supported")
        if how == "leave": sys.exit(0)
        self.given, self.llm_engine = given, Box(engine_core=Box(shutdown=lambda: None))
        self.calls = self.prompts = 0
    def generate(self, prompts, params, use_tqdm):
        import json
        assert "localhost" in os.environ["no_proxy"] and "localhost" in os.environ["NO_PROXY"]
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps([self.given, [p.given for p in params]]) + "\\n")
        self.calls, self.prompts = self.calls + 1, self.prompts + len(prompts)
        drafts = self.given.get("speculative_config")
        rounds = Box(per_step_drafted=[1, 1], per_step_accepted=[1, 0]) if drafts else None
        seconds = 99 if self.calls == 2 else 3 if drafts else 2.5  # the second call is a warm-up
        times = Box(scheduled_ts=1, first_token_ts=7, last_token_ts=7 + seconds)
        texts = [Box(token_ids=p["prompt_token_ids"], spec_decode_metrics=rounds) for p in prompts]
        return [Box(outputs=[text], metrics=times) for text in texts]
    def get_metrics(self):
        rounds = self.prompts * (how != "lose")
        sums = {"drafts": 2 * rounds, "draft_tokens": 2 * rounds, "accepted_tokens": rounds}
        prefix = "vllm:spec_decode_num_"
        yield Box(name="vllm:other", value=1)
        for name, value in sums.items(): yield Box(name=prefix + name, value=value)
        yield Box(name=prefix + "accepted_tokens_per_pos", values=[rounds])
"""
PLATFORMS = """
from types import SimpleNamespace as Box
current_platform = Box(is_cpu=lambda: False, get_device_name=lambda: "a device")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """This interpreter in place of the engine's, with a module vllm. Returns its log file."""
    package = tmp_path / "modules" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    (package / "platforms.py").write_text(PLATFORMS)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv(vllm.PYTHON_VARIABLE, sys.executable)
    return tmp_path / "log"


def ask(target, **changed):
    jobs = {"plain": None, "a": Speculation("medusa", "some/folder", 1)}
    options = dict(max_new_tokens=NEW, sampling=Sampling(0.0), batch_size=8, seed=5)
    return serve(target, jobs, [[4, 5], [6, 7, 8]], **(options | changed))


def test_the_engine_gets_what_was_asked_and_its_answer_comes_back(fake, tiny_target):
    target = tiny_target("llama")
    found = ask(target)
    alone = found["plain"]
    assert alone.seconds > 0
    machine = "float32 on a device, in eager mode"
    assert alone == EngineRun(
        [[4, 5], [6, 7, 8]], None, [], None, "vllm 0", alone.seconds, machine, {}
    )
    one = found["a"]
    assert one.tokens == [[4, 5], [6, 7, 8]]
    assert one.rounds == [[[1, 1], [1, 0]]] * 2
    assert one.counters == EngineCounters(4, 4, 2, [2])
    (plain, _), (engine, params) = map(json.loads, fake.read_text().splitlines())
    speculative = engine.pop("speculative_config")
    assert engine.pop("per_request_spec_decode_metrics") == "detailed"
    assert plain == engine
    assert engine["model"] == str(Path(target.name).resolve())
    assert (engine["dtype"], engine["max_num_seqs"]) == ("float32", 2)
    assert engine["max_model_len"] >= 3 + NEW + 1
    folder = str(Path("some/folder").resolve())
    assert speculative == {"method": "medusa", "model": folder, "num_speculative_tokens": 1}
    assert [one["seed"] for one in params] == [5, 6]
    assert params[0]["stop_token_ids"] == [EOS]
    assert params[0]["ignore_eos"]
    assert (params[0]["temperature"], params[0]["max_tokens"]) == (0.0, NEW)


@pytest.mark.slow
def test_prompts_are_timed_alone_after_a_warm_up_and_are_not_counted_again(fake, tiny_target):
    found = ask(tiny_target("llama"), alone=[1, 0])
    assert found["plain"].alone == {1: Timing(2.5, 2, 2), 0: Timing(2.5, 1, 1)}
    assert found["a"].alone == {1: Timing(3, 2, 2), 0: Timing(3, 2, 1)}
    assert found["a"].counters == EngineCounters(4, 4, 2, [2])
    assert len(found["a"].tokens) == 2


@pytest.mark.slow
def test_sampling_reaches_the_engine_and_the_drafter(fake, tiny_target):
    ask(tiny_target("llama"), sampling=SAMPLED)
    _, (engine, params) = map(json.loads, fake.read_text().splitlines())
    assert {k: params[0][k] for k in ("temperature", "top_k", "top_p")} == vars(SAMPLED)
    assert engine["speculative_config"]["draft_sample_method"] == "probabilistic"
    greedy = dataclasses.replace(Speculation("medusa", "x", 1), sampled=False)
    assert "draft_sample_method" not in greedy.config(SAMPLED)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("die", r"ended with code 1:(?s:.*)RuntimeError: Model architectures \['X'\] are not"),
        ("leave", "ended with code 0:\nloading"),
        ("lose", "a: vLLM's rounds add up to .*drafts=4.*counters say .*drafts=0"),
    ],
)
def test_an_engine_that_fails_is_a_fault_with_its_last_words(
    fake, tiny_target, monkeypatch, how, told
):
    monkeypatch.setenv("FAKE_VLLM", how)
    with pytest.raises(RunFault, match=told):
        ask(tiny_target("llama"))


def test_a_missing_environment_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv(vllm.PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(vllm, "DEFAULT_PYTHON", tmp_path / "python")
    with pytest.raises(UserError, match=r"run `bash scripts/engine_env.sh`") as error:
        vllm.engine_python()
    assert "\n" not in str(error.value)
    monkeypatch.setenv(vllm.PYTHON_VARIABLE, str(tmp_path))  # a folder
    with pytest.raises(UserError, match="is not a program"):
        vllm.engine_python()
    monkeypatch.setenv(vllm.PYTHON_VARIABLE, sys.executable)
    assert str(vllm.engine_python()) == sys.executable


def test_the_worker_imports_nothing_of_the_project():
    tree = ast.parse(vllm_run.WORKER.read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    standard = {"__future__", "collections", "gc", "json", "sys", "pathlib", "time", "typing"}
    assert names <= standard | {"torch", "vllm"}


def test_the_repaired_kernel_repeats_by_prompt_and_replaces(monkeypatch):
    sampler = types.ModuleType("vllm.v1.sample.rejection_sampler")
    sample = types.ModuleType("vllm.v1.sample")
    sample.rejection_sampler = sampler
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.sample", sample)
    vllm_worker.repair()
    expand = sampler.expand_batch_to_tokens
    temperatures = expand(torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6]), 6, 0, 1)
    assert temperatures.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    top_k = expand(torch.tensor([7, 0], dtype=torch.int32), torch.tensor([1, 3]), 3)
    assert top_k.tolist() == [7, 0, 0]
    assert top_k.dtype == torch.int32


# --- counters --------------------------------------------------------------------------------


def test_metrics_are_summed_over_engines_and_ordered_by_position():
    found = from_metrics(METRICS.replace('position="10"', 'position="3"'))
    assert found == EngineCounters(75, 900, 150, [100, 30, 19, 1], 9, 3.0)
    assert found.tokens_per_round == 3.0
    ten = [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {i}.0' for i in
           range(11)]  # fmt: skip
    lines = [line for line in METRICS.splitlines() if "per_pos" not in line]
    assert from_metrics("\n".join(lines + ten[::-1])).accepted_per_position == list(range(11))


def test_a_server_without_speculation_is_refused():
    with pytest.raises(UserError, match="start vLLM with --speculative-config"):
        from_metrics('vllm:generation_tokens_total{engine="0"} 4000.0\n')


def test_no_rounds_no_mean():
    assert EngineCounters(0, 0, 0, [0]).tokens_per_round is None


@pytest.fixture
def server():
    """A web server on this machine; `text` is its metrics page."""
    page = types.SimpleNamespace(text=EARLIER, post=None)
    page.get = lambda path: page.text if path == "/metrics" else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if page.get(self.path) is not None else 404)
            self.end_headers()
            self.wfile.write((page.get(self.path) or "").encode())

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.post(content).encode())

        def log_message(self, *_):
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    page.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield page
    running.shutdown()
    thread.join()
    running.server_close()


def test_scraping_before_and_after(server):
    before = scrape(server.url)
    server.text = METRICS
    after = scrape(server.url + "/metrics")
    assert after - before == EngineCounters(20, 200, 40, [40, 0, 0, 0], 1, 0.25)
    with pytest.raises(RunFault, match="started again"):
        before - after


def test_what_cannot_be_read_is_one_line(server):
    with pytest.raises(UserError, match=r"cannot read http://127.*404.*is the server running"):
        scrape(server.url + "/v2")
    with pytest.raises(UserError, match="must begin with http"):
        scrape("localhost:8000")
    with pytest.raises(UserError, match="is the server running"):
        scrape("http://127.0.0.1:9")


# --- rows ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tiny_target, tmp_path_factory):
    """(bench, our decoding of it, the same as an engine would tell it), some answers ended."""
    target = tiny_target("llama")
    drafter = CausalLMDrafter._of(perturbed(target.model, 0.1), target, "draft")
    texts = [f"{'word ' * (i % 4)}{chr(97 + i)} {i}" for i in range(8)]
    prompts = tuple(Prompt(text, None, None, "d", "t", text) for text in texts)
    plan = GenerationPlan("tiny", prompts, (0.0,), max_new_tokens=NEW, lookahead=K)

    def traces_of(target, name):
        folder = tmp_path_factory.mktemp(name) / "traces"
        return list(generate_traces(target, plan, folder, batch_size=8, rows_per_shard=64))

    free = traces_of(target, "free")
    ending = {free[0].response_ids[6], free[1].response_ids[9], free[2].response_ids[14]}
    target = dataclasses.replace(target, eos_ids=tuple(sorted(ending)))
    config = EvalConfig(
        num_prompts=8, max_new_tokens=NEW, temperatures=[0.0], K=K, timing_prompts=0,
        bootstrap_draws=20,
    )  # fmt: skip
    traces = traces_of(target, "ended")
    assert {trace.finish_reason for trace in traces} == {"eos", "length"}
    bench = Bench(target, traces, Sampling(0.0), config, {"name": "tiny", "hash": ""})
    ours = bench.decoded("draft", drafter, Cost(0.1, 1.0, 0.1, 0.1))
    rounds: dict[str, list[list[int]]] = {trace.prompt_hash: [] for trace in bench.traces}
    for one in ours.rounds:
        rounds[one.prompt_hash].append([one.submitted, one.engine_accepted])
    tokens = [trace.response_ids for trace in bench.traces]
    told = EngineRun(
        tokens, Speculation("draft_model", "x", K), list(rounds.values()), None, "vllm 0", 1.0,
        "a machine", {},
    )  # fmt: skip
    return bench, ours, told


def test_a_prompt_counts_as_in_our_own_decoding(measured):
    bench, ours, told = measured
    assert sum(one.truncated_rounds for one in ours.counters) > 0
    for index, (trace, expected) in enumerate(zip(bench.traces, ours.counters, strict=True)):
        found = prompt_counters(told, index, trace, K)
        same = dataclasses.replace(expected, overlap_sum=0.0, overlap_count=0.0)
        assert found == same


@pytest.mark.parametrize("change", [lambda log: log[:-1], lambda log: [*log, [K, 0]]])
def test_rounds_that_do_not_make_up_the_answer_are_a_fault(measured, change):
    bench, _, told = measured
    changed = dataclasses.replace(told, rounds=[change(log) for log in told.rounds])
    with pytest.raises(RunFault, match="do not add up to its answer"):
        prompt_counters(changed, 0, bench.traces[0], K)


def test_a_row_has_the_shape_and_the_numbers_of_our_own(measured):
    bench, ours, told = measured
    plain = dataclasses.replace(told, drafter=None)
    row = served_row(bench, "draft", told, plain, Cost(0.1, 1.0, 0.1, 0.1)).row
    build_report({}, {}, {}, [row], [], [])  # would refuse another shape
    origin = {"measured_by", "num_compared", "identical_to_plain", "cost_source", "cost_ratio",
              "verify_cost", "modelled_speedup", "engine", "draft_sampled",
              "draft_time_share"}  # fmt: skip
    theirs, own = vars(row), vars(ours.row)
    assert {name for name in theirs if theirs[name] != own[name]} == origin
    assert (row.measured_by, row.engine) == ("vllm", "vllm 0")
    assert row.identical_to_plain == 1.0
    assert row.lossless
    assert row.engine_accepted > 0


def test_costs_are_the_engines_and_count_decoding_by_rounds(measured):
    """A round takes 30 ms, a token of plain decoding 20; in one of three prompts 120 and none; an
    answer of one token has no decoding to time."""
    bench, _, told = measured
    timed = {0: Timing(0.3, 10, 16), 3: Timing(0.6, 20, 30), 4: Timing(0.6, 5, 16),
             5: Timing(0.0, 0, 0)}  # fmt: skip
    alone = {i: Timing(0.02 * one.tokens, one.tokens, one.tokens) for i, one in timed.items()}
    alone[4] = Timing(0.0, 16, 16)
    served = dataclasses.replace(told, alone=timed)
    plain = dataclasses.replace(told, drafter=None, alone=alone)
    row = served_row(bench, "draft", served, plain, Cost(0.1, 1.0, 0.1, 0.1)).row
    build_report({}, {}, {}, [row], [], [])
    assert row.token_s == pytest.approx([0.01, 0.02, 0.02])
    assert row.round_s == pytest.approx([0.03, 0.03, 0.075])
    assert row.modelled_speedup == pytest.approx(row.tokens_per_round / 1.5)
    # of the prompts that have a time of both
    assert row.speedup == pytest.approx(0.02 * 46 / 0.9)
    assert row.cost_source == "vllm 0 in a machine, batch 1"
    (note,) = [one for one in notes([row]) if "round" in one]
    assert note == (
        "draft: a round takes 30 ms (quartiles 30 and 75) in vllm 0 in a machine, batch 1, a token "
        "of plain decoding 20 ms (quartiles 10 and 20). A round costs as much as 1.50 such tokens "
        f"(1.50 to 7.50 between the quartiles): at K={K} the speed-up of any drafter of this shape "
        "is its tokens per round over that."
    )
    slow = served_row(bench, "draft", served, plain, Cost(9.0, 9.0, 0.1, 0.1)).row
    assert slow == row  # times of this project's decoding say nothing of an engine


def test_without_times_of_the_engine_nothing_is_modelled(measured):
    bench, _, told = measured
    plain = dataclasses.replace(told, drafter=None)
    row = served_row(bench, "draft", told, plain, Cost(0.1, 1.0, 0.1, 0.1)).row
    untimed = ("token_s", "round_s", "round_cost", "modelled_speedup", "speedup", "cost_ratio")
    assert [getattr(row, name) for name in untimed] == [None] * len(untimed)
    assert not [one for one in notes([row]) if "modelled" in one or "round" in one]


def test_an_answer_that_differs_from_plain_decoding_is_listed(measured):
    bench, _, told = measured
    other = [[*tokens[:-1], tokens[-1] ^ 1] for tokens in told.tokens]
    plain = dataclasses.replace(told, drafter=None, tokens=[other[0], *told.tokens[1:]])
    row = served_row(bench, "draft", told, plain, Cost(0.1, 1.0, 0.1, 0.1)).row
    assert row.identical_to_plain == 1 - 1 / len(told.tokens)
    (differing,) = row.differing_prompts
    assert differing["prompt_hash"] == bench.traces[0].prompt_hash
    assert differing["position"] == len(told.tokens[0]) - 1
    assert not row.lossless


def test_an_engine_that_samples_another_law_is_marked(measured):
    """A sharp law, of which the greedy tokens are likely and others are not."""
    bench, ours, told = measured
    sharp, cost = copy.copy(bench), Cost(0.1, 1.0, 0.1, 0.1)
    sharp.sampling = Sampling(0.01)
    for shift, lossless in ((0, True), (1, False)):
        answers = [[(token + shift) % 100 for token in tokens] for tokens in told.tokens]
        found = engine_row(
            sharp, "draft", ours.counters, answers, told.tokens, cost, UNTIMED, "vllm"
        ).row
        assert found.lossless == lossless
        assert ("does not sample the target's distribution" in (found.note or "")) != lossless
    answers[0] = told.tokens[0]  # one answer that is right says nothing of the others
    found = engine_row(
        sharp, "draft", ours.counters, answers, told.tokens, cost, UNTIMED, "vllm"
    ).row
    assert not found.lossless
