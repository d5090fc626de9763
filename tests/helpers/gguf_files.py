"""GGUF files of Llama models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy
import torch
from transformers import AutoTokenizer, PreTrainedModel


def write_gguf(
    path: Path, model: PreTrainedModel, tokenizer: Path, quantised: bool = False,
    leave_out: tuple[str, ...] = (), more: dict[str, numpy.ndarray] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write `model` with the tokenizer in the folder `tokenizer`. Returns the weights as a reader
    has to give them back, by their names in transformers."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if "tokenizer" not in leave_out:
        own = AutoTokenizer.from_pretrained(tokenizer)
        tokens = sorted(own.get_vocab().items(), key=lambda item: item[1])
        stored = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_types([1] * len(tokens))
        # llama.cpp wants one at least
        writer.add_token_merges([" ".join(pair) for pair in stored.get("merges", [])] or ["a b"])
        if "eos" not in leave_out:
            writer.add_eos_token_id(own.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    expected = {}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        new = names.get_name(name, try_suffixes=(".weight",))
        if new in leave_out:
            continue
        rotated = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if rotated:
            halves = values.reshape(rotated, 2, -1, weight.shape[1])
            values = halves.swapaxes(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType.F32
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
        stored_values = gguf.quants.quantize(numpy.ascontiguousarray(values), kind)
        writer.add_tensor(new, stored_values, raw_dtype=kind)
        again = gguf.quants.dequantize(stored_values, kind)
        if rotated:
            pairs = again.reshape(rotated, -1, 2, weight.shape[1])
            again = pairs.swapaxes(1, 2).reshape(weight.shape)
        expected[name] = torch.from_numpy(again.copy())
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
