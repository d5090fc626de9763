"""Traces from OpenAI-compatible servers, played by a small web server on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
import time
import types

import pytest

import train
from data import completions as module
from data.completions import complete, continuation
from data.decode import Request
from data.generate import GenerationPlan, generate_traces
from data.prompts import Prompt
from data.sampling import Sampling
from recipes.distillspec import Config
from tests.commands import command, stored_traces, training_stores
from tests.tiny import EOS, perturbed
from trainer.config import RunFault, UserError, compose

NEW = 12
MODELS = {"data": [{"id": "tiny"}]}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


def plan_of(count=20, temperature=0.0, served=True, **options):
    prompts = tuple(
        Prompt(f"Question {i}: ", None, None, "test", "", f"c{i}") for i in range(count)
    )
    return GenerationPlan(
        "test", prompts, (temperature,), max_new_tokens=NEW, served=served, **options
    )


def filled(plan, target, folder, servers=None, **options):
    context = {} if servers is None else {"servers": lambda: contextlib.nullcontext(servers)}
    return generate_traces(
        target, plan, folder, batch_size=4, rows_per_shard=4, **context, **options
    )


@pytest.fixture(scope="module")
def known(target, tmp_path_factory):
    """What the target answers: prompt -> token ids."""
    folder = tmp_path_factory.mktemp("known")
    plan = plan_of(40, served=False)
    return {tuple(t.prompt_ids): t for t in filled(plan, target, folder)}


@pytest.fixture
def server(known):
    """Answers as `known` tells. `faults`: what the next requests get instead, a status, "drop",
    "half" or "abort"; `models`: what it says of itself, the last first;
    `down`: every request is dropped; `change`: of an answer's tokens."""
    state = types.SimpleNamespace(
        faults=[],
        down=False,
        models=[MODELS],
        asked=[],
        headers=[],
        change=lambda ids: ids,
        most=0,
        now=0,
        delay=0,
    )
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, content, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            if state.down:
                return self.close_connection
            return self.reply(state.models.pop() if len(state.models) > 1 else state.models[0])

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                fault = "drop" if state.down else state.faults.pop() if state.faults else None
                state.asked.append(content)
                state.headers.append(dict(self.headers))
                state.now += 1
                state.most = max(state.most, state.now)
            time.sleep(state.delay)
            with lock:
                state.now -= 1
            if fault == "drop":
                return None
            if fault == "half":
                self.send_response(500)
                self.send_header("Content-Length", "99")
                self.end_headers()
                return self.wfile.write(b"half of wh")
            if fault == "abort":
                return self.reply({"choices": [{"token_ids": [5], "finish_reason": "abort"}]})
            if fault:
                return self.reply({"message": "no"}, fault)
            tokens = known[tuple(content["prompt"])].response_ids
            return self.reply({"choices": [{"token_ids": state.change(list(tokens))}]})

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    state.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.01,))


def asked_of(known, server, **options):
    requests = [Request(list(ids), i, Sampling(0.0)) for i, ids in enumerate(known)]
    settings = {"max_new_tokens": NEW, "eos_ids": (EOS,), "concurrency": 3} | options
    rows = list(complete([server.url], requests, **settings))
    assert not requests
    return {tuple(row.request.prompt_ids): row for row in rows}


def test_a_served_store_holds_what_the_target_says(target, known, server, tmp_path):
    plan = plan_of()
    found = filled(plan, target, tmp_path, [server.url + "/v1/"])
    assert len(found) == 20
    own = filled(plan_of(served=False), target, tmp_path / "own")
    for one, other in zip(found, own, strict=True):
        assert one == other
    assert server.most <= 4  # as many as batch_size says
    filled(plan, target, tmp_path, [server.url])
    assert len(server.asked) == 20  # a full store asks nobody
    with pytest.raises(UserError, match="was made with"):
        filled(plan_of(served=False), target, tmp_path)


def test_what_the_model_would_bring_along_is_overruled(known, server, monkeypatch):
    monkeypatch.setenv(module.KEY_VARIABLE, "secret")
    ids = list(next(iter(known)))
    continuation(
        server.url, "tiny", ids, Sampling(0.5, 7, 0.9), max_new_tokens=NEW, eos_ids=[EOS, 9],
        seed=-1, stop_strings=("!",),
    )  # fmt: skip
    (sent,) = server.asked
    expected = {
        "prompt": ids, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": [EOS, 9], "ignore_eos": True, "stop": ["!"], "seed": 0x7FFFFFFF,
        "return_token_ids": True, "add_special_tokens": False,
    }  # fmt: skip
    assert expected.items() <= sent.items()
    assert server.headers[0]["Authorization"] == "Bearer secret"
    server.faults = [400]
    with pytest.raises(RunFault, match="400") as error:
        continuation(
            server.url, "tiny", ids, Sampling(0.0), max_new_tokens=NEW, eos_ids=[EOS], seed=0
        )
    assert "secret" not in str(error.value)
    assert server.asked[1]["top_k"] == -1  # 0 means "none" to one server and is refused by another


def test_faults_that_pass_cost_no_row(known, server):
    server.faults = [503, "drop", 429, "abort", "half", 500, "drop"]
    found = asked_of(known, server)
    assert {ids: row.response_ids for ids, row in found.items()} == {
        ids: trace.response_ids for ids, trace in known.items()
    }
    assert {row.finish_reason for row in found.values()} == {
        trace.finish_reason for trace in known.values()
    }
    assert len(server.asked) == len(known) + 7


def test_of_two_servers_one_may_die(known, server):
    requests = [Request(list(ids), 0, Sampling(0.0)) for ids in known]
    dead = "http://127.0.0.1:9"
    rows = complete([dead, server.url], requests, max_new_tokens=NEW, eos_ids=(EOS,), concurrency=2)
    assert len(list(rows)) == len(known)


def test_a_server_that_dies_and_comes_back_loses_and_doubles_nothing(
    target, known, server, tmp_path, monkeypatch
):
    """Killed for good in the middle: the rows there are stay, the same command fetches the rest."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    plan = plan_of(40)

    def change(ids):
        server.down = len(server.asked) > 17
        return ids

    server.change = change
    with pytest.raises(RunFault, match="the same command goes on"):
        filled(plan, target, tmp_path, [server.url])
    kept = len(stored_traces(tmp_path))
    assert 8 <= kept < 40
    server.down, server.change, before = False, (lambda ids: ids), len(server.asked)
    found = filled(plan, target, tmp_path, [server.url])
    assert [t.prompt_hash for t in found] == [p.hash for p in plan.prompts]
    assert [t.response_ids for t in found] == [
        known[tuple(t.prompt_ids)].response_ids for t in found
    ]
    assert len(server.asked) - before == 40 - kept


@pytest.mark.parametrize(
    ("status", "change", "says"),
    [
        (404, None, "404"),
        (None, lambda ids: [], "no token ids in the answer: vLLM 0.11"),
        (None, lambda ids: [5] * (NEW - 1), "11 tokens without EOS, 12 were asked for"),
    ],
)
def test_what_cannot_be_helped_stops_at_once(known, server, status, change, says):
    server.faults, server.change = [status] * 99 if status else [], change or server.change
    with pytest.raises(RunFault, match=says):
        asked_of(known, server)
    assert len(server.asked) <= 4


def test_a_router_whose_servers_are_not_there_yet_is_waited_for(known, server, monkeypatch):
    server.models = [MODELS, {"object": "list", "data": []}, {"status": "ok"}]
    assert len(asked_of(known, server)) == len(known)
    server.models = [{"status": "ok"}]
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    with pytest.raises(RunFault, match="its /v1/models names no model"):
        asked_of(known, server)


def test_a_fault_of_our_own_is_not_waited_for(known, server, monkeypatch):
    monkeypatch.setattr(module, "continuation", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asked_of(known, server)


def test_an_answer_is_cut_behind_its_first_eos(known, server):
    server.change = lambda ids: [5, EOS, 6, EOS]
    row = next(iter(asked_of(known, server).values()))
    assert (row.response_ids, row.finish_reason) == ([5, EOS], "eos")
    server.change = lambda ids: [5, 6]
    row = next(iter(asked_of(known, server, stop_strings=("!",)).values()))
    assert (row.response_ids, row.finish_reason) == ([5, 6], "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_model_behind_the_address_is_found_out(
    target, known, server, tmp_path, temperature
):
    """Also with a handful of rows; nothing of it is stored."""
    server.change = lambda ids: [(7 * i) % 50 + 4 for i in range(NEW)]
    with pytest.raises(UserError, match=r"not those of .* serve this very model"):
        filled(plan_of(3, temperature), target, tmp_path, [server.url])
    assert not list(tmp_path.glob("*.parquet"))


def test_drawn_tokens_of_the_target_pass(target, tmp_path):
    """The same test lets through what the target itself draws, and not another model's."""
    traces = filled(plan_of(8, 1.0, served=False), target, tmp_path)
    rows = [
        types.SimpleNamespace(
            request=Request(t.prompt_ids, 0, Sampling(1.0)), response_ids=t.response_ids
        )
        for t in traces
    ]
    module.check_law(target, rows)
    module.check_law(target, [])
    other = type(target).__new__(type(target))
    other.__dict__ |= target.__dict__ | {"model": perturbed(target.model, 5.0)}
    with pytest.raises(UserError, match="nats beyond its entropy"):
        module.check_law(other, rows)


def test_a_conversation_goes_on_from_the_servers_answer(tiny_target, server, known, tmp_path):
    target = tiny_target("llama", chat_template=True)
    turns = tuple({"role": r, "content": f"say {r}"} for r in ("user", "assistant", "user"))
    prompt = Prompt(None, turns, None, "test", "", "c0")
    plan = GenerationPlan("chat", (prompt,), (0.0,), max_new_tokens=NEW)
    for trace in filled(plan, target, tmp_path / "own"):
        known[tuple(trace.prompt_ids)] = trace
    plan = dataclasses.replace(plan, served=True)
    found = filled(plan, target, tmp_path / "served", [server.url])
    assert [t.turn for t in found] == [0, 1]


def test_a_run_trains_on_a_servers_text_and_reports_on_its_own(
    tiny_folder, server, known, tmp_path
):
    def run(name, *words):
        given = ("data.temperature=0", "eval.temperatures=0", f"run.dir={tmp_path / name}")
        return train.main(command(tmp_path, tiny_folder("llama"), *given, *words))

    assert run("own") == 0
    (store,) = training_stores(tmp_path / "cache")
    own = stored_traces(store)
    known |= {tuple(t.prompt_ids): t for t in own}
    assert run("served", "data.engine=openai", f"data.servers=[{server.url}]") == 0
    assert len(server.asked) == len(own)
    (other,) = [s for s in training_stores(tmp_path / "cache") if s != store]
    assert stored_traces(other) == own
    server.down = True  # another address, and nobody there: everything is on the disk
    assert run("served", "data.engine=openai", "data.servers=[http://127.0.0.1:9]") == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.engine=sglang"], "data.engine must be one of hf, vllm, openai"),
        (["data.engine=openai"], "names the servers of data.engine=openai"),
        (["data.servers=[http://a]"], "names the servers of data.engine=openai"),
        (["data.engine=openai", "data.servers=[a:1]"], "data.servers must be http://host"),
        (["data.engine_options={seed: 1}"], "data.engine_options are of data.engine=vllm"),
        (["data.engine=vllm", "data.engine_options=3"], "data.engine_options must be a mapping"),
    ],
)
def test_bad_settings_end_in_one_line(words, says):
    with pytest.raises(UserError, match=says):
        compose("distillspec", Config, None, words)
