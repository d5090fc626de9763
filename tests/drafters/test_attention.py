"""Attention of unrolled steps: the same by every kernel, and what each column sees."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from drafters.attention import attend_unrolled
from drafters.eagle3 import Eagle3Settings
from drafters.hydra import HydraDrafter, HydraSettings
from drafters.text import Text
from target import attention
from target.attention import BLOCK, Capability, Visible, flex
from tests.helpers.eagle import build_eagle
from tests.helpers.heads import close, outputs_of, randomised
from tests.helpers.kernels import GPU, chosen_as_on_a_gpu, without
from tests.helpers.tiny import prompts_of

KERNELS = {"sdpa": contextlib.nullcontext, "flex": chosen_as_on_a_gpu}


def unrolled(steps=4, length=6, heads=4, groups=2, dtype=torch.float32):
    """Queries of the last step; keys and values of the first one; those of the later ones."""
    torch.manual_seed(0)
    queries = torch.randn(2, heads, length, 8, dtype=dtype)
    keys, values = torch.randn(2, 2, groups, length, 8, dtype=dtype)
    later = [tuple(torch.randn(2, 2, groups, length, 8, dtype=dtype)) for _ in range(steps - 1)]
    return queries, keys, values, later


def every_column(length):
    return Visible(length, torch.arange(length).expand(2, -1), causal=True)


def at(columns, one):
    """The columns [2, C] of one [2, heads, T, D]."""
    return one.transpose(1, 2)[torch.arange(2).unsqueeze(1), columns].transpose(1, 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_unrolled_attention_is_that_of_the_whole_mask(steps, groups, kernel):
    """Columns 0..t of the first step, its own column of every later one, in one softmax."""
    queries, keys, values, later = unrolled(steps, groups=groups)
    length = queries.shape[2]
    row = torch.arange(length)
    causal = row.unsqueeze(0) <= row.unsqueeze(1)
    mask = torch.cat([causal] + [torch.eye(length, dtype=torch.bool)] * (steps - 1), 1)
    both = [torch.cat(parts, 2) for parts in zip((keys, values), *later, strict=True)]
    whole = [one.repeat_interleave(4 // groups, 1) for one in both]
    wanted = F.scaled_dot_product_attention(queries, *whole, attn_mask=mask)
    some = torch.tensor([[1, 4, 5], [0, 2, 3]])
    own = [(at(some, key), at(some, value)) for key, value in later]
    with KERNELS[kernel]():
        close(attend_unrolled(queries, keys, values, later, every_column(length)), wanted)
        got = attend_unrolled(at(some, queries), keys, values, own, Visible(length, some))
    close(got, at(some, wanted))


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_unrolled_query_sees_its_own_column_of_later_steps_only(kernel):
    queries, keys, values, later = unrolled()
    visible = every_column(6)
    with KERNELS[kernel]():
        plain = attend_unrolled(queries, keys, values, later, visible)
        for step in range(4):
            for column in range(6):
                for part in (0, 1):
                    moved = [[one.clone() for one in pair] for pair in ((keys, values), *later)]
                    moved[step][part][:, :, column] += 1.0
                    got = attend_unrolled(queries, *moved[0], moved[1:], visible)
                    change = (got - plain).abs().amax((0, 1, 3))
                    sees = torch.arange(6) == column if step else torch.arange(6) >= column
                    assert torch.equal(change > 1e-4, sees), (step, column, part)


LENGTH = 2 * BLOCK + 37  # two whole blocks and a part of one


def texts(ends):
    """Documents [1, LENGTH] that end at these columns; what follows the last one is padding."""
    documents = torch.full((LENGTH,), -1)
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        documents[begin:end] = number
    return documents


def visible_of(case):
    """Rows as training has them: packed or not, with some columns chosen or all."""
    documents = torch.stack([texts([40, 200, LENGTH]), texts([BLOCK, 2 * BLOCK])])
    every = torch.arange(LENGTH).expand(2, -1)
    chosen = torch.zeros(2, LENGTH, dtype=torch.bool)
    chosen[0, 30:40], chosen[0, 150:260], chosen[1, 200:249] = True, True, True
    # the second row has fewer: its filling is columns from the beginning, as `_compact` makes it
    some = chosen.long().argsort(dim=1, descending=True, stable=True)[:, : int(chosen[0].sum())]
    return {
        "causal": Visible(LENGTH, every, causal=True),
        "columns": Visible(LENGTH, some),
        "documents": Visible(LENGTH, every, documents),
        "both": Visible(LENGTH, some, documents),
        "window": Visible(LENGTH, every, window=BLOCK + 20),
        "narrow window": Visible(LENGTH, every, window=BLOCK // 2),
        "window of texts": Visible(LENGTH, some, documents, window=BLOCK // 2),
        "few": Visible(LENGTH, every[:, 150:250]),
    }[case]


CASES = ["causal", "columns", "documents", "both", "window", "narrow window", "window of texts"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 3])
def test_both_kernels_give_the_same_values_and_gradients(case, steps):
    """In float64, so that a wrong term of a gradient cannot pass for rounding."""
    visible = visible_of(case)
    made = unrolled(steps, LENGTH, dtype=torch.float64)
    queries, *later = at(visible.columns, made[0]), *made[3]
    own = [at(visible.columns, part) for pair in later for part in pair]
    weights = torch.randn_like(queries)
    found = []
    for kernel in KERNELS.values():
        inputs = [one.clone().requires_grad_() for one in (queries, *made[1:3], *own)]
        pairs = list(zip(inputs[3::2], inputs[4::2], strict=True))
        with kernel():
            mixed = attend_unrolled(*inputs[:3], pairs, visible)
            found.append((mixed, *torch.autograd.grad((mixed * weights).sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_float32_values_agree_to_a_millionth(case):
    visible = visible_of(case)
    queries, keys, values, later = unrolled(4, LENGTH)
    own = [(at(visible.columns, key), at(visible.columns, value)) for key, value in later]
    found = []
    for kernel in KERNELS.values():
        with kernel():
            found.append(attend_unrolled(at(visible.columns, queries), keys, values, own, visible))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_block_mask_skips_blocks_that_nobody_sees_and_masks_none_that_all_see(case):
    visible = visible_of(case)
    if case == "causal":
        visible = Visible(LENGTH, visible.columns)
    dense, blocks = visible.dense, visible.blocks
    count = dense.shape[1]
    padded = F.pad(dense, (0, -LENGTH % BLOCK, 0, -count % BLOCK))
    tiles = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3)
    some, every = tiles.flatten(-2).any(-1), tiles.flatten(-2).all(-1)
    listed = []
    for numbers, indices in [
        (blocks.kv_num_blocks, blocks.kv_indices),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ]:
        first = torch.arange(indices.shape[-1]) < numbers.unsqueeze(-1)
        listed.append(torch.zeros_like(first).scatter(-1, indices.long(), first)[:, 0])
    masked, whole = listed
    assert not bool((masked & whole).any())
    assert bool((whole <= every).all())
    assert bool((some <= masked | whole).all())
    if case == "causal":
        assert torch.equal(whole, every)
        assert torch.equal(masked | whole, some)
    # blocks of documents that ended before this one begins are not looked at
    if case == "documents":
        assert not bool((masked | whole)[0, 2, 0])
        assert not bool(some[0, 2, 0])


def test_a_gpu_takes_flex_attention_where_its_kernels_can():
    assert GPU.flex
    assert without(dtype=torch.float32).flex
    refused = [{"device": "cpu"}, {"compiles": False}, {"width": 8}, {"dtype": torch.float64}]
    assert not any(without(**changed).flex for changed in refused)


@pytest.mark.parametrize(
    ("triton", "compiler", "compiles"),
    [(True, "gcc", True), (True, None, False), (False, "gcc", False)],
)
def test_a_kernel_needs_triton_and_a_c_compiler(triton, compiler, compiles, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(attention, "has_triton", lambda: triton)
    monkeypatch.setattr(attention.shutil, "which", lambda name: compiler)
    attention._compiles.cache_clear()
    said = contextlib.nullcontext() if compiles else pytest.warns(UserWarning, match="is installed")
    with said:
        assert Capability.here(torch.device("cuda"), torch.float32, 64).flex == compiles
    assert not Capability.here(torch.device("cpu"), torch.float32, 64).flex
    attention._compiles.cache_clear()


@torch.no_grad()
def test_few_queries_take_the_kernel_of_many(monkeypatch):
    """100 queries of two heads that share keys: torch 2.13 has no tile for them in the kernel that
    it would choose."""
    options = []

    def backend(graph, _):
        name = torch.ops.higher_order.flex_attention
        options.extend(node.args[6] for node in graph.graph.nodes if node.target is name)
        return graph.forward

    compiled = torch.compile(flex_attention, fullgraph=True, backend=backend)
    monkeypatch.setattr("target.attention._compiled", lambda: compiled)
    visible = Visible(100, torch.arange(100).unsqueeze(0))
    flex(torch.randn(1, 4, 100, 16), *torch.randn(2, 1, 2, 100, 16), visible.blocks)
    assert [one["BACKEND"] for one in options] == ["TRITON"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle3", "hydra"])
def test_a_heads_states_are_the_same_by_every_kernel(name, tiny_target):
    """Of packed texts, and with chosen columns."""
    target = tiny_target("llama", layers=4)
    torch.manual_seed(0)
    if name == "eagle3":
        drafter = build_eagle(target, Eagle3Settings([0, 2, 3], target.hidden_size))
    else:
        drafter = HydraDrafter.build(target, HydraSettings(prefix_layer=True))
    randomised(drafter)
    ids = torch.tensor(prompts_of([12, 12]))
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 9 + [-1] * 3])
    outputs = outputs_of(drafter, target, ids)
    columns = torch.zeros(2, 12, dtype=torch.bool)
    columns[0, 2:4], columns[1, 4:8] = True, True
    for chosen in (None, columns):
        for apart in (None, documents):
            found = []
            for kernel in KERNELS.values():
                with kernel():
                    text = Text(ids, columns=chosen, documents=apart)
                    states = drafter.states(text, outputs, 3)
                    found.append(torch.stack(list(states)))
            close(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, "few"])
def test_the_compiled_kernel_gives_sdpas_values_and_gradients(case):
    """Block lists are read by the compiled kernel alone."""
    visible = visible_of(case)
    there = Visible(
        LENGTH, visible.columns.cuda(),
        None if visible.documents is None else visible.documents.cuda(), window=visible.window,
    )  # fmt: skip
    torch.manual_seed(0)
    queries = torch.randn(2, 4, visible.columns.shape[1], 64)
    keys, values = torch.randn(2, 2, 2, LENGTH, 64)
    own = torch.randn(2, 2, 2, visible.columns.shape[1], 64)
    found = []
    for device, seen in (("cpu", visible), ("cuda", there)):
        inputs = [one.to(device).requires_grad_() for one in (queries, keys, values, *own)]
        mixed = attend_unrolled(*inputs[:3], [(inputs[3], inputs[4])], seen)
        gradients = torch.autograd.grad(mixed.square().sum(), inputs)
        found.append([one.cpu() for one in (mixed, *gradients)])
    for one, other in zip(*found, strict=True):  # products in TF32
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
