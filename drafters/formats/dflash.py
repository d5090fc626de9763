"""Reader of the layouts of DFlash and DSpark drafters.

- Flat: that of vLLM, SGLang and llama.cpp's converter.
- That of transformers, Muse Glimmer's assistant: `fc` and its norm have other names, and the
  settings of the block stand at the top level. With a `dflash_config` beside them vLLM reads it.
- That of the speculators library: the layers' configuration is nested, and captured layers are
  counted by those that a state has passed. The slots of a block all see each other there.

DSpark is DFlash with further keys and tensors, flat or of the speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from drafters.formats.files import Tensors, check_keys, check_tensors, renamed
from drafters.formats.head import PublishedHead, check_vocabulary
from drafters.formats.keys import ASSISTANT, KEYS, LAYER_KEYS, MARKOV_KEYS, HeadConfig
from drafters.formats.layer import layer_config, refuse_variants
from drafters.formats.speculators import check_proposal
from target.outputs import LayerId
from trainer.errors import UserError

INNER: dict[str, tuple[type, bool]] = {
    "mask_token_id": (int, False),
    "target_layer_ids": (list, False),
    "causal": (bool, False),
}
# keys that our exports hold only where they say something
SAID: dict[str, tuple[type, bool]] = {"is_causal": (bool, True), "draft_vocab_size": (int, True)}
MASK_EMBEDDING = "mask_embedding.pt"  # a row of its own for the mask, which vLLM reads
ENCODER = [(r"encoder\.fc\.(.+)", r"fc.\1"), (r"encoder\.output_norm_enc\.(.+)", r"hidden_norm.\1")]
# of the target, which files of the speculators library may repeat
REPEATED = ("verifier_lm_head.weight", "verifier_norm.weight")


def read_dflash(
    folder: Path, layout: str, config: HeadConfig, tensors: Tensors, strict: bool
) -> PublishedHead:
    """The drafter in `folder`; UserError where it is not in `layout`. `strict`: see `reader`."""
    said = {name: kind for name, kind in SAID.items() if name in config}
    check_keys(folder, config, {**said, **KEYS[layout]}, strict)
    if (folder / MASK_EMBEDDING).exists():
        raise UserError(f"{folder} has an embedding of its own for the mask, {MASK_EMBEDDING}")
    nested, rules, settings = config, list[tuple[str, str]](), dict[str, Any](config)
    method = layout[:6]
    if layout.endswith("_speculators"):
        nested = config["transformer_layer_config"]
        check_keys(folder, nested, {**LAYER_KEYS, "layer_types": (list, False)}, strict)
        refuse_variants(folder, config)
        passed = config["aux_hidden_state_layer_ids"]
        settings["target_layer_ids"] = [k - 1 if type(k) is int else k for k in passed]
        if strict:
            check_proposal(folder, config["speculators_config"], method)
    else:
        settings = _joined(folder, config, strict)
        rules = ENCODER if layout == "dflash_hf" else []
    kind, wanted = nested.get("model_type"), ASSISTANT if layout == "dflash_hf" else "qwen3"
    if kind != wanted:
        raise UserError(f"{folder}: key 'model_type' must be {wanted!r} here, got {kind!r}")
    layer = _layers(folder, nested, strict)
    vocab_size = nested.get("vocab_size") or 0
    tensors, given = renamed(
        folder, tensors, [*rules, *([] if strict else [(r"model\.(.+)", r"\1")])]
    )
    from_anchor = settings.get("sample_from_anchor")
    head = PublishedHead(
        method, tensors, _captures(folder, settings.get("target_layer_ids")), vocab_size, layer,
        flags={
            "causal": settings.get("is_causal", settings.get("causal", False)),
            "from_anchor": layout == "dspark" if from_anchor is None else from_anchor,
        },
        block_size=_number(folder, settings, "block_size"),
        mask_token=_number(folder, settings, "mask_token_id"),
        correction=_correction(folder, settings) if method == "dspark" else "none",
    )  # fmt: skip
    drafted = config.get("draft_vocab_size") or vocab_size
    further = {} if method == "dflash" else _heads(folder, head, settings, drafted)
    _check(folder, head, layer, drafted, further, given, strict)
    head.tensors = {name: t for name, t in tensors.items() if name not in REPEATED}
    check_vocabulary(folder, head)
    return head


def _correction(folder: Path, settings: Mapping[str, Any]) -> str:
    """The name here of the correction."""
    kind = settings.get("markov_head_type") or "vanilla"
    if kind not in ("vanilla", "gated"):
        raise UserError(f"{folder}: key 'markov_head_type' must be vanilla or gated, got {kind!r}")
    return "markov" if kind == "vanilla" else kind


def _heads(
    folder: Path, head: PublishedHead, settings: Mapping[str, Any], drafted: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the correction and the confidence."""
    assert head.layer is not None
    rank, width = _number(folder, settings, "markov_rank"), head.layer.hidden_size
    if rank < 1:
        raise UserError(f"{folder}: key 'markov_rank' must be >= 1, got {rank}")
    wanted: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (head.vocab_size, rank),
        "markov_head.markov_w2.weight": (drafted, rank),
    }
    if head.correction == "gated":
        wanted["markov_head.gate_proj.weight"] = (rank, width + rank)
        wanted["markov_head.gate_proj.bias"] = (rank,)
    if settings.get("enable_confidence_head"):
        reads = width + rank * bool(settings.get("confidence_head_with_markov"))
        wanted["confidence_head.proj.weight"] = (1, reads)
        wanted["confidence_head.proj.bias"] = (1,)
    return wanted


def _joined(folder: Path, config: HeadConfig, strict: bool) -> dict[str, Any]:
    """The settings at the top level and in `dflash_config`; UserError where both have one and they
    differ."""
    inner = dict[str, Any](config.get("dflash_config") or {})
    # what stands at the top level is not asked for again
    known = {name: kind for name, kind in INNER.items() if name in inner or name not in config}
    check_keys(folder, inner, known, strict)
    for key in ("block_size", *INNER, *MARKOV_KEYS):
        outer = config.get(key)
        if outer is not None and inner.get(key, outer) != outer:
            raise UserError(
                f"{folder}: key {key!r} is {outer}, in dflash_config {inner[key]}: leave one out"
            )
    return {**config, **inner}


def _layers(folder: Path, config: HeadConfig, strict: bool) -> LlamaConfig:
    """The configuration of all layers; it is read as that of one Llama layer."""
    one = {"vocab_size": 1, **config, "model_type": "llama", "num_hidden_layers": 1}
    layer = layer_config(folder, one, strict)
    layer.num_hidden_layers = config["num_hidden_layers"]
    return layer


def _number(folder: Path, settings: Mapping[str, Any], key: str) -> int:
    if type(settings.get(key)) is not int:
        raise UserError(f"{folder}: key {key!r} is missing")
    return settings[key]


def _captures(folder: Path, layers: object) -> list[LayerId]:
    """The captured layers, counted from 0."""
    if not isinstance(layers, list) or not layers:
        raise UserError(f"{folder}: key 'target_layer_ids' must list layers, got {layers!r}")
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise UserError(f"{folder}: key 'target_layer_ids' must list layers, got {layers!r}")
    if layers != sorted(set(layers)):
        raise UserError(f"{folder}: key 'target_layer_ids' must be ascending, got {layers}")
    return list(layers)


def _check(
    folder: Path,
    head: PublishedHead,
    layer: LlamaConfig,
    drafted: int,
    further: dict[str, tuple[int, ...]],
    given: dict[str, str],
    strict: bool,
) -> None:
    """Check names, shapes and dtypes of the tensors. `drafted`: rows of an output matrix of its
    own; `further`: shapes of those of DSpark."""
    width, head_dim, vocab_size = layer.hidden_size, int(layer.head_dim or 0), head.vocab_size
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
    layers = range(layer.num_hidden_layers)
    wanted = {f"layers.{i}.{n}.weight": s for i in layers for n, s in shapes.items()}
    wanted |= {"fc.weight": (width, len(head.captures) * width)}
    wanted |= {"hidden_norm.weight": (width,), "norm.weight": (width,)} | further
    optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab_size, width)}
    optional |= {"lm_head.weight": (drafted, width), "d2t": (drafted,), "t2d": (vocab_size,)}
    if drafted != vocab_size:
        wanted |= {name: optional[name] for name in ("lm_head.weight", "d2t")}
        wanted |= {"t2d": optional["t2d"]} if strict else {}
    if not strict:
        rows = {"verifier_lm_head.weight": (drafted, width), "verifier_norm.weight": (width,)}
        optional |= rows
    check_tensors(folder, head.tensors, wanted, optional, given)
