"""Two processes that read texts together get the states and the gradients of one."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from drafters.causal_lm import CausalLMDrafter
from drafters.text import Text
from phases.exits import end
from target import shared_text
from target.masks import LayerMasks
from target.model import Target
from target.shared_text import TextGroup, can_share
from tests.helpers.commands import FOUR, TWO, finish, start
from tests.helpers.kernels import chosen_as_on_a_gpu
from trainer.errors import UserError

LENGTH = 33  # no whole number of blocks
LAYERS = (0, "final_norm")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "phi3", "mistral", "gemma3"])
def test_processes_that_share_a_text_read_what_one_reads(arch, tiny_folder):
    code, _, err = finish(
        start(*TWO, "-m", "tests.target.test_shared_text", str(tiny_folder(arch)))
    )
    assert code == 0, err[-3000:]


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("blocks", [1, 7, 24])
def test_every_column_has_one_owner_and_blocks_are_dealt_back_and_forth(parts, blocks):
    length = blocks * shared_text.BLOCK - 3
    groups = [TextGroup(part, parts) for part in range(parts)]
    assert torch.stack([group.owns(length) for group in groups]).sum(0).eq(1).all()
    ids = torch.arange(length).unsqueeze(0)
    masks = LayerMasks(("full_attention",), False, None)
    read = [group.reading(ids, None).arguments(masks)["input_ids"] for group in groups]
    assert len({one.shape for one in read}) == 1
    joined = torch.cat([group.reading(ids, None).columns for group in groups])
    assert torch.equal(joined[groups[0].reading(ids, None).places], ids[0])
    if blocks == 24 and parts == 3:  # as many keys for each
        keys = [int(one.sum()) for one in read]
        assert max(keys) - min(keys) < 0.02 * max(keys)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_from_the_length_are_not_shared(kind, tiny_target, monkeypatch):
    target = tiny_target("llama")
    assert can_share(target.model)
    rotary = {"rope_type": kind, "rope_theta": 1e4}
    monkeypatch.setattr(target.model.config, "rope_parameters", rotary)
    assert not can_share(target.model)
    with pytest.raises(UserError, match="must be 1 for the target, got 2"):
        TextGroup(0, 2).check(target.model, "the target")


def test_a_draft_model_with_dropout_is_refused(tiny_target, monkeypatch):
    target = tiny_target("llama")
    monkeypatch.setattr(target.model.config, "attention_dropout", 0.1)
    with pytest.raises(UserError, match="without dropout"):
        TextGroup(0, 2).check(target.model, "the drafter", trains=True)
    assert not target.model.training


@pytest.mark.slow
def test_each_of_four_processes_is_in_one_group_of_two():
    code, _, err = finish(start(*FOUR, "-m", "tests.target.test_shared_text"))
    assert code == 0, err[-3000:]


def pair(words: list[str]) -> int:
    """One of the four."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = TextGroup.here(rank, 4, 2)
    ids = torch.zeros(1, 3 * shared_text.BLOCK, dtype=torch.long)
    reading = group.reading(ids, None)
    own = torch.full((1, len(reading.columns)), float(rank))
    first = rank // 2 * 2
    assert group.part == rank - first
    # the first block, then two of the other process
    expected = first + torch.tensor([0.0, 1, 1]).repeat_interleave(shared_text.BLOCK)
    assert torch.equal(reading.whole(own)[0], expected)
    return 0


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    exact = one.dtype == torch.float64
    torch.testing.assert_close(
        one, other, rtol=1e-8 if exact else 1e-4, atol=1e-8 if exact else 1e-4
    )


def read(words: list[str]) -> int:
    """One of the two processes."""
    [folder] = words
    dist.init_process_group("gloo")
    shared_text.BLOCK = 5
    group = TextGroup.here(dist.get_rank(), 2, 2)
    target = Target.load(folder)
    group.check(target.model, "the target")
    ids = (torch.arange(2 * LENGTH) * 7 % 97).view(2, LENGTH)
    several = torch.arange(LENGTH).repeat(2, 1)
    several[0, 17:] -= 17
    for positions, kernel in itertools.product((None, several), (nullcontext, chosen_as_on_a_gpu)):
        whole = target.outputs(ids, positions, layers=LAYERS, logits=False)
        with kernel():
            mine = target.outputs(ids, positions, layers=LAYERS, project_later=True, group=group)
        for layer in LAYERS:
            close(mine.hidden[layer], whole.hidden[layer])
        assert mine.logits is not None

    torch.manual_seed(0)  # the same weights on both
    drafter = CausalLMDrafter.from_target(target, num_layers=2, hidden_size=32)
    if not folder.endswith(("moe", "gemma3")):  # experts and norms are not computed in float64
        drafter.double()
    weights = torch.randn(2, LENGTH, 32, dtype=next(drafter.parameters()).dtype)
    own = group.owns(LENGTH)
    for checkpointed in (False, True):
        if checkpointed:
            drafter.gradient_checkpointing_enable()
        gradients = []
        for given, columns in (({}, slice(None)), ({"group": group}, own)):
            drafter.zero_grad()
            states = next(drafter.states(Text(ids, several, **given), None, 1))
            (states * weights)[:, columns].sum().backward()
            gradients.append([p.grad for p in drafter.parameters() if p.grad is not None])
        for one, part in zip(*gradients, strict=True):
            dist.all_reduce(part)
            close(part, one)

    broken = target.model.model.layers[0].self_attn
    broken.register_forward_hook(lambda own, args, out: (out[0].cumsum(1), *out[1:]))
    with pytest.raises(UserError, match="computes other states where 2 processes share a text"):
        group.check(target.model, "the target")
    return 0


if __name__ == "__main__":
    end(read if len(sys.argv) > 1 else pair)
