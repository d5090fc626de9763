"""Trees behind prefixes of one text: attention by every kernel, and what the target says of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

from target.attention import BLOCK, Branches, branched
from target.branches import TextBranches
from target.cache import CachedModel
from tests.helpers.kernels import chosen_as_on_a_gpu
from tests.helpers.tiny import VOCAB_SIZE, prompts_of, tiny_model
from tests.helpers.watch import Watch
from trainer.errors import UserError

KERNELS = {"sdpa": contextlib.nullcontext, "flex": chosen_as_on_a_gpu}
TEXT, NODES, WIDTH = BLOCK + 37, 5, 16
LENGTHS = torch.tensor([1, 7, BLOCK, BLOCK + 1, TEXT])
PARENTS = [-1, -1, 0, 0, 2]


def tree():
    """Which node sees which: itself and those above it."""
    seen = torch.eye(NODES, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen.expand(len(LENGTHS), -1, -1)


def problem(heads=4, groups=2, dtype=torch.float32):
    """Queries of the last three nodes of each tree, and all keys and values."""
    torch.manual_seed(0)
    queries = torch.randn(len(LENGTHS), heads, 3, WIDTH, dtype=dtype)
    text = tuple(torch.randn(2, 1, groups, TEXT, WIDTH, dtype=dtype))
    own = tuple(torch.randn(2, len(LENGTHS), groups, NODES, WIDTH, dtype=dtype))
    return queries, text, own, Branches(LENGTHS, TEXT, tree()[:, -3:])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nodes_see_their_prefix_and_those_above_them_in_one_softmax(groups, dtype, kernel):
    queries, text, own, branches = problem(groups=groups, dtype=dtype)
    rows = len(LENGTHS)
    prefix = (torch.arange(TEXT) < LENGTHS[:, None])[:, None].expand(-1, 3, -1)
    mask = torch.cat([prefix, branches.allowed], -1).unsqueeze(1)
    keys, values = (
        torch.cat([shared.expand(rows, -1, -1, -1), mine], 2).repeat_interleave(4 // groups, 1)
        for shared, mine in zip(text, own, strict=True)
    )
    for scale in (None, 0.1):
        wanted = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
        with KERNELS[kernel]():
            found = branched(queries, text, own, branches, scale)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert found.dtype == dtype


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_node_sees_nothing_else(kernel):
    """Of the text, of its own tree, of another tree."""
    queries, text, own, branches = problem()
    with KERNELS[kernel]():
        plain = branched(queries, text, own, branches)
        for part in (0, 1):
            for at in (0, 6, BLOCK - 1, BLOCK, TEXT - 1):
                moved = [one.clone() for one in text]
                moved[part][:, :, at] += 1
                change = branched(queries, tuple(moved), own, branches) - plain
                assert torch.equal(change.abs().amax((1, 2, 3)) > 1e-4, at < LENGTHS)
            for node in range(NODES):
                moved = [one.clone() for one in own]
                moved[part][2, :, node] += 1
                change = (branched(queries, text, tuple(moved), branches) - plain).abs()
                seen = torch.zeros(len(LENGTHS), 3, dtype=torch.bool)
                seen[2] = branches.allowed[2, :, node]
                assert torch.equal(change.amax((1, 3)) > 1e-4, seen)


def nodes():
    """Tokens and depths of the tree behind prefixes of a text of 22 tokens."""
    lengths = torch.tensor([2, 7, 20])
    tokens = torch.tensor(prompts_of([NODES] * 3, seed=5))
    depths = tree().sum(-1)[:3]
    return lengths, tokens, depths


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "llama_padded"])
def test_a_target_reads_trees_as_it_reads_their_paths(name, kernel, tiny_target):
    """Models with a window copy the text's keys for each tree, a layer at a time."""
    target = tiny_target(name)
    lengths, tokens, depths = nodes()
    (text,) = prompts_of([22], seed=4)
    with KERNELS[kernel]():
        branches = TextBranches(CachedModel(target.model))
        assert branches.shares == name.startswith("llama")
        branches.read(torch.tensor([text]))
        logits = branches.score(tokens, lengths, tree()[:3], depths, logits_to_keep=0)
    for row, length in enumerate(lengths.tolist()):
        for node in range(NODES):
            path = []
            at = node
            while at >= 0:
                path.insert(0, int(tokens[row, at]))
                at = PARENTS[at]
            alone = target.outputs(torch.tensor([text[:length] + path])).logits[0, -1]
            torch.testing.assert_close(
                logits[row, node, :VOCAB_SIZE], alone[:VOCAB_SIZE], rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_no_key_of_the_text_is_copied_for_every_tree(tiny_target):
    target = tiny_target("llama")
    lengths, tokens, depths = nodes()
    branches = TextBranches(CachedModel(target.model))
    branches.read(torch.tensor(prompts_of([22], seed=4)))
    with Watch() as watch:
        branches.score(tokens, lengths, tree()[:3], depths)
    assert (3, 2, NODES, 8) in watch.shapes or (3, 4, NODES, 8) in watch.shapes, watch.shapes
    assert not [shape for shape in watch.shapes if shape[:1] == (3,) and max(shape[1:]) == 22]
    assert all(shape[0] == 1 for shape in watch.shapes if len(shape) == 4 and 22 <= shape[2] <= 30)


def test_a_model_that_does_not_see_the_text_is_refused(monkeypatch):
    """One whose attention would take the nodes' own mask for the whole one."""

    def alone(queries, text, own, branches, scale=None):
        mask = branches.allowed.unsqueeze(1)
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in own)
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)

    monkeypatch.setattr("target.branches.branched", alone)
    with pytest.raises(UserError, match="scores a tree behind a prefix otherwise than all in one"):
        TextBranches(CachedModel(tiny_model("llama"))).read(torch.tensor(prompts_of([22])))


@pytest.mark.gpu
def test_the_compiled_kernel_gives_sdpas_values():
    """Block lists are read by the compiled kernel alone."""
    queries, text, own, branches = problem()
    wanted = branched(queries, text, own, branches)
    there = Branches(LENGTHS.cuda(), TEXT, branches.allowed.cuda())
    text, own = ([one.cuda() for one in pair] for pair in (text, own))
    found = branched(queries.cuda(), tuple(text), tuple(own), there)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)  # products in TF32
