"""Reader of the flat layout of DFlash drafters, that of vLLM, SGLang and llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path

from drafters.formats.files import Tensors, check_keys, check_tensors, renamed
from drafters.formats.head import PublishedHead
from drafters.formats.keys import KEYS, DFlashConfig, HeadConfig
from drafters.formats.layer import layer_config
from target.outputs import LayerId
from trainer.errors import UserError

INNER: dict[str, tuple[type, bool]] = {
    "mask_token_id": (int, True),
    "target_layer_ids": (list, True),
    "causal": (bool, False),
}
MASK_EMBEDDING = "mask_embedding.pt"  # a row of its own for the mask, which vLLM reads


def read_dflash(folder: Path, config: HeadConfig, tensors: Tensors, strict: bool) -> PublishedHead:
    """The drafter in `folder`; UserError where it is not in this layout. `strict`: see `reader`."""
    causal = {"is_causal": (bool, True)} if "is_causal" in config else {}
    check_keys(folder, config, {**KEYS["dflash"], **causal}, strict)
    inner: DFlashConfig = config["dflash_config"]
    check_keys(folder, inner, INNER, strict)
    if config.get("model_type") != "qwen3":
        kind = config.get("model_type")
        raise UserError(f"{folder}: key 'model_type' must be 'qwen3' for DFlash, got {kind!r}")
    if (folder / MASK_EMBEDDING).exists():
        raise UserError(f"{folder} has an embedding of its own for the mask, {MASK_EMBEDDING}")
    count, size = config["num_hidden_layers"], config.get("block_size", inner.get("block_size"))
    if size is None:
        raise UserError(f"{folder}: key 'block_size' is missing")
    # the rest of the configuration is that of one Llama layer
    layer = layer_config(folder, {**config, "model_type": "llama", "num_hidden_layers": 1}, strict)
    layer.num_hidden_layers = count
    width, head_dim = layer.hidden_size, int(layer.head_dim or 0)
    attended = layer.num_attention_heads * head_dim
    grouped, hidden = (layer.num_key_value_heads or 0) * head_dim, layer.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
        "self_attn.q_proj": (attended, width), "self_attn.k_proj": (grouped, width),
        "self_attn.v_proj": (grouped, width), "self_attn.o_proj": (width, attended),
        "self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }  # fmt: skip
    captures = _captures(folder, inner)
    wanted = {f"layers.{i}.{n}.weight": s for i in range(count) for n, s in shapes.items()}
    wanted |= {"fc.weight": (width, len(captures) * width)}
    wanted |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    optional = {"embed_tokens.weight": (layer.vocab_size, width)}
    tensors, given = renamed(folder, tensors, [] if strict else [(r"model\.(.+)", r"\1")])
    check_tensors(folder, tensors, wanted, optional, given)
    is_causal = config.get("is_causal", inner.get("causal", False))
    flags = {"causal": is_causal, "from_anchor": inner.get("sample_from_anchor", False)}
    return PublishedHead(
        "dflash", tensors, captures, layer.vocab_size, layer, flags=flags, block_size=size,
        mask_token=inner["mask_token_id"],
    )  # fmt: skip


def _captures(folder: Path, inner: DFlashConfig) -> list[LayerId]:
    """The captured layers, counted from 0."""
    layers = inner["target_layer_ids"]
    if not layers or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise UserError(f"{folder}: key 'target_layer_ids' must list layers, got {layers!r}")
    if layers != sorted(set(layers)):
        raise UserError(f"{folder}: key 'target_layer_ids' must be ascending, got {layers}")
    return list(layers)
