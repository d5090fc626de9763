"""Servers that answer what the target would not: none of it reaches the store."""

from __future__ import annotations

import collections
import dataclasses
import os
import signal
import time
from functools import partial

import pytest
import torch

from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from engines import completions
from engines import distribution_check as check
from engines.completions import complete, continuation
from engines.distribution_check import (
    CHECKED,
    ENOUGH,
    WINDOW,
    UncheckedRows,
    judged,
    sampled,
    unlike,
)
from target.decode import Continuation, Request
from target.sampling import Sampling
from tests.helpers.commands import stored_traces
from tests.helpers.servers import NEW, filled, plan_of, played
from tests.helpers.tiny import EOS, VOCAB_SIZE, perturbed
from tests.helpers.watch import Reads
from trainer.errors import RunFault, UserError

COUNT = 40


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def known(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    plan = plan_of(COUNT, served=False)
    return {tuple(t.prompt_ids): t for t in filled(plan, target, folder)}


@pytest.fixture
def good(known):
    with played(known) as state:
        yield state


@pytest.fixture
def bad(known):
    with played(known) as state:
        yield state


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(completions, "DELAYS_S", (0.01,))


def another(ids):
    """What another model would say."""
    return [(7 * i) % 50 + 4 for i in range(NEW)]


def after(server, count, change=another):
    """It becomes another model once it has been asked `count` times."""
    return lambda ids: change(ids) if len(server.asked) > count else ids


def behind(server, count):
    """It answers once the other has been asked more than `count` times, so that this one is,
    whatever the threads do."""

    def change(ids):
        until = time.monotonic() + 60
        while len(server.asked) <= count and time.monotonic() < until:
            time.sleep(0.001)
        return ids

    return change


def rows_of(known, count=COUNT):
    return [
        Continuation(Request(list(ids), 0, Sampling(0.0)), trace.response_ids, "")
        for ids, trace in list(known.items())[:count]
    ]


def assert_exact(traces, known, count=COUNT):
    """Each row once, and as the target says it."""
    assert len({trace.key for trace in traces}) == len(traces) == count
    for trace in traces:
        assert trace.response_ids == known[tuple(trace.prompt_ids)].response_ids


def said_of(server, capsys):
    """The lines that name it."""
    return [line for line in capsys.readouterr().out.splitlines() if server.url in line]


# --- single answers --------------------------------------------------------------------------

ODD = {
    "beyond the vocabulary": (lambda ids: [*ids[:-1], VOCAB_SIZE], "'100' .*not a token .*0 to 99"),
    "negative": (lambda ids: [-1, *ids[1:]], "'-1' in an answer is not a token id"),
    "floats": (lambda ids: [float(i) for i in ids], r"\.0' in an answer is not a token id"),
    "booleans": (lambda ids: [True, *ids[1:]], "'True' in an answer is not a token id"),
    "null": (lambda ids: [None, *ids[1:]], "'None' in an answer is not a token id"),
    "text": (lambda ids: [str(i) for i in ids], "in an answer is not a token id"),
    "nested": (lambda ids: [ids], "in an answer is not a token id"),
    "too many": (lambda ids: (ids * 50)[:501], "501 tokens, 12 were requested"),
    "one too many": (lambda ids: [*ids, 5], "13 tokens, 12 were requested"),
    "too few": (lambda ids: ids[:-1], "11 tokens without EOS"),
    "none": (lambda ids: [], "no token ids in the answer"),
    "no list": (lambda ids: "abc", "no token ids in the answer"),
    "a mapping": (lambda ids: {"0": 5}, "no token ids in the answer"),
}  # fmt: skip


def request_of(known):
    return Request(list(next(iter(known))), 0, Sampling(0.0))


SETTINGS = {"max_new_tokens": NEW, "eos_ids": [EOS], "vocab_size": VOCAB_SIZE}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_answer_is_refused_at_once(known, bad, kind):
    bad.change, says = ODD[kind]
    with pytest.raises(completions.ServerError, match=rf"{bad.url} failed \(.*{says}") as error:
        continuation(bad.url, "tiny", request_of(known), **SETTINGS)
    assert "\n" not in str(error.value)
    assert not error.value.transient


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ({"finish_reason": "content_filter"}, "finish_reason is 'content_filter'"),
        ({"prompt_token_ids": [1, 2]}, "to a prompt other than the one sent"),
    ],
)
def test_an_answer_to_something_else_is_refused(known, bad, beside, says):
    bad.beside = beside
    with pytest.raises(completions.ServerError, match=says):
        continuation(bad.url, "tiny", request_of(known), **SETTINGS)


@pytest.mark.parametrize("kind", ["beyond the vocabulary", "floats", "too many"])
def test_of_an_odd_answer_nothing_is_stored(target, known, good, bad, tmp_path, capsys, kind):
    """Its server is not used any more; where it is the only one, the run stops and says why."""
    change, says = ODD[kind]
    bad.change, good.change = after(bad, 5, change), behind(bad, 5)
    assert_exact(filled(plan_of(), target, tmp_path / "two", [bad.url, good.url]), known, 20)
    (line,) = said_of(bad, capsys)
    assert "it is not used any more" in line
    bad.asked.clear()
    with pytest.raises(RunFault, match=rf"{bad.url} failed \(.*{says}.*rows are saved"):
        filled(plan_of(), target, tmp_path / "one", [bad.url])
    kept = stored_traces(tmp_path / "one")
    assert_exact(kept, known, len(kept))
    assert len(kept) >= 2  # of five good answers; three may have been under way
    assert len(bad.asked) < 15  # no patience with what cannot be helped
    assert_exact(filled(plan_of(), target, tmp_path / "one", [good.url]), known, 20)


def test_the_limits_themselves_are_allowed(known, good):
    request = request_of(known)
    good.change = lambda ids: [VOCAB_SIZE - 1] * NEW
    good.beside = {"finish_reason": "length", "prompt_token_ids": request.prompt_ids}
    row = continuation(good.url, "tiny", request, **SETTINGS)
    assert (row.response_ids, row.finish_reason) == ([VOCAB_SIZE - 1] * NEW, "length")


# --- another model -----------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "count"), [(0.0, 1), (0.0, 20), (1.0, 3), (1.0, 20)])
def test_another_model_behind_the_address_is_found_out(target, bad, tmp_path, temperature, count):
    """Also with a handful of rows; nothing of it is stored."""
    bad.change = another
    with pytest.raises(UserError, match=r"not those of .* serve this model"):
        filled(plan_of(count, temperature), target, tmp_path, [bad.url])
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize(("count", "window"), [(0, 16), (7, 16), (20, 16), (20, WINDOW), (30, 8)])
def test_of_two_servers_one_may_become_another_model(
    target, known, good, bad, tmp_path, capsys, monkeypatch, count, window
):
    monkeypatch.setattr(check, "WINDOW", window)
    bad.change = after(bad, count)
    good.delay = 0.02  # so that the other has the most of it
    assert_exact(filled(plan_of(COUNT), target, tmp_path, [bad.url, good.url]), known)
    lines = said_of(bad, capsys)
    assert bool(lines) == (len(bad.asked) > count)
    assert not said_of(good, capsys)
    for line in lines:
        assert "of the greedy tokens differ" in line
        assert "it is not used any more" in line


def test_where_the_only_server_becomes_another_model_its_checked_rows_are_kept(
    target, known, good, bad, tmp_path, monkeypatch
):
    monkeypatch.setattr(check, "WINDOW", 8)
    bad.change = after(bad, 26)
    with pytest.raises(RunFault, match=rf"of {bad.url} are not those of .* rows are saved"):
        filled(plan_of(COUNT), target, tmp_path, [bad.url])
    kept = stored_traces(tmp_path)
    assert 16 <= len(kept) <= 26
    assert_exact(kept, known, len(kept))
    assert_exact(filled(plan_of(COUNT), target, tmp_path, [good.url]), known)


def test_where_both_servers_are_bad_the_last_is_named(target, known, good, bad, tmp_path, capsys):
    good.change, bad.change, good.delay = after(good, 12), another, 0.01
    with pytest.raises(RunFault, match=rf"the answers of {good.url} are not those of"):
        filled(plan_of(COUNT), target, tmp_path, [good.url, bad.url])
    (line,) = said_of(bad, capsys)
    assert "it is not used any more" in line
    kept = stored_traces(tmp_path)
    assert_exact(kept, known, len(kept))


def test_conversations_go_on_from_good_answers_only(tiny_target, tmp_path, capsys):
    ends = (EOS, 1, 2, 3, *range(30, 100))  # nothing stands behind an answer that is cut
    target = dataclasses.replace(tiny_target("llama", chat_template=True), eos_ids=ends)
    turns = tuple(
        {"role": role, "content": f"say {i}"}
        for i in range(3) for role in ("user", "assistant")
    )  # fmt: skip
    prompts = tuple(Prompt(None, turns[:-1], None, "test", "", f"c{i}") for i in range(3))
    prompts = tuple(
        dataclasses.replace(p, messages=({"role": "user", "content": f"call {i}"}, *turns[1:-1]))
        for i, p in enumerate(prompts)
    )
    plan = GenerationPlan("chat", prompts, (0.0,), max_new_tokens=NEW)
    own = filled(plan, target, tmp_path / "own")
    assert collections.Counter(t.turn for t in own) == {0: 3, 1: 3, 2: 3}
    known = {tuple(t.prompt_ids): t for t in own}
    plan = dataclasses.replace(plan, served=True)
    with played(known) as good, played(known) as bad:
        bad.change = after(bad, 2)
        assert filled(plan, target, tmp_path / "two", [bad.url, good.url]) == own
        assert filled(plan, target, tmp_path / "one", [good.url]) == own


def test_a_run_that_is_told_to_end_keeps_checked_rows_only(target, known, bad, tmp_path):
    told = []

    def change(ids):
        if len(bad.asked) >= 30 and not told:
            told.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return another(ids) if len(bad.asked) > 12 else ids

    def end(*_):
        raise SystemExit(75)

    bad.change = change
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            filled(plan_of(COUNT), target, tmp_path, [bad.url])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_exact(stored_traces(tmp_path), known, CHECKED)


# --- when and on what --------------------------------------------------------------------------


def pulled(target, known, server, **options):
    """For each row in turn: how many had been asked for when it came."""
    requests = [Request(list(ids), 0, Sampling(0.0)) for ids in known]
    settings = {"max_new_tokens": NEW, "concurrency": 1} | options
    return [len(server.asked) for _ in complete(target, [server.url], requests, **settings)]


def test_rows_wait_for_their_check(target, known, good, monkeypatch):
    """The first ones for each other, later ones for a window, and slow ones not for long."""
    monkeypatch.setattr(check, "WINDOW", 16)
    seen = pulled(target, known, good)
    assert seen == [CHECKED] * CHECKED + [24] * 16 + [40] * 16
    monkeypatch.setattr(check, "HOLD_S", 0.0)
    good.asked.clear()
    few = dict(list(known.items())[:12])
    assert pulled(target, few, good) == [*[CHECKED] * CHECKED, 9, 10, 11, 12]


def test_short_answers_wait_until_there_are_tokens_enough(target, known, good):
    good.change = lambda ids: ids[:2]
    seen = pulled(target, known, good, stop_strings=("!",))
    assert seen[0] == ENOUGH // 2


def test_a_check_costs_one_row_in_thirty_two(target, known, monkeypatch):
    """Unless something is suspicious: then the whole window is looked at."""
    monkeypatch.setattr(check, "ENOUGH", CHECKED * NEW // 2)  # of rows as short as these
    passes = []
    hook = target.model.register_forward_pre_hook(
        lambda _, __, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    rows = (rows_of(known) * 7)[:WINDOW]
    window = UncheckedRows(partial(check.measured, target))
    try:
        for number, row in enumerate(rows[:CHECKED]):
            window.add(number, row)
        assert window.due()
        assert window.check() is None
        assert window.release() == rows[:CHECKED]
        passes.clear()
        for number, row in enumerate(rows):
            assert not window.due()
            window.add(number, row)
        assert window.due()
        assert window.check() is None
        assert passes == [CHECKED]
        assert WINDOW // CHECKED == 32
        wrong = dataclasses.replace(rows[-1], response_ids=another(None))
        window.rows[-1] = (WINDOW, wrong)
        assert "of the greedy tokens differ" in str(window.check())
        assert passes == [CHECKED, CHECKED, *[CHECKED] * 32]
    finally:
        hook.remove()


def test_a_sample_is_spread_and_holds_the_last_rows_with_tokens_enough(known):
    rows = (rows_of(known) * 7)[:WINDOW]
    chosen = sampled(rows)
    places = [next(i for i, row in enumerate(rows) if row is one) for one in chosen]
    assert len(places) == len(set(places))
    short = [dataclasses.replace(row, response_ids=[5]) for row in rows]
    assert sum(len(row.response_ids) for row in sampled(short)[CHECKED // 2 :]) == ENOUGH
    assert sampled(short)[-ENOUGH:] == short[-ENOUGH:]
    assert list(sampled(rows[:CHECKED])) == rows[:CHECKED]
    for count in range(1, 40):
        assert list(sampled(rows[:count]))[-min(count, 4) :] == rows[:count][-min(count, 4) :]


def test_rows_are_judged_in_the_order_of_asking(target, known):
    """One that was asked for long ago may come last: it says nothing of the server as it is."""
    window = UncheckedRows(partial(check.measured, target))
    rows = rows_of(known, 24)
    for number, row in enumerate(rows[:20]):
        window.add(100 + number, dataclasses.replace(row, response_ids=another(None)))
    for number, row in enumerate(rows[20:]):
        window.add(number, row)
    assert window.check() is not None
    few = UncheckedRows(partial(check.measured, target))
    few.add(1, dataclasses.replace(rows[0], response_ids=another(None)))
    for number in range(2, 30):
        few.add(-number, rows[number % 20])
    assert few.check() is not None  # what was asked for last, though it came first


# --- the comparison ----------------------------------------------------------------------------


def greedy(count, differing):
    """Of so many tokens, where the target would rather say another in so many places."""
    tokens = torch.tensor([1] * differing + [0] * (count - differing))
    return check._greedy(torch.tensor([[5.0, 0.0]]).expand(count, 2), tokens)


def drawn(count, rare):
    """Of so many tokens, the rare one of a distribution in so many places."""
    tokens = torch.tensor([1] * rare + [0] * (count - rare))
    return check._drawn(torch.tensor([[0.999, 0.001]]).expand(count, 2), tokens)


def test_a_few_tokens_condemn_no_server_and_many_do():
    assert judged([]) is None
    assert judged([greedy(1, 1)]) is None
    assert judged([greedy(3, 1)]) is None
    assert judged([greedy(12, 3)]) is None
    assert judged([greedy(3, 3)]) == "1.00 of the greedy tokens differ"
    assert judged([greedy(2, 2)] * 2) is not None  # short ones add up
    assert judged([greedy(1000, 100)]) is None
    assert judged([greedy(1000, 150)]) == "0.15 of the greedy tokens differ"
    assert judged([drawn(1, 1)]) is None
    assert judged([drawn(12, 1)]) is None
    assert judged([drawn(4000, 4)]) is None
    assert judged([drawn(3, 3)]) is not None
    assert "nats beyond the entropy" in str(judged([drawn(4000, 400)]))
    assert judged([greedy(100, 0), drawn(3, 3)]) is not None


def test_rows_since_any_one_of_them_are_judged():
    assert judged([greedy(12, 0)] * 200 + [greedy(12, 11)]) is not None
    assert judged([greedy(12, 11)] + [greedy(12, 0)] * 200) is None


def test_short_answers_of_another_model_add_up_over_checks(target, known):
    """In conversations a check may have one short row."""
    window, checks = UncheckedRows(partial(check.measured, target)), 0
    for number, row in enumerate(rows_of(known, 8)):
        window.add(number, dataclasses.replace(row, response_ids=[another(None)[number]]))
        checks += 1
        if window.check():
            break
        window.release()
    assert checks == 3


def test_near_ties_of_a_greedy_server_are_no_difference(target, known):
    """The same weights in half precision answer as the target, others do not."""
    for scale, same in ((0.002, True), (1.0, False)):
        model = perturbed(target.model, scale)
        other = dataclasses.replace(target, model=model)
        assert (unlike(other, rows_of(known)) is None) == same


def test_a_token_that_is_nearly_as_likely_is_no_difference(target, known, monkeypatch):
    wrong = [dataclasses.replace(row, response_ids=another(None)) for row in rows_of(known, 1)]
    assert unlike(target, wrong) is not None
    monkeypatch.setattr(check, "TIE", 1e9)
    assert unlike(target, wrong) is None


def test_drawn_tokens_of_the_target_pass(target, tmp_path):
    """And not another model's."""
    traces = filled(plan_of(8, 1.0, served=False), target, tmp_path)
    rows = [
        Continuation(Request(t.prompt_ids, 0, Sampling(1.0)), t.response_ids, "") for t in traces
    ]
    assert unlike(target, rows) is None
    assert unlike(target, []) is None
    other = dataclasses.replace(target, model=perturbed(target.model, 5.0))
    assert "nats beyond the entropy" in str(unlike(other, rows))


def test_a_target_that_computes_no_numbers_is_like_no_server(target, known):
    broken = perturbed(target.model, 0.0)
    broken.lm_head.weight.data.fill_(float("nan"))
    assert unlike(dataclasses.replace(target, model=broken), rows_of(known, 8)) is not None


def test_long_answers_are_read_a_few_texts_and_positions_at_a_time(target, known, monkeypatch):
    """One text of 32,000 tokens has 20 GB of logits over a vocabulary of 152,000."""
    hot = Sampling(1.0, 20, 0.9)
    rows = [
        dataclasses.replace(row, request=dataclasses.replace(row.request, sampling=hot))
        if number % 3 else dataclasses.replace(row, response_ids=row.response_ids[: 1 + number])
        for number, row in enumerate(rows_of(known, 12))
    ]  # fmt: skip
    whole, chunk, tokens = check.measured(target, rows), 5, 100
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", chunk * target.vocab_size)
    monkeypatch.setattr("target.padding.MOST_TOKENS", tokens)
    with Reads(target) as reads:
        found = check.measured(target, rows)
    assert tokens / 2 < max(reads.forwards) <= tokens
    assert reads.positions == chunk < NEW
    for one, other, row in zip(found, whole, rows, strict=True):
        assert one.greedy == other.greedy == (row.request.sampling != hot)
        assert one.num_tokens == other.num_tokens == len(row.response_ids)
        assert one.total == pytest.approx(other.total, rel=1e-4, abs=1e-4)
        torch.testing.assert_close(one.nats, other.nats, rtol=1e-4, atol=1e-3)
