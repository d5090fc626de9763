"""Text from servers for a command that has no weights of the target: servers score each other."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from engines import completions, distribution_check, witnesses
from engines.completions import complete
from engines.distribution_check import judged
from scripts import generate
from target.decode import Continuation, Request
from target.model import Target
from target.outline import outline
from target.sampling import Sampling
from tests.helpers.commands import stored_traces
from tests.helpers.servers import NEW, filled, plan_of, played, scoring
from tests.helpers.tiny import perturbed
from trainer.errors import RunFault, UserError

COUNT = 24


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def other(target):
    return perturbed(target.model, 1.0)


@pytest.fixture(scope="module")
def bare(tiny_folder):
    return outline(str(tiny_folder("llama")))


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["T=0", "T=1"])
def plan(request):
    return plan_of(COUNT, request.param)


@pytest.fixture(scope="module")
def known(target, plan, tmp_path_factory):
    own = plan_of(COUNT, plan.temperatures[0], served=False)
    return {tuple(t.prompt_ids): t for t in filled(own, target, tmp_path_factory.mktemp("known"))}


@pytest.fixture(scope="module")
def of_other(target, other, plan, tmp_path_factory):
    """The same of another model."""
    own = plan_of(COUNT, plan.temperatures[0], served=False)
    served = Target(other, target.tokenizer, "other", target.fingerprint, target.eos_ids)
    return {tuple(t.prompt_ids): t for t in filled(own, served, tmp_path_factory.mktemp("other"))}


@pytest.fixture
def servers(target, known):
    """Three of the target."""
    with contextlib.ExitStack() as stack:
        states = [stack.enter_context(played(known)) for _ in range(3)]
        for state in states:
            state.score = scoring(target.model)
        yield states


@pytest.fixture
def foreign(other, of_other):
    with played(of_other) as state:
        state.score = scoring(other)
        yield state


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (completions, witnesses):
        monkeypatch.setattr(module, "DELAYS_S", (0.01,))


def urls(*states):
    return [state.url for state in states]


def scorings(state):
    return sum("echo" in content for content in state.asked)


def assert_exact(traces, known):
    assert len(traces) == COUNT
    for trace in traces:
        assert trace.response_ids == known[tuple(trace.prompt_ids)].response_ids


def test_servers_of_one_model_vouch_for_each_other(plan, bare, target, known, servers, tmp_path):
    first, second, _ = servers
    assert_exact(filled(plan, bare, tmp_path, urls(first, second)), known)
    assert scorings(first)
    assert scorings(second)
    assert scorings(first) + scorings(second) <= COUNT  # each at most once
    read = []
    with_hook = target.model.register_forward_pre_hook(lambda *_: read.append(1))
    assert_exact(filled(plan, target, tmp_path, urls(first)), known)  # the same store, as it is
    with_hook.remove()
    assert not read


def test_of_two_servers_nobody_knows_which_is_another_model(plan, bare, servers, foreign, tmp_path):
    with pytest.raises(UserError, match=r"data.servers: .* serve different models .*probabilities"):
        filled(plan, bare, tmp_path, urls(servers[0], foreign))
    assert not list(tmp_path.glob("*.parquet"))


def test_of_three_servers_the_odd_one_is_left_out(
    plan, bare, known, servers, foreign, tmp_path, capsys
):
    servers[0].delay = servers[1].delay = 0.02
    assert_exact(filled(plan, bare, tmp_path, urls(foreign, *servers[:2])), known)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not used any more" in line]
    assert len(lines) == 1
    assert foreign.url in lines[0]


def test_one_that_becomes_another_model_is_found_out(
    plan, bare, known, of_other, other, target, servers, tmp_path
):
    """Its answers are judged by what it said of them then, not by what it says later."""
    changing, *rest = servers
    own, odd = scoring(target.model), scoring(other)
    answers = {tuple(t.response_ids): of_other[key] for key, t in known.items()}

    def change(ids):
        if 6 < len(changing.asked) < 14 and tuple(ids) in answers:
            changing.score = odd
            return list(answers[tuple(ids)].response_ids)
        changing.score = own
        return ids

    changing.change = change
    for state in rest:
        state.delay = 0.02
    assert_exact(filled(plan, bare, tmp_path, urls(*servers)), known)


def test_the_answers_of_one_server_are_checked_by_the_first_that_has_the_weights(
    plan, bare, target, other, known, servers, tmp_path, capsys
):
    first = servers[0]
    first.score = None  # no log-probabilities are asked for, which nobody would compare
    assert_exact(filled(plan, bare, tmp_path, urls(first, first)), known)
    assert "the answers of a single server are not checked here" in capsys.readouterr().out
    filled(plan, bare, tmp_path, urls(first))
    assert "not checked" not in capsys.readouterr().out  # said when they are written
    read = []
    hook = target.model.register_forward_pre_hook(lambda *_: read.append(1))
    assert_exact(filled(plan, target, tmp_path, urls(first)), known)
    assert read
    assert "16 answers of an unchecked server are the target's own" in capsys.readouterr().out
    read.clear()
    assert_exact(filled(plan, target, tmp_path, urls(first)), known)
    hook.remove()
    assert not read  # once
    assert len(first.asked) == COUNT


def test_the_answers_of_one_wrong_server_are_refused_then(plan, bare, target, foreign, tmp_path):
    assert len(filled(plan, bare, tmp_path, urls(foreign))) == COUNT
    for _ in range(2):
        with pytest.raises(UserError, match=r"not those of .*their server was not checked: delete"):
            filled(plan, target, tmp_path, urls(foreign))


def test_without_a_witness_the_run_stops_and_goes_on(plan, bare, known, servers, tmp_path):
    first, second, third = servers

    def change(ids):
        second.down = len(first.asked) > 9
        return ids

    first.change, second.delay = change, 0.05
    with pytest.raises(
        RunFault, match=rf"no other server scores the answers of {first.url} .*saved"
    ):
        filled(plan, bare, tmp_path, urls(first, second))
    assert len(stored_traces(tmp_path)) < COUNT
    second.down, first.change = False, lambda ids: ids
    assert_exact(filled(plan, bare, tmp_path, urls(first, third)), known)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"token_logprobs": [0.5] * 5},  # too few
        {"token_logprobs": ["a"] * 100},
    ],
)
def test_a_server_without_log_probabilities_is_named(bare, known, servers, capsys, table):
    first, second, _ = servers
    first.score = second.score = lambda ids: table
    requests = [Request(list(ids), i, Sampling(0.0)) for i, ids in enumerate(known)]
    measure = witnesses.Witnesses(bare, 2).measure
    with pytest.raises(RunFault, match=r"no other server scores|without the log-probabilities"):
        list(complete(
            bare, urls(first, second), requests, max_new_tokens=NEW, concurrency=2, witness=measure,
        ))  # fmt: skip
    assert "an answer without the log-probabilities of its tokens" in capsys.readouterr().out


def test_what_a_server_scores_is_checked(target, servers):
    first = servers[0]
    ids = list(range(4, 20))
    law = target.outputs(torch.tensor([ids])).logits[0, 2:-1].double().log_softmax(-1)
    own, tops = witnesses.scored(first.url, "tiny", ids, 3)
    torch.testing.assert_close(
        own, law.gather(-1, torch.tensor(ids[3:])[:, None])[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(tops, law.topk(20).values, rtol=0, atol=1e-5)
    few = [{"a": -1.0, "b": -2.0}] * 16
    for odd in (
        {},
        {"token_logprobs": [-1.0] * 10, "top_logprobs": few},
        {"token_logprobs": [-1.0] * 16, "top_logprobs": few[:10]},
        {"token_logprobs": [float("nan")] * 16, "top_logprobs": few},
        {"token_logprobs": [-1.0] * 16, "top_logprobs": [{}] * 16},
        {"token_logprobs": [-1.0] * 16, "top_logprobs": [["a"]] * 16},
        {"token_logprobs": [-1.0] * 16, "top_logprobs": [{"a": "b"}] * 16},
        {"token_logprobs": ["a"] * 16, "top_logprobs": few},
        {"token_logprobs": 3, "top_logprobs": None},
    ):
        first.score = lambda ids, odd=odd: odd
        with pytest.raises(RunFault, match="does not score a prompt"):
            witnesses.scored(first.url, "tiny", ids, 3)
    fewer = [{"a": -1.0}, *few[1:]]  # two of the likeliest have one text
    first.score = lambda ids: {"token_logprobs": [-1.0] * 16, "top_logprobs": fewer}
    assert witnesses.scored(first.url, "tiny", ids, 0)[1].shape == (16, 1)


def test_with_the_whole_distribution_it_is_the_check_by_the_target():
    torch.manual_seed(0)
    laws = torch.randn(6, 50, dtype=torch.float64).log_softmax(-1)
    tokens = torch.randint(50, (6,))
    own = laws.gather(-1, tokens[:, None])[:, 0]
    found = witnesses.drawn(own, laws.sort(-1, descending=True).values, 50, 1.0)
    wanted = distribution_check._drawn(laws.exp(), tokens)
    assert found.total == pytest.approx(wanted.total, abs=1e-5)
    torch.testing.assert_close(found.nats[:4], wanted.nats[:4], rtol=1e-4, atol=1e-4)  # to tilt 1


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.5])
@pytest.mark.parametrize("scale", [0.5, 2.0, 5.0])
def test_tokens_of_the_temperature_never_cost_more_than_the_bound(temperature, scale):
    """The mean over all tokens, weighted by their chance: whatever the rest of a distribution is,
    and no tilt gives evidence against it."""
    torch.manual_seed(1)
    laws = torch.randn(4, 60, dtype=torch.float64).mul(scale).log_softmax(-1)
    chances = (laws / temperature).softmax(-1)
    for law, chance in zip(laws, chances, strict=True):
        tops = law.topk(8).values[None].expand(60, -1)
        ones = [witnesses.drawn(law[i : i + 1], tops[:1], 60, temperature) for i in range(60)]
        assert sum(c * one.total for c, one in zip(chance.tolist(), ones, strict=True)) < 1e-9
        found = torch.stack([one.nats for one in ones]).double()
        assert (chance @ found.exp() < 1 + 1e-4).all()  # a mean of likelihood ratios is at most 1


@pytest.mark.parametrize("asked", [0.4, 1.0])
def test_a_server_that_draws_otherwise_is_found_out(target, servers, tmp_path_factory, asked):
    """Its model is the target, and it draws at three times the temperature."""
    first = servers[0]
    plan = plan_of(COUNT, 3 * asked, served=False)

    def claimed(trace):
        found = first.score([*trace.prompt_ids, *trace.response_ids])["token_logprobs"]
        return found[len(trace.prompt_ids) :]

    rows = [
        Continuation(
            Request(t.prompt_ids, 0, Sampling(asked)), t.response_ids, "", logprobs=claimed(t)
        )
        for t in filled(plan, target, tmp_path_factory.mktemp("hot"))
    ]  # fmt: skip
    found = judged(witnesses.Witnesses(target, 2).measure("a", [first.url], rows))
    assert "nats beyond the entropy is what drawn tokens cost" in str(found)


def test_drawn_tokens_are_as_likely_as_their_own_server_said(target, servers, tmp_path):
    """A model that is broader than the target would draw text that costs no more than it may."""
    first, plan = servers[0], plan_of(COUNT, 1.0, served=False)
    rows = []
    for trace in filled(plan, target, tmp_path):
        claimed = first.score([*trace.prompt_ids, *trace.response_ids])["token_logprobs"]
        request = Request(trace.prompt_ids, 0, Sampling(1.0))
        said = claimed[len(trace.prompt_ids) :]
        rows.append(Continuation(request, trace.response_ids, "", logprobs=said))
    measure = witnesses.Witnesses(target, 2).measure
    assert judged(measure("a", [first.url], rows)) is None
    rows = [dataclasses.replace(row, logprobs=[one - 0.5 for one in row.logprobs]) for row in rows]
    assert judged(measure("a", [first.url], rows), "differ") == "1.00 differ"


def test_rounding_is_no_difference_and_a_little_noise_in_the_weights_is(
    target, known, servers, plan
):
    """bfloat16 against float32, and a copy of the target with a tenth of noise."""
    first = servers[0]
    rows = [
        Continuation(
            Request(list(ids), 0, Sampling(plan.temperatures[0])), t.response_ids, "",
            logprobs=scoring(target.model)([*ids, *t.response_ids])["token_logprobs"][len(ids):],
        )
        for ids, t in known.items()
    ]  # fmt: skip
    measure = witnesses.Witnesses(target, 2).measure
    for scale, same in ((0.0, True), (0.002, True), (0.5, False)):
        first.score = scoring(perturbed(target.model, scale))
        assert (judged(measure("a", [first.url], rows)) is None) == same


def test_the_command_loads_no_model(
    known, plan, servers, tiny_folder, tmp_path, monkeypatch, capsys
):
    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"text": "Question {i}: "}}\n' for i in range(COUNT)))
    words = [
        f"model.target={tiny_folder('llama')}", f"data.prompts={prompts}", "data.engine=openai",
        f"data.servers=[{servers[0].url},{servers[1].url}]", f"data.max_new_tokens={NEW}",
        f"data.temperature={plan.temperatures[0]}", f"data.traces={tmp_path / 'traces'}",
        "data.prompts_column=text", f"data.num_prompts={COUNT}", "data.eval_share=0.1",
    ]  # fmt: skip
    assert generate.main(words) == 0
    found = stored_traces(tmp_path / "traces")
    assert 16 < len(found) < COUNT
    for trace in found:
        assert trace.response_ids == known[tuple(trace.prompt_ids)].response_ids
    # distributions are not to be had from servers
    with pytest.raises(AssertionError, match="was loaded"):
        generate.main([*words, "data.teacher_top_k=4"])
