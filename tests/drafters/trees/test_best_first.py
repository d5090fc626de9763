"""Best-first trees against all paths one by one, and what they are refused for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import train
from drafters.base import TrainedDrafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget, DraftState
from drafters.trees.best_first import BestFirst, best_nodes
from drafters.trees.table import parse_shape, parse_tree
from eval.config import EvalConfig
from phases.check import check_drafter
from target.sampling import KeyedRandom, Sampling
from tests.drafters.test_block import made
from tests.helpers.commands import command
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.heads import (
    assert_greedy_text_is_the_targets,
    outputs_of,
    prefilled,
    randomised,
    state_of,
)
from tests.helpers.tiny import prompts_of
from tests.helpers.watch import Watch
from trainer.errors import UserError

V, K = 5, 3


class Slotted(TrainedDrafter):
    """Logits [B, K, V] of the slots, the same in every round."""

    has_slots = True

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def slot_logits(self, state, budget):
        return self.logits[: len(state.ids), : budget.max_tokens]


def grown(logits, shape, temperature=0.0):
    rows = len(logits)
    ids, lengths = torch.zeros(rows, 4, dtype=torch.long), torch.full((rows,), 2)
    random = KeyedRandom(torch.arange(rows))
    state = DraftState(ids, lengths, 2, Sampling(temperature), random)
    return Slotted(logits).propose(state, Budget.of(shape))


def paths_of(tree, row=0):
    found = [()]
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        found.append((*found[parent + 1], token))
    return found[1:]


def all_paths(logits, top_k=V):
    """Every path of tokens among the best `top_k` of their slots, with the log of its product."""
    law = logits.log_softmax(-1)
    found = {}
    for depth in range(1, len(law) + 1):
        choices = [one.topk(top_k).indices.tolist() for one in law[:depth]]
        for path in itertools.product(*choices):
            found[path] = sum(float(law[j, token]) for j, token in enumerate(path))
    return found


def slots(seed, rows=1, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    return sharpness * torch.randn(rows, K, V, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("top_k", [5, 3, 2, 1])
@pytest.mark.parametrize("count", [1, 3, 12, 30])
def test_the_nodes_are_the_likeliest_of_all_paths(count, top_k):
    """In falling order, and so each behind its parent and its likelier siblings."""
    every = sum(top_k**depth for depth in range(1, K + 1))
    for seed in range(5):
        logits = slots(seed)
        worth = all_paths(logits[0], top_k)
        assert len(worth) == every
        size = min(count, every)
        found = paths_of(grown(logits, BestFirst(size, top_k, K)))
        assert found == sorted(worth, key=lambda path: -worth[path])[:size]


def test_rows_are_grown_each_for_itself_and_alike_at_every_temperature():
    logits, shape = slots(0, rows=3), BestFirst(12, 5, K)
    tree = grown(logits, shape, temperature=1.0)
    assert (tree.probs, tree.siblings, tree.is_chain) == (None, "top", False)
    assert tree.lengths.tolist() == [12] * 3
    assert (tree.draft_forwards, tree.draft_tokens) == (1, 1)
    for row in range(3):
        alone = grown(logits[row : row + 1], shape)
        assert torch.equal(alone.tokens[0], tree.tokens[row])
        assert torch.equal(alone.parents[0], tree.parents[row])


def test_as_many_choices_as_nodes_are_enough():
    """The default: with all tokens to choose from no other tree comes out."""
    shape = parse_tree("best_first:4").shape(None, K)
    assert shape == BestFirst(4, 4, K)
    for seed in range(20):  # of nearly equal tokens, so that siblings are worth more than children
        logits = slots(seed, sharpness=0.3)
        assert paths_of(grown(logits, shape)) == paths_of(grown(logits, BestFirst(4, V, K)))


def expanded_whole(logits, count, top_k):
    """JetSpec: take the best open node, append all of its children, until there are so many."""
    worth, nodes, opened = all_paths(logits, top_k), [], [()]
    while len(nodes) < count:
        best = max(opened, key=lambda path: worth.get(path, 0.0))
        opened.remove(best)
        children = [p for p in worth if p[:-1] == best and len(p) == len(best) + 1]
        nodes += sorted(children, key=lambda path: -worth[path])
        opened += [p for p in children if len(p) < K]
    return sum(math.exp(worth[path]) for path in nodes[:count])


def test_no_less_probable_than_the_tree_that_expands_all_children():
    gains = []
    for seed in range(20):
        logits, (count, top_k) = slots(seed), ((8, 3), (12, 4))[seed % 2]
        worth = all_paths(logits[0], top_k)
        found = paths_of(grown(logits, BestFirst(count, top_k, K)))
        gains.append(
            sum(math.exp(worth[path]) for path in found) - expanded_whole(logits[0], count, top_k)
        )
    assert min(gains) > -1e-9
    assert max(gains) > 1e-3


def test_no_more_is_computed_than_the_slots():
    vocab, shape = 200, BestFirst(64, 64, K)
    logits = torch.randn(2, K, vocab)
    with Watch() as watch:
        tree = grown(logits, shape)
    assert tree.tokens.shape == (2, 64)
    assert max(map(math.prod, watch.shapes)) == logits.numel()


def test_equal_sums_keep_parents_first():
    """Of certain slots: a child is worth as much as its parent."""
    assert best_nodes([[0.0, -9.0]] * 3, 4) == [(-1, 0, 0), (0, 1, 0), (1, 2, 0), (-1, 0, 1)]


# --- of drafters ----------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["dflash", "from anchor", "medusa", "medusa, shared"])
def test_slots_are_what_chains_are_drafted_from(kind, tiny_target):
    target = tiny_target("llama")
    torch.manual_seed(0)
    if kind.startswith("medusa"):
        settings = MedusaSettings(K, own_head=kind == "medusa")
        drafter = randomised(MedusaDrafter.build(target, settings))
    else:
        drafter = randomised(made(target, kind))
    ids = torch.tensor(prompts_of([12, 12]))
    prefilled(drafter, target, ids.tolist(), [7, 6])
    state = state_of(ids, [8, 7], outputs_of(drafter, target, ids), sampling=Sampling(1.0))
    found = drafter.slot_logits(state, Budget(K))
    assert drafter.has_slots
    assert found.shape == (2, K, target.vocab_size)
    chain = drafter.propose(state, Budget(K))
    torch.testing.assert_close(found.softmax(-1), chain.probs)


def test_greedy_decoding_gives_the_targets_text(tiny_target):
    target = tiny_target("llama")
    drafter = randomised(made(target, layers=1))
    budget = Budget.of(BestFirst(64, 64, 3))
    accepted = assert_greedy_text_is_the_targets(drafter, target, budget)
    assert 0 < sum(accepted) / len(accepted) < 3


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("best_first", "must be best_first:<num_nodes>"),
        ("best_first:0", "num_nodes must lie in 1"),
        ("best_first:9:-1", "top_k must lie in 0"),
        ("best_first:7:2", "num_nodes must be at most 6, the nodes of 2 levels with 2 children"),
        ("best_first:3:1", "at most 2"),
    ],
)
def test_trees_that_cannot_be_are_refused(text, says):
    with pytest.raises(UserError, match=r"eval\.tree") as caught:
        EvalConfig(tree=[text], K=2)
    assert says in str(caught.value)


def test_depth_is_that_of_chains_or_the_number_of_nodes():
    assert parse_tree("best_first:64").deepest(7) == 7
    assert parse_tree("best_first:2").deepest(7) == 2
    assert parse_tree("best_first:6:2").deepest(2) == 2
    described = [
        parse_tree(text).shape(None, 3).describe() for text in ("best_first:9", "best_first:9:4")
    ]
    assert described == ["best_first, 9 nodes, depth 3", "best_first, 9 nodes, depth 3, top 4"]


def test_a_drafter_whose_tokens_depend_on_the_path_is_refused(tiny_target):
    target = tiny_target("llama")
    config = EvalConfig(tree=["best_first:9"], K=3)
    check_drafter(made(target), target, config)
    check_drafter(MedusaDrafter.build(target, MedusaSettings(3)), target, config)
    eagle = build_eagle(target, eagle_settings(3, [0, 1], target.hidden_size))
    with pytest.raises(UserError, match=r"eval\.tree=best_first:9: is grown from .* name dynamic"):
        check_drafter(eagle, target, config)
    with pytest.raises(UserError, match=r"eval\.tree must be one of"):
        parse_shape("best_first:9")  # of a tree that every drafter drafts


@pytest.mark.parametrize("recipe", ["eagle3", "hydra", "distillspec", "dflash", "medusa2"])
def test_so_is_a_recipe_of_one_before_a_model_is_loaded(recipe, tmp_path, capsys):
    words = command(
        tmp_path, tmp_path / "no target", f"recipe={recipe}", "eval.tree=best_first:9",
        "dry_run=true",
    )  # fmt: skip
    assert train.main([word for word in words if not word.startswith("method.draft_")]) == 2
    drafts_slots = recipe in ("dflash", "medusa2")  # then the target is what is missing
    said = "no such file or folder" if drafts_slots else "eval.tree=best_first:9: is grown"
    assert said in capsys.readouterr().err
