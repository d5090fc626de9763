"""Rewards of trees: what the target says of each node, and what the branches are worth together."""

from __future__ import annotations

import contextlib

import pytest
import torch

from drafters.round import Budget, DraftState, Steps
from drafters.trees.dynamic import DynamicTree
from drafters.trees.static import StaticTree
from drafters.trees.table import parse_shape
from drafters.trees.tree import TokenTree
from eval.tree_reward import AGGREGATIONS, ScoredTrees, TreeScorer
from eval.verifiers.base import Verification
from eval.verifiers.token import Token
from target.outputs import TargetOutputs
from target.sampling import KeyedRandom, Sampling
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.heads import BUSHY, randomised
from tests.helpers.kernels import chosen_as_on_a_gpu
from tests.helpers.tiny import VOCAB_SIZE, prompts_of
from trainer.errors import UserError

TREE = DynamicTree(9, 4, 3)
LENGTHS = [2, 7, 8, 15, 20]
KEPT = torch.arange(3, 97, 2)


def head(target, version=3, kept=None):
    captures = [0, 1] if version == 3 else ["final_norm"]
    torch.manual_seed(0)
    settings = eagle_settings(version, captures, target.hidden_size)
    return randomised(build_eagle(target, settings, kept=kept), 0.1)


def scored(target, drafter, lengths=LENGTHS, shape=TREE, **options):
    (text,) = prompts_of([22], seed=4)
    (found,) = TreeScorer(target, shape, **options)(text, lengths, [drafter])
    return text, found


def path_of(tree, row, node):
    path = []
    while node >= 0:
        path.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path


@torch.no_grad()
def next_logits(target, ids):
    return target.outputs(torch.tensor([ids])).logits[0, -1, :VOCAB_SIZE]


class Perfect(Steps):
    """The target as its own drafter, each path by itself."""

    start_width, target_layers = 1, ()

    def __init__(self, target):
        self.target = target

    def branches(self, ids, outputs):
        self.ids = ids[0].tolist()
        return self

    def start(self, state, budget):
        self.paths = [[self.ids[:length]] for length in state.lengths.tolist()]
        return torch.stack([next_logits(self.target, paths[0]) for paths in self.paths])

    def extend(self, tokens, parents, depth):
        for paths, own, above in zip(self.paths, tokens.tolist(), parents.tolist(), strict=True):
            paths += [paths[p + 1] + [t] for t, p in zip(own, above, strict=True)]
        new = [paths[-tokens.shape[1] :] for paths in self.paths]
        return torch.stack([torch.stack([next_logits(self.target, p) for p in row]) for row in new])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "llama_padded"])
def test_every_node_has_the_targets_probability_of_its_token(name, tiny_target):
    """Against a plain forward pass of the prefix and the path, nothing else in sight."""
    target = tiny_target(name)
    text, found = scored(target, head(target))
    for row, length in enumerate(LENGTHS):
        for node in range(TREE.num_nodes):
            *above, token = path_of(found.tree, row, node)
            logits = next_logits(target, text[:length] + above)
            wanted = logits.log_softmax(-1)[token]
            torch.testing.assert_close(found.log_p[row, node], wanted, rtol=1e-4, atol=1e-4)
            assert bool(found.best[row, node]) == (int(logits.argmax()) == token)


@pytest.mark.parametrize("kernel", [contextlib.nullcontext, chosen_as_on_a_gpu])
@pytest.mark.parametrize("shape", [TREE, BUSHY])
@pytest.mark.parametrize(("version", "kept"), [(3, None), (3, KEPT), (1, None)])
def test_trees_are_those_of_decoding(shape, version, kept, kernel, tiny_target):
    """A drafter that has seen the prefix and nothing behind it drafts the same."""
    target = tiny_target("llama")
    drafter = head(target, version, kept)
    with kernel():
        text, found = scored(target, drafter, shape=shape)
    budget = Budget.of(shape)
    for row, length in enumerate(LENGTHS):
        ids = torch.tensor([text[:length]])
        outputs = target.outputs(ids, layers=drafter.target_layers, logits=False)
        drafter.begin(1, 64)
        prompt = TargetOutputs({k: v[:, : length - 1] for k, v in outputs.hidden.items()})
        drafter.prefill(torch.tensor([0]), ids[:, :-1], torch.tensor([length - 1]), prompt)
        keys = torch.zeros(1, dtype=torch.long)
        state = DraftState(
            ids, torch.tensor([length]), length, Sampling(0.0), KeyedRandom(keys), outputs
        )
        with torch.no_grad():
            tree = drafter.propose(state, budget)
        assert torch.equal(tree.tokens[0], found.tree.tokens[row])
        assert torch.equal(tree.parents[0], found.tree.parents[row])
    if kept is not None:
        assert bool(torch.isin(found.tree.tokens, kept).all())


@pytest.mark.parametrize("shape", [DynamicTree(4, 4, 1), BUSHY])
def test_all_that_a_perfect_drafter_drafts_is_accepted(shape, tiny_target):
    """On any text: the first node competes with the token behind the prefix."""
    target = tiny_target("llama")
    _, found = scored(target, Perfect(target), shape=shape)
    tokens, lengths = found.accepted()
    assert lengths.tolist() == [shape.depth] * len(LENGTHS)
    text = prompts_of([22], seed=4)[0][:15]
    for token in tokens[3].tolist():
        assert token == int(next_logits(target, text).argmax())
        text.append(token)


@torch.no_grad()
def test_node_sum_is_what_verification_accepts(tiny_target):
    """Monte Carlo with the verifier of decoding; the mean of many rounds within 4 standard
    errors."""
    target, rounds = tiny_target("llama", std=0.08), 4000
    text, found = scored(target, head(target), [15])
    paths = [[], *(path_of(found.tree, 0, node) for node in range(TREE.num_nodes))]
    logits = torch.stack([next_logits(target, text[:15] + path) for path in paths])
    tree = TokenTree(
        found.tree.tokens.expand(rounds, -1), found.tree.parents.expand(rounds, -1), None,
        torch.full((rounds,), TREE.num_nodes),
    )  # fmt: skip
    round = Verification(
        tree, logits.expand(rounds, -1, -1), Sampling(1.0), KeyedRandom(torch.arange(rounds)),
        torch.full((rounds,), 15),
    )  # fmt: skip
    verdict = Token()(round)
    accepted = verdict.accepted.double()
    error = float(accepted.std() / rounds**0.5)
    assert error < 0.02
    assert abs(float(accepted.mean() - found.node_sum()[0])) < 4 * error


@pytest.mark.parametrize("drafter", ["head", "target"])
def test_the_greedy_path_is_the_verifiers(drafter, tiny_target):
    target = tiny_target("llama")
    one = head(target) if drafter == "head" else Perfect(target)
    text, found = scored(target, one)
    tokens, lengths = found.accepted()
    for row, length in enumerate(LENGTHS):
        paths = [[], *(path_of(found.tree, row, node) for node in range(TREE.num_nodes))]
        logits = torch.stack([next_logits(target, text[:length] + path) for path in paths])
        tree = TokenTree(
            found.tree.tokens[row : row + 1], found.tree.parents[row : row + 1], None,
            torch.tensor([TREE.num_nodes]),
        )  # fmt: skip
        random = KeyedRandom(torch.zeros(1, dtype=torch.long))
        first = torch.tensor([length])
        verdict = Token()(Verification(tree, logits[None], Sampling(0.0), random, first))
        assert int(verdict.accepted[0]) == int(lengths[row])
        nodes = [node for node in verdict.path[0].tolist() if node >= 0]
        assert tokens[row, : len(nodes)].tolist() == found.tree.tokens[row, nodes].tolist()
        assert not bool(tokens[row, len(nodes) :].any())
    if drafter == "target":
        assert int(lengths.max()) > 1


def test_chunks_of_prefixes_change_nothing(tiny_target):
    target = tiny_target("llama")
    drafter = head(target)
    whole, *others = (
        scored(target, drafter, chunk_tokens=tokens)[1] for tokens in (1 << 12, 1, 20)
    )
    for other in others:
        assert torch.equal(other.tree.tokens, whole.tree.tokens)
        assert torch.equal(other.tree.parents, whole.tree.parents)
        torch.testing.assert_close(other.log_p, whole.log_p, rtol=1e-5, atol=1e-5)


def test_nodes_are_scored_in_chunks_of_the_vocabulary(tiny_target, monkeypatch):
    target = tiny_target("llama")
    drafter = head(target)
    _, whole = scored(target, drafter)
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 7 * VOCAB_SIZE)
    _, parts = scored(target, drafter)
    torch.testing.assert_close(parts.log_p, whole.log_p, rtol=1e-5, atol=1e-5)
    assert torch.equal(parts.best, whole.best)


def test_what_a_text_gives_does_not_depend_on_the_other_drafter(tiny_target):
    """To the last bit: a drafter against a copy of itself must gain nothing."""
    target = tiny_target("llama")
    (text,) = prompts_of([22], seed=4)
    scorer = TreeScorer(target, TREE)
    one, other = scorer(text, LENGTHS, [head(target), head(target)])
    (alone,) = scorer(text, LENGTHS, [head(target)])
    for found in (other, alone):
        assert torch.equal(found.log_p, one.log_p)
        assert torch.equal(found.tree.tokens, one.tree.tokens)


def test_no_gradient_and_no_change_of_the_drafter(tiny_target):
    target = tiny_target("llama")
    drafter = head(target).train()
    _, found = scored(target, drafter)
    assert not found.log_p.requires_grad
    assert drafter.training
    assert all(p.grad is None for p in drafter.parameters())


# --- what the branches are worth together --------------------------------------------------------


def by_hand(log_p=(0.5, 0.25, 0.5, 0.5)):
    """A root with two children, the first of which has two; given as probabilities."""
    log_p = torch.tensor([log_p]).log()
    tree = TokenTree(
        torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 0]]), None, torch.tensor([4])
    )
    return ScoredTrees(tree, log_p, log_p > -0.8)


def test_rewards_by_hand():
    found = by_hand()
    assert found.leaves.tolist() == [[False, True, True, True]]
    torch.testing.assert_close(found.reached, torch.tensor([[0.5, 0.25, 0.25, 0.25]]))
    lengths = torch.tensor([0.25, 0.75, 0.75])  # of the branches: sums of what is reached
    torch.testing.assert_close(found.expected_lengths[0, 1:], lengths)
    expected = {
        "node_sum": 1.25,
        "mean": lengths.mean().item(),
        "max": 0.75,
        "lse": (2 * lengths).exp().sum().log().item() / 2,
        "lse_mean": (2 * lengths).exp().mean().log().item() / 2,
    }
    assert set(expected) == set(AGGREGATIONS)
    for name, value in expected.items():
        assert found.reward(name, eta=2.0).item() == pytest.approx(value)
    assert found.reward("lse", 1.0).item() != pytest.approx(found.reward("lse", 2.0).item())


def test_the_smooth_maximum_lies_where_it_should():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        shares = torch.rand(4, generator=generator).tolist()
        found = by_hand(shares)
        low, high = found.reward("mean"), found.reward("max")
        for eta in (0.1, 1.0, 10.0):
            assert found.reward("lse", eta) >= high - 1e-5
            assert low - 1e-4 <= found.reward("lse_mean", eta) <= high + 1e-4
        torch.testing.assert_close(found.reward("lse_mean", 1e-3), low, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(found.reward("lse", 1e3), high, rtol=1e-2, atol=3e-3)
        more = by_hand([min(1.0, share + 0.1) for share in shares])
        for name in AGGREGATIONS:
            assert more.reward(name) > found.reward(name)


def test_a_further_branch_that_is_never_accepted_adds_to_lse_only():
    """As printed it counts branches too; the normalised form and node_sum do not fall for it."""
    tree = TokenTree(torch.tensor([[5, 6]]), torch.tensor([[-1, -1]]), None, torch.tensor([2]))
    two = ScoredTrees(tree, torch.tensor([[-0.5, -torch.inf]]), torch.tensor([[True, False]]))
    alone = TokenTree(torch.tensor([[5]]), torch.tensor([[-1]]), None, torch.tensor([1]))
    one = ScoredTrees(alone, torch.tensor([[-0.5]]), torch.tensor([[True]]))
    assert two.reward("lse") > one.reward("lse") + 0.1
    for name in ("node_sum", "max"):
        assert two.reward(name).item() == pytest.approx(one.reward(name).item())
    assert two.reward("lse_mean") < one.reward("lse_mean")


def test_impossible_and_tiny_paths_are_numbers():
    """Products of three of them are far below half precision, and below float32 too."""
    chain = torch.arange(-1, 2)[None]
    for log_p in (-torch.inf, -60.0, -12.0):
        tree = TokenTree(torch.tensor([[5, 6, 7]]), chain, None, torch.tensor([3]))
        found = ScoredTrees(tree, torch.full((1, 3), log_p), torch.zeros(1, 3, dtype=torch.bool))
        for name in AGGREGATIONS:
            assert bool(found.reward(name).isfinite().all())
        assert found.accepted()[1].tolist() == [0]
    assert found.reached[0, 2].item() == pytest.approx(2.718281828**-36, rel=1e-4)


def test_the_drafters_own_greedy_path_may_be_pruned(tiny_target):
    """As deep as it drafts alone, as far as the tree has kept it."""
    target = tiny_target("llama")
    text, found = scored(target, head(target))
    (chains,) = TreeScorer(target, DynamicTree(4, 4, 1))(text, LENGTHS, [head(target)])
    depths = []
    for row in range(len(LENGTHS)):
        paths = [path_of(found.tree, row, node) for node in range(TREE.num_nodes)]
        greedy = chains.tree.tokens[row].tolist()
        depths.append(max(n for n in range(5) if not n or greedy[:n] in paths))
    assert found.greedy_depth().tolist() == depths
    assert chains.greedy_depth().tolist() == [4] * len(LENGTHS)
    assert len(set(depths)) > 1


def test_the_accepted_path_ends_with_the_first_choices():
    tokens, lengths = by_hand((0.5, 0.25, 0.1, 0.2)).accepted()  # only the first node is one
    assert (tokens.tolist(), lengths.tolist()) == ([[5, 0]], [1])


def test_a_target_that_takes_no_mask_is_refused(tiny_target, monkeypatch):
    target = tiny_target("llama")
    monkeypatch.setattr(target.model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(UserError, match="takes no explicit mask"):
        TreeScorer(target, parse_shape("eagle"))


def test_static_trees_are_drafted_too(tiny_target):
    target = tiny_target("llama")
    shape = StaticTree(((0,), (1,), (0, 0)))
    _, found = scored(target, head(target), shape=shape)
    assert found.tree.parents[0].tolist() == [-1, -1, 0]
