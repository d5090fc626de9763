"""Hydra's heads: grounded in the tokens before theirs, with and without a layer over the prefix."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaModel

from drafters.hydra import HydraDrafter, HydraSettings, prefix_config
from drafters.round import Budget, Drafter
from drafters.text import Text
from drafters.trees.dynamic import DynamicTree
from target.model import Target
from target.outputs import TargetOutputs
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
from tests.helpers.tiny import VOCAB_SIZE, prompts_of, save_tiny, tiny_model
from trainer.errors import UserError

K = 4
KINDS = {
    "plain": HydraSettings(K),
    "deep": HydraSettings(K, 3, shared_lm_head=True),
    "tied": HydraSettings(K, 4, tie_layers=True, dropout=0.1),
    "random": HydraSettings(K, identity_residual=False),
    "prefix": HydraSettings(K, prefix_layer=True),
    "plus plus": HydraSettings(K, 4, prefix_layer=True, dropout=0.2, shared_lm_head=True),
    "kept": HydraSettings(K, prefix_layer=True),
}
KEPT = torch.tensor([token for token in range(VOCAB_SIZE) if token % 3])


def made(target, kind="plain") -> HydraDrafter:
    torch.manual_seed(0)
    return HydraDrafter.build(target, KINDS[kind], KEPT if kind == "kept" else None).eval()


@pytest.fixture
def target(tiny_target):
    return tiny_target("llama")


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_padded", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", ["plain", "deep", "tied"])
def test_a_fresh_head_scores_as_the_target_did_before_the_round(kind, name, tiny_target):
    target = tiny_target(name)
    drafter = made(target, kind)
    assert isinstance(drafter, Drafter)
    ids = torch.tensor(prompts_of([14, 14]))
    whole = target.outputs(ids, layers=("final_norm",))
    for depth in range(1, K + 1):
        with torch.no_grad():
            logits = drafter.draft_logits(ids, whole, depth)
        assert logits.shape == (2, 14, VOCAB_SIZE)
        close(logits[:, depth:], whole.logits[:, :-depth, :VOCAB_SIZE], 1e-4)


def test_a_head_is_the_formula_column_by_column(target):
    """Written out from the paper: which embeddings, in which order, and where the result goes."""
    drafter = randomised(made(target, "deep"))
    ids = torch.tensor(prompts_of([9, 9]))
    outputs = outputs_of(drafter, target, ids)
    silu = torch.nn.functional.silu
    table = target.model.get_input_embeddings().weight
    with torch.no_grad():
        for depth, states in enumerate(drafter.states(Text(ids), outputs, K), start=1):
            head = drafter.heads[depth - 1]
            for row in range(2):
                for t in range(9 - depth):
                    tokens = [table[ids[row, t + 1 + i]] for i in range(depth)]
                    u = torch.cat([outputs.hidden["final_norm"][row, t], *tokens])
                    r = head.residual.weight @ u + head.residual.bias
                    r = r + silu(head.first.weight @ u + head.first.bias)
                    for layer in head.layers:
                        r = r + silu(layer.weight @ r + layer.bias)
                    close(states[row, t + depth], r)


def test_the_residual_starts_as_the_identity_on_the_state_or_at_random(target):
    head = made(target).heads[2]
    assert torch.equal(head.residual.weight[:, :32], torch.eye(32))
    assert not bool(head.residual.weight[:, 32:].any())
    assert not bool(head.residual.bias.any())
    other = made(target, "random").heads[2]
    assert bool(other.residual.weight[:, 32:].any())
    for one in (head, other):
        assert not bool(one.first.weight.any())
        assert not bool(one.first.bias.any())


@torch.no_grad()
def test_the_prefix_layer_is_a_llama_of_one_layer(target):
    prefix = randomised(made(target, "prefix")).prefix
    config = prefix_config(target)
    config._attn_implementation = "sdpa"
    theirs = LlamaModel(config)
    weights = {"embed_tokens.weight": theirs.embed_tokens.weight}
    for name, tensor in prefix.state_dict().items():
        if name.startswith("layer.") and "_proj" in name and "mlp" not in name:
            name = name.replace("layer.", "layers.0.self_attn.")
        elif name.startswith("layer."):
            name = name.replace("layer.", "layers.0.", 1)
        elif name.startswith("input"):
            name = f"layers.0.{name}"
        weights[name] = tensor
    theirs.load_state_dict(weights)
    hidden, positions = torch.randn(2, 9, 32), torch.arange(4, 13).expand(2, -1)
    wanted = theirs(inputs_embeds=hidden, position_ids=positions, use_cache=False)
    close(prefix(hidden, positions), wanted.last_hidden_state)


@pytest.mark.parametrize("kind", ["plain", "prefix"])
def test_without_embeddings_every_head_scores_otherwise(kind, target):
    """Zeroing what the target's embedding module gives, not its weight: the module is asked."""
    drafter = randomised(made(target, kind))
    ids = torch.tensor(prompts_of([12]))
    outputs = outputs_of(drafter, target, ids)

    def laws():
        with torch.no_grad():
            return [drafter.draft_logits(ids, outputs, depth) for depth in range(1, K + 1)]

    plain = laws()
    handle = target.embedding.register_forward_hook(lambda *_: torch.zeros(1, 12, 32))
    grounded = laws()
    handle.remove()
    for depth, (with_tokens, without) in enumerate(zip(plain, grounded, strict=True), start=1):
        assert bool(((with_tokens - without)[:, depth:].abs().amax(-1) > 1e-2).all())


# --- what is drafted is what is trained ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_branches_follow_the_unroll(kind, target):
    drafter = randomised(made(target, kind))
    assert_rounds_follow_the_unroll(drafter, target, K)
    assert_branches_follow_the_unroll(drafter, target)
    assert_one_token_prompts_begin(drafter, target)


def test_a_reduced_vocabulary_is_all_that_is_drafted(target):
    drafter = made(target, "kept")
    assert torch.equal(drafter.output_head(2).weight, target.head.weight[KEPT])
    assert_drafts_kept_tokens_only(randomised(drafter), target, KEPT, K)


def test_the_prefix_layer_of_other_families_drafts_what_it_trains(tiny_target):
    for name in ("qwen3", "gemma3"):
        target = tiny_target(name)
        drafter = randomised(made(target, "prefix"))
        assert_rounds_follow_the_unroll(drafter, target, 3)
        assert_branches_follow_the_unroll(drafter, target)


@pytest.mark.parametrize("kind", ["plain", "prefix"])
def test_heads_know_the_past_and_their_own_path_only(kind, target):
    drafter = randomised(made(target, kind))
    assert_causal(drafter, target, K)
    assert_starts_before_the_text_are_zero(drafter, target, K)
    ids = torch.tensor(prompts_of([12]))
    outputs = outputs_of(drafter, target, ids)
    plain = drafter.draft_logits(ids, outputs, 3)
    for back, known in ((0, True), (1, True), (2, True), (3, False)):
        # tokens 7..9 ground the head of depth 3 that scores token 10
        changed = ids.clone()
        changed[:, 9 - back] += 1
        moved = drafter.draft_logits(changed, outputs, 3)
        assert bool((moved[:, 9] - plain[:, 9]).abs().amax() > 1e-3) == known


@torch.inference_mode()
def test_the_prefix_layer_alone_carries_what_lies_further_back(target):
    ids = torch.tensor(prompts_of([12]))
    for kind, reaches in (("plain", False), ("prefix", True)):
        drafter = randomised(made(target, kind))
        outputs = outputs_of(drafter, target, ids)
        plain = drafter.draft_logits(ids, outputs, 2)
        hidden = outputs.hidden["final_norm"].clone()
        hidden[:, 1] += 1.0
        moved = drafter.draft_logits(ids, TargetOutputs({"final_norm": hidden}), 2)
        assert bool((moved[:, 10] - plain[:, 10]).abs().amax() > 1e-3) == reaches
        # and its cache holds committed text only: as many slots as positions with known states
        prefilled(drafter, target, ids.tolist(), [5])
        drafter.propose(state_of(ids, [6], outputs), Budget(3))
        if reaches:
            assert drafter._slots.keys is not None
            used = drafter._slots.keys.abs().sum((0, 1, 3)).nonzero()[:, 0]
            assert used.tolist() == [0, 1, 2, 3, 4]
            assert drafter.start_width == 4
        else:
            assert drafter.start_width == 1


@torch.inference_mode()
def test_a_given_numbering_of_positions_is_followed(target):
    """Rotary positions are relative: a common offset changes nothing, a gap does."""
    drafter = randomised(made(target, "prefix"))
    ids = torch.tensor(prompts_of([10]))
    outputs = outputs_of(drafter, target, ids)
    positions = torch.arange(10).unsqueeze(0)
    plain = next(drafter.states(Text(ids), outputs, 1))
    close(next(drafter.states(Text(ids, positions + 7), outputs, 1)), plain, 1e-4)
    gap = positions + 5 * (positions > 3)
    moved = next(drafter.states(Text(ids, gap), outputs, 1))
    close(moved[:, :4], plain[:, :4])
    assert bool((moved[:, 6:] - plain[:, 6:]).abs().amax() > 1e-3)


@torch.inference_mode()
def test_states_of_half_precision_are_taken(target):
    for kind in ("plain", "plus plus"):
        drafter = randomised(made(target, kind), 0.1)
        ids = torch.tensor(prompts_of([9]))
        outputs = outputs_of(drafter, target, ids)
        plain = drafter.draft_logits(ids, outputs, 2)
        outputs.hidden = {k: v.bfloat16() for k, v in outputs.hidden.items()}
        half = drafter.draft_logits(ids, outputs, 2)
        assert half.dtype == torch.float32
        close(half, plain, 0.2)
        prefilled(drafter, target, ids.tolist(), [5])
        assert drafter.start(state_of(ids, [6], outputs), Budget(2)).dtype == torch.float32


def test_dropout_is_of_training_alone(target):
    drafter = randomised(made(target, "plus plus"))
    ids = torch.tensor(prompts_of([12]))
    outputs = outputs_of(drafter, target, ids)

    def once():
        return [states.detach() for states in drafter.states(Text(ids), outputs, K)]

    def same():
        return [torch.equal(a, b) for a, b in zip(once(), once(), strict=True)]

    assert all(same())
    drafter.train()
    assert not any(same())
    last = torch.cat([states[:, depth:].flatten() for depth, states in enumerate(once(), 1)])
    assert 0.1 < float((last == 0).float().mean()) < 0.3  # the one before the output matrix
    drafter = randomised(made(target, "prefix")).train()
    assert all(same())


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "prefix", "kept"])
def test_greedy_decoding_gives_the_targets_text(kind, target):
    drafter = fitted(made(target, kind), target, K)
    accepted = assert_greedy_text_is_the_targets(drafter, target, Budget(3))
    often = {0, 1} if kind == "kept" else {0, 1, 3}
    assert often < set(accepted), "the heads must be right and wrong"
    for shape in (BUSHY, DynamicTree(12, 3, 4)):
        budget = Budget(3, tree=shape)
        with_tree = assert_greedy_text_is_the_targets(drafter, target, budget)
        assert sum(with_tree) / len(with_tree) > sum(accepted) / len(accepted)


# --- parameters, storage, errors ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_drafters_own_weights_are_trained(kind, target):
    drafter = randomised(made(target, kind), 0.1)
    assert_target_is_not_part_of(drafter, target)
    assert_gradients_reach_everything(drafter, target, K)


def test_own_heads_start_as_copies_with_a_bias_of_zero(tiny_target):
    target = tiny_target("llama_tied")
    shared = made(target, "deep")
    assert not any("lm_heads" in name for name in shared.state_dict())
    assert shared.output_head(3).weight.data_ptr() == target.head.weight.data_ptr()
    assert not shared.output_head(3).weight.requires_grad
    drafter = made(target)
    before = target.head.weight.clone()
    first, second = drafter.output_head(1), drafter.output_head(2)
    assert torch.equal(first.weight, before)
    assert first.bias is not None
    assert not bool(first.bias.any())
    with torch.no_grad():
        first.weight.zero_()
    assert torch.equal(second.weight, before)
    assert torch.equal(target.head.weight, before)


def test_tied_layers_are_one_module_and_others_are_not(target):
    tied, plain = made(target, "tied"), made(target, "deep")
    for head in tied.heads:
        assert len(head.layers) == 3
        assert head.layers[0] is head.layers[1] is head.layers[2]
    assert tied.heads[0].layers[0] is not tied.heads[1].layers[0]
    assert len({id(layer) for head in plain.heads for layer in head.layers}) == 2 * K
    # the count of the paper: 2 (i + 2) d^2 + 2 d + (n - 1) (d^2 + d) for head i = 0..H-1
    d = 32
    firsts = sum(2 * (i + 2) * d * d + 2 * d for i in range(K))
    assert plain.num_parameters == firsts + K * 2 * (d * d + d)
    assert tied.num_parameters == firsts + K * (d * d + d) + K * (VOCAB_SIZE * d + VOCAB_SIZE)
    assert [name for name in plain.state_dict() if name.startswith("heads.1.")] == [
        "heads.1.layers.0.weight",
        "heads.1.layers.0.bias",
        "heads.1.layers.1.weight",
        "heads.1.layers.1.bias",
        "heads.1.first.weight",
        "heads.1.first.bias",
        "heads.1.residual.weight",
        "heads.1.residual.bias",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_stored_heads_load_as_they_were(kind, target, tmp_path):
    assert_stored_whole(randomised(made(target, kind)), target, tmp_path)


def test_heads_of_another_target_are_refused(target, tmp_path):
    made(target).save_pretrained(tmp_path / "draft")
    other = Target.load(str(save_tiny(tmp_path / "other", "llama", seed=5)))
    with pytest.raises(UserError, match=r"another target \(weights differ\)"):
        HydraDrafter.from_pretrained(tmp_path / "draft", other)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_heads": 0}, r"method\.num_heads must be >= 1, got 0"),
        ({"num_layers": 0}, r"method\.num_layers must be >= 1, got 0"),
        ({"num_layers": -1}, r"method\.num_layers must be >= 1, got -1"),
        ({"dropout": 1.0}, r"method\.dropout must lie in \[0, 1\), got 1\.0"),
        ({"dropout": -0.1}, r"method\.dropout must lie in \[0, 1\), got -0\.1"),
    ],
)
def test_settings_that_make_no_head_are_refused(changed, message):
    with pytest.raises(UserError, match=message):
        HydraSettings(**changed)


def test_targets_that_give_the_heads_no_ground_are_refused(tiny_target):
    with pytest.raises(UserError, match=r"method\.prefix_layer must be false for a gpt2 target"):
        made(tiny_target("gpt2"), "prefix")
    model = tiny_model("llama")
    model.set_input_embeddings(torch.nn.Embedding(VOCAB_SIZE, 16))
    plain = tiny_target("llama")
    narrow = Target(model, plain.tokenizer, "narrow", {}, (0,))
    with pytest.raises(UserError, match="embedding is 16 wide, its states 32"):
        made(narrow, "deep")
