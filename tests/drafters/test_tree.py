"""The proposal: chains, depths and who may attend to whom."""

from __future__ import annotations

import torch

from drafters.tree import TokenTree


def tree(parents: list[int]) -> TokenTree:
    count = len(parents)
    return TokenTree(
        torch.zeros(1, count, dtype=torch.long), torch.tensor(parents), None, torch.tensor([count])
    )


def test_a_chain_is_the_tree_with_one_path():
    tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
    chain = TokenTree.chain(tokens, None, torch.tensor([3, 1]), draft_forwards=3, draft_tokens=4)
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.is_chain
    assert chain.depths.tolist() == [1, 2, 3]
    assert torch.equal(chain.ancestors(), torch.ones(3, 3).tril().bool())
    assert (chain.draft_forwards, chain.draft_tokens) == (3, 4)
    assert tree([-1]).is_chain


def test_a_branching_tree_is_no_chain():
    branching = tree([-1, -1, 0, 0, 1, 4])
    assert not branching.is_chain
    assert branching.depths.tolist() == [1, 1, 2, 2, 2, 3]
    allowed = branching.ancestors()
    seen = [set(row.nonzero()[:, 0].tolist()) for row in allowed]
    assert seen == [{0}, {1}, {0, 2}, {0, 3}, {1, 4}, {1, 4, 5}]


def test_ancestors_of_random_trees_follow_the_parents():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 20):
        parents = [-1] + [
            int(torch.randint(-1, i, (1,), generator=generator)) for i in range(1, size)
        ]
        one = tree(parents)
        for node in range(size):
            path, at = set(), node
            while at >= 0:
                path.add(at)
                at = parents[at]
            assert set(one.ancestors()[node].nonzero()[:, 0].tolist()) == path
            assert int(one.depths[node]) == len(path)
