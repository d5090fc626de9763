"""A frozen target reads rows of several texts without a dense mask where a GPU allows it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.heads import close
from tests.kernels import chosen_as_on_a_gpu
from tests.tiny import prompts_of

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
    assert target.model.config._attn_implementation == "sdpa"


def test_a_model_with_windows_keeps_transformers_masks(tiny_target):
    target = tiny_target("mistral", layers=2)  # a window of 12 tokens
    ids, positions = torch.tensor(prompts_of([24])), torch.arange(24).unsqueeze(0) % 20
    wanted = target.outputs(ids, positions, layers=("final_norm",), logits=False).hidden
    with chosen_as_on_a_gpu():
        states = target.outputs(ids, positions, layers=("final_norm",), logits=False).hidden
    close(states["final_norm"], wanted["final_norm"])
