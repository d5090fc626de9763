"""A drafter that drafts a round in one forward: trained, measured and counted as such.

The one here computes its columns alone and has nan elsewhere, so that nothing else may be read.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from data.batches import Batches
from drafters.base import TrainedDrafter
from drafters.layers import Shared
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget
from drafters.text import Text
from eval.costs import read_per_round
from eval.offline import OfflineEvaluator
from eval.replay import measure_accuracies
from recipes.common.heads import HeadConfig, HeadObjective
from target.sampling import Sampling, keyed_uniform, row_key
from target.shared_text import TextGroup
from tests.eval.test_offline import traces_of
from tests.helpers.heads import (
    BUSHY,
    assert_rounds_follow_the_unroll,
    outputs_of,
    randomised,
    state_of,
)
from tests.helpers.tiny import VOCAB_SIZE, prompts_of
from tests.recipes.test_packed_texts import one_a_row, packed, texts_of
from trainer.shift import at_index

DEPTH, SHARE = 3, 0.4


class OnePass(TrainedDrafter):
    """One linear map on the target's last state for each depth, made together. `given`: the columns
    of the text that it read last."""

    kind = "one_pass"
    one_pass = True
    target_layers = ("final_norm",)

    def __init__(self, target):
        super().__init__()
        self.vocab_size, self.shared = target.vocab_size, Shared(target)
        width = target.hidden_size
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(DEPTH))

    def states(self, text, outputs, depth):
        length, self.given = text.ids.shape[1], text.columns
        for number in range(1, depth + 1):
            made = self.maps[number - 1](outputs.hidden["final_norm"][:, : max(length - number, 0)])
            if text.columns is not None:
                assert text.columns.shape == text.ids.shape
                begins = text.columns[:, : made.shape[1]].unsqueeze(-1)
                made = torch.where(begins, made, torch.nan)
            yield at_index(made, number, length)

    def output_head(self, depth=1):
        return self.shared.target.head

    def start(self, state, budget):
        rows = torch.arange(len(state.lengths))
        last = state.outputs.hidden["final_norm"][rows, state.lengths - 2]
        self._logits = [self.project(one(last), 1) for one in self.maps]
        return self._logits[0]

    def extend(self, tokens, parents, depth):
        return self._logits[depth].unsqueeze(1).expand(-1, tokens.shape[1], -1)


class Everywhere(OnePass):
    """The same, which reads all columns."""

    one_pass = False


class Sampled(HeadObjective):
    """Trains at some anchors of each text; `each`: those of the depths are drawn by themselves."""

    each = False

    def anchors(self, batch, step):
        if not self.each:
            return batch.uniform("anchors") < SHARE
        drawn = [batch.uniform(f"anchors {depth}") < SHARE for depth in range(1, DEPTH + 1)]
        return torch.stack(drawn)


class SampledByDepth(Sampled):
    each = True


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return texts_of(target, tmp_path_factory.mktemp("traces"))


def drafter_of(target, kind=OnePass):
    torch.manual_seed(0)
    return kind(target)


def objective(target, kind=Sampled, reduction="token"):
    config = HeadConfig(divergence="ce_hard", reduction=reduction)
    return kind(config, target, DEPTH, ("final_norm",))


def loss_and_gradients(wanted, drafter, batch):
    """The weighted mean of all depths, their denominators, and the gradient of each map."""
    outputs = outputs_of(drafter, wanted.target, batch.input_ids)
    if batch.text_starts is not None:
        given = {"layers": drafter.target_layers, "logits": False}
        outputs = wanted.target.outputs(batch.input_ids, batch.position_ids, **given)
    terms, counts = wanted.loss(drafter, batch, outputs, 0).terms, wanted.denominators(batch, 0)
    assert {name: float(term.count) for name, term in terms.items()} == counts
    loss = sum(term.weight * term.total / max(counts[name], 1) for name, term in terms.items())
    return loss, counts, torch.autograd.grad(loss, list(drafter.parameters()))


def expected(wanted, drafter, batch):
    """Text by text and anchor by anchor, each text read alone."""
    totals, counts, anchors = [torch.zeros(()) for _ in range(DEPTH)], [0] * DEPTH, set()
    for number, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        text = [*prompt, *response]
        ids, key = torch.tensor([text]), torch.tensor([row_key(batch.seed, text, batch.index)])
        hidden = outputs_of(drafter, wanted.target, ids).hidden["final_norm"][0]
        for anchor in range(max(1, len(prompt)), len(text)):
            for depth in range(1, DEPTH + 1):
                stream = f"anchors {depth}" if wanted.each else "anchors"
                drawn = float(keyed_uniform(key, torch.tensor([anchor]), stream))
                if drawn < SHARE and anchor + depth < len(text):
                    anchors.add((number, anchor))
                    made = drafter.maps[depth - 1](hidden[anchor - 1])
                    logits = wanted.target.head.logits(made)[:VOCAB_SIZE]
                    totals[depth - 1] += F.cross_entropy(logits, ids[0, anchor + depth])
                    counts[depth - 1] += 1
    means = [total / max(n, 1) for total, n in zip(totals, counts, strict=True)]
    loss = sum(wanted.config.depth_decay**i * mean for i, mean in enumerate(means))
    return loss, counts, torch.autograd.grad(loss, list(drafter.parameters())), len(anchors)


@pytest.mark.parametrize("kind", [Sampled, SampledByDepth])
@pytest.mark.parametrize("packs", [False, True])
def test_only_the_sampled_anchors_are_trained(packs, kind, target, traces):
    drafter, wanted = drafter_of(target), objective(target, kind)
    batch = packed(traces).at(1)
    batch = batch if packs else one_a_row(batch)
    loss, counts, gradients = loss_and_gradients(wanted, drafter, batch)
    theirs, numbers, of_theirs, anchors = expected(wanted, drafter, batch)
    assert list(counts.values()) == numbers
    assert int(drafter.given.sum()) == anchors
    full = objective(target, HeadObjective).denominators(batch, 0).values()
    assert all(0 < few < n for few, n in zip(numbers, full, strict=True))
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    for ours, other in zip(gradients, of_theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [Sampled, SampledByDepth])
def test_processes_that_share_texts_train_the_anchors_of_one(kind, target, traces, monkeypatch):
    monkeypatch.setattr("target.shared_text.BLOCK", 5)
    drafter, wanted = drafter_of(target), objective(target, kind)
    batch = Batches(traces, {"target": 1.0}, 4, seed=0).at(0)
    outputs = outputs_of(drafter, target, batch.input_ids)

    def totals(one):
        terms = wanted.loss(drafter, one, outputs, 0).terms.values()
        return torch.stack(
            [torch.stack([t.total.detach(), torch.as_tensor(float(t.count))]) for t in terms]
        )

    parts = [totals(batch.shared(TextGroup(part, 2))) for part in range(2)]
    assert all(bool((part[:, 1] > 0).all()) for part in parts)
    torch.testing.assert_close(sum(parts), totals(batch))


def test_rounds_are_what_is_trained_and_one_forward(target):
    drafter = randomised(drafter_of(target))
    assert_rounds_follow_the_unroll(drafter, target, DEPTH)
    ids = torch.tensor(prompts_of([12]))
    state = state_of(ids, [8], outputs_of(drafter, target, ids))
    for budget in (Budget(DEPTH), Budget.of(BUSHY)):
        assert drafter.propose(state, budget).draft_forwards == 1
        assert drafter_of(target, Everywhere).propose(state, budget).draft_forwards == DEPTH


def test_one_pass_of_a_network_without_a_deepest_path_is_read_whole(target):
    drafter = drafter_of(target)
    read = DEPTH * 32 * 32 + VOCAB_SIZE * 32
    assert [read_per_round(drafter, depth)[1] for depth in (1, 3)] == [read, read]


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)], ids=["greedy", "sampled"])
def test_replay_reads_the_columns_of_its_rounds_alone(sampling, target):
    """Whatever the numbers elsewhere: prompts of one token, answers of one, other lengths."""
    traces = traces_of(target, prompts_of([3, 17, 1, 9]), sampling, max_new_tokens=9)
    traces[1].response_ids = traces[1].response_ids[:1]
    replay = OfflineEvaluator(target, traces, sampling, Budget(DEPTH), engine_counters=False)
    drafter, other = drafter_of(target), drafter_of(target, Everywhere)
    found, whole = replay(drafter), replay(other)
    assert other.given is None
    # a prompt of one token has no column before it
    starts = [len(t.response_ids) - (len(t.prompt_ids) == 1) for t in replay.texts.groups[0]]
    assert drafter.given.sum(1).tolist() == starts
    for one, other in zip(found.counters, whole.counters, strict=True):
        assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert found.alpha_by_depth == whole.alpha_by_depth
    assert found.calibration == whole.calibration


def test_so_do_the_accuracies_of_ranks(target):
    traces = traces_of(target, prompts_of([3, 17, 1, 9]), Sampling(0.0), max_new_tokens=9)
    drafter, other = drafter_of(target), drafter_of(target, Everywhere)
    ranks = [
        measure_accuracies(target, traces, one, DEPTH, Sampling(0.0)) for one in (drafter, other)
    ]
    assert ranks[0] == ranks[1]
    assert other.given is None
    assert int(drafter.given.sum()) == sum(len(t.response_ids) for t in traces) - 1


@torch.no_grad()
@pytest.mark.parametrize("own_head", [True, False])
def test_medusa_has_states_at_the_columns_alone(own_head, target):
    drafter = randomised(MedusaDrafter.build(target, MedusaSettings(DEPTH, own_head=own_head)))
    ids = torch.tensor(prompts_of([10, 10]))
    outputs = outputs_of(drafter, target, ids)
    columns = torch.zeros(2, 10, dtype=torch.bool)
    columns[0, [2, 5, 9]], columns[1, 4] = True, True
    some, every = (
        drafter.states(Text(ids, columns=given), outputs, DEPTH) for given in (columns, None)
    )
    for depth, (found, whole) in enumerate(zip(some, every, strict=True), start=1):
        known = at_index(columns[:, : 10 - depth].unsqueeze(-1).float(), depth, 10)
        assert torch.equal(found, whole * known)
        assert int(found.any(-1).sum()) == int(known.sum())
