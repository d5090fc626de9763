"""Trees without decoding against decoding, and the ranks that trees are calibrated from."""

from __future__ import annotations

import pytest
import torch

from data.traces import Trace
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget
from drafters.trees.calibrated import MAX_RANKS
from drafters.trees.copy import CopyOrDraft
from drafters.trees.dynamic import DynamicTree
from eval.counters import counters_from_rounds
from eval.engine import SpeculativeDecoder
from eval.replay import TreeReplay, rank_accuracy
from target.cache import CachedModel
from target.decode import Request, decode
from target.sampling import Sampling, warp
from tests.heads import BUSHY, GREEDY, NEW_TOKENS, PROMPTS, fitted
from tests.watch import Watch
from trainer.config import UserError

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
    "shape", [BUSHY, DynamicTree(4, 3, 2), CopyOrDraft(1, 4, K)], ids=["static", "dynamic", "copy"]
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
    found = rank_accuracy(target, traces, drafter, K, GREEDY, batch_size=2)
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
    found = torch.tensor(rank_accuracy(target, traces, drafter, K, hot, batch_size=2))
    torch.testing.assert_close(found, masses / tried)
    greedy = torch.tensor(rank_accuracy(target, traces, drafter, K, GREEDY))
    assert float((found - greedy).abs().max()) > 0.05


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.5, top_k=5)])
def test_ranks_do_not_depend_on_the_chunks(target, drafter, traces, sampling, monkeypatch):
    whole = rank_accuracy(target, traces, drafter, K, sampling)
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 2 * target.vocab_size)
    with Watch() as watch:
        parts = rank_accuracy(target, traces, drafter, K, sampling)
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-6, atol=1e-7)
    assert (2, target.vocab_size) in watch.shapes


def test_traces_of_another_sampling_are_refused(target, traces):
    """At T=1 the greedy text would be taken for the target's draws."""
    for sampling in (Sampling(1.0), Sampling(0.0, top_k=3)):
        with pytest.raises(UserError, match=r"traces were sampled with .* the evaluation needs"):
            TreeReplay(target, traces, sampling, Budget(K, tree=BUSHY))


def test_copied_chains_are_replayed_at_temperature_0_alone(target, traces):
    """Where they are not copied they are drawn, and accepted by chance."""
    with pytest.raises(UserError, match="only decoding measures those whose siblings are chain"):
        TreeReplay(target, traces, Sampling(1.0), Budget.of(CopyOrDraft(2, 8, K)))
