"""Trees without decoding against decoding, and the ranks that trees are calibrated from."""

from __future__ import annotations

import pytest
import torch

from data.traces import Trace
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget
from drafters.trees.best_first import BestFirst
from drafters.trees.calibrated import MAX_RANKS
from drafters.trees.copy import CopyOrDraft
from drafters.trees.dynamic import DynamicTree
from drafters.trees.tree import WITHOUT_REPLACEMENT, TokenTree
from eval import replay
from eval.counters import counters_from_rounds
from eval.engine import SpeculativeDecoder
from eval.replay import TreeReplay, accepted_draws, measure_accuracies
from eval.verifiers.base import Verification
from eval.verifiers.multi_round import MultiRound
from target.cache import CachedModel
from target.decode import Request, decode
from target.padding import by_length
from target.sampling import KeyedRandom, Sampling, warp
from tests.helpers.heads import BUSHY, GREEDY, NEW_TOKENS, PROMPTS, fitted
from tests.helpers.watch import Watch
from trainer.errors import UserError

K = 3


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(0)
    return fitted(MedusaDrafter.build(target, MedusaSettings(K)), target, K)


@pytest.fixture(scope="module")
def traces(target):
    """Greedy answers with look-ahead."""
    requests = [Request(p, 0, GREEDY, i) for i, p in enumerate(PROMPTS)]
    found = decode(
        CachedModel(target.model), requests, max_new_tokens=NEW_TOKENS, eos_ids=(), batch_size=8,
        lookahead=K, vocab_size=target.vocab_size,
    )  # fmt: skip
    return [
        Trace(
            prompt_ids=one.request.prompt_ids, response_ids=one.response_ids, source="target",
            domain="all", conversation_id="", turn=0, sample_index=0, temperature=0.0, top_k=0,
            top_p=1.0, seed=0, finish_reason="length", model_hash="", tokenizer_hash="",
            lookahead_ids=one.lookahead_ids, prompt_hash=str(one.request.tag),
        )
        for one in sorted(found, key=lambda one: one.request.tag)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [BUSHY, DynamicTree(4, 3, 2), CopyOrDraft(1, 4, K), BestFirst(4, 4, K)],
    ids=["static", "dynamic", "copy", "best first"],
)
def test_replayed_counters_of_a_tree_are_those_of_decoding(target, drafter, traces, shape):
    budget = Budget(K, tree=shape)
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=GREEDY, budget=budget, eos_ids=(),
        max_new_tokens=NEW_TOKENS, batch_size=3, vocab_size=target.vocab_size,
    )  # fmt: skip
    requests = [Request(t.prompt_ids, 0, GREEDY, t.prompt_hash) for t in traces]
    decoded = {
        one.request.tag: counters_from_rounds(one.rounds, one.request.tag, "all", K)
        for one in decoder.run(requests)
    }
    for one in decoded.values():  # of chains, which replay does not compare with the target's law
        one.overlap_sum = one.overlap_count = 0.0
    replayed = {one.prompt_hash: one for one in TreeReplay(target, traces, GREEDY, budget)(drafter)}
    assert replayed == decoded
    found = replayed.values()
    assert any(one.truncated_rounds for one in found)
    rejections, rounds = (sum(getattr(one, n) for one in found) for n in ("rejections", "rounds"))
    assert 0 < rejections < rounds  # a path may end at a leaf


@torch.inference_mode()
def test_ranks_are_those_of_the_places_where_a_round_may_draft(target, drafter, traces):
    """Rounds begin behind the first token of an answer, which is the prefill's: depth d drafts the
    tokens from the one after the d-th."""
    hits, tried = torch.zeros(K, MAX_RANKS), torch.zeros(K, 1)
    for trace in traces:
        text = trace.prompt_ids + trace.response_ids
        ids = torch.tensor([text])
        outputs = target.outputs(ids, layers=drafter.target_layers)
        for depth in range(1, K + 1):
            logits = drafter.draft_logits(ids, outputs, depth)[0]
            for place in range(len(trace.prompt_ids) + depth, len(text)):
                best = logits[place - 1].topk(MAX_RANKS).indices
                hits[depth - 1] += best == text[place]
                tried[depth - 1] += 1
    found, draws = measure_accuracies(target, traces, drafter, K, GREEDY, batch_size=2)
    assert draws == found
    torch.testing.assert_close(torch.tensor(found), hits / tried)
    assert int(tried[0]) == len(PROMPTS) * (NEW_TOKENS - 1)


@torch.inference_mode()
def test_ranks_are_measured_at_the_rows_own_temperature(target, drafter, traces):
    """The target's probability at that temperature of the tokens that the drafter ranks first."""
    hot = Sampling(1.5, top_k=5)
    masses, tried = torch.zeros(K, MAX_RANKS), torch.zeros(K, 1)
    for trace in traces:
        text = trace.prompt_ids + trace.response_ids
        ids = torch.tensor([text])
        outputs = target.outputs(ids, layers=drafter.target_layers)
        p = warp(outputs.logits[0], hot)
        for depth in range(1, K + 1):
            logits = drafter.draft_logits(ids, outputs, depth)[0]
            for place in range(len(trace.prompt_ids) + depth, len(text)):
                best = logits[place - 1].topk(MAX_RANKS).indices
                masses[depth - 1] += p[place - 1, best]
                tried[depth - 1] += 1
    measured = measure_accuracies(target, traces, drafter, K, hot, batch_size=2)
    found = torch.tensor(measured.ranks)
    torch.testing.assert_close(found, masses / tried)
    greedy = torch.tensor(measure_accuracies(target, traces, drafter, K, GREEDY).ranks)
    assert float((found - greedy).abs().max()) > 0.05


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.5, top_k=5)])
def test_ranks_do_not_depend_on_the_chunks(target, drafter, traces, sampling, monkeypatch):
    whole = measure_accuracies(target, traces, drafter, K, sampling)
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 2 * target.vocab_size)
    with Watch() as watch:
        parts = measure_accuracies(target, traces, drafter, K, sampling)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7)
    assert (2, target.vocab_size) in watch.shapes


def test_draws_are_accepted_as_often_as_multi_round_rejection_does():
    """By every order of draws of a small law."""
    p, q = torch.tensor([0.5, 0.1, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.25, 0.05])
    expected = torch.zeros(MAX_RANKS)

    def follow(p, q, weight, number):
        if number == len(p) or weight == 0:
            return
        for token in q.nonzero().flatten().tolist():
            here = weight * float(q[token])
            accepted = min(1.0, float(p[token] / q[token]))
            expected[number] += here * accepted
            left, rest = (p - q).clamp_min(0), q.clone()
            rest[token] = 0
            follow(left / left.sum(), rest / rest.sum().clamp_min(1e-9), here * (1 - accepted),
                   number + 1)  # fmt: skip

    follow(p, q, 1.0, 0)
    numbers = torch.arange(40_000)
    # the target has a column more than the drafter
    wide = torch.nn.functional.pad(p, (0, 1)).expand(len(numbers), -1)
    found = accepted_draws(wide, q.expand(len(numbers), -1), numbers, 0)
    assert float(expected[1]) > 0.1
    torch.testing.assert_close(found.mean(0), expected, atol=2e-3, rtol=0)
    assert 0.95 < float(expected.sum()) <= 1
    same = accepted_draws(q.expand(3, -1), q.expand(3, -1), numbers[:3], 0)
    torch.testing.assert_close(same.sum(1), torch.ones(3))
    torch.testing.assert_close(same[:, 0], torch.ones(3))


def test_draws_are_accepted_as_often_as_the_verifier_accepts_them():
    torch.manual_seed(4)
    n, V = 20_000, 6
    logits, q = 2 * torch.randn(V), (2 * torch.randn(V)).softmax(-1)
    random, places = KeyedRandom(torch.arange(n)), torch.full((n,), 5)
    left, drawn = q.repeat(n, 1), []
    for node in range(3):
        drawn.append(random.choice(left, places, f"draft {node}"))
        left = left.scatter(1, drawn[-1].unsqueeze(1), 0.0)
    tree = TokenTree(
        torch.stack(drawn, 1), torch.full((n, 3), -1), q.expand(n, 3, V), torch.full((n,), 3),
        siblings=WITHOUT_REPLACEMENT,
    )  # fmt: skip
    round = Verification(tree, logits.expand(n, 4, V), Sampling(1.0), random, places)
    verdict = MultiRound()(round)
    counts = [float((verdict.path[:, 0] == child).double().mean()) for child in range(3)]
    p = logits.softmax(-1)
    found = accepted_draws(p.expand(n, V), q.expand(n, V), torch.arange(n), 0).mean(0)
    assert min(counts) > 0.02
    torch.testing.assert_close(
        torch.tensor(counts), found[:3].double(), atol=0.01, rtol=0, check_dtype=False
    )


@torch.inference_mode()
def test_the_accuracies_of_draws_are_of_starts_spread_over_the_texts(
    target, drafter, traces, monkeypatch
):
    """Each start and depth by itself gives the table; the drafter has a temperature of its own."""
    hot, cool = Sampling(1.5, top_k=5), Sampling(0.5)
    sums, tried = torch.zeros(K, MAX_RANKS), torch.zeros(K, 1)
    number, every = 0, 3
    total = len(PROMPTS) * (NEW_TOKENS - 1)
    monkeypatch.setattr(replay, "STARTS", total // every)
    (group,) = by_length(traces, lambda t: t.num_tokens, len(traces))
    for trace in group:
        text = trace.prompt_ids + trace.response_ids
        ids = torch.tensor([text])
        outputs = target.outputs(ids, layers=drafter.target_layers)
        for start in range(len(trace.prompt_ids), len(text) - 1):
            for depth in range(1, K + 1):
                if number % every == 0 and start - depth + 1 >= len(trace.prompt_ids):
                    q = warp(drafter.draft_logits(ids, outputs, depth)[:, start], cool)
                    p = warp(outputs.logits[:, start], hot)
                    sums[depth - 1] += accepted_draws(p, q, torch.tensor([number]), depth - 1)[0]
                    tried[depth - 1] += 1
            number += 1
    found = measure_accuracies(target, traces, drafter, K, hot, cool, batch_size=len(traces))
    torch.testing.assert_close(torch.tensor(found.draws), sums / tried, atol=1e-5, rtol=1e-4)
    other = measure_accuracies(target, traces, drafter, K, hot, batch_size=len(traces))
    assert other.ranks == found.ranks
    assert abs(other.draws[0][0] - found.draws[0][0]) > 0.01


def test_traces_of_another_sampling_are_refused(target, traces):
    """At T=1 the greedy text would be taken for the target's draws."""
    for sampling in (Sampling(1.0), Sampling(0.0, top_k=3)):
        with pytest.raises(UserError, match=r"traces were sampled with .* the evaluation needs"):
            TreeReplay(target, traces, sampling, Budget(K, tree=BUSHY))


def test_copied_chains_are_replayed_at_temperature_0_alone(target, traces):
    """Where they are not copied they are drawn, and accepted by chance."""
    with pytest.raises(UserError, match="only decoding measures those whose siblings are chain"):
        TreeReplay(target, traces, Sampling(1.0), Budget.of(CopyOrDraft(2, 8, K)))
