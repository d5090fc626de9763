"""Chain verification against enumeration: the exact law of one round of the real decoding loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters.round import Budget
from drafters.trees.tree import TokenTree
from eval.engine import SpeculativeDecoder
from eval.policies.table import make_budget
from eval.verifiers.base import Verdict, Verification
from eval.verifiers.block import Block
from eval.verifiers.lenient import Lenient
from eval.verifiers.token import ChainLaws, Token
from target.sampling import Sampling, warp
from tests.helpers.tabular import (
    TabularModel,
    completed,
    dirichlet_table,
    product,
    round_laws,
    tabular_drafter,
)
from trainer.errors import RunFault

V = 3
CONTEXTS = [(0, 1), (2, 2), (1, 0)]
PLAIN = Sampling(1.0)
VERIFY = Token()
both = pytest.mark.parametrize("verifier", [Token(), Block()], ids=lambda one: one.name)


def error(
    monkeypatch,
    *,
    seed=0,
    gamma=2,
    sampling=PLAIN,
    draft_sampling=None,
    budget=None,
    change=lambda drafter: drafter,
    batch_size=1000,
    size=V,
    verifier=VERIFY,
):
    """Largest difference between the law of gamma + 1 tokens and the target's own, over contexts,
    and the same for the sum of the weights."""
    target = dirichlet_table([size, size, size], 100 + seed)
    draft = dirichlet_table([size, size], 200 + seed)
    drafter = change(tabular_drafter(draft))

    def decoder():
        return SpeculativeDecoder(
            TabularModel(target),
            drafter,
            sampling=sampling,
            draft_sampling=draft_sampling,
            budget=budget or Budget(gamma),
            eos_ids=(),
            max_new_tokens=gamma + 2,
            batch_size=batch_size,
            verifier=verifier,
        )

    law = warp(target.log(), sampling)
    worst = 0.0
    for context, outcomes in round_laws(monkeypatch, decoder, CONTEXTS).items():
        assert sum(o.weight for o in outcomes) == pytest.approx(1.0, abs=1e-12)
        for outcome in outcomes:
            assert outcome.round.emitted == outcome.round.accepted + 1 == len(outcome.emitted)
            assert outcome.round.submitted <= gamma
        ours = completed(outcomes, context, law, gamma + 1)
        theirs = torch.ones_like(ours)
        for text in product(size, gamma + 1):
            for i in range(gamma + 1):
                theirs[text] *= law[(*context, *text)[i : i + 2]][text[i]]
        worst = max(worst, float((ours - theirs).abs().max()))
    return worst


@both
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampled_drafts_leave_the_targets_law(monkeypatch, seed, gamma, verifier):
    assert error(monkeypatch, seed=seed, gamma=gamma, verifier=verifier) < 1e-12


@both
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_drafts_under_a_sampling_target_leave_its_law(monkeypatch, seed, verifier):
    greedy = Sampling(0.0)
    found = error(monkeypatch, seed=seed, gamma=3, draft_sampling=greedy, verifier=verifier)
    assert found < 1e-12


@pytest.mark.slow
@both
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_confidence_stop_leaves_the_targets_law(monkeypatch, draft_temperature, verifier):
    kind = type(verifier)
    lengths, verify = set(), kind.__call__

    def spy(self, round):
        lengths.update(round.tree.lengths.tolist())
        return verify(self, round)

    monkeypatch.setattr(kind, "__call__", spy)
    for seed in range(3):
        budget = make_budget("confidence:0.55", 3)
        found = error(
            monkeypatch, seed=seed, gamma=3, budget=budget,
            draft_sampling=Sampling(draft_temperature), verifier=verifier,
        )  # fmt: skip
        assert found < 1e-12
    assert lengths == {1, 2, 3}  # the policy did stop, at every depth


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, top_k=2), Sampling(0.7, top_p=0.6), Sampling(1.3, top_k=3, top_p=0.7)],
    ids=str,
)
@both
def test_truncated_laws_with_zeros_are_kept(monkeypatch, sampling, verifier):
    for seed in range(2):
        found = error(monkeypatch, seed=seed, sampling=sampling, size=4, verifier=verifier)
        assert found < 1e-12


@both
@pytest.mark.parametrize("draft", [Sampling(0.5), Sampling(2.0), Sampling(1.0, top_k=1)], ids=str)
def test_another_sampling_of_the_drafter_leaves_the_targets_law(monkeypatch, draft, verifier):
    assert error(monkeypatch, draft_sampling=draft, verifier=verifier) < 1e-12
    cut = Sampling(0.8, top_k=2)
    assert error(monkeypatch, draft_sampling=draft, sampling=cut, verifier=verifier) < 1e-12


@both
@pytest.mark.parametrize("batch_size", [1, 5])
def test_refilled_batches_have_the_same_law(monkeypatch, batch_size, verifier):
    assert error(monkeypatch, batch_size=batch_size, verifier=verifier) < 1e-12


@both
def test_rows_without_a_draft_emit_one_token_of_the_target(monkeypatch, verifier):
    class Silent:  # submits nothing on some rows, like prompt lookup
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def propose(self, state, budget):
            tree = self.inner.propose(state, budget)
            last = state.ids.gather(1, state.lengths.unsqueeze(1) - 1)[:, 0]
            return dataclasses.replace(tree, lengths=torch.where(last == 1, 0, tree.lengths))

    assert error(monkeypatch, change=Silent, verifier=verifier) < 1e-12


# --- positive controls: the harness must see what is wrong -----------------------------------


def test_control_resampling_from_p_after_a_rejection_is_seen(monkeypatch):
    def broken(self, round):
        tree, random, first = round.tree, round.random, round.first_position
        p = warp(round.logits, round.sampling)
        index = torch.arange(tree.tokens.shape[1])
        drafted = tree.tokens.unsqueeze(-1)
        ratio = (p[:, :-1].gather(-1, drafted) / tree.probs.gather(-1, drafted))[..., 0].clamp(
            max=1
        )
        flips = [random.flip(ratio[:, i], first + i, "accept") for i in index]
        accepted = torch.stack(flips, 1).long().cumprod(1).sum(1)
        law = p[torch.arange(len(p)), accepted]
        emitted = random.choice(law, first + accepted, "target")
        return Verdict(accepted, emitted, ratio)

    monkeypatch.setattr(Token, "__call__", broken)
    assert error(monkeypatch) > 0.01


def test_control_the_residual_of_a_token_is_not_that_of_a_block(monkeypatch):
    verdict = ChainLaws.verdict

    def broken(self, round, accepted, kept, lenience):
        return verdict(self, round, accepted, 1.0, lenience)

    monkeypatch.setattr(ChainLaws, "verdict", broken)
    assert error(monkeypatch, seed=1, verifier=Block()) > 0.01


class _Changed:
    """A drafter whose proposal is changed by `edit(tree, state)`."""

    def __init__(self, inner, edit):
        self.inner, self.edit = inner, edit

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, state, budget):
        return self.edit(self.inner.propose(state, budget), state)


def test_control_softmax_law_of_argmax_drafts_is_seen(monkeypatch):
    def lie(tree, state):
        # the inner drafter sampled from a point mass; say the softmax instead
        table = dirichlet_table([V, V], 200)
        before = torch.cat([state.ids.gather(1, state.lengths[:, None] - 1), tree.tokens], 1)
        return dataclasses.replace(tree, probs=table[before[:, :-1]])

    found = error(
        monkeypatch, change=lambda d: _Changed(d, lie), draft_sampling=Sampling(1.0, top_k=1)
    )
    assert found > 0.01


def test_control_discarding_a_token_for_its_own_probability_is_seen(monkeypatch):
    def choosy(tree, state):
        own = tree.probs.gather(-1, tree.tokens.unsqueeze(-1))[..., 0]
        lengths = (own >= 0.3).long().cumprod(1).sum(1)
        return dataclasses.replace(tree, lengths=lengths)

    assert error(monkeypatch, change=lambda d: _Changed(d, choosy)) > 0.01


# --- single calls ------------------------------------------------------------------------------


class _Fixed:
    """flip: accept when the probability is above 0.5; choice: the most likely."""

    def __init__(self):
        self.laws = []

    def flip(self, probability, positions, stream):
        return probability > 0.5

    def choice(self, probs, positions, stream):
        self.laws.append(probs)
        return probs.argmax(-1)


def tree_of(tokens, laws, lengths=None):
    tokens = torch.tensor(tokens)
    full = torch.full((len(tokens),), tokens.shape[1])
    return TokenTree.chain(tokens, laws, full if lengths is None else torch.tensor(lengths))


def test_greedy_accepts_the_matching_prefix_and_emits_the_argmax_after_it():
    best = torch.tensor([[3, 1, 2, 0], [3, 1, 2, 0], [3, 1, 2, 0], [3, 1, 2, 0]])
    logits = torch.nn.functional.one_hot(best, 4).double()
    tree = tree_of([[3, 1, 2], [3, 0, 2], [0, 1, 2], [3, 1, 2]], None, [3, 3, 3, 1])
    verdict = VERIFY(Verification(tree, logits, Sampling(0.0), _Fixed(), torch.full((4,), 5)))
    assert verdict.accepted.tolist() == [3, 1, 0, 1]
    assert verdict.emitted.tolist() == [0, 1, 3, 1]
    assert verdict.overlap.tolist() == [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 0]]


def test_residual_is_used_on_rejection_and_p_when_nothing_is_left():
    p = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]).double()
    q = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.5, 0.3]]).double()
    random = _Fixed()
    random.flip = lambda probability, positions, stream: torch.zeros(2, dtype=torch.bool)
    logits = torch.stack([p.log(), p.log()], 1)
    tree = tree_of([[0], [1]], q.unsqueeze(1))
    verdict = VERIFY(Verification(tree, logits, PLAIN, random, torch.tensor([4, 4])))
    assert verdict.accepted.tolist() == [0, 0]
    assert random.laws[0][0].tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert random.laws[0][1].tolist() == pytest.approx([0.2, 0.5, 0.3])  # rounding only
    assert verdict.overlap[:, 0].tolist() == pytest.approx([0.6, 1.0])


def test_target_head_wider_than_the_drafters_vocabulary():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).double()
    q = torch.tensor([[0.5, 0.3, 0.2]]).double()
    random = _Fixed()
    tree, logits = tree_of([[0]], q.unsqueeze(1)), torch.stack([p.log(), p.log()], 1)
    VERIFY(Verification(tree, logits, PLAIN, random, torch.tensor([4])))
    assert random.laws[0][0].tolist() == pytest.approx([0.0, 0.0, 0.2, 0.8])


def test_a_drafted_token_of_probability_zero_is_a_fault_on_live_rows_only():
    laws = torch.tensor([[[0.0, 1.0, 0.0]]]).double()
    logits = torch.zeros(1, 2, 3).double()
    round = Verification(tree_of([[0]], laws), logits, PLAIN, _Fixed(), torch.tensor([4]))
    with pytest.raises(RunFault, match="probability 0"):
        VERIFY(round)
    VERIFY(dataclasses.replace(round, live=torch.tensor([False])))
    VERIFY(dataclasses.replace(round, tree=tree_of([[0]], laws, [0])))  # drafted, not submitted


# --- blocks --------------------------------------------------------------------------------------


class _Asked:
    """flip: note the probability, and refuse; choice: the first token."""

    def __init__(self):
        self.asked = []

    def flip(self, probability, positions, stream):
        self.asked.append(probability)
        return torch.zeros(len(probability), dtype=torch.bool)

    def choice(self, probs, positions, stream):
        return torch.zeros(len(probs), dtype=torch.long)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_accept_no_fewer_behind_any_prefix_than_tokens_do(seed):
    """Given i drafts, and over all further ones, at least i are accepted with probability P_i."""
    gamma, first = 3, 2
    target, draft = dirichlet_table([V] * 2, seed), dirichlet_table([V] * 2, 50 + seed)
    drafts = torch.tensor(list(product(V, gamma)))
    before = torch.cat([torch.full((len(drafts), 1), first), drafts], 1)
    random = _Asked()
    tree = tree_of(drafts.tolist(), draft[before[:, :-1]])
    positions = torch.full((len(drafts),), 4)
    Block()(Verification(tree, target[before].log(), PLAIN, random, positions))
    h = torch.stack(random.asked, 1)
    at_least = 1 - (1 - h).flip(1).cumprod(1).flip(1)  # i or more, of these drafts
    q = draft[before[:, :-1], drafts]
    ratio = target[before[:, :-1], drafts] / q
    gained = 0.0
    for i in range(1, gamma + 1):
        weight = q[:, i:].prod(1)  # of the drafts behind the first i
        blocks = (at_least[:, i - 1] * weight).view(V**i, -1).sum(1)
        likelihood, tokens = torch.ones(len(drafts)).double(), torch.ones(len(drafts)).double()
        for j in range(i):
            likelihood = (likelihood * ratio[:, j]).clamp(max=1)
            tokens = tokens * ratio[:, j].clamp(max=1)
        likelihood, tokens = (one.view(V**i, -1)[:, 0] for one in (likelihood, tokens))
        torch.testing.assert_close(blocks, likelihood, atol=1e-12, rtol=0)
        assert bool((blocks >= tokens - 1e-12).all())
        gained += float((blocks - tokens).max())
    assert gained > 0.01


def test_a_block_that_ends_earlier_is_judged_as_a_shorter_one():
    target, draft = dirichlet_table([V] * 2, 1), dirichlet_table([V] * 2, 2)
    before = torch.tensor([[0, 1, 2]])
    logits, laws = target[before].log(), draft[before[:, :2]]
    long, short = _Asked(), _Asked()
    first = torch.tensor([4])
    tree = tree_of([[1, 2]], laws, [1])
    Block()(Verification(tree, logits, PLAIN, long, first))
    Block()(Verification(tree_of([[1]], laws[:, :1]), logits[:, :2], PLAIN, short, first))
    assert torch.equal(long.asked[0], short.asked[0])


# --- lenience ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.3])
def test_lenience_accepts_more_and_bounds_what_it_changes(monkeypatch, lenience):
    """The law of the first token in closed form: min(q, p/l) + rho (p - l q)+."""
    target, draft = dirichlet_table([V] * 3, 100), dirichlet_table([V] * 2, 200)

    def laws(verifier):
        def decoder():
            return SpeculativeDecoder(
                TabularModel(target), tabular_drafter(draft), sampling=PLAIN, budget=Budget(2),
                eos_ids=(), max_new_tokens=4, batch_size=1000, verifier=verifier,
            )  # fmt: skip

        return round_laws(monkeypatch, decoder, CONTEXTS)

    exact, lossy = laws(Token()), laws(Lenient(lenience))
    for context, outcomes in lossy.items():
        p, q = target[context], draft[context[-1]]
        first = torch.zeros(V, dtype=torch.float64)
        for one in outcomes:
            first[one.emitted[0]] += one.weight
        kept, left = torch.minimum(q, p / lenience), (p - lenience * q).clamp_min(0)
        expected = kept + (1 - kept.sum()) * left / left.sum()
        torch.testing.assert_close(first, expected, atol=1e-12, rtol=0)
        assert bool((first <= p / lenience + 1e-12).all())
        accepted = [
            sum(o.weight * o.round.accepted for o in one[context]) for one in (exact, lossy)
        ]
        if lenience == 1:
            assert accepted[0] == pytest.approx(accepted[1], abs=1e-12)
            assert Lenient(1.0).lossless(PLAIN)
        else:
            assert accepted[1] > accepted[0] + 0.05
            assert float((first - p).abs().max()) > 0.01
            assert not Lenient(lenience).lossless(PLAIN)
            assert not Lenient(lenience).replayable(PLAIN)  # its text is no sample of the target
            assert Lenient(lenience).lossless(Sampling(0.0))


def test_at_temperature_0_lenience_changes_nothing(monkeypatch):
    tokens, lengths = torch.tensor([[1, 2], [1, 0]]), torch.tensor([2, 2])
    logits = dirichlet_table([2, 3, V], 3).log()
    tree = TokenTree.chain(tokens, None, lengths)
    round = Verification(tree, logits, Sampling(0.0), _Fixed(), torch.tensor([4, 4]))
    one, other = Token()(round), Lenient(0.2)(round)
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.emitted, other.emitted)
