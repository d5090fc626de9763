"""The causal-LM drafter: built from every target, drafting from a cache as from whole forwards."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.causal_lm import CausalLMDrafter
from drafters.round import Budget, Drafter, DraftState, StopRule
from target.model import Target
from target.sampling import KeyedRandom, Sampling, row_key, warp
from tests.helpers.tiny import (
    ARCHITECTURES,
    CONTEXT,
    EOS,
    PAD,
    VOCAB_SIZE,
    prompts_of,
    save_tiny,
    tiny_tokenizer,
)
from trainer.errors import UserError

GREEDY = Sampling(0.0)
LENGTHS = [2, 19, 7]
CAPACITY = 40


def state_of(texts, sampling=GREEDY):
    """Right-padded with an id that would matter if it were looked at."""
    ids = torch.full((len(texts), CAPACITY), 77)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    keys = torch.tensor([row_key(0, text, 0) for text in texts])
    return DraftState(ids, lengths, max(map(len, texts)), sampling, KeyedRandom(keys))


@torch.inference_mode()
def started(drafter, texts):
    """Prefilled with all but the last token of each text, as the engine does."""
    state = state_of(texts)
    drafter.begin(len(texts), CAPACITY)
    rows = torch.arange(len(texts))
    width = int(state.lengths.max()) - 1
    drafter.prefill(rows, state.ids[:, :width], state.lengths - 1)
    return drafter


@torch.inference_mode()
def plain_drafts(drafter, text, K):
    text = list(text)
    for _ in range(K):
        text.append(int(drafter.draft_logits(torch.tensor([text]))[0, -1].argmax()))
    return text[-K:]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_drafter_built_from_any_target_runs_and_proposes(name, tiny_target):
    target = tiny_target(name, layers=3)
    torch.manual_seed(0)
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    config = drafter.model.config
    assert isinstance(drafter, Drafter)
    assert (config.num_hidden_layers, config.hidden_size) == (1, 16)
    assert config.model_type == target.model.config.model_type
    assert drafter.num_parameters < sum(p.numel() for p in target.model.parameters())
    assert drafter.model.dtype == torch.float32
    assert all(p.requires_grad for p in drafter.parameters())
    with torch.no_grad():  # fresh weights are nearly flat: widen them
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter *= 10
    texts = prompts_of(LENGTHS)
    logits = drafter.draft_logits(torch.tensor(texts[1:2]))
    assert logits.shape == (1, 19, VOCAB_SIZE)
    assert torch.equal(drafter.draft_logits(torch.tensor(texts[1:2]), None, 3), logits)
    logits.sum().backward()
    with torch.inference_mode():
        tree = started(drafter, texts).propose(state_of(texts), Budget(4))
    assert tree.is_chain
    assert tree.lengths.tolist() == [4, 4, 4]
    assert (tree.draft_forwards, tree.draft_tokens) == (4, 5)
    for row, text in enumerate(texts):
        assert tree.tokens[row].tolist() == plain_drafts(drafter, text, 4)


def test_layer_types_of_a_mixed_target_are_kept(tiny_target):
    target = tiny_target("gemma3", layers=3)
    for num_layers in (1, 2, 5):
        drafter = CausalLMDrafter.from_target(target, num_layers=num_layers, hidden_size=16)
        assert len(drafter.model.config.layer_types) == num_layers


def other_target(folder, model_type, **shape):
    """Of a family that tests.helpers.tiny does not have."""
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD,
        **shape,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Target.load(str(folder))


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_drafter_of_gemma_4_has_what_each_kind_of_layer_has_there(num_layers, tmp_path):
    """Layers that see the whole text have heads of their own; the last one has to; keys that later
    layers share and the table of the vocabulary for each layer are left out."""
    target = other_target(
        tmp_path, "gemma4_text", hidden_size=32, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, intermediate_size=64,
        max_position_embeddings=CONTEXT, sliding_window=16, num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    drafter = CausalLMDrafter.from_target(target, num_layers=num_layers, hidden_size=16)
    text = {1: [], 2: ["sliding_attention"], 3: ["sliding_attention", "full_attention"]}[num_layers]
    text = [*text, "full_attention"]
    assert drafter.model.config.layer_types == text
    widths = [layer.self_attn.head_dim for layer in drafter.model.model.layers]
    assert widths == [16 if kind == "full_attention" else 8 for kind in text]
    assert not [name for name, _ in drafter.named_parameters() if "per_layer" in name]
    texts = prompts_of(LENGTHS)
    with torch.inference_mode():
        tree = started(drafter, texts).propose(state_of(texts), Budget(3))
    assert tree.tokens[1].tolist() == plain_drafts(drafter, texts[1], 3)


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [
        ("smollm3", {"num_key_value_heads": 2, "intermediate_size": 64}),
        ("cohere2", {"num_key_value_heads": 2, "intermediate_size": 64, "sliding_window": 16}),
    ],
)
def test_a_drafter_of_one_layer_knows_the_order_of_its_text(model_type, shape, tmp_path):
    """Every fourth layer of these families does not."""
    target = other_target(
        tmp_path, model_type, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=CONTEXT, **shape,
    )  # fmt: skip
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter *= 20
        one, other = (
            drafter.draft_logits(torch.tensor([t]))[0, -1] for t in ([5, 9, 7], [9, 5, 7])
        )
    assert float((one - other).abs().max()) > 1e-3


def test_every_width_of_a_target_shrinks(tmp_path):
    target = other_target(
        tmp_path, "opt", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=256,
        word_embed_proj_dim=64, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=32)
    assert drafter.model.config.ffn_dim == 128
    assert drafter.model.model.decoder.embed_tokens.weight.shape[1] == 32


def test_a_width_that_no_head_fits_is_refused(tiny_target):
    with pytest.raises(UserError, match=r"method\.draft_hidden_size must be a multiple of"):
        CausalLMDrafter.from_target(tiny_target("phi3"), num_layers=1, hidden_size=20)


def test_a_width_that_fails_only_in_the_forward_pass_is_refused(tmp_path):
    """CodeGen's heads come in fours, which it finds out when it runs."""
    target = other_target(
        tmp_path, "codegen", n_embd=64, n_layer=2, n_head=4, rotary_dim=4, n_positions=CONTEXT
    )
    CausalLMDrafter.from_target(target, num_layers=1, hidden_size=64)
    with pytest.raises(UserError, match=r"method\.draft_hidden_size=32 gives no codegen model"):
        CausalLMDrafter.from_target(target, num_layers=1, hidden_size=32)


@torch.inference_mode()
def test_drafting_goes_on_from_any_number_of_accepted_tokens(tiny_target):
    """Rounds that accept 0..K drafts in turn, checked against forwards without a cache."""
    drafter = CausalLMDrafter.of_target(tiny_target("mistral"))
    texts = prompts_of(LENGTHS)
    started(drafter, texts)
    for accepted in ([0, 3, 1], [3, 3, 0], [2, 0, 3], [1, 2, 2]):
        tree = drafter.propose(state_of(texts), Budget(3))
        for row, text in enumerate(texts):
            assert tree.tokens[row].tolist() == plain_drafts(drafter, text, 3)
            emitted = (int(tree.tokens[row, -1]) + 11) % VOCAB_SIZE
            text += [*tree.tokens[row, : accepted[row]].tolist(), emitted]
    kept = [2, 0]
    drafter.keep(torch.tensor(kept))
    texts = [texts[i] for i in kept]
    tree = drafter.propose(state_of(texts), Budget(3))
    for row, text in enumerate(texts):
        assert tree.tokens[row].tolist() == plain_drafts(drafter, text, 3)


@torch.inference_mode()
def test_refilled_rows_draft_for_their_new_text(tiny_target):
    drafter = CausalLMDrafter.of_target(tiny_target("llama"))
    texts = prompts_of(LENGTHS)
    started(drafter, texts).propose(state_of(texts), Budget(3))
    texts[1] = prompts_of([5], seed=9)[0]
    new = torch.tensor([texts[1][:-1]])
    drafter.prefill(torch.tensor([1]), new, torch.tensor([4]))
    tree = drafter.propose(state_of(texts), Budget(3))
    for row, text in enumerate(texts):
        assert tree.tokens[row].tolist() == plain_drafts(drafter, text, 3)


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_stated_laws_are_the_warped_law_each_token_was_drawn_from(rows, tiny_target):
    drafter = CausalLMDrafter.of_target(tiny_target("llama"))
    sampling = Sampling(0.8, top_k=20, top_p=0.9)
    texts = prompts_of(LENGTHS[-rows:])
    tree = started(drafter, texts).propose(state_of(texts, sampling), Budget(4))
    for row, text in enumerate(texts):
        ids = torch.tensor([text + tree.tokens[row].tolist()])
        law = warp(drafter.draft_logits(ids)[0, len(text) - 1 : -1], sampling)
        torch.testing.assert_close(tree.probs[row], law, rtol=1e-3, atol=1e-5)
    assert bool((tree.probs.gather(-1, tree.tokens.unsqueeze(-1)) > 0).all())
    greedy = started(drafter, texts).propose(state_of(texts), Budget(4))
    assert greedy.probs is None


@torch.inference_mode()
def test_stop_rule_ends_each_row_after_the_token_it_saw(tiny_target):
    drafter = CausalLMDrafter.of_target(tiny_target("llama"))
    texts = prompts_of([5, 6, 7])
    plan = torch.tensor([2, 9, 1])  # the depth at which each row is told to stop
    seen = []

    class Stop(StopRule):
        def __call__(self, signals, depth):
            assert signals.score is None
            # at T=0 the likeliest token is the drafted one
            assert torch.equal(signals.confidence, signals.probability)
            seen.append((depth, signals.probability.tolist()))
            return plan == depth

    stop = Stop()
    full = started(drafter, texts).propose(state_of(texts), Budget(4))
    for limit, expected in ((4, [2, 4, 1]), (1, [1, 1, 1])):
        seen.clear()
        tree = started(drafter, texts).propose(state_of(texts), Budget(limit, stop))
        assert tree.lengths.tolist() == expected
        assert [depth for depth, _ in seen] == list(range(1, limit + 1))
        assert torch.equal(tree.tokens, full.tokens[:, :limit])
    plan = torch.tensor([1, 1, 2])
    tree = started(drafter, texts).propose(state_of(texts), Budget(4, stop))
    assert tree.lengths.tolist() == [1, 1, 2]
    assert tree.draft_forwards == tree.tokens.shape[1] == 2  # all have stopped: no more forwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_padding_of_the_head_is_never_drafted(temperature, tmp_path):
    target = Target.load(str(save_tiny(tmp_path / "m", "llama_padded")))
    drafter = CausalLMDrafter.of_target(target)
    target.model.get_output_embeddings().weight[VOCAB_SIZE:] *= 50
    texts = prompts_of([5] * 64)
    raw = target.model(input_ids=torch.tensor(texts)).logits
    assert bool((raw.argmax(-1) >= VOCAB_SIZE).any())  # it would win
    tree = started(drafter, texts).propose(state_of(texts, Sampling(temperature)), Budget(4))
    assert int(tree.tokens.max()) < VOCAB_SIZE
    assert temperature == 0 or tree.probs.shape[-1] == VOCAB_SIZE
    assert drafter.draft_logits(torch.tensor(texts)).shape[-1] == VOCAB_SIZE


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama_padded"])
def test_saved_drafters_load_as_they_were(name, tiny_target, tmp_path):
    target = tiny_target(name)
    torch.manual_seed(1)
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    drafter.save_pretrained(tmp_path / "draft")
    about = json.loads((tmp_path / "draft" / "drafter.json").read_text())
    assert about["vocab_size"] == VOCAB_SIZE
    assert about["target"] == target.fingerprint
    again = CausalLMDrafter.from_pretrained(str(tmp_path / "draft"), target)
    ids = torch.tensor(prompts_of([9]))
    assert torch.equal(again.draft_logits(ids), drafter.draft_logits(ids))


def test_a_drafter_of_another_vocabulary_is_refused(tiny_target, tmp_path):
    target = tiny_target("llama")
    folder = save_tiny(tmp_path / "other", "qwen3", vocab_size=VOCAB_SIZE + 1)
    CausalLMDrafter.from_pretrained(str(folder), target)  # a wider head with the same tokenizer
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=f"first id {VOCAB_SIZE}"):
        CausalLMDrafter.from_pretrained(str(folder), target)


def test_a_drafter_that_scores_too_few_ids_is_refused(tiny_target, tmp_path):
    folder = save_tiny(tmp_path / "narrow", "llama", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(UserError, match="scores 99 ids"):
        CausalLMDrafter.from_pretrained(str(folder), tiny_target("llama"))
