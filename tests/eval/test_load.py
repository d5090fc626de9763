"""Speculation under load: servers' counters, the best length at each load, engines' schedules."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import threading
import time
import types

import pytest

from engines import load as module
from engines.load import LoadRun, under_load
from engines.vllm_run import EngineCounters
from eval.config import EvalConfig
from eval.load import best_length, level, load_part, pays_up_to, schedule, sglang_schedule
from eval.report.load import load_blocks, sentences
from eval.report.render import to_markdown
from phases.serve import loads
from target.decode import Request
from target.sampling import Sampling
from tests.helpers.servers import MODELS
from trainer.errors import RunFault, UserError

NEW, EOS = 9, 3


@contextlib.contextmanager
def serving(K=0, accepted=0):
    """A server whose rounds draft K tokens, of which `accepted` are accepted; K 0: none. An answer
    has NEW tokens and takes 0.09 s by its counters. `most`: requests that it had at once."""
    state = types.SimpleNamespace(answers=0, drafts=0, now=0, most=0, status=200)
    lock = threading.Lock()

    def metrics():
        lines = [
            f"vllm:request_decode_time_seconds_count{{}} {state.answers}",
            f"vllm:request_decode_time_seconds_sum{{}} {0.09 * state.answers}",
        ]
        if K:
            named = {"drafts": state.drafts, "draft_tokens": K * state.drafts,
                     "accepted_tokens": accepted * state.drafts}  # fmt: skip
            lines += [f"vllm:spec_decode_num_{n}_total{{}} {v}" for n, v in named.items()]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{position="{i}"}} {state.drafts * (i < accepted)}' for i in range(K)]
        return "\n".join(lines)

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, text):
            self.send_response(state.status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):
            pages = {"/metrics": metrics, "/v1/models": lambda: json.dumps(MODELS),
                     "/version": lambda: json.dumps({"version": "9"})}  # fmt: skip
            self.reply(pages[self.path]())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                state.now += 1
                state.most = max(state.most, state.now)
            time.sleep(0.02)
            with lock:
                state.now -= 1
                state.answers += 1
                state.drafts += (NEW - 1) // (1 + accepted)
            choice = {"token_ids": [5] * (NEW - 1) + [EOS], "finish_reason": "stop"}
            self.reply(json.dumps({"choices": [choice]}))

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    state.url = f"http://127.0.0.1:{running.server_port}"
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield state
    finally:
        running.shutdown()
        running.server_close()


TARGET = types.SimpleNamespace(
    eos_ids=(EOS,), vocab_size=100, device=types.SimpleNamespace(type="")
)
REQUESTS = [Request([4, 5], i, Sampling(0.0), i) for i in range(6)]


def asked(server, concurrency, drafting=True, requests=REQUESTS):
    return under_load(
        server.url, TARGET, requests, concurrency, max_new_tokens=NEW, drafting=drafting
    )  # type: ignore[arg-type]


def test_so_many_requests_are_under_way_and_counted():
    with serving(K=3, accepted=1) as server:
        for concurrency, requests in ((1, 6), (3, 6), (5, 10)):
            server.most = 0
            found = asked(server, concurrency)
            assert (server.most, found.concurrency) == (concurrency, concurrency)
            assert (found.requests, found.tokens) == (requests, requests * NEW)
            assert found.counters.drafts == requests * 4
            assert found.token_s == pytest.approx(0.09 / 8)
            assert found.round_s == pytest.approx(0.09 / 4)


def test_a_server_without_a_drafter_counts_steps():
    with serving() as server:
        found = asked(server, 2, drafting=False)
        assert found.round_s == found.token_s == pytest.approx(0.09 / 8)
        with pytest.raises(UserError, match="start vLLM with --speculative-config"):
            asked(server, 2)


def test_answers_of_others_and_faults_end_the_measurement(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    with serving(K=3, accepted=1) as server:
        begun = asked(server, 1).counters
        assert begun.answers == 6
        with monkeypatch.context() as patch:
            patch.setattr(
                EngineCounters, "__sub__", lambda now, then: EngineCounters(1, 1, 1, [1], 7)
            )
            with pytest.raises(RunFault, match="counted 7 answers, 6 were asked for"):
                asked(server, 1)
            patch.setattr(
                EngineCounters, "__sub__", lambda now, then: EngineCounters(1, 1, 1, [1], 5)
            )
            with pytest.raises(RunFault, match="counts 5 of 6 answers in its metrics"):
                asked(server, 1)
        server.status = 400
        with pytest.raises((RunFault, UserError)):
            asked(server, 1)


# --- what follows --------------------------------------------------------------------------------


def test_the_best_length_is_the_best_of_all():
    for shares in itertools.product((0.9, 0.5, 0.1), repeat=3):
        reach = [shares[0], shares[0] * shares[1], shares[0] * shares[1] * shares[2]]
        for ratio in (1.0, 1.3, 2.0, 4.0):
            gains = {0: 1.0} | {
                k: (1 + sum(reach[:k])) / (1 + (ratio - 1) * k / 3) for k in (1, 2, 3)
            }
            k, gain = best_length(reach, 0.02, 0.02 * ratio)
            assert gain == pytest.approx(max(gains.values()))
            assert gains[k] == pytest.approx(gain)
    assert best_length([0.01, 0.0], 0.02, 0.05) == (0, 1.0)


def runs(concurrency, round_s, token_s=0.01, accepted=(60, 30, 10)):
    """100 rounds with these accepted tokens by position, and 200 plain tokens."""
    tokens = 100 + sum(accepted)
    counters = EngineCounters(100, 300, sum(accepted), [*accepted], 1, 100 * round_s)
    drafted = LoadRun(concurrency, 1, tokens + 1, 100 * round_s / concurrency, counters)
    plain = EngineCounters(0, 0, 0, [], 1, tokens * token_s)
    return drafted, LoadRun(concurrency, 1, tokens + 1, tokens * token_s / concurrency, plain)


LEVELS = [level(*runs(1, 0.011)), level(*runs(8, 0.014)), level(*runs(32, 0.03))]


def test_a_load_has_the_numbers_of_both_servers():
    one = LEVELS[0]
    assert one.reach == [0.6, 0.3, 0.1]
    assert (one.tokens_per_round, one.round_s) == (2.0, pytest.approx(0.011))
    assert one.plain_token_s == pytest.approx(0.01)
    assert one.gain == pytest.approx(2.0 / 1.1)
    assert [each.best_K for each in LEVELS] == [3, 2, 0]
    assert LEVELS[1].best_gain == pytest.approx(1.9 / (1 + 0.4 * 2 / 3))
    assert LEVELS[2].gain == pytest.approx(2.0 / 3.0)
    assert pays_up_to(LEVELS) == 8
    assert pays_up_to(LEVELS[2:]) is None
    assert pays_up_to([LEVELS[0], LEVELS[2], LEVELS[1]]) == 1, "at each load up to it"
    alone = level(runs(4, 0.02)[0], None)
    assert (alone.gain, alone.best_K) == (None, None)


def lookup(ranges, size):
    """K at a batch size as vLLM reads a schedule."""
    found = 0
    for first, last, K in ranges:
        if size < first:
            break
        found = K
        if size <= last:
            break
    return found


def test_schedules_have_the_best_length_of_each_load_and_go_on():
    ranges = schedule(LEVELS)
    assert ranges == [[1, 1, 3], [2, 8, 2], [9, 32, 0]]
    assert [lookup(ranges, one.concurrency) for one in LEVELS] == [3, 2, 0]
    assert [lookup(ranges, size) for size in (2, 9, 1000)] == [2, 0, 0]
    assert schedule([LEVELS[0], LEVELS[0]])[0][0] == 1
    same = [level(*runs(n, 0.011)) for n in (1, 4, 16)]
    assert schedule(same) == [[1, 16, 3]]
    steps = {"1": [3], "2": [2], "9": [1]}
    assert sglang_schedule(ranges) == {n: {"candidate_steps": own} for n, own in steps.items()}


def test_a_schedule_is_recommended_from_named_servers_alone():
    named = load_part(0.0, 3, "a server", LEVELS, named=True)
    assert named["pays_up_to"] == 8
    text = to_markdown(load_blocks([named]))
    assert "[[1, 1, 3], [2, 8, 2], [9, 32, 0]]" in text
    assert "Drafting 3 tokens pays up to 8 requests at once." in sentences(named)
    own = load_part(0.0, 3, "a server", LEVELS, named=False)
    assert "schedules" not in own
    assert "No schedule is recommended" in " ".join(sentences(own))
    alone = load_part(0.0, 3, "s", [level(runs(4, 0.02)[0], None)], named=True)
    assert "schedules" not in alone
    assert "eval.plain_engine names" in " ".join(sentences(alone))
    at_none = load_part(0.0, 3, "s", LEVELS[2:], named=True)
    assert "pays at none of these loads" in " ".join(sentences(at_none))


def bench_of(config):
    return types.SimpleNamespace(
        config=config, target=TARGET, requests=lambda: REQUESTS, sampling=Sampling(0.0)
    )


def test_named_servers_are_measured_at_every_load(capsys):
    with serving(K=3, accepted=1) as drafting, serving() as plain:
        config = EvalConfig(
            engine=drafting.url, plain_engine=plain.url, concurrency=[1, 4], K=3,
            max_new_tokens=NEW,
        )  # fmt: skip
        (part,) = loads(bench_of(config), None)  # type: ignore[arg-type]
    assert part["source"] == "vllm 9 server"
    assert [one["concurrency"] for one in part["levels"]] == [1, 4]
    assert all(one["gain"] is not None for one in part["levels"])
    assert capsys.readouterr().out.count("requests at once") == 4
    assert loads(bench_of(EvalConfig()), None) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"concurrency": [1, 8]}, "eval.concurrency must be null where eval.engine is neither"),
        ({"concurrency": [8, 1], "engine": "vllm"}, "must name each load once, rising"),
        ({"concurrency": [0], "engine": "vllm"}, "eval.concurrency must"),
        ({"plain_engine": "http://a:1"}, "eval.plain_engine must be null where"),
        ({"plain_engine": "a", "engine": "http://a:1", "concurrency": [1]}, "eval.plain_engine"),
        ({"plain_engine": "http://a:1", "engine": "http://a:1", "concurrency": [1]}, "another ser"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        EvalConfig(**given)
