"""Acceptance without decoding against real decoding and against enumeration."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from data.traces import Trace
from drafters.causal_lm import CausalLMDrafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget
from drafters.training_free.lookup import PromptLookup
from drafters.trees.tree import TokenTree
from eval.counters import check_invariants, counters_from_rounds
from eval.engine import SpeculativeDecoder
from eval.offline import OfflineEvaluator
from eval.policies.table import make_budget
from eval.scored import score
from eval.walk import replay
from target.cache import CachedModel
from target.decode import Request, decode
from target.model import Target
from target.sampling import Sampling, row_key, warp
from tests.drafters.test_eagle import three
from tests.helpers.eagle import build_eagle
from tests.helpers.heads import PROMPTS, fitted
from tests.helpers.tabular import PADDING, TabularModel, dirichlet_table, product, round_laws
from tests.helpers.tiny import EOS, perturbed, prompts_of, tiny_model, tiny_tokenizer
from tests.helpers.watch import Watch
from trainer.errors import UserError

GREEDY, SAMPLED = Sampling(0.0), Sampling(1.0)
K = 4
DECODED_ONLY = {"overlap_sum", "overlap_count", "greedy_sum", "greedy_count"}
# what a stop rule drafts after a rejection is not in the trace
NOT_UNDER_A_STOP_RULE = {"submitted", "engine_drafted"}


def target_of(model, eos=(EOS,)) -> Target:
    return Target(model, tiny_tokenizer(), "tiny", {}, eos)


def drafter_of(model, target) -> CausalLMDrafter:
    return CausalLMDrafter._of(model, target, "draft")


def negated(model):
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_output_embeddings().weight.neg_()
    return wrong


def requests_for(prompts, sampling, seed=0):
    return [Request(p, row_key(seed, p, i), sampling, i) for i, p in enumerate(prompts)]


def trace_of(prompt, response, sampling, lookahead=(), index=0, reason="length") -> Trace:
    return Trace(
        prompt_ids=list(prompt), response_ids=list(response), source="target", domain="all",
        conversation_id=str(index), turn=0, sample_index=0, temperature=sampling.temperature,
        top_k=sampling.top_k, top_p=sampling.top_p, seed=0, finish_reason=reason, model_hash="",
        tokenizer_hash="", lookahead_ids=list(lookahead), prompt_hash=str(index), index=index,
    )  # fmt: skip


def traces_of(target, prompts, sampling, *, max_new_tokens=24, lookahead=K, seed=0):
    found = decode(
        CachedModel(target.model), requests_for(prompts, sampling, seed), batch_size=16,
        max_new_tokens=max_new_tokens, eos_ids=target.eos_ids, lookahead=lookahead,
    )  # fmt: skip
    return sorted(
        (
            trace_of(
                c.request.prompt_ids, c.response_ids, sampling, c.lookahead_ids, c.request.tag,
                c.finish_reason,
            )
            for c in found
        ),
        key=lambda trace: trace.index,
    )  # fmt: skip


def offline(target, traces, drafter, sampling, budget=None, draft_sampling=None, **options):
    """{prompt_hash: counters}"""
    evaluator = OfflineEvaluator(target, traces, sampling, budget or Budget(K), **options)
    result = evaluator(drafter, draft_sampling)
    return {one.prompt_hash: one for one in result.counters}


def decoded(
    target, traces, drafter, sampling, budget=None, *, max_new_tokens=24, seed=0, **options
):
    """{prompt_hash: counters} and {prompt_hash: text} of real speculative decoding."""
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=sampling, budget=budget or Budget(K),
        eos_ids=target.eos_ids, max_new_tokens=max_new_tokens,
        **({"batch_size": 8} | options),
    )  # fmt: skip
    requests = [
        Request(t.prompt_ids, row_key(seed, t.prompt_ids, t.index), sampling, t.prompt_hash)
        for t in traces
    ]
    counters, texts = {}, {}
    for one in decoder.run(requests):
        tag = one.request.tag
        check_invariants(one.rounds, len(one.response_ids))
        counters[tag] = counters_from_rounds(one.rounds, tag, "all", decoder.budget.max_tokens)
        texts[tag] = one.response_ids
    return counters, texts


def numbers(counters, without=frozenset()):
    found = dataclasses.asdict(counters)
    return {k: v for k, v in found.items() if k not in DECODED_ONLY | without}


# --- T = 0: exactly the counters of decoding -----------------------------------------------------


@pytest.fixture(scope="module")
def greedy():
    """A target with several ends of sequence, its traces with look-ahead, ragged and some short."""
    model = tiny_model("llama")
    prompts = prompts_of([3, 17, 9, 30, 1, 5, 12, 8] * 3)
    free = traces_of(target_of(model, ()), prompts, GREEDY)
    ends = {free[0].response_ids[3], free[1].response_ids[9], free[2].response_ids[0]}
    target = target_of(model, tuple(ends))
    traces = traces_of(target, prompts, GREEDY)
    reasons = [trace.finish_reason for trace in traces]
    assert reasons.count("eos") >= 5
    assert reasons.count("length") >= 5
    assert any(len(trace.response_ids) == 1 for trace in traces)
    return target, traces


def drafters(target):
    return {
        "causal_lm": drafter_of(perturbed(target.model, 0.1), target),
        "poor": drafter_of(perturbed(target.model, 0.4), target),
        "itself": drafter_of(target.model, target),
        "wrong": drafter_of(negated(target.model), target),
        "lookup": PromptLookup(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal_lm", "poor", "itself", "wrong", "lookup"])
def test_greedy_counters_equal_decoding_exactly(kind, greedy):
    target, traces = greedy
    drafter = drafters(target)[kind]
    for batch_size in (1, 5, 16):
        expected = offline(target, traces, drafter, GREEDY, batch_size=batch_size)
        for decode_batch in (1, 8) if batch_size == 5 else ():
            real, texts = decoded(target, traces, drafter, GREEDY, batch_size=decode_batch)
            assert {t.prompt_hash: t.response_ids for t in traces} == texts
            for tag, counters in real.items():
                assert numbers(expected[tag]) == numbers(counters), tag
        if batch_size == 1:
            alone = expected
        assert {k: numbers(v) for k, v in expected.items()} == {
            k: numbers(v) for k, v in alone.items()
        }


@pytest.mark.parametrize("policy", ["confidence:0.3", "confidence:0.6", "confidence:0.95"])
def test_greedy_counters_equal_decoding_under_a_stop_rule(policy, greedy):
    target, traces = greedy
    drafter, budget = drafters(target)["causal_lm"], make_budget(policy, K)
    expected = offline(target, traces, drafter, GREEDY, budget)
    real, _ = decoded(target, traces, drafter, GREEDY, budget)
    fixed, _ = decoded(target, traces, drafter, GREEDY)
    for tag, counters in real.items():
        ours = numbers(expected[tag], NOT_UNDER_A_STOP_RULE)
        assert ours == numbers(counters, NOT_UNDER_A_STOP_RULE), tag
    assert any(real[tag].rounds > fixed[tag].rounds for tag in real)  # the rule did stop


def test_lookup_counters_equal_decoding_on_repetitive_text():
    target = target_of(tiny_model("gemma3"), ())
    prompts = [p * 3 for p in prompts_of([4, 6, 3, 8, 5])]
    traces = traces_of(target, prompts, GREEDY)
    expected = offline(target, traces, PromptLookup(), GREEDY)
    real, _ = decoded(target, traces, PromptLookup(), GREEDY)
    assert {k: numbers(v) for k, v in expected.items()} == {k: numbers(v) for k, v in real.items()}
    assert sum(one.accepted for one in real.values()) > 10
    assert any(one.engine_drafts < one.rounds for one in real.values())  # rounds without a draft


def test_greedy_match_counts_every_response_position(greedy):
    target, traces = greedy
    drafter = drafters(target)["causal_lm"]
    expected = offline(target, traces, drafter, GREEDY)
    for trace in traces:
        ids = torch.tensor([trace.prompt_ids + trace.response_ids])
        with torch.no_grad():
            best = drafter.draft_logits(ids)[0, len(trace.prompt_ids) - 1 : -1].argmax(-1).tolist()
        same = sum(a == b for a, b in zip(best, trace.response_ids, strict=True))
        one = expected[trace.prompt_hash]
        assert (one.greedy_sum, one.greedy_count) == (same, len(trace.response_ids))
        assert (one.overlap_sum, one.overlap_count) == (same, len(trace.response_ids))


def test_a_head_is_judged_from_the_second_token_of_an_answer(greedy):
    """The first is the prefill's: no round drafts it."""
    target, traces = greedy
    torch.manual_seed(0)
    head = MedusaDrafter.build(target, MedusaSettings(K))
    expected = offline(target, traces, head, GREEDY)
    for trace in traces:
        ids = torch.tensor([trace.prompt_ids + trace.response_ids])
        outputs = target.outputs(ids, layers=head.target_layers)
        with torch.no_grad():
            best = head.draft_logits(ids, outputs)[0, len(trace.prompt_ids) : -1].argmax(-1)
        drafted = trace.response_ids[1:]
        same = sum(a == b for a, b in zip(best.tolist(), drafted, strict=True))
        one = expected[trace.prompt_hash]
        assert (one.greedy_sum, one.greedy_count) == (same, len(drafted))
        assert (one.overlap_sum, one.overlap_count) == (same, len(drafted))


def test_alpha_of_a_depth_is_over_the_tokens_that_it_may_draft(greedy):
    """The second token of a round is at the earliest the third of an answer."""
    target, traces = greedy
    torch.manual_seed(0)
    head = MedusaDrafter.build(target, MedusaSettings(K))
    same, count = np.zeros(K), np.zeros(K)
    for trace in traces:
        ids = torch.tensor([trace.prompt_ids + trace.response_ids])
        outputs = target.outputs(ids, layers=head.target_layers)
        for depth in range(1, K + 1):
            drafted = trace.response_ids[depth:]
            with torch.no_grad():
                logits = head.draft_logits(ids, outputs, depth)
            best = logits[0, len(trace.prompt_ids) - 1 + depth : -1].argmax(-1)
            same[depth - 1] += sum(a == b for a, b in zip(best.tolist(), drafted, strict=True))
            count[depth - 1] += len(drafted)
    found = OfflineEvaluator(target, traces, GREEDY, Budget(K))(head).alpha_by_depth
    assert found == pytest.approx(same / count)


def test_without_look_ahead_the_cut_counters_are_the_same(greedy):
    target, traces = greedy
    bare = [dataclasses.replace(trace, lookahead_ids=[]) for trace in traces]
    for kind in ("causal_lm", "lookup"):
        drafter = drafters(target)[kind]
        whole = offline(target, traces, drafter, GREEDY)
        cut = offline(target, bare, drafter, GREEDY, engine_counters=False)
        for tag, one in cut.items():
            ours, theirs = numbers(one), numbers(whole[tag])
            for name in list(ours):
                if name.startswith("engine_"):
                    assert np.sum(ours.pop(name)) == 0
                    theirs.pop(name)
            assert ours == theirs


# --- enumeration -----------------------------------------------------------------------------


class DepthDrafter:
    """table [K, V, V]: the law of depth j+1 given the last token."""

    target_layers = ()

    def __init__(self, table):
        self.table = table

    def begin(self, rows, capacity): ...
    def prefill(self, rows, ids, lengths, outputs=None): ...
    def keep(self, rows): ...

    def propose(self, state, budget):
        last = state.ids.gather(1, state.lengths.unsqueeze(1) - 1)[:, 0]
        tokens, laws = [], []
        for depth in range(budget.max_tokens):
            laws.append(self.table[depth][last])
            last = state.random.choice(laws[-1], state.lengths + depth, "draft")
            tokens.append(last)
        full = torch.full_like(state.lengths, budget.max_tokens)
        return TokenTree.chain(torch.stack(tokens, 1), torch.stack(laws, 1), full)


def expectation(laws, context_of, text, room, depth):
    """Expected counters of the real algorithm when `room` tokens are still to come after `text`,
    from the exact laws of its rounds: `NAMES` in this order (the last for fixed depths only)."""
    memo: dict = {}

    def value(text, room):
        if room <= 0:
            return np.zeros(5)
        key = (context_of(text), room)
        if key not in memo:
            total = np.zeros(5)
            for outcome in laws[context_of(text)]:
                size = len(outcome.emitted)
                accepted, kept = size - 1, min(size, room)
                rejected = accepted < min(depth, kept)
                own = [1, kept < size, kept, min(accepted, kept), rejected]
                total += outcome.weight * (
                    np.array(own) + value((*text, *outcome.emitted), room - size)
                )
            memo[key] = total
        return memo[key]

    return value(tuple(text), room)


NAMES = ("rounds", "truncated_rounds", "emitted", "accepted", "rejections")


@pytest.mark.parametrize(("size", "depth", "length"), [(3, 2, 5), (3, 3, 6), (2, 4, 8)])
def test_replayed_counters_sum_to_the_exact_expectation_of_decoding(
    monkeypatch, size, depth, length
):
    target = dirichlet_table([size] * 3, 1)
    draft = dirichlet_table([depth, size, size], 2)
    prompt = [0] * (PADDING + 2)

    def decoder():
        return SpeculativeDecoder(
            TabularModel(target), DepthDrafter(draft), sampling=SAMPLED, budget=Budget(depth),
            eos_ids=(), max_new_tokens=depth + 2, batch_size=10_000,
        )  # fmt: skip

    laws = round_laws(monkeypatch, decoder, product(size, 2))
    exact = np.zeros(5)
    for first in range(size):
        value = expectation(laws, lambda text: text[-2:], (0, first), length - 1, depth)
        exact += float(target[0, 0, first]) * value

    texts = product(size, length)
    accept = np.zeros((len(texts), length, depth))
    weights = np.ones(len(texts))
    for row, text in enumerate(texts):
        whole = (*prompt, *text)
        for i in range(length):
            before = whole[len(prompt) + i - 2 : len(prompt) + i]
            p = float(target[before][text[i]])
            weights[row] *= p
            for j in range(depth):
                if i - j >= 1:
                    q = float(draft[j][before[-1]][text[i]])
                    accept[row, i - j, j] = min(1.0, q / p)
    sums = replay(accept, np.full((len(texts), length), depth), np.full(len(texts), length), depth)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    replayed = [float(weights @ sums[name]) for name in NAMES]
    assert replayed == pytest.approx(exact.tolist(), abs=1e-11)
    assert exact[2] == pytest.approx(length - 1)


@pytest.mark.parametrize(
    ("sampling", "draft_sampling", "policy"),
    [
        (SAMPLED, None, "fixed"),
        (Sampling(0.7, top_k=2), Sampling(1.5), "fixed"),
        (SAMPLED, GREEDY, "fixed"),
        (SAMPLED, None, "confidence:0.5"),
        (GREEDY, SAMPLED, "fixed"),
    ],
    ids=["plain", "truncated", "greedy-drafts", "stop-rule", "sampled-drafts"],
)
def test_offline_evaluation_of_all_texts_is_the_exact_expectation(
    monkeypatch, sampling, draft_sampling, policy
):
    """The whole of it on networks: caches, batches, warped laws, the evaluator's own indexing."""
    size, depth, length = 3, 2, 4
    model = tiny_model("llama", seed=3, vocab_size=size, eos_token_id=None, std=0.35)
    target = target_of(model, ())
    drafter = drafter_of(
        tiny_model("llama", seed=5, vocab_size=size, eos_token_id=None, layers=1), target
    )
    budget = make_budget(policy, depth)
    prompt = [0] * PADDING + [1, 2]

    def decoder():
        return SpeculativeDecoder(
            CachedModel(model), drafter, sampling=sampling, draft_sampling=draft_sampling,
            budget=budget, eos_ids=(), max_new_tokens=depth + 2, batch_size=10_000,
        )  # fmt: skip

    contexts = [(1, 2, *text) for n in range(1, length) for text in product(size, n)]
    with torch.no_grad():
        texts = product(size, length)
        ids = torch.tensor([[*prompt, *text] for text in texts])
        probs = warp(model(ids).logits[:, len(prompt) - 1 : -1], sampling)
    weights = probs.gather(-1, ids[:, len(prompt) :, None])[..., 0].double().prod(-1).numpy()
    if sampling.temperature == 0:  # the prefill's token is no random call: only its own contexts
        best = probs[int(weights.argmax())].argmax(-1).tolist()
        contexts = [(1, 2, *best[:n]) for n in range(1, length)]
    laws = round_laws(monkeypatch, decoder, contexts)

    exact = np.zeros(4)
    firsts = warp(model(torch.tensor([prompt])).logits[0, -1], sampling).tolist()
    for first, weight in enumerate(firsts):
        if weight > 0:
            value = expectation(laws, lambda t: t, (1, 2, first), length - 1, depth)
            exact += weight * value[:4]

    real = [i for i in range(len(texts)) if weights[i] > 0]
    traces = [trace_of(prompt, texts[i], sampling, index=i) for i in real]
    found = offline(
        target, traces, drafter, sampling, budget, draft_sampling, engine_counters=False,
        batch_size=7,
    )  # fmt: skip
    replayed = [sum(weights[i] * getattr(found[str(i)], name) for i in real) for name in NAMES[:4]]
    # float32 laws against enumerated float32 laws
    assert replayed == pytest.approx(exact.tolist(), rel=2e-5)


def test_sampled_decoding_agrees_within_three_standard_errors():
    model = tiny_model("llama")
    target = target_of(model, (EOS, 7))
    drafter = drafter_of(perturbed(model, 0.15), target)
    prompts = prompts_of([4, 9, 6, 14] * 50)
    traces = traces_of(target, prompts, SAMPLED, max_new_tokens=32)
    assert {trace.finish_reason for trace in traces} == {"eos", "length"}
    expected = offline(target, traces, drafter, SAMPLED)
    real, texts = decoded(
        target, traces, drafter, SAMPLED, max_new_tokens=32, seed=1, batch_size=64
    )
    tags = sorted(expected)
    assert sum(texts[t.prompt_hash] == t.response_ids for t in traces) < 20  # other draws

    def ratio_gap(top, bottom):
        """Difference of the two ratios of sums over prompts, in standard errors."""
        gap, variance = 0.0, 0.0
        for sign, source in ((1, real), (-1, expected)):
            x, y = (np.array([np.sum(getattr(source[t], n)) for t in tags]) for n in (top, bottom))
            ratio = x.sum() / y.sum()
            gap += sign * ratio
            variance += np.sum((x - ratio * y) ** 2) / y.sum() ** 2
        return gap / variance**0.5

    for top, bottom in (
        ("emitted", "rounds"), ("accepted", "rounds"), ("engine_accepted", "rounds"),
        ("rejections", "rounds"), ("tested", "rounds"), ("engine_accepted", "engine_drafted"),
    ):  # fmt: skip
        assert abs(ratio_gap(top, bottom)) < 3, (top, bottom)
    reach = [np.sum([s[t].reach for t in tags], 0) for s in (real, expected)]
    rounds = [sum(s[t].rounds for t in tags) for s in (real, expected)]
    assert reach[0] / rounds[0] == pytest.approx(reach[1] / rounds[1], abs=0.05)


# --- bounds, refusals, regressions -------------------------------------------------------------


def test_the_target_as_its_own_drafter_accepts_everything():
    target = target_of(tiny_model("llama"), (EOS, 7))
    for sampling in (GREEDY, SAMPLED, Sampling(0.7, top_k=12, top_p=0.9)):
        traces = traces_of(target, prompts_of([5, 11, 20, 3]), sampling, max_new_tokens=26)
        for trace in traces:
            found = offline(target, [trace], drafter_of(target.model, target), sampling)
            one = found[trace.prompt_hash]
            length = len(trace.response_ids)
            assert one.rounds == -(-(length - 1) // (K + 1))
            assert one.emitted == length - 1
            assert one.rejections == 0
            assert one.engine_accepted == K * one.rounds
            assert one.overlap_sum == pytest.approx(length, abs=1e-3)


@pytest.mark.parametrize("free", [None, 2**17])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_distributions_live_for_a_few_positions_at_a_time(sampling, free, monkeypatch):
    """All of them together are 130 GB for sixteen texts of 2,000 tokens over a vocabulary of
    152,000."""
    target, wide = target_of(tiny_model("llama"), ()), 3
    drafter = drafter_of(negated(target.model), target)
    traces = traces_of(target, prompts_of([5, 11, 20, 3]), sampling)
    whole = offline(target, traces, drafter, sampling)
    size = wide * len(traces) * target.vocab_size
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", size)
    monkeypatch.setattr("trainer.logits.free_bytes", lambda device: free)
    if free is not None:  # more positions where a device has the memory for them
        size = free // 64
        wide = size // (len(traces) * target.vocab_size)
        assert wide > 3
    with Watch() as watch:
        found = offline(target, traces, drafter, sampling)
    for key, one in found.items():
        assert one.rounds == pytest.approx(whole[key].rounds, rel=1e-5)
        assert one.overlap_sum == pytest.approx(whole[key].overlap_sum, rel=1e-5)
        assert one.greedy_sum == whole[key].greedy_sum
    over_vocabulary = {s for s in watch.shapes if s and s[-1] == target.vocab_size}
    assert (len(traces), wide, target.vocab_size) in over_vocabulary
    # but for the embedding and the output matrix
    others = over_vocabulary - {tuple(p.shape) for p in target.model.parameters()}
    assert all(np.prod(shape) <= size for shape in others), others


def test_disjoint_support_emits_exactly_one_token_a_round():
    target = target_of(tiny_model("llama"), (EOS, 7))
    sampling = Sampling(1.0, top_k=8)
    traces = traces_of(target, prompts_of([5, 11, 20, 3, 7]), sampling)
    found = offline(target, traces, drafter_of(negated(target.model), target), sampling)
    for trace in traces:
        one = found[trace.prompt_hash]
        assert one.rounds == one.emitted == one.rejections == len(trace.response_ids) - 1
        assert one.accepted == one.engine_accepted == one.overlap_sum == 0


def test_truncated_laws_stay_numbers_on_ragged_rows_and_without_look_ahead():
    """Padding behind a short row has probability 0 under both truncated laws: 0/0."""
    target = target_of(tiny_model("llama"), (EOS, 7, 8, 9))
    drafter = drafter_of(perturbed(target.model, 0.3), target)
    sampling = Sampling(1.0, top_k=3)
    traces = traces_of(target, prompts_of([5, 11, 20, 3, 7, 2, 9, 4]), sampling)
    assert len({len(trace.response_ids) for trace in traces}) > 2
    whole = offline(target, traces, drafter, sampling)
    bare = [dataclasses.replace(trace, lookahead_ids=[]) for trace in traces]
    cut = offline(target, bare, drafter, sampling, engine_counters=False)
    for trace in traces:
        alone = offline(target, [trace], drafter, sampling)[trace.prompt_hash]
        ours, theirs = numbers(whole[trace.prompt_hash]), numbers(alone)
        for name, value in ours.items():
            if not isinstance(value, str | None):
                assert np.isfinite(value).all(), name
                assert value == pytest.approx(theirs[name], abs=1e-4), name
        for name in ("rounds", "accepted", "emitted", "truncated_rounds", "reach", "tested"):
            value = getattr(cut[trace.prompt_hash], name)
            assert value == pytest.approx(ours[name], abs=1e-4), name


def test_a_second_drafter_reuses_the_targets_pass():
    target = target_of(tiny_model("llama"))
    traces = traces_of(target, prompts_of([5, 11, 20, 3]), SAMPLED)
    evaluator = OfflineEvaluator(target, traces, SAMPLED, Budget(K), batch_size=2)
    one, two = (drafter_of(perturbed(target.model, s), target) for s in (0.1, 0.4))
    calls = []
    hook = target.model.register_forward_hook(lambda *_: calls.append(1))
    first = evaluator(one)
    num_calls = len(calls)
    second = evaluator(two)
    hook.remove()
    assert len(calls) == num_calls == 2
    assert numbers(second.counters[0]) == numbers(
        OfflineEvaluator(target, traces, SAMPLED, Budget(K), batch_size=2)(two).counters[0]
    )
    assert numbers(first.counters[0]) != numbers(second.counters[0])


def test_calibration_bins_hold_every_position():
    target = target_of(tiny_model("llama"))
    traces = traces_of(target, prompts_of([5, 11, 20, 3]), SAMPLED)
    drafter = drafter_of(perturbed(target.model, 0.1), target)
    bins = OfflineEvaluator(target, traces, SAMPLED, Budget(K))(drafter).calibration["bins"]
    assert sum(b["count"] for b in bins) == sum(len(t.response_ids) for t in traces)
    assert all(0 <= b["confidence"] <= 1 and 0 <= b["acceptance"] <= 1.0001 for b in bins)
    assert OfflineEvaluator(target, traces, SAMPLED, Budget(K))(PromptLookup()).calibration == {}


def test_unfit_traces_are_refused():
    target = target_of(tiny_model("llama"))
    traces = traces_of(target, prompts_of([5, 11]), SAMPLED, lookahead=K)
    for other in (GREEDY, Sampling(0.9), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.9)):
        with pytest.raises(UserError, match="traces were sampled with"):
            OfflineEvaluator(target, traces, other, Budget(K))
    OfflineEvaluator(target, traces, SAMPLED, Budget(K + 1))  # K - 1 tokens past the end suffice
    with pytest.raises(UserError, match=f"eval.K={K + 2}"):
        OfflineEvaluator(target, traces, SAMPLED, Budget(K + 2))
    OfflineEvaluator(target, traces, SAMPLED, Budget(K + 2), engine_counters=False)
    with pytest.raises(UserError, match="at least one target trace"):
        OfflineEvaluator(target, [], SAMPLED, Budget(K))


# --- by position, and the draft vocabulary -------------------------------------------------------


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, Sampling(0.7, top_k=3), Sampling(1.0, top_p=0.6),
                 Sampling(1.0, top_k=20)], ids=str,
)  # fmt: skip
def test_what_a_reduced_vocabulary_lacks_has_probability_0(sampling, drawn):
    """Logits of the ids kept are scored as those of all ids, -inf for the rest."""
    random = torch.Generator().manual_seed(0)
    kept, shape = torch.tensor([1, 2, 5, 8, 9, 11, 14]), (2, 30)
    logits = 3 * torch.randn(*shape, len(kept), generator=random)
    whole = logits.new_full((*shape, 16), -torch.inf)
    whole[..., kept] = logits
    tokens = torch.randint(16, shape, generator=random)
    p = torch.randn(*shape, 16, generator=random).softmax(-1) if drawn else None
    found = score(logits, kept, tokens, p, sampling)
    wanted = score(whole, None, tokens, p, sampling)
    for name, value in vars(wanted).items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-6, atol=1e-7)
    assert (found.own > 0).any()
    assert (found.own[~torch.isin(tokens, kept)] == 0).all()


def test_rounds_are_counted_by_the_place_in_the_answer_at_which_they_begin():
    """At T=0 equal to decoding, range by range; the ranges add up to the answer."""
    target = target_of(tiny_model("llama"), ())
    prompts = prompts_of([3, 9, 5])
    traces = traces_of(target, prompts, GREEDY, max_new_tokens=80)
    drafter = drafter_of(perturbed(target.model, 0.05), target)
    replayed = offline(target, traces, drafter, GREEDY)
    real, _ = decoded(target, traces, drafter, GREEDY, max_new_tokens=80)
    for tag, one in replayed.items():
        assert one.rounds_from == real[tag].rounds_from
        assert one.emitted_from == real[tag].emitted_from
        assert sum(one.rounds_from) == one.rounds
        assert sum(one.emitted_from) == one.emitted == 79
        assert min(one.rounds_from[:3]) > 0 == max(one.rounds_from[3:])


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_cost_of_a_draft_vocabulary_bounds_what_the_whole_one_would_gain(sampling, kind):
    """A head that knows half of the tokens, and the same head with all of them: its output rows of
    the kept tokens are equal."""
    target = target_of(tiny_model("llama"), ())
    traces = traces_of(target, PROMPTS, sampling)
    kept = torch.arange(0, target.vocab_size, 2)

    def build(kept=None):
        if kind == "medusa":
            return MedusaDrafter.build(target, MedusaSettings(K), kept)
        return build_eagle(target, three([0, 1, "final_norm"]), kept=kept)

    torch.manual_seed(0)
    whole, reduced = fitted(build(), target, K), build(kept).eval()
    weights = {n: t[kept] if "lm_head" in n else t for n, t in whole.state_dict().items()}
    reduced.load_state_dict(weights | {"kept": kept})
    evaluator = OfflineEvaluator(target, traces, sampling, Budget(K))
    one, other = evaluator(reduced), evaluator(whole)
    assert other.draft_vocabulary is None
    cost = one.draft_vocabulary
    assert cost is not None
    assert cost["size"] == len(kept)
    tokens = [token for trace in traces for token in trace.response_ids[1:]]
    share = sum(token % 2 for token in tokens) / len(tokens)
    assert cost["tokens_outside"] == pytest.approx(share)
    if sampling.temperature == 0:
        assert cost["alpha_lost"] == pytest.approx(share)
    else:
        masses = []
        for trace in traces:
            ids = torch.tensor([trace.prompt_ids + trace.response_ids])
            p = warp(target.outputs(ids).logits[0, len(trace.prompt_ids) : -1], sampling)
            masses += p[:, 1::2].sum(-1).tolist()
        assert cost["alpha_lost"] == pytest.approx(np.mean(masses), abs=1e-5)

    def total(result, name):
        return sum(getattr(counters, name) for counters in result.counters)

    alpha = [total(r, "overlap_sum") / total(r, "overlap_count") for r in (one, other)]
    tokens_per_round = [total(r, "emitted") / total(r, "rounds") for r in (one, other)]
    gains = alpha[1] - alpha[0], tokens_per_round[1] - tokens_per_round[0]
    assert gains[0] <= cost["alpha_lost"]
    assert gains[1] <= cost["tokens_per_round_lost"]
    if sampling.temperature == 0:  # the head was trained on this text
        assert min(gains) > 0.1
        rounds = sum(rounds_of(reduced, trace, lambda token: token % 2 == 1) for trace in traces)
        emitted = total(one, "emitted")
        lost = emitted / rounds - emitted / total(one, "rounds")
        assert cost["tokens_per_round_lost"] == pytest.approx(lost)


@torch.no_grad()
def rounds_of(head, trace, accepted):
    """Rounds of K tokens at T=0 along the trace, if `accepted` tokens always are."""
    ids = torch.tensor([trace.prompt_ids + trace.response_ids])
    outputs = head.shared.target.outputs(ids, layers=head.target_layers)
    first, text = len(trace.prompt_ids) - 1, trace.response_ids
    best = [
        head.draft_logits(ids, outputs, depth)[0, first:].argmax(-1) for depth in range(1, K + 1)
    ]
    start, rounds = 1, 0
    while start < len(text):
        rounds += 1
        for depth, token in enumerate(text[start : start + K]):
            if not accepted(token) and best[depth][start] != token:
                break
            start += 1
        start += 1
    return rounds
