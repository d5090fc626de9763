"""Medusa's heads: the target's own predictor when fresh, and what they draft is what they train."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from drafters.hydra import HydraDrafter, HydraSettings
from drafters.medusa import MedusaDrafter, MedusaSettings
from drafters.round import Budget, Drafter
from drafters.text import Text
from drafters.trees.copy import CopyOrDraft
from drafters.trees.dynamic import DynamicTree
from eval.policies.table import make_budget
from target.model import Target
from tests.helpers.heads import (
    BUSHY,
    assert_branches_follow_the_unroll,
    assert_causal,
    assert_drafts_kept_tokens_only,
    assert_gradients_reach_everything,
    assert_greedy_text_is_the_targets,
    assert_one_token_prompts_begin,
    assert_rounds_follow_the_unroll,
    assert_starts_before_the_text_are_zero,
    assert_stored_whole,
    assert_target_is_not_part_of,
    close,
    fitted,
    outputs_of,
    prefilled,
    randomised,
    state_of,
)
from tests.helpers.tiny import VOCAB_SIZE, prompts_of, save_tiny, tiny_model, tiny_tokenizer
from trainer.errors import UserError
from trainer.shift import supervised

K = 4
KINDS = {
    "own": MedusaSettings(K),
    "shared": MedusaSettings(K, own_head=False),
    "deep": MedusaSettings(K, 3, own_head=False),
    "tied": MedusaSettings(K, 3, tie_layers=True),
    "head alone": MedusaSettings(K, 0),
    "kept": MedusaSettings(K),
}
KEPT = torch.tensor([token for token in range(VOCAB_SIZE) if token % 3])


def made(target, kind="own") -> MedusaDrafter:
    torch.manual_seed(0)
    return MedusaDrafter.build(target, KINDS[kind], KEPT if kind == "kept" else None)


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama")


# --- a fresh head is the target's predictor of the next token -------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_padded", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_scores_as_the_target_did_before_the_round(kind, name, tiny_target):
    """Index i at depth j must hold the target's logits of index i - j, for any off-by-one shows."""
    target = tiny_target(name)
    drafter = made(target, kind)
    assert isinstance(drafter, Drafter)
    ids = torch.tensor(prompts_of([14, 14]))
    whole = target.outputs(ids, layers=("final_norm",))
    for depth in range(1, K + 1):
        with torch.no_grad():
            logits = drafter.draft_logits(ids, whole, depth)
        assert logits.shape == (2, 14, VOCAB_SIZE)
        scored = slice(None) if drafter.kept is None else drafter.kept
        close(logits[:, depth:, scored], whole.logits[:, :-depth, :VOCAB_SIZE][..., scored], 1e-4)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_the_loss_of_a_fresh_head_is_that_of_the_targets_law_on_a_later_token(kind, target):
    drafter = made(target, kind)
    ids = torch.tensor(prompts_of([14, 14]))
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 5:12], mask[1, 3:] = True, True
    outputs = target.outputs(ids, layers=("final_norm",))
    law = outputs.logits.log_softmax(-1)
    for depth, states in enumerate(drafter.states(Text(ids), outputs, K), start=1):
        rows, index = supervised(mask, depth).nonzero(as_tuple=True)
        logits = drafter.output_head(depth).logits(states[rows, index])
        loss = F.cross_entropy(logits, ids[rows, index + 1])
        pairs = [
            (row, t)  # x_{t+1} is the response's and committed, x_{t+1+depth} is drafted
            for row in range(2)
            for t in range(14 - 1 - depth)
            if mask[row, t + 1] and mask[row, t + 1 + depth]
        ]
        wanted = -sum(law[row, t, ids[row, t + 1 + depth]] for row, t in pairs) / len(pairs)
        close(loss.detach(), wanted)


def test_a_head_of_a_scaled_and_capped_target_ends_as_the_targets_does():
    for model in (
        tiny_model("gemma3", final_logit_softcapping=3.0),
        tiny_model("llama", std=0.25),
    ):
        target = Target(model.requires_grad_(False), tiny_tokenizer(), "tiny", {}, (0,))
        drafter = made(target)
        ids = torch.tensor(prompts_of([9]))
        whole = target.outputs(ids, layers=("final_norm",))
        with torch.no_grad():
            close(drafter.draft_logits(ids, whole, 2)[:, 2:], whole.logits[:, :-2], 1e-4)


# --- what is drafted is what is trained ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_branches_follow_the_unroll(kind, target):
    drafter = randomised(made(target, kind))
    assert_rounds_follow_the_unroll(drafter, target, K)
    assert_branches_follow_the_unroll(drafter, target)
    assert_one_token_prompts_begin(drafter, target)


def test_a_reduced_vocabulary_is_all_that_is_drafted(target):
    assert_drafts_kept_tokens_only(randomised(made(target, "kept")), target, KEPT, K)


def test_heads_know_neither_the_future_nor_each_others_tokens(target):
    drafter = randomised(made(target))
    assert_causal(drafter, target, K)
    assert_starts_before_the_text_are_zero(drafter, target, K)
    texts = prompts_of([12])
    ids = torch.tensor(texts)
    outputs = outputs_of(drafter, target, ids)
    drafter.start(state_of(ids, [8], outputs), Budget(K))
    children = drafter.extend(torch.tensor([[5, 60, 99]]), torch.full((1, 3), -1), 1)
    assert children.shape == (1, 3, VOCAB_SIZE)
    assert torch.equal(children[:, 0], children[:, 2])


@torch.inference_mode()
def test_a_shorter_round_asks_fewer_heads(target):
    drafter = randomised(made(target))
    texts = prompts_of([12])
    ids = torch.tensor(texts)
    outputs = outputs_of(drafter, target, ids)
    full = drafter.propose(state_of(ids, [8], outputs), Budget(K))
    short = drafter.propose(state_of(ids, [8], outputs), Budget(2))
    assert torch.equal(short.tokens, full.tokens[:, :2])
    assert (full.draft_tokens, drafter.start_width) == (K, 1)
    best = [drafter.draft_logits(ids, outputs, d)[0, 6 + d].argmax() for d in range(1, K + 1)]
    assert full.tokens[0].tolist() == [int(token) for token in best]


@torch.inference_mode()
@pytest.mark.parametrize(
    "budget",
    [
        Budget(3),
        make_budget("product:0.999", 3),
        Budget.of(BUSHY),
        Budget.of(DynamicTree(12, 3, 4)),
        Budget.of(CopyOrDraft(2, 8, 3)),
    ],
    ids=["chain", "stop", "static", "dynamic", "copy"],
)
def test_a_round_of_any_shape_is_one_forward(budget, target):
    ids = torch.tensor(prompts_of([12]))
    for one, forwards in ((made(target), 1), (HydraDrafter.build(target, HydraSettings(3)), 3)):
        drafter, outputs = randomised(one), outputs_of(one, target, ids)
        prefilled(drafter, target, ids.tolist(), [7])
        if budget.stop is not None:
            budget.stop.begin(1, ids.device)
            forwards = 1  # the rule stops after the first token
        assert drafter.propose(state_of(ids, [8], outputs), budget).draft_forwards == forwards


@torch.inference_mode()
def test_states_of_half_precision_are_taken(target):
    drafter = randomised(made(target, "shared"))
    ids = torch.tensor(prompts_of([9]))
    outputs = outputs_of(drafter, target, ids)
    plain = drafter.draft_logits(ids, outputs, 2)
    outputs.hidden = {k: v.bfloat16() for k, v in outputs.hidden.items()}
    half = drafter.draft_logits(ids, outputs, 2)
    assert half.dtype == torch.float32
    close(half, plain, 0.3)
    prefilled(drafter, target, ids.tolist(), [5])
    assert drafter.start(state_of(ids, [6], outputs), Budget(2)).dtype == torch.float32


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "shared", "kept"])
def test_greedy_decoding_gives_the_targets_text(kind, target):
    drafter = fitted(made(target, kind), target, K)
    accepted = assert_greedy_text_is_the_targets(drafter, target, Budget(3))
    assert {0, 1} < set(accepted), "the heads must be right and wrong"
    for shape in (BUSHY, DynamicTree(12, 3, 4)):
        budget = Budget(3, tree=shape)
        with_tree = assert_greedy_text_is_the_targets(drafter, target, budget)
        assert sum(with_tree) / len(with_tree) > sum(accepted) / len(accepted)


# --- parameters, storage, errors ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_heads_own_weights_are_trained(kind, target):
    drafter = randomised(made(target, kind), 0.1)
    assert_target_is_not_part_of(drafter, target)
    assert_gradients_reach_everything(drafter, target, K)


def test_own_heads_are_copies_and_shared_ones_the_targets(tiny_target):
    target = tiny_target("llama_tied")
    assert all("lm_heads" not in name for name in made(target, "shared").state_dict())
    shared = made(target, "shared").output_head(2)
    assert shared.weight.data_ptr() == target.head.weight.data_ptr()
    assert not shared.weight.requires_grad
    drafter = made(target)
    before = target.head.weight.clone()
    first, second = (drafter.output_head(depth).weight for depth in (1, 2))
    assert torch.equal(first, before)
    with torch.no_grad():
        first.zero_()
    assert torch.equal(second, before)
    assert torch.equal(target.head.weight, before)


def test_tied_layers_are_one_module_and_others_are_not(target):
    tied, plain = made(target, "tied"), made(target, "deep")
    for block in tied.blocks:
        assert len(block.layers) == 3
        assert block.layers[0] is block.layers[1] is block.layers[2]
    assert tied.blocks[0].layers[0] is not tied.blocks[1].layers[0]
    layers = [layer for block in plain.blocks for layer in block.layers]
    assert len({id(layer) for layer in layers}) == 3 * K
    names = list(plain.state_dict())
    assert names[:2] == ["blocks.0.layers.0.weight", "blocks.0.layers.0.bias"]
    assert list(tied.state_dict())[-1] == f"lm_heads.{K - 1}.weight"
    assert plain.num_parameters == 3 * K * (32 * 32 + 32)
    assert tied.num_parameters == K * (32 * 32 + 32 + VOCAB_SIZE * 32)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_heads_load_as_they_were(kind, target, tmp_path):
    drafter = randomised(made(target, kind))
    assert_stored_whole(drafter, target, tmp_path)
    if kind == "kept":
        assert torch.equal(MedusaDrafter.from_pretrained(tmp_path, target).kept, KEPT)
    if kind == "tied":
        again = MedusaDrafter.from_pretrained(tmp_path, target)
        assert again.blocks[0].layers[0] is again.blocks[0].layers[2]


def test_heads_of_another_target_are_refused(target, tiny_target, tmp_path):
    made(target).save_pretrained(tmp_path / "draft")
    other = Target.load(str(save_tiny(tmp_path / "other", "llama", seed=5)))
    with pytest.raises(UserError, match=r"another target \(weights differ\)"):
        MedusaDrafter.from_pretrained(tmp_path / "draft", other)


def test_weights_that_are_not_those_described_are_refused(target, tmp_path):
    made(target).save_pretrained(tmp_path)
    about = json.loads((tmp_path / "drafter.json").read_text())
    about["settings"]["num_layers"] = 2
    (tmp_path / "drafter.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"disagree \(.*blocks\.0\.layers\.1\.weight"):
        MedusaDrafter.from_pretrained(tmp_path, target)


def test_a_stored_vocabulary_that_is_not_the_matrices_is_refused(target, tmp_path):
    made(target, "kept").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"kept": KEPT[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"disagree \(.*lm_heads\.0\.weight"):
        MedusaDrafter.from_pretrained(tmp_path, target)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_heads": 0}, r"method\.num_heads must be >= 1, got 0"),
        ({"num_layers": -1}, r"method\.num_layers must be >= 0, got -1"),
        ({"num_layers": 0, "own_head": False}, r"method\.num_layers must be >= 1 where"),
    ],
)
def test_settings_that_make_no_head_are_refused(changed, message):
    with pytest.raises(UserError, match=message):
        MedusaSettings(**changed)
