"""The slot cache on the families of transformers: scored alike, or refused in a line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.causal_lm import parameters_read
from target import cache
from target.cache import CachedModel, place_tree
from target.model import Target, captured, decoder_layers, output_head
from tests.helpers.tiny import (
    ARCHITECTURES,
    CONTEXT,
    EOS,
    PAD,
    STD,
    VOCAB_SIZE,
    tiny_model,
    tiny_tokenizer,
)
from tests.helpers.watch import Watch
from trainer.errors import UserError

SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": EOS,
    "pad_token_id": PAD,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64, "attention_dropout": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1,
          "topk_group": 1, "first_k_dense_replace": 1} | EXPERTS  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": GROUPED | {"logit_scale": 0.5},
    "cohere2": GROUPED | {"sliding_window": 16},
    "deepseek_v3": GROUPED | LATENT,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 16},
    "gemma4_text": GROUPED | {"head_dim": 8, "global_head_dim": 8},
    "gemma4 with shared keys": GROUPED | {
        "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma3n_text": GROUPED | {
        "head_dim": 8, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0],
    },
    "glm4": GROUPED | {"head_dim": 8},
    "gpt_neox": {"intermediate_size": 64},
    "gpt_oss": GROUPED | EXPERTS | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 16},
    "granite": GROUPED | {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "mixtral": GROUPED | {"num_local_experts": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "olmo2": GROUPED,
    "olmo3": GROUPED | {"sliding_window": 16},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": GROUPED,
    "qwen2": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "gemma3 with images": {  # whose encoder has as many layers
        "model_type": "gemma3",
        "text_config": SHAPE | GROUPED | {"head_dim": 8, "sliding_window": 16},
        "vision_config": {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 16, "image_size": 28, "patch_size": 14,
        },
    },
    "bert": {"intermediate_size": 64, "is_decoder": False},
    "openai-gpt": {},
    "rwkv": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "llama4_text": GROUPED | {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 64},
    "mamba": {},
}  # fmt: skip
OTHERS = ("bert", "openai-gpt", "rwkv", "bloom", "llama4_text", "mamba")
SCORED = (*ARCHITECTURES, *(name for name in FAMILIES if name not in OTHERS))
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


def model_of(name: str) -> Any:
    if name in ARCHITECTURES:
        return tiny_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = {} if "text_config" in FAMILIES[name] else SHAPE | {"model_type": name}
        config = AutoConfig.for_model(**(shape | FAMILIES[name]))
        model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
    return model


@torch.no_grad()
def plain(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]


@pytest.mark.parametrize("name", SCORED)
@torch.no_grad()
def test_slots_score_what_one_pass_does(name):
    model = model_of(name)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(4, VOCAB_SIZE, (n,), generator=generator) for n in (30, 21)]
    ids = torch.stack([torch.nn.functional.pad(text, (0, 30 - len(text))) for text in texts])
    cached = CachedModel(model)
    cached.begin(2, 64)
    logits = cached.forward(ids, torch.arange(30).expand(2, -1), used=30, first=0)
    for i, text in enumerate(texts):
        torch.testing.assert_close(logits[i, : len(text)], plain(model, text), **CLOSE)

    lengths = torch.tensor([len(text) for text in texts])
    chain = torch.randint(4, VOCAB_SIZE, (2, 3), generator=generator)
    logits = cached.forward(chain, lengths.unsqueeze(1) + torch.arange(3), used=33)
    for i, text in enumerate(texts):
        expected = plain(model, torch.cat([text, chain[i]]))[len(text) :]
        torch.testing.assert_close(logits[i], expected, **CLOSE)
    if name == "mpt":
        return

    paths = ([0], [1], [1, 2], [0, 3])  # of each node, from the root
    ancestors = torch.tensor([[node in path for node in range(4)] for path in paths])
    depths = torch.tensor([len(path) for path in paths])
    placed = place_tree(lengths, ancestors.expand(2, -1, -1), depths.expand(2, -1))
    nodes = torch.randint(4, VOCAB_SIZE, (2, 4), generator=generator)
    last = torch.stack([text[-1:] for text in texts])
    logits = cached.forward(torch.cat([last, nodes], 1), placed.positions, used=40, tree=placed)
    for i, text in enumerate(texts):
        for node, path in enumerate(paths):
            expected = plain(model, torch.cat([text, nodes[i, path]]))[-1]
            torch.testing.assert_close(logits[i, 1 + node], expected, **CLOSE)

    path = torch.tensor(paths[2])  # it is accepted
    depth = torch.arange(len(path))
    cached.move(placed.slots[:, 1:][:, path], lengths.unsqueeze(1) + depth)
    logits = cached.forward(chain, lengths.unsqueeze(1) + len(path) + torch.arange(3), used=35)
    for i, text in enumerate(texts):
        expected = plain(model, torch.cat([text, nodes[i, path], chain[i]]))[-3:]
        torch.testing.assert_close(logits[i], expected, **CLOSE)


@pytest.mark.parametrize("name", SCORED)
@torch.no_grad()
def test_states_and_head_are_found(name):
    model, ids = model_of(name), torch.arange(4, 24).unsqueeze(0)
    assert len(decoder_layers(model)) == 2
    found: dict[Any, torch.Tensor] = {}
    layers = (0, "final_norm")
    if name == "gemma3n_text":  # a layer has four states for each token
        with pytest.raises(UserError, match="several states for a token"), captured(model, [0], {}):
            model(input_ids=ids, use_cache=False)
        layers = ("final_norm",)
    with captured(model, layers, found):
        logits = model(input_ids=ids, use_cache=False).logits
    assert all(states.shape == (1, 20, 32) for states in found.values())
    mine = output_head(model, VOCAB_SIZE).logits(found["final_norm"])
    torch.testing.assert_close(mine, logits[..., :VOCAB_SIZE], **CLOSE)
    # as training reads them, and as a prompt is read: without the logits of all columns
    target, read = Target(model, tiny_tokenizer(), name, {}, (EOS,)), dict[Any, torch.Tensor]()
    cached = CachedModel(model)
    cached.begin(1, 24)
    cached.forward(
        ids, torch.arange(20)[None], used=20, first=0, logits_to_keep=1, layers=tuple(found),
        found=read,
    )  # fmt: skip
    states = target.outputs(ids, layers=tuple(found), logits=False).hidden
    for layer, expected in found.items():
        torch.testing.assert_close(states[layer], expected, **CLOSE)
        torch.testing.assert_close(read[layer], expected, **CLOSE)


@pytest.mark.parametrize("name", SCORED)
@torch.no_grad()
def test_a_prompt_projects_one_state_of_each_row(name):
    """With a vocabulary of 150,000, the logits of 32 rows at 32 distinct ends have 614 MB."""
    model = model_of(name)
    ids, positions = torch.randint(4, VOCAB_SIZE, (3, 7)), torch.arange(7).expand(3, -1)
    ends, found, cached = torch.tensor([6, 1, 3]), {}, CachedModel(model)
    cached.begin(3, 16)
    every = cached.forward(ids, positions, used=7, first=0)
    with Watch() as watch:
        own = cached.forward(
            ids, positions, used=7, first=0, logits_to_keep=ends, layers=("final_norm",),
            found=found,
        )  # fmt: skip
    torch.testing.assert_close(own[:, 0], every[torch.arange(3), ends])
    assert found["final_norm"].shape[:2] == (3, 7)
    assert {s for s in watch.shapes if s[-1:] == every.shape[-1:] and s[1:-1]} == {own.shape}
    assert (3 * 7, every.shape[-1]) not in watch.shapes


def test_an_image_encoder_is_not_read_for_text():
    model = model_of("gemma3 with images")
    read = set(parameters_read(model))
    names = {name for name, parameter in model.named_parameters() if parameter in read}
    every = {name for name, _ in model.named_parameters()}
    assert {name.split(".")[1] for name in every - names} == {
        "vision_tower",
        "multi_modal_projector",
    }
    assert "model.language_model.embed_tokens.weight" in names  # tied: it scores


@pytest.mark.parametrize(
    ("name", "tree", "words"),
    [
        ("mpt", True, "MptForCausalLM scores a path of a tree otherwise .* measure chains"),
        ("rwkv", False, "RwkvForCausalLM scores later tokens otherwise"),
        ("bert", False, "BertLMHeadModel scores later tokens otherwise"),
        ("openai-gpt", False, "OpenAIGPTLMHeadModel cannot be decoded with this slot cache"),
        ("bloom", False, "bloom masks or biases attention in a way of its own"),
        ("llama4_text", False, "layers of type chunked_attention"),
        ("mamba", False, "layers of type linear_attention"),
    ],
)
def test_what_it_cannot_follow_is_refused(name, tree, words):
    def use() -> None:
        cached = CachedModel(model)
        cached.begin(1, 32)
        ids, positions = torch.arange(5, 9).unsqueeze(0), torch.arange(4).unsqueeze(0)
        cached.forward(ids, positions, used=4, first=0)
        assert tree
        node = torch.zeros(1, 1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.long)
        placed = place_tree(torch.tensor([4]), *node)
        cached.forward(ids[:, :2], placed.positions, used=5, tree=placed)

    model = model_of(name)
    for _ in range(2):  # not only the first time
        with pytest.raises(UserError, match=words):
            use()


def test_a_model_is_tried_once():
    model, calls = tiny_model("llama"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        cached = CachedModel(model)
        cached.begin(1, 32)
        cached.forward(torch.ones(1, 2, dtype=torch.long), torch.arange(2)[None], used=2, first=0)
    assert len(calls) == 3 + 2


def test_a_fault_in_the_trial_is_not_taken_for_the_model(monkeypatch):
    model = tiny_model("llama")

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(model, "forward", full)
    cached = CachedModel(model)
    cached.begin(1, 32)
    ids, positions = torch.ones(1, 2, dtype=torch.long), torch.arange(2).unsqueeze(0)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            cached.forward(ids, positions, used=2, first=0)
    monkeypatch.undo()
    cached.forward(ids, positions, used=2, first=0)
    assert model in cache._SAME[cache.LATER]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
@torch.no_grad()
def test_a_prompt_needs_no_mask(name):
    """At 32k tokens a mask has 1 GB, and keeps fused kernels from being used."""
    model, length = model_of(name), 200
    cached = CachedModel(model)
    cached.begin(2, length + 40)
    ids = torch.randint(4, VOCAB_SIZE, (2, length))
    positions = torch.arange(length).expand(2, -1)
    cached.forward(ids[:, :2], positions[:, :2], used=2, first=0)  # it is tried once
    with Watch() as watch:
        cached.forward(ids, positions, used=length, first=0, logits_to_keep=1)
    assert not [s for s in watch.shapes if len(s) > 1 and s[-1] >= length and s[-2] >= length]
    with Watch() as watch:
        cached.forward(ids[:, :3], positions[:, -3:] + 3, used=length + 3)
    assert any(s[-2:] == (3, 208) for s in watch.shapes), "a chain has one"
