"""Tree verification against enumeration: whatever the tree, the target's law comes out."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.round import Budget, DraftState
from drafters.trees.best_first import BestFirst
from drafters.trees.dynamic import DynamicTree
from drafters.trees.static import static_tree
from drafters.trees.table import parse_tree
from drafters.trees.tree import TOP, WITHOUT_REPLACEMENT, TokenTree
from eval.engine import SpeculativeDecoder
from eval.verifiers.base import Verification
from eval.verifiers.multi_round import MultiRound
from eval.verifiers.table import exact_verifier
from eval.verifiers.token import Token
from eval.verifiers.typical import Typical
from target.cache import CachedModel
from target.decode import Request
from target.sampling import Sampling, warp
from tests.helpers.tabular import Replaying, dirichlet_table
from tests.helpers.tiny import assert_same_greedy, generated, prompts_of
from trainer.errors import UserError

V = 3
PLAIN = Sampling(1.0)


class Tabular(TrainedDrafter):
    """Order-1 law of the next token."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def start(self, state, budget):
        return self.table[state.ids.gather(1, state.lengths[:, None] - 1)[:, 0]].log()

    def extend(self, tokens, parents, depth):
        return self.table[tokens].log()

    def slot_logits(self, state, budget):
        """The rows of the table in their order, from that of the last token."""
        last = state.ids.gather(1, state.lengths[:, None] - 1)
        return self.table[(last + torch.arange(budget.max_tokens)) % len(self.table)].log()


def sampled(tree):
    """Its children drawn without replacement."""
    return Budget(2, tree=dataclasses.replace(tree, siblings=WITHOUT_REPLACEMENT))


def one_round(target, drafter, context, budget, random, verify, draft=PLAIN):
    ids = torch.tensor([[*context, *[0] * 8]])
    lengths = torch.tensor([len(context)])
    state = DraftState(ids, lengths, len(context), draft, random)
    tree = drafter.propose(state, budget)
    assert tree.siblings == budget.tree.siblings
    texts = [list(context)]
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        texts.append([*texts[parent + 1], token])
    logits = torch.stack([target[t[-2], t[-1]].log() for t in texts])[None]
    verdict = verify(Verification(tree, logits, PLAIN, random, lengths))
    path = [n for n in verdict.path[0].tolist() if n >= 0]
    assert len(path) == int(verdict.accepted)
    assert [tree.parents[0, n].item() for n in path] == [-1, *path][: len(path)]
    return [tree.tokens[0, n].item() for n in path] + [int(verdict.emitted)]


def error(budget, seed=0, verify=None, draft=PLAIN):
    """Largest difference between the law of depth + 1 tokens and the target's own."""
    verify = verify or {TOP: Token(), WITHOUT_REPLACEMENT: MultiRound()}[budget.form]
    target, own = dirichlet_table([V] * 3, 100 + seed), dirichlet_table([V] * 2, 200 + seed)
    drafter, length, worst = Tabular(own), budget.max_tokens + 1, 0.0
    for context in ((0, 1), (2, 2))[: 1 if budget.form == WITHOUT_REPLACEMENT else 2]:
        law, total, open_ = {}, 0.0, [((), 1.0)]
        while open_:
            outcomes, weight = open_.pop()
            random = Replaying(outcomes)
            emitted = one_round(target, drafter, context, budget, random, verify, draft)
            if random.fork is not None:
                open_ += [((*outcomes, i), weight * w) for i, w in random.fork]
                continue
            total += weight
            for rest in itertools.product(range(V), repeat=length - len(emitted)):
                text, share = (*emitted, *rest), weight
                for i in range(len(emitted), length):
                    before = (*context, *text[:i])[-2:]
                    share *= float(target[before][text[i]])
                law[text] = law.get(text, 0.0) + share
        assert total == pytest.approx(1.0, abs=1e-12)
        for text in itertools.product(range(V), repeat=length):
            wanted = 1.0
            for i, token in enumerate(text):
                wanted *= float(target[(*context, *text[:i])[-2:]][token])
            worst = max(worst, abs(law.get(text, 0.0) - wanted))
    return worst


SMALL = static_tree([[0], [1], [0, 0], [0, 1]])
STATIC = static_tree([[0], [1], [0, 0], [0, 1], [1, 0]])
WIDE = static_tree([[0], [1], [2], [0, 0], [0, 1], [0, 2]])  # every token is a child


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "tree",
    [STATIC, WIDE, DynamicTree(4, 2, 2), BestFirst(5, 3, 2)],
    ids=["two", "all", "dynamic", "best first"],
)
def test_deterministic_trees_leave_the_targets_law(tree, seed):
    assert error(Budget(2, tree=tree), seed) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "seed"),
    [
        (SMALL, 0),
        (SMALL, 1),
        (SMALL, 2),
        (WIDE, 0),
        pytest.param(STATIC, 0, marks=pytest.mark.slow),
    ],
    ids=["two-0", "two-1", "two-2", "all", "both"],
)
def test_children_drawn_without_replacement_leave_the_targets_law(tree, seed):
    assert error(sampled(tree), seed) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "calibrated"])
def test_static_trees_that_have_a_name_draw_their_children_and_keep_the_targets_law(kind, tmp_path):
    path = tmp_path / "paths.json"
    path.write_text(json.dumps(SMALL.paths))
    text = f"static,file={path}" if kind == "file" else "calibrated:4"
    table = [[0.5, 0.3, 0.1], [0.5, 0.4, 0.1]]
    shape, top = (parse_tree(text + more).shape(table, 2) for more in ("", ",siblings=top"))
    assert shape.paths == SMALL.paths
    assert exact_verifier(shape.siblings, PLAIN) == MultiRound()
    assert exact_verifier(shape.siblings, Sampling(0.0)) == Token()
    assert exact_verifier(top.siblings, PLAIN) == Token()
    assert error(Budget.of(shape)) < 1e-12
    assert error(Budget.of(top)) < 1e-12


@pytest.mark.slow
def test_a_drafter_that_is_the_target_has_every_drawn_child_accepted():
    """Its best tokens would be accepted as often as they are drawn."""
    law = dirichlet_table([V] * 2, 7)
    target = law.expand(V, V, V)
    accepted = {}
    for budget, verify in ((sampled(SMALL), MultiRound()), (Budget(2, tree=SMALL), Token())):
        mean, open_ = 0.0, [((), 1.0)]
        while open_:
            outcomes, weight = open_.pop()
            random = Replaying(outcomes)
            emitted = one_round(target, Tabular(law), (0, 1), budget, random, verify)
            if random.fork is not None:
                open_ += [((*outcomes, i), weight * w) for i, w in random.fork]
            else:
                mean += weight * (len(emitted) - 1)
        accepted[budget.form] = mean
    best = law[1].topk(2)
    expected = sum(float(p) * (1 + float(law[v].topk(2).values.sum()) * (v == best.indices[0]))
                   for p, v in zip(best.values, best.indices, strict=True))  # fmt: skip
    assert accepted[TOP] == pytest.approx(expected)
    # the tree's second child has no children of its own, and is never needed
    assert accepted[WITHOUT_REPLACEMENT] == pytest.approx(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.4, 2.0])
def test_children_drawn_at_the_drafters_own_temperature_leave_the_targets_law(temperature):
    assert error(sampled(SMALL), draft=Sampling(temperature)) < 1e-12


def test_a_rejection_that_leaves_no_residual_draws_from_the_target():
    """Where p = q the probability of acceptance is 1 up to rounding: a coin may still reject."""

    class Rejecting:
        def flip(self, probability, positions, stream):
            return torch.zeros_like(probability, dtype=torch.bool)

        def choice(self, probs, positions, stream):
            assert torch.equal(probs, p)
            return probs.argmax(-1)

    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(1, 2, -1)
    p = warp(logits[:, 0], PLAIN)
    tree = TokenTree(
        torch.tensor([[1]]), torch.tensor([[-1]]), p[:, None], lengths=torch.tensor([1])
    )
    round = Verification(tree, logits, PLAIN, Rejecting(), torch.tensor([4]))
    verdict = MultiRound()(round)
    assert verdict.emitted.tolist() == [1]
    assert verdict.accepted.tolist() == [0]


def test_control_typical_acceptance_is_seen_to_change_the_law():
    assert error(Budget(2, tree=STATIC), verify=Typical()) > 0.01


@pytest.mark.slow
def test_control_sampled_children_taken_as_deterministic_are_exact_too():
    """Drawing from the target is exact for every tree that does not look at the draw."""

    def follow(round):
        round.tree.probs = None
        return Token()(round)

    assert error(sampled(SMALL), verify=follow) < 1e-12


def test_control_deterministic_children_taken_as_sampled_are_seen():
    own = dirichlet_table([V] * 2, 200)

    def lie(round):
        tree = round.tree
        parents = tree.parents[0].tolist()
        tokens = [1 if p < 0 else int(tree.tokens[0, p]) for p in parents]
        tree.probs = own[torch.tensor(tokens)][None]
        return MultiRound()(round)

    assert error(Budget(2, tree=STATIC), verify=lie) > 0.01


@pytest.mark.parametrize("verify", [Token(), MultiRound(), Typical()])
def test_greedy_follows_the_longest_path_of_best_tokens(verify):
    target = dirichlet_table([V] * 3, 1)
    best = [int(target[0, 1].argmax())]
    best.append(int(target[1, best[0]].argmax()))

    class Best(Tabular):
        def start(self, state, budget):
            return torch.nn.functional.one_hot(torch.tensor([best[0]]), V).double()

        def extend(self, tokens, parents, depth):
            return (
                torch.nn.functional.one_hot(torch.tensor(best[1]), V)
                .double()
                .expand(*tokens.shape, V)
            )

    state = DraftState(
        torch.tensor([[0, 1, 0, 0]]), torch.tensor([2]), 2, Sampling(0.0), Replaying(())
    )
    tree = Best(target).propose(state, Budget(2, tree=STATIC))
    texts = [[0, 1]]
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        texts.append([*texts[parent + 1], token])
    logits = torch.stack([target[t[-2], t[-1]].log() for t in texts])[None]
    round = Verification(tree, logits, Sampling(0.0), Replaying(()), torch.tensor([2]))
    verdict = verify(round)
    assert verdict.accepted.tolist() == [2]
    assert not bool(verdict.rejected)
    assert [tree.tokens[0, n].item() for n in verdict.path[0]] == best
    assert verdict.emitted.item() == int(target[best[0], best[1]].argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_that_its_row_did_not_draft_is_neither_accepted_nor_rejected(temperature):
    """The second row drafted one node of the two; the target agrees with all of them."""
    tokens, parents = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[-1, 0], [-1, 0]])
    tree = TokenTree(tokens, parents, None, torch.tensor([2, 1]))
    certain = torch.tensor([[1, 2, 0]]).expand(2, -1)  # what the target says after each node
    logits = torch.nn.functional.one_hot(certain, V).double().log()
    first = torch.tensor([4, 4])
    random = Replaying([1, 1, 2, 2, 0, 0])
    verdict = Token()(Verification(tree, logits, Sampling(temperature), random, first))
    assert verdict.path.tolist() == [[0, 1], [0, -1]]
    assert verdict.accepted.tolist() == [2, 1]
    assert verdict.emitted.tolist() == [0, 2]
    assert verdict.rejected.tolist() == [False, False]


def test_typical_accepts_what_passes_the_threshold_and_takes_the_longest_path():
    p = torch.full((1, 6, V), 1 / 3).double()
    p[0, 1] = torch.tensor([0.98, 0.01, 0.01])
    tokens = torch.tensor([[0, 1, 0, 1, 0]])
    parents = torch.tensor([[-1, -1, 0, 0, 1]])
    tree = TokenTree(tokens, parents, None, torch.tensor([5]))
    round = Verification(tree, p.log(), PLAIN, Replaying(()), torch.tensor([2]))
    verdict = Typical(epsilon=0.09, delta=0.3)(round)
    # from the root all pass (1/3 > 0.09), under node 0 only token 0: the likelier of two paths
    assert verdict.path.tolist() == [[0, 2]]
    strict = Typical(0.5, 2.0)(round)
    assert strict.path.tolist() == [[-1, -1]]  # min(0.5, 2 exp(-ln 3)) = 0.5 > 1/3
    assert strict.accepted.tolist() == [0]


@pytest.mark.parametrize(
    ("epsilon", "delta", "accepted"),
    [(0.5, 0.9, 1), (0.2, 3.0, 1), (0.5, 2.0, 0), (0.4, 1.1, 0), (0.34, 1.1, 0)],
)
def test_typical_takes_the_lower_of_its_two_limits(epsilon, delta, accepted):
    """All three tokens have probability 1/3, which is exp(-H) too."""
    tree = TokenTree(torch.tensor([[0]]), torch.tensor([[-1]]), None, torch.tensor([1]))
    p, first = torch.full((1, 2, V), 1 / 3).double(), torch.tensor([2])
    verdict = Typical(epsilon, delta)(Verification(tree, p.log(), PLAIN, Replaying(()), first))
    assert verdict.accepted.tolist() == [accepted]


def test_typical_takes_the_likelier_of_paths_of_one_length():
    p = torch.tensor([[[0.7, 0.3, 1e-9]] * 5]).double()
    for tokens, path in (([1, 0], [1]), ([0, 1], [0])):
        tree = TokenTree(torch.tensor([tokens]), torch.tensor([[-1, -1]]), None, torch.tensor([2]))
        round = Verification(tree, p[:, :3].log(), PLAIN, Replaying(()), torch.tensor([2]))
        assert Typical()(round).path.tolist() == [path]


def test_a_dynamic_tree_that_feeds_more_nodes_than_it_keeps_has_room(tiny_target):
    """16 nodes are fed to the drafter for the 4 that are kept."""
    target = tiny_target("llama")
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    budget = Budget(6, tree=DynamicTree(4, 6, 4))
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=Sampling(0.0), budget=budget, eos_ids=(),
        max_new_tokens=12, batch_size=2,
    )  # fmt: skip
    prompts = prompts_of([5, 9])
    found = {
        s.request.tag: s.response_ids
        for s in decoder.run([Request(p, 0, Sampling(0.0), i) for i, p in enumerate(prompts)])
    }
    for index, prompt in enumerate(prompts):
        assert_same_greedy(target.model, prompt, found[index], generated(target.model, prompt, 12))


def test_a_tree_deeper_than_its_budget_is_refused():
    with pytest.raises(UserError, match="depth 2 needs a budget"):
        Budget(1, tree=STATIC)
