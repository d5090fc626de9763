"""The target's states of a text, read once for all replays of it."""

from __future__ import annotations

import pytest
import torch

from drafters.round import Budget
from drafters.trees.dynamic import DynamicTree
from eval import texts
from eval.offline import OfflineEvaluator
from eval.replay import TreeReplay
from eval.texts import Texts
from target.sampling import Sampling
from tests.drafters.test_eagle import three
from tests.eval.test_offline import numbers, traces_of
from tests.helpers.eagle import build_eagle
from tests.helpers.heads import fitted
from tests.helpers.tiny import prompts_of

K = 3
LAYERS = (1, "final_norm")


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture
def reads(target):
    """Batches that the target has read."""
    found = []
    hook = target.model.register_forward_hook(lambda *_: found.append(1))
    yield found
    hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)], ids=["greedy", "sampled"])
def test_all_rows_of_a_report_read_each_text_once(target, reads, sampling):
    """Two heads as chains and one of them as a tree; their counters are those that each has
    alone."""
    traces = traces_of(target, prompts_of([5, 11, 20, 3]), sampling, lookahead=K)
    torch.manual_seed(0)
    one = fitted(build_eagle(target, three([0, 1, "final_norm"])), target, K)
    other = build_eagle(target, three([0, 1, "final_norm"])).eval()
    tree = Budget(K, tree=DynamicTree(4, 3, 2))
    evaluator = OfflineEvaluator(target, traces, sampling, Budget(K), batch_size=2)
    reads.clear()
    shared = [evaluator(head).counters for head in (one, other)]
    in_trees = TreeReplay(target, traces, sampling, tree, evaluator.texts)(one)
    assert len(reads) == len(evaluator.texts.groups) == 2

    def alone(head):
        return OfflineEvaluator(target, traces, sampling, Budget(K), batch_size=2)(head).counters

    apart = [alone(one), alone(other)]
    for mine, theirs in zip(shared[:2], apart, strict=True):
        assert [numbers(c) for c in mine] == [numbers(c) for c in theirs]
    assert numbers(shared[0][0]) != numbers(shared[1][0])
    wanted = {c.prompt_hash: c for c in TreeReplay(target, traces, sampling, tree)(one)}
    assert {c.prompt_hash: c for c in in_trees} == wanted


@torch.inference_mode()
def test_only_states_that_were_not_read_are_read(target, reads):
    traces = traces_of(target, prompts_of([5, 11]), Sampling(0.0), lookahead=K)
    found = Texts(target, traces, K)
    assert found.states(0, ()) == {}
    first = found.states(0, LAYERS[:1])
    reads.clear()
    again = found.states(0, LAYERS)
    assert len(reads) == 1
    assert again[1] is first[1]
    whole = target.outputs(found.ids(0), layers=LAYERS, logits=False).hidden
    for layer in LAYERS:
        torch.testing.assert_close(again[layer], whole[layer], rtol=0, atol=0)


@torch.inference_mode()
def test_states_beyond_the_bound_are_read_again(target, reads, monkeypatch):
    """Room for the shorter one of two texts."""
    traces = traces_of(target, prompts_of([5, 11]), Sampling(0.0), lookahead=0)
    lengths = sorted(len(t.prompt_ids) + len(t.response_ids) for t in traces)
    monkeypatch.setattr(texts, "HELD_BYTES", lengths[0] * target.hidden_size * 4)
    found = Texts(target, traces, 0, batch_size=1)
    reads.clear()
    first, again = ([found.states(i, LAYERS[:1])[1] for i in (0, 1)] for _ in range(2))
    assert len(reads) == 3
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
