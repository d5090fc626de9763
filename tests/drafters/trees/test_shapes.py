"""The proposal: chains, depths and who may attend to whom."""

from __future__ import annotations

import itertools

import pytest
import torch

from drafters.base import TrainedDrafter
from drafters.round import Budget, DraftState
from drafters.trees.calibrated import calibrated_tree, expected_tokens
from drafters.trees.dynamic import DynamicTree
from drafters.trees.static import static_tree
from drafters.trees.table import parse_shape, parse_tree
from drafters.trees.tree import TokenTree
from target.sampling import KeyedRandom, Sampling
from trainer.errors import UserError


def tree(parents: list[int]) -> TokenTree:
    count = len(parents)
    return TokenTree(
        torch.zeros(1, count, dtype=torch.long),
        torch.tensor([parents]),
        None,
        torch.tensor([count]),
    )


def test_a_chain_is_the_tree_with_one_path():
    tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
    chain = TokenTree.chain(tokens, None, torch.tensor([3, 1]), draft_forwards=3, draft_tokens=4)
    assert chain.parents.tolist() == [[-1, 0, 1]] * 2
    assert chain.is_chain
    assert chain.depths.tolist() == [[1, 2, 3]] * 2
    assert torch.equal(chain.ancestors, torch.ones(2, 3, 3).tril().bool())
    assert (chain.draft_forwards, chain.draft_tokens) == (3, 4)


def test_a_branching_tree_is_no_chain():
    branching = tree([-1, -1, 0, 0, 1, 4])
    assert branching.depths.tolist() == [[1, 1, 2, 2, 2, 3]]
    allowed = branching.ancestors[0]
    seen = [set(row.nonzero()[:, 0].tolist()) for row in allowed]
    assert seen == [{0}, {1}, {0, 2}, {0, 3}, {1, 4}, {1, 4, 5}]


def test_ancestors_of_random_trees_follow_the_parents():
    generator = torch.Generator().manual_seed(0)
    trees = [
        [-1, *(int(torch.randint(-1, i, (1,), generator=generator)) for i in range(1, size))]
        for size in (1, 2, 7, 20, 60)
    ]
    for parents in [*trees, [*range(-1, 32)], [*range(-1, 31)]]:  # the deepest ones at last
        one = tree(parents)
        for node in range(len(parents)):
            path, at = set(), node
            while at >= 0:
                path.add(at)
                at = parents[at]
            assert set(one.ancestors[0, node].nonzero()[:, 0].tolist()) == path
            assert int(one.depths[0, node]) == len(path)


# --- shapes ---------------------------------------------------------------------------------------


def test_a_static_tree_is_kept_level_by_level():
    shape = static_tree([[0], [0, 0], [1], [0, 1], [0, 0, 0]])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert (shape.depth, shape.num_nodes, shape.width) == (3, 5, 2)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([], "at least one path"),
        ([[0], [0]], "none twice"),
        ([[0], [1, 0]], "has no parent"),
        ([[1]], "more likely sibling"),
        ([[0], [0, 1]], "more likely sibling"),
        ([[-1]], "ranks >= 0"),
        ([[0.5]], "a rank must be a whole number, got 0.5"),
        ([["0"]], "a rank must be a whole number, got '0'"),
        ({"0": 1}, "a rank must be a whole number, got '0'"),
    ],
)
def test_bad_static_trees_are_refused(paths, says):
    with pytest.raises(UserError, match=says):
        static_tree(paths)


def test_the_published_tree_has_25_nodes_of_depth_5():
    shape = parse_shape("eagle")
    assert (shape.num_nodes, shape.depth, shape.width) == (25, 5, 4)


@pytest.mark.parametrize(
    "text",
    ["dynamic", "dynamic:a:2", "dynamic:9", "no/such/file.json", f"dynamic:{'9' * 5000}:2",
     "dynamic:1000000:2", "a" * 5000, "static:no/such/file.json", "calibrated:9",
     "eagle,siblings=best", "dynamic:9:2,siblings=top"],
)  # fmt: skip
def test_unknown_trees_are_refused(text):
    with pytest.raises(UserError, match=r"eval\.tree") as error:
        parse_shape(text)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("content", ["[" * 9999, "[[" + "9" * 5000 + "]]", "[[0]", "{}", "[[[0]]]"])
def test_a_file_that_holds_no_tree_is_refused(tmp_path, content):
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"eval\.tree='.*tree.json is not a list of rank paths"):
        parse_shape(f"static:{path}")


def test_a_dynamic_tree_larger_than_its_candidates_is_refused():
    assert parse_shape("dynamic:6:2:2").num_nodes == 6
    with pytest.raises(UserError, match="more than the 6 candidates"):
        parse_shape("dynamic:7:2:2")


class Table(TrainedDrafter):
    """The next token depends on the last one: table [V, V]."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def start(self, state, budget):
        return self.table[state.ids[:, 0]].log()

    def extend(self, tokens, parents, depth):
        return self.table[tokens].log()


def test_a_dynamic_tree_holds_the_likeliest_paths():
    """Of all paths of one and two tokens, and those of three behind the three best of two."""
    table = torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    found = {(): 1.0}
    for depth in (1, 2, 3):
        last = sorted((p for p in found if len(p) == depth - 1), key=lambda p: -found[p])[:3]
        for path, token in itertools.product(last, range(3)):
            found[(*path, token)] = found[path] * float(table[(0, *path)[-1], token])
    del found[()]
    for size in (4, 7, 12):
        ids, shape = torch.zeros(1, 4, dtype=torch.long), DynamicTree(size, 3, 3)
        state = DraftState(ids, torch.tensor([1]), 1, Sampling(0.0), KeyedRandom(torch.tensor([0])))
        tree = Table(table).propose(state, Budget(3, tree=shape))
        paths = [()]
        for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
            paths.append((*paths[parent + 1], token))
        assert set(paths[1:]) == set(sorted(found, key=lambda p: -found[p])[:size])


def test_a_calibrated_tree_is_the_best_of_all_trees():
    """Against every prefix-closed tree of the same size."""
    accuracy = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05]]
    nodes = [(r,) for r in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for size in range(1, 6):
        found = calibrated_tree(accuracy, size)
        best = 0.0
        for chosen in itertools.combinations(nodes, size):
            try:
                best = max(best, expected_tokens(static_tree(chosen), accuracy))
            except UserError:
                continue
        assert expected_tokens(found, accuracy) == pytest.approx(best)


class Fed(TrainedDrafter):
    """Counts the nodes that it is fed."""

    num_fed = 0

    def start(self, state, budget):
        return torch.arange(9.0).expand(len(state.ids), -1)

    def extend(self, tokens, parents, depth):
        self.num_fed += tokens.shape[1]
        return torch.arange(9.0).expand(*tokens.shape, -1)


@pytest.mark.parametrize(
    "shape",
    [DynamicTree(6, 3, 2), DynamicTree(3, 1, 4), parse_shape("eagle"), static_tree([[0], [1]])],
    ids=lambda shape: shape.describe(),
)
def test_the_nodes_that_a_drafter_is_fed_are_counted(shape):
    """Room is made for so many: those of the last level have no children."""
    ids, drafter = torch.zeros(1, 4, dtype=torch.long), Fed()
    state = DraftState(ids, torch.tensor([2]), 2, Sampling(0.0), KeyedRandom(torch.tensor([0])))
    tree = drafter.propose(state, Budget(shape.depth, tree=shape))
    assert tree.tokens.shape[1] == shape.num_nodes
    assert drafter.num_fed == shape.num_fed == tree.draft_tokens - drafter.start_width


def test_a_rank_that_measures_better_than_the_one_before_it_counts_as_that_one():
    """The third rank beats the second by chance. With its own 0.4, its child would be worth 0.2."""
    found = calibrated_tree([[0.5, 0.2, 0.4], [0.5, 0.45, 0.3]], 6)
    assert found.paths == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2))


def test_a_calibrated_tree_larger_than_its_table_is_refused():
    with pytest.raises(UserError, match="only 3 nodes fit"):
        calibrated_tree([[0.5], [0.4], [0.3]], 4)


def test_eagle2_counts_the_root_and_one_level_more():
    assert parse_shape("eagle2:60:7:10") == DynamicTree(59, 8, 10)
    assert parse_shape("eagle2:2:0") == DynamicTree(1, 1, 10)
    assert parse_tree("eagle2:60:7:10").deepest(4) == 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eagle2:1:7", "total_tokens must be >= 2"),
        ("eagle2:60:-1", "depth must be >= 0"),
        ("eagle2:60:0", "59 nodes are more than the 10 candidates"),
    ],
)
def test_eagle2_out_of_range_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        parse_shape(text)
