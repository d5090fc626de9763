"""Traces from OpenAI-compatible servers, played by a small web server on this machine."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest

import train
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import Prompt
from engines import completions as module
from engines.completions import complete, continuation
from recipes.common.config import compose
from recipes.distillspec import Config
from target.decode import Request
from target.sampling import Sampling
from tests.helpers.commands import command, report_stores, stored_traces, training_stores
from tests.helpers.servers import MODELS, NEW, filled, plan_of, played
from tests.helpers.tiny import EOS, VOCAB_SIZE
from trainer.errors import RunFault, UserError


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def known(target, tmp_path_factory):
    """What the target answers: prompt -> token ids."""
    folder = tmp_path_factory.mktemp("known")
    plan = plan_of(40, served=False)
    return {tuple(t.prompt_ids): t for t in filled(plan, target, folder)}


@pytest.fixture
def server(known):
    with played(known) as state:
        yield state


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.01,))


def asked_of(target, known, *servers, **options):
    requests = [Request(list(ids), i, Sampling(0.0)) for i, ids in enumerate(known)]
    settings = {"max_new_tokens": NEW, "concurrency": 3} | options
    rows = list(complete(target, [server.url for server in servers], requests, **settings))
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
    settings = {"max_new_tokens": NEW, "eos_ids": [EOS, 9], "vocab_size": VOCAB_SIZE}
    request = Request(ids, -1, Sampling(0.5, 7, 0.9))
    continuation(server.url, "tiny", request, stop_strings=("!",), **settings)
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
        continuation(server.url, "tiny", Request(ids, 0, Sampling(0.0)), **settings)
    assert "secret" not in str(error.value)
    assert server.asked[1]["top_k"] == -1  # 0 means "none" to one server and is refused by another


def test_faults_that_pass_cost_no_row(target, known, server):
    server.faults = [503, "drop", 429, "abort", "half", 500, "drop"]
    found = asked_of(target, known, server)
    assert {ids: row.response_ids for ids, row in found.items()} == {
        ids: trace.response_ids for ids, trace in known.items()
    }
    assert {row.finish_reason for row in found.values()} == {
        trace.finish_reason for trace in known.values()
    }
    assert len(server.asked) == len(known) + 7


def test_of_two_servers_one_may_die(target, known, server):
    dead = types.SimpleNamespace(url="http://127.0.0.1:9")
    assert len(asked_of(target, known, dead, server, concurrency=2)) == len(known)


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
    with pytest.raises(RunFault, match="run the same command again to resume"):
        filled(plan, target, tmp_path, [server.url])
    kept = len(stored_traces(tmp_path))
    assert 12 <= kept < 40  # also what no check had covered when it died
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
        (None, lambda ids: [5] * (NEW - 1), "11 tokens without EOS, 12 were requested"),
    ],
)
def test_what_cannot_be_helped_stops_at_once(target, known, server, status, change, says):
    server.faults, server.change = [status] * 99 if status else [], change or server.change
    with pytest.raises(RunFault, match=says):
        asked_of(target, known, server)
    assert len(server.asked) <= 4


def test_a_router_whose_servers_are_not_there_yet_is_waited_for(target, known, server, monkeypatch):
    server.models = [MODELS, {"object": "list", "data": []}, {"status": "ok"}]
    assert len(asked_of(target, known, server)) == len(known)
    server.models = [{"status": "ok"}]
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    with pytest.raises(RunFault, match="its /v1/models names no model"):
        asked_of(target, known, server)


def test_a_fault_of_our_own_is_not_waited_for(target, known, server, monkeypatch):
    monkeypatch.setattr(module, "continuation", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asked_of(target, known, server)


def test_an_answer_is_cut_behind_its_first_eos(target, known, server):
    """Of a target that ends with the third token of each answer."""
    ending = {trace.response_ids[2] for trace in known.values()}
    target = dataclasses.replace(target, eos_ids=tuple(ending))
    assert any(set(trace.response_ids[3:]) & ending for trace in known.values())
    for ids, row in asked_of(target, known, server).items():
        whole = known[ids].response_ids
        length = next(i for i, token in enumerate(whole) if token in ending) + 1
        assert (row.response_ids, row.finish_reason) == (whole[:length], "eos")


def test_an_answer_ends_at_a_stop_string_unless_the_room_ended(target, known, server):
    server.change = lambda ids: ids[:3]
    for ids, row in asked_of(target, known, server, stop_strings=("!",)).items():
        assert (row.response_ids, row.finish_reason) == (known[ids].response_ids[:3], "stop")
    server.beside = {"finish_reason": "length"}
    with pytest.raises(RunFault, match="3 tokens without EOS, 12 were requested"):
        asked_of(target, known, server, stop_strings=("!",))


def test_a_conversation_goes_on_from_the_servers_answer(tiny_target, server, known, tmp_path):
    ends = (EOS, 1, 2, 3, *range(30, 100))  # nothing stands behind an answer that is cut
    target = dataclasses.replace(tiny_target("llama", chat_template=True), eos_ids=ends)
    turns = tuple({"role": r, "content": f"say {r}"} for r in ("user", "assistant", "user"))
    prompt = Prompt(None, turns, None, "test", "", "c0")
    plan = GenerationPlan("chat", (prompt,), (0.0,), max_new_tokens=NEW)
    for trace in filled(plan, target, tmp_path / "own"):
        known[tuple(trace.prompt_ids)] = trace
    plan = dataclasses.replace(plan, served=True)
    found = filled(plan, target, tmp_path / "served", [server.url])
    assert [t.turn for t in found] == [0, 1]


@pytest.mark.slow
def test_a_run_has_the_text_of_training_and_report_from_a_server(
    tiny_folder, server, known, tmp_path
):
    def run(name, *words):
        given = ("data.temperature=0", "eval.temperatures=0", f"run.dir={tmp_path / name}")
        return train.main(command(tmp_path, tiny_folder("llama"), *given, *words))

    assert run("own") == 0
    stores = [find(tmp_path / "cache") for find in (training_stores, report_stores)]
    (own, held_out) = (stored_traces(store) for (store,) in stores)
    known |= {tuple(t.prompt_ids): t for t in (*own, *held_out)}
    assert run("served", "data.engine=openai", f"data.servers=[{server.url}]") == 0
    assert len(server.asked) == len(own) + 2 * len(held_out)  # look-ahead by requests of its own
    for find, before, text in zip(
        (training_stores, report_stores), stores, (own, held_out), strict=True
    ):
        (other,) = [s for s in find(tmp_path / "cache") if s not in before]
        assert stored_traces(other) == text
    server.down = True  # another address, and nobody there: everything is on the disk
    assert run("served", "data.engine=openai", "data.servers=[http://127.0.0.1:9]") == 0
    reports = [json.loads((tmp_path / n / "report.json").read_text()) for n in ("own", "served")]
    for report, by in zip(reports, ("hf", "openai"), strict=True):
        rows = [row for row in report["results"] if row["role"] != "plain"]
        assert {row["text_by"] for row in rows} == {by}
    first, second = (
        [(row["drafter"], row["tokens_per_round"]) for row in report["results"]]
        for report in reports
    )
    assert first == second
    said = (tmp_path / "served" / "report.md").read_text()
    assert "answers were generated by OpenAI-compatible servers." in said


def test_a_report_of_another_engine_or_of_transformers_has_a_text_of_its_own(
    target, known, server, tmp_path
):
    """Drawn by another program's random numbers."""
    plans = [plan_of(served=by) for by in (False, True, "vllm", "openai")]
    assert len({traces_folder(plan, target, tmp_path) for plan in plans}) == 4


def test_look_ahead_goes_on_behind_whatever_ended_an_answer(target, known, server, tmp_path):
    """By random numbers of its own, and past an EOS."""
    settings = {"temperature": 0.0, "lookahead": 3}
    own = filled(plan_of(served=False, **settings), target, tmp_path / "own")
    known |= {tuple(t.prompt_ids): t for t in own}
    assert all(len(t.lookahead_ids) == 3 for t in own)
    served = filled(plan_of(**settings), target, tmp_path / "served", [server.url])
    assert list(served) == list(own)
    later = [sent for sent in server.asked if sent["max_tokens"] == 3]
    assert len(later) == len(own) == len(server.asked) - len(later)
    for sent in later:
        before = next(s for s in server.asked if s["prompt"] == sent["prompt"][: len(s["prompt"])])
        assert sent["seed"] != before["seed"]
        assert sent["ignore_eos"]
        assert not sent.keys() & {"stop_token_ids", "stop"}


def test_an_answer_without_its_look_ahead_is_refused(target, known, server, tmp_path):
    server.change = lambda ids: ids[:NEW] if len(ids) == NEW else ids[:2]
    plan = plan_of(lookahead=3)
    own = filled(plan_of(served=False, lookahead=3), target, tmp_path / "own")
    known |= {tuple(t.prompt_ids): t for t in own}
    with pytest.raises(RunFault, match="2 tokens without EOS, 3 were requested: allow the server"):
        filled(plan, target, tmp_path / "served", [server.url])


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
        compose("distillspec", Config, (), words)
