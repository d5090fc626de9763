"""A frozen target reads rows of several texts without a dense mask where a GPU allows it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.llama.modeling_llama import LlamaAttention

from drafters.causal_lm import CausalLMDrafter
from drafters.text import Text
from target.attention import Capability, packed
from target.cache import CachedModel
from target.nodes import place_tree
from tests.helpers.heads import close
from tests.helpers.kernels import GPU, chosen_as_on_a_gpu
from tests.helpers.tiny import prompts_of, tiny_model
from tests.helpers.watch import Watch

IDS = torch.tensor(prompts_of([12, 12]))
ONE = torch.arange(12).expand(2, -1)
SEVERAL = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2], [*range(9), 0, 1, 2]])


def read(target, positions):
    """States on a GPU's kernels; and the masks that the layers were given."""
    masks = []
    hooks = [
        module.register_forward_pre_hook(
            lambda own, args, given: masks.append(given["attention_mask"]), with_kwargs=True
        )
        for module in target.model.modules()
        if isinstance(module, LlamaAttention)
    ]
    with chosen_as_on_a_gpu():
        states = target.outputs(IDS, positions, layers=(1, "final_norm"), logits=False).hidden
    for hook in hooks:
        hook.remove()
    return states, masks


@pytest.mark.parametrize("positions", [SEVERAL, ONE], ids=["several", "one"])
def test_states_of_rows_are_those_of_the_dense_mask(positions, tiny_target):
    target = tiny_target("llama", layers=2)
    wanted = target.outputs(IDS, positions, layers=(1, "final_norm"), logits=False).hidden
    states, masks = read(target, positions)
    for layer, one in states.items():
        close(one, wanted[layer])
    assert len(masks) == 2
    several = positions is SEVERAL
    assert all(isinstance(mask, BlockMask) if several else mask is None for mask in masks)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("arch", ["mistral", "gemma3"])
def test_windows_are_block_masks_too(arch, several, tiny_target, monkeypatch):
    """Of 12 and 16 tokens; blocks of keys before a window, behind a query or of another text are
    not computed."""
    monkeypatch.setattr("target.attention.BLOCK", 8)
    target = tiny_target(arch, layers=2)
    ids, positions = torch.tensor(prompts_of([61])), torch.arange(61).unsqueeze(0)
    if several:
        positions = positions % 40
    wanted = target.outputs(ids, positions, layers=("final_norm",), logits=False).hidden
    with chosen_as_on_a_gpu():
        given = packed(target.model, positions)["attention_mask"]
        states = target.outputs(ids, positions, layers=("final_norm",), logits=False).hidden
    close(states["final_norm"], wanted["final_norm"])
    masks = given if isinstance(given, dict) else {"sliding_attention": given}
    assert isinstance(masks["sliding_attention"], BlockMask)
    assert masks["sliding_attention"].sparsity() > 60
    if arch == "gemma3":
        assert isinstance(masks["full_attention"], BlockMask) is several


def test_a_window_as_long_as_the_row_needs_no_mask(tiny_target):
    target = tiny_target("mistral", layers=2)
    with chosen_as_on_a_gpu():
        assert packed(target.model, torch.arange(12).unsqueeze(0)) == {}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_causal_lm_trains_on_packed_rows_as_with_the_dense_mask(checkpointed, tiny_target):
    """Also where activations are computed again in the backward pass."""
    target = tiny_target("llama", layers=2)
    drafter = CausalLMDrafter.from_target(target, num_layers=2, hidden_size=32)
    if checkpointed:
        drafter.gradient_checkpointing_enable()
    drafter.double()  # in float32 rounding hides what differs
    gradients = []
    for kernel in (contextlib.nullcontext, chosen_as_on_a_gpu):
        drafter.zero_grad()
        with kernel():
            next(drafter.states(Text(IDS, SEVERAL), None, 1)).square().sum().backward()
        gradients.append([p.grad for p in drafter.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_attention_with_dropout_keeps_transformers_masks(tiny_target):
    target = tiny_target("llama", layers=2)
    config = target.model.config
    with chosen_as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "attention_dropout", 0.1)
        assert "attention_mask" in packed(target.model, SEVERAL)
        patch.setattr(target.model, "training", True)
        assert "attention_mask" not in packed(target.model, SEVERAL)


@pytest.mark.parametrize("tree", [False, True])
@torch.no_grad()
def test_a_cache_is_read_once_for_the_heads_that_share_it(tree, monkeypatch):
    """Of two groups of keys for four heads; transformers repeats keys and values for each head."""
    monkeypatch.delenv("TRANSFORMERS_SDPA_FORCE_GQA", raising=False)  # a CPU's, of target.layout
    cached = CachedModel(tiny_model("llama"))
    ids, lengths = torch.tensor(prompts_of([20, 20])), torch.tensor([20, 13])
    siblings = torch.eye(3, dtype=torch.bool).expand(2, -1, -1)
    nodes = place_tree(lengths, siblings, torch.ones(2, 3, dtype=torch.long))
    positions = nodes.positions if tree else lengths.unsqueeze(1) + torch.arange(4)
    later = torch.tensor(prompts_of([4, 4]))

    def logits():
        cached.begin(2, 64)
        cached.forward(ids, torch.arange(20).expand(2, -1), used=20, first=0)
        with Watch() as watch:
            found = cached.forward(later, positions, used=24, tree=nodes if tree else None)
        return found, [s for s in watch.shapes if len(s) == 4 and s[1:3] == (4, 32)]

    wanted, repeated = logits()
    monkeypatch.setattr(Capability, "here", lambda *where: GPU)
    found, left = logits()
    close(found, wanted)
    assert repeated
    assert not left
