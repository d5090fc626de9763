"""What a step of decoding reads."""

from __future__ import annotations

import pytest
import torch

from drafters.hydra import HydraDrafter, HydraSettings
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.medusa2 import Medusa2Drafter
from eval.costs import read_per_round, read_per_step
from target.adapted import LoraSettings
from tests.eval.test_offline import drafter_of
from tests.helpers.tiny import VOCAB_SIZE, tiny_model


@pytest.mark.parametrize("sent", [1, 2])
def test_a_token_reads_the_experts_that_it_is_sent_to(sent, tiny_target):
    """As many as of a model that has no others, beside the router's rows."""
    layers, width, others = 2, 32, 62
    options = {"num_experts_per_tok": sent, "layers": layers, "width": width}
    many = tiny_model("qwen3_moe", num_experts=sent + others, **options)
    few = tiny_model("qwen3_moe", num_experts=sent, **options)
    router = layers * others * width
    assert read_per_step(many)[1] == pytest.approx(read_per_step(few)[1] + router)
    assert read_per_step(many)[0] == pytest.approx(4 * read_per_step(many)[1])
    target = tiny_target("llama")
    drafts = [drafter_of(model, target) for model in (many, few)]
    rounds = [read_per_round(drafter, 3)[1] for drafter in drafts]
    assert rounds[0] == pytest.approx(rounds[1] + 3 * router)


LAYER, MATRIX, ROWS = 32 * 32 + 32, VOCAB_SIZE * 32, 20  # parameters; rows of a reduced vocabulary
HEADS = {  # settings, and the parameters of a head and of what all heads share
    "own": (MedusaSettings(4), LAYER + MATRIX, 0),
    "reduced": (MedusaSettings(4), LAYER + ROWS * 32, 0),
    "shared": (MedusaSettings(4, own_head=False), LAYER, MATRIX),
    "deep": (MedusaSettings(4, 3, own_head=False), 3 * LAYER, MATRIX),
    "tied": (MedusaSettings(4, 3, own_head=False, tie_layers=True), LAYER, MATRIX),
}


@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize("kind", HEADS)
def test_one_pass_reads_the_heads_that_draft_and_a_shared_matrix_once(kind, depth, tiny_target):
    settings, head, shared = HEADS[kind]
    target = tiny_target("llama")
    kept = torch.arange(ROWS) if kind == "reduced" else None
    drafter = MedusaDrafter.build(target, settings, kept)
    adapted = Medusa2Drafter.adapt(drafter, LoraSettings(2))
    for one in (drafter, adapted):  # an adapter is the target's
        assert read_per_round(one, depth) == (4 * (depth * head + shared), depth * head + shared)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_head_that_reads_drafted_tokens_reads_a_shared_matrix_for_each(depth, tiny_target):
    drafter = HydraDrafter.build(tiny_target("llama"), HydraSettings(4, shared_lm_head=True))
    own = sum(p.numel() for p in drafter.parameters())
    assert read_per_round(drafter, depth)[1] == pytest.approx(own * depth / 4 + MATRIX * depth)
