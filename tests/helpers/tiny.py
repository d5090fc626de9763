"""Tiny random models of the supported architectures with a tiny tokenizer, for all tests.

from tests.helpers.tiny import save_tiny

The tokenizer has one id per character: exactly 100 ids, text round-trips for printable ASCII and
newlines. Weights are drawn wide so that greedy text wanders and no two logits tie.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|pad|>", "<|unk|>", "<|turn|>"]
EOS, PAD = 0, 1
VOCAB_SIZE = 100  # 4 special, newline, 95 printable characters
PADDED_WIDTH = 128  # of the embedding and head of `llama_padded`
CONTEXT = 256
STD = 0.25
NEAR_TIE = 1e-4

_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_padded": {"model_type": "llama", "vocab_size": PADDED_WIDTH},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16},
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": 12},
    "phi3": {"model_type": "phi3"},
    "gpt2": {"model_type": "gpt2"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
_FINAL_NORMS = ("model.norm.weight", "ln_f.weight")
ARCHITECTURES = tuple(_SHAPES)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def tiny_config(name: str, layers: int = 2, width: int = 32, **changed: Any) -> Any:
    """Configuration of one of `ARCHITECTURES`; `changed` overrides single fields."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 8),
        "num_key_value_heads": max(1, width // 16),
        "intermediate_size": 2 * width,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "attention_dropout": 0.0,
    }
    shape |= _SHAPES[name]
    if name == "gpt2":
        for key in ("num_key_value_heads", "intermediate_size", "attention_dropout"):
            del shape[key]
        shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if name == "gemma3":  # both kinds of layers, whatever the depth
        kinds = ("sliding_attention", "full_attention")
        shape["layer_types"] = [kinds[i % 2] for i in range(layers)]
    return AutoConfig.for_model(**(shape | changed))


def tiny_model(
    name: str, seed: int = 0, *, layers: int = 2, width: int = 32, std: float = STD, **changed: Any
) -> Any:
    """A random model in eval mode, float32; the same weights for the same arguments."""
    model = AutoModelForCausalLM.from_config(tiny_config(name, layers, width, **changed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if head is embedding:  # a token would mostly predict itself: less of it, as sharp a head
            embedding.mul_(0.2)
            norms = [p for n, p in model.named_parameters() if n.endswith(_FINAL_NORMS)]
            assert len(norms) == 1
            norms[0].fill_(5.0)
        if name == "llama_padded":  # as in trained models, padding never has the largest logit
            head[VOCAB_SIZE:] = head[:VOCAB_SIZE].mean(0)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=PAD
    )
    return model.float().eval()


def perturbed(model: Any, scale: float, seed: int = 1) -> Any:
    """A copy with noise of `scale` times each matrix's own size: a drafter that often agrees."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += scale * parameter.std() * noise.to(parameter.device)
    return copied


def prompts_of(lengths: Iterable[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[Any]:
    """Random prompts of these lengths, without special ids where the vocabulary allows."""
    generator = torch.Generator().manual_seed(seed)
    lowest = len(SPECIAL) if vocab_size == VOCAB_SIZE else 0
    return [
        torch.randint(lowest, vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]


@torch.no_grad()
def generated(
    model: Any, prompt: list[int], max_new_tokens: int, eos_ids: Iterable[int] = ()
) -> list[int]:
    """Greedy continuation by transformers' own generate, at batch 1."""
    ids = torch.tensor([prompt], device=model.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=PAD,
    )
    plain = model.generation_config
    model.generation_config = GenerationConfig()  # generate would fill in its EOS
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.generation_config = plain
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def assert_same_greedy(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal, or parted where the two best logits are closer than float32 kernels can tell."""
    if ours == theirs:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    ids = torch.tensor([prompt + theirs[:where]], device=model.device)
    logits = model(input_ids=ids).logits[0, -1]
    best = logits.topk(2).values
    gap = float(best[0] - best[1])
    assert gap < NEAR_TIE, f"differ at {where} with a gap of {gap}: {ours} and {theirs}"


def tiny_tokenizer(chat_template: bool = False) -> PreTrainedTokenizerFast:
    """One id per character, 100 ids; <|endoftext|> ends, no BOS."""
    characters = ["\n"] + [chr(c) for c in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|turn|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat_template else None
    return tokenizer


def save_tiny(
    folder: str | Path,
    name: str,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 32,
    sharded: bool = False,
    chat_template: bool = False,
    **changed: Any,
) -> Path:
    """Write model, tokenizer and generation config to `folder`; `sharded`: several weight files."""
    folder = Path(folder)
    model = tiny_model(name, seed, layers=layers, width=width, **changed)
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder
