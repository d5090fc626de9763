"""A vLLM server that runs already, played by a small web server on this machine."""

# ruff: noqa: F811 - the fixtures are those of test_served

from __future__ import annotations

import dataclasses
import json
import types

import pytest

from engines.vllm_run import EngineCounters
from eval import server as module
from eval.costs import Cost
from eval.counters import NUM_RANGES, RANGES
from eval.report.schema import build_report
from eval.report.tables import notes
from eval.server import check_server, server_row
from tests.eval.test_served import NEW, K, measured, server  # noqa: F401
from tests.helpers.tiny import VOCAB_SIZE
from trainer.errors import RunFault, UserError

COST = Cost(0.1, 1.0, 0.1, 0.1)


@pytest.fixture
def vllm_server(server, measured):
    """Answers the bench's prompts as `measured` tells, and counts as vLLM does; `late`: so many
    times the page is asked before it shows the newest counters."""
    bench, _, told = measured
    whole = {tuple(t.prompt_ids): i for i, t in enumerate(bench.traces)}
    state = types.SimpleNamespace(
        url=server.url, late=0, waiting=0, asked=[], changed=None, answers=1, about={"version": "9"}
    )
    old, new = EngineCounters(3, 12, 5, [3, 1, 1], 7, 3.0), None

    def page(counters):
        def line(name, value, position=""):
            return f'vllm:spec_decode_num_{name}_total{{engine="0"{position}}} {value}.0\n'

        found = line("drafts", counters.drafts) + line("draft_tokens", counters.drafted)
        found += line("accepted_tokens", counters.accepted)
        for i, value in enumerate(counters.accepted_per_position):
            found += line("accepted_tokens_per_pos", value, f',position="{i}"')
        times = "vllm:request_decode_time_seconds_"
        return f"{found}{times}count{{}} {counters.answers}.0\n{times}sum{{}} {counters.decode_s}\n"

    def get(path):
        nonlocal old
        if path == "/metrics":
            if new is not None and not state.waiting:
                old = new
            state.waiting = max(0, state.waiting - 1)
            return page(old)
        return json.dumps(state.about if path == "/version" else {"data": [{"id": "toy"}]})

    def post(content):
        nonlocal new
        state.asked.append(content)
        index = whole[tuple(content["prompt"])]
        rounds = [a for _, a in told.rounds[index]]
        now = new or old
        reached = [sum(a > i for a in rounds) for i in range(K)]
        total = [x + y for x, y in zip(now.accepted_per_position, reached, strict=True)]
        drafts = now.drafts + len(rounds)
        seconds = 0.25 * len(rounds)  # exact in a sum
        new = EngineCounters(
            drafts, now.drafted + K * len(rounds), sum(total), total,
            now.answers + state.answers, now.decode_s + seconds,
        )  # fmt: skip
        state.waiting = state.late
        tokens = told.tokens[index] if state.changed is None else state.changed(told.tokens[index])
        return json.dumps({"choices": [{"token_ids": tokens}]})

    server.get, server.post = get, post
    server.text = ""
    return state


def test_a_running_server_counts_as_our_own_decoding(measured, vllm_server):
    bench, ours, _ = measured
    check_server(vllm_server.url, K)
    vllm_server.late = 2
    found = server_row(bench, "draft", vllm_server.url + "/v1/", COST)
    build_report({}, {}, {}, [found.row], [], [])
    untold = {"reach": [0.0] * K, "tested": [0.0] * K, "rejections": 0.0}
    untold |= dict.fromkeys(RANGES, [0.0] * NUM_RANGES)
    assert found.row.by_position == []
    for one, expected in zip(found.counters, ours.counters, strict=True):
        known = dataclasses.replace(expected, overlap_sum=0.0, overlap_count=0.0, **untold)
        times = {"speculative_s": 0.25 * known.rounds, "speculative_tokens": known.emitted}
        assert one == dataclasses.replace(known, identical=True, **times)
    for key in ("tokens_per_round", "draft_acceptance_rate", "engine_accepted_per_position"):
        assert getattr(found.row, key) == getattr(ours.row, key)
    assert found.row.alpha_hat is None
    assert (found.row.engine, found.row.lossless) == ("vllm 9 server", True)
    first = vllm_server.asked[0]
    assert first["prompt"] == bench.traces[0].prompt_ids
    assert first["stop_token_ids"] == list(bench.target.eos_ids)
    assert [one["seed"] for one in vllm_server.asked] == [
        bench.config.seed + index for index in range(len(bench.traces))
    ]
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.0, NEW, "toy")


def test_a_server_that_answers_otherwise_is_not_called_lossless(measured, vllm_server):
    others = [i for i in range(4, VOCAB_SIZE) if i not in measured[0].target.eos_ids]
    vllm_server.changed = lambda tokens: [
        *(others[token == others[0]] for token in tokens[:-1]),
        tokens[-1],
    ]
    row = server_row(measured[0], "draft", vllm_server.url, COST).row
    alone = [len(tokens) == 1 for tokens in measured[2].tokens]  # the EOS, which stays
    assert row.identical_to_plain == sum(alone) / len(alone) < 1
    assert not row.lossless


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda tokens: tokens[-1:], "another client uses it"),  # the EOS alone
        (lambda tokens: tokens[:1] * NEW, "it did not draft in every round"),
        (lambda tokens: [], "no token ids in the answer"),
        (lambda tokens: (tokens * 9)[: NEW + 1], f"{NEW + 1} tokens, {NEW} were requested"),
        (lambda tokens: tokens[:2], "2 tokens without EOS"),
        (lambda tokens: [VOCAB_SIZE], "not a token id of the target"),
    ],
)
def test_counters_that_are_not_of_the_answer_are_a_fault(
    measured, vllm_server, monkeypatch, changed, told
):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    vllm_server.changed = changed
    with pytest.raises(RunFault, match=told):
        server_row(measured[0], "draft", vllm_server.url, COST)


def test_a_running_server_has_times_of_rounds_alone(measured, vllm_server):
    row = server_row(measured[0], "draft", vllm_server.url, COST).row
    assert row.round_s == [0.25] * 3
    assert row.speculative_tokens_per_s == pytest.approx(row.tokens_per_round / 0.25)
    unknown = ("token_s", "round_cost", "cost_ratio", "verify_cost", "modelled_speedup", "speedup")
    assert [getattr(row, name) for name in unknown] == [None] * len(unknown)
    (note,) = [one for one in notes([row]) if "round" in one]
    assert note == (
        "draft: a round takes 250 ms (quartiles 250 and 250) in vllm 9 server, batch 1, which "
        "drafts in every round: its time of plain decoding is not known."
    )


@pytest.mark.parametrize("about", [{}, [], "9", {"version": None}])
def test_a_server_that_does_not_say_its_version_is_measured(measured, vllm_server, about):
    vllm_server.about = about
    row = server_row(measured[0], "draft", vllm_server.url, COST).row
    assert (row.engine, row.lossless) == ("vllm server", True)


def test_another_clients_answer_among_the_times_is_a_fault(measured, vllm_server):
    vllm_server.answers = 2
    with pytest.raises(RunFault, match=r"counted 2 answers and .* another client uses it"):
        server_row(measured[0], "draft", vllm_server.url, COST)


def test_a_server_that_drafts_another_number_is_refused(vllm_server):
    with pytest.raises(UserError, match=f"drafts {K} tokens a round: set eval.K={K}"):
        check_server(vllm_server.url, K + 1)
