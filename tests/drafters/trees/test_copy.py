"""Chains that are copied where the text repeats itself, and drafted where it does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from drafters.causal_lm import CausalLMDrafter
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.hydra import HydraDrafter, HydraSettings
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget, DraftState
from drafters.training_free.lookup import PromptLookup
from drafters.trees.copy import CopyOrDraft, copies
from drafters.trees.table import parse_shape, parse_tree
from eval.engine import SpeculativeDecoder
from eval.verifiers.base import Verification
from eval.verifiers.token import Token
from target.cache import CachedModel
from target.decode import Request
from target.sampling import KeyedRandom, Sampling, row_key
from tests.helpers.heads import GREEDY, randomised
from tests.helpers.tabular import Replaying, dirichlet_table
from tests.helpers.tiny import assert_same_greedy, generated, perturbed, prompts_of
from trainer.errors import UserError

K, V = 3, 3
PLAIN = Sampling(1.0)


def copied(text, shortest=2, longest=8, count=4, padding=()):
    ids = torch.tensor([[*text, *padding]])
    tokens, found = copies(ids, torch.tensor([len(text)]), shortest, longest, count)
    return tokens[0].tolist() if bool(found) else None


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 9, 2], None),  # one token agrees
        ([1, 2, 7, 8, 1, 2, 5, 6, 1, 2], [5, 6, 1, 2]),  # of equal places the latest
        ([0, 1, 2, 7, 8, 4, 1, 2, 5, 6, 0, 1, 2], [7, 8, 4, 1]),  # the longer one before the later
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),  # a text of period 2 goes on with it
        ([5, 4, 4, 4], [4, 4, 4, 4]),
        ([4, 4, 4], [4, 4, 4, 4]),
        ([4, 4], None),  # the place itself is no earlier one
        ([1, 2], None),
        ([0, 0], None),
        ([0, 0, 0, 1, 0], None),  # nothing agrees before the beginning
    ],
)
def test_what_is_copied(text, follows):
    assert copied(text) == follows
    assert copied(text, padding=[*text, 1, 2, 3]) == follows  # what lies behind is not read


def test_agreement_counts_up_to_the_longest():
    text = [7, 1, 2, 3, 9, 8, 1, 2, 3, 4, 7, 1, 2, 3]
    assert copied(text, longest=4) == [9, 8, 1, 2]
    assert copied(text, longest=3) == [4, 7, 1, 2]  # as long, and later
    assert copied(text, shortest=4) == [9, 8, 1, 2]
    assert copied(text, shortest=5) is None


def test_rows_are_copied_by_themselves():
    rows = [[1, 2, 3, 1, 2], [9, 8, 7, 6, 5, 4], [3, 3, 3]]
    ids = torch.tensor([row + [1] * (6 - len(row)) for row in rows])
    tokens, found = copies(ids, torch.tensor([5, 6, 3]), 2, 8, 2)
    assert found.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == [[3, 1], [3, 3]]


def test_copies_are_those_of_prompt_lookup():
    """Up to the end of the text, where prompt lookup ends."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        text = generator.integers(0, 4, generator.integers(2, 30)).tolist()
        longest = int(generator.integers(1, 5))
        known = PromptLookup(longest).continuation(np.array(text), 4)
        found = copied(text, shortest=1, longest=longest, padding=[1, 2])
        assert (found or [])[: len(known)] == known
        assert bool(found) == bool(known)


def causal_lm(target):
    return CausalLMDrafter._of(perturbed(target.model, 0.1), target, "draft")


def eagle3(target):
    torch.manual_seed(0)
    return randomised(Eagle3Drafter.build(target, Eagle3Settings([0, 1], target.hidden_size)))


def medusa(target):
    return randomised(MedusaDrafter.build(target, MedusaSettings(K)))


def hydra(target):
    return randomised(HydraDrafter.build(target, HydraSettings(K, prefix_layer=True)))


@pytest.mark.parametrize("build", [causal_lm, eagle3, medusa, hydra])
def test_text_is_the_targets_and_rounds_of_both_kinds_follow_each_other(tiny_target, build):
    target = tiny_target("llama")
    drafter = build(target)
    pieces = prompts_of([7] * 6)
    prompts = [piece * (1 + i % 3) for i, piece in enumerate(pieces)]
    wanted = [generated(target.model, prompt, 24) for prompt in prompts]
    fed = []
    extend = type(drafter).extend

    def counted(self, *arguments):
        fed.append(len(arguments[0]))
        return extend(self, *arguments)

    drafter.extend = counted.__get__(drafter)
    for batch_size in (1, 4):
        fed.clear()
        decoder = SpeculativeDecoder(
            CachedModel(target.model), drafter, sampling=GREEDY,
            budget=Budget.of(parse_tree("copy:1:4").shape(None, K)), eos_ids=(), max_new_tokens=24,
            batch_size=batch_size,
        )  # fmt: skip
        requests = [Request(p, row_key(0, p, i), GREEDY, i) for i, p in enumerate(prompts)]
        rounds = 0
        for one in decoder.run(requests):
            tag = one.request.tag
            assert_same_greedy(target.model, prompts[tag], one.response_ids, wanted[tag])
            rounds += len(one.rounds)
            assert all(r.submitted == K for r in one.rounds)
        if batch_size == 1:
            assert set(fed) == {1}
            assert 0 < len(fed) < rounds * (K - 1)  # some rounds copied, some drafted


def test_a_drafter_has_read_what_was_copied(tiny_target):
    """The target as its own drafter goes on as greedy decoding does, though it has not drafted the
    tokens before."""
    target = tiny_target("llama")
    drafter = CausalLMDrafter.of_target(target)
    (fresh,) = prompts_of([14])
    text = [*fresh[:8], *fresh[:2], *fresh[2:6], *fresh[8:]]
    ids, shape = torch.tensor([[*text, *[0] * 8]]), CopyOrDraft(2, 8, 4)

    def propose(length):
        lengths = torch.tensor([length])
        keys = KeyedRandom(torch.zeros_like(lengths))
        return shape.grow(drafter, DraftState(ids, lengths, length, GREEDY, keys))

    drafter.begin(1, 40)
    drafter.prefill(torch.tensor([0]), ids[:, :9], torch.tensor([9]))
    copied_round = propose(10)
    assert copied_round.tokens[0].tolist() == fresh[2:6]
    assert copied_round.draft_forwards == 1
    drafted = propose(15)  # all four were accepted, and another token was emitted
    assert drafted.draft_forwards == 4
    assert drafted.tokens[0].tolist() == generated(target.model, text[:15], 4)


class Table:
    """Order-1 law of the next token."""

    start_width = 1

    def __init__(self, table):
        self.table = table

    def start(self, state, budget):
        return self.table[state.ids.gather(1, state.lengths[:, None] - 1)[:, 0]].log()

    def extend(self, tokens, parents, depth):
        return self.table[tokens].log()


@pytest.mark.parametrize("context", [(0, 1, 2, 0, 1), (0, 1, 1, 2, 0)], ids=["copied", "drafted"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a row of the other kind"])
def test_sampled_text_has_the_targets_law(context, beside):
    target = dirichlet_table([V] * 2, 100)
    drafter, depth = Table(dirichlet_table([V] * 2, 200)), 2
    other = (0, 1, 1, 2, 0) if context[-1] == 1 else (0, 1, 2, 0, 1)
    rows = [context] + [other] * beside
    law, total, open_ = {}, 0.0, [((), 1.0)]
    while open_:
        outcomes, weight = open_.pop()
        random = Replaying(outcomes, rows=1)
        ids = torch.tensor([[*row, *[0] * 8] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        state = DraftState(ids, lengths, len(context), PLAIN, random)
        tree = CopyOrDraft(2, 8, depth).grow(drafter, state)
        last = torch.cat([ids.gather(1, lengths[:, None] - 1), tree.tokens], 1)
        verdict = Token()(Verification(tree, target[last].log(), PLAIN, random, lengths))
        if random.fork is not None:
            open_ += [((*outcomes, i), weight * w) for i, w in random.fork]
            continue
        total += weight
        accepted = int(verdict.accepted[0])
        emitted = [*tree.tokens[0, :accepted].tolist(), int(verdict.emitted[0])]
        for rest in itertools.product(range(V), repeat=depth + 1 - len(emitted)):
            text, share = (*emitted, *rest), weight
            for i in range(len(emitted), depth + 1):
                share *= float(target[text[i - 1]][text[i]])
            law[text] = law.get(text, 0.0) + share
    assert total == pytest.approx(1.0, abs=1e-12)
    for text in itertools.product(range(V), repeat=depth + 1):
        wanted = 1.0
        for before, token in zip((context[-1], *text), text, strict=False):
            wanted *= float(target[before][token])
        assert law.get(text, 0.0) == pytest.approx(wanted, abs=1e-12)


def test_names_and_limits():
    shape = parse_tree("copy").shape(None, 5)
    assert shape == CopyOrDraft(2, 8, 5)
    assert parse_tree("copy:3:9").shape(None, 4).describe() == "K 4, copied after 3 known tokens"
    assert shape != parse_tree("copy:3").shape(None, 5)
    for text in ("copy:0", "copy:4:3", "copy:2:8:1"):
        with pytest.raises(UserError):
            parse_tree(text)
    with pytest.raises(UserError, match="must be"):
        parse_shape("copy")  # a training that drafts trees trains on the drafter's own tokens


def test_random_draws_of_a_row_do_not_depend_on_the_rows_beside_it():
    """A row that copies spends no draw of a row that drafts."""
    drafter = Table(dirichlet_table([V] * 2, 200))
    ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 1, 2, 0, 0]])
    lengths, keys = torch.tensor([5, 5]), torch.tensor([11, 12])
    both = DraftState(ids, lengths, 5, PLAIN, KeyedRandom(keys))
    alone = DraftState(ids[1:], lengths[1:], 5, PLAIN, KeyedRandom(keys[1:]))
    shape = CopyOrDraft(2, 8, 2)
    own, with_it = (shape.grow(drafter, state).tokens[-1] for state in (alone, both))
    assert torch.equal(own, with_it)
