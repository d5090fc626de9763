"""GGUF files for llama.cpp (run with build b11549): EAGLE-3 heads, block drafters, draft models.

Tensors have llama.cpp's names; the rows of Llama's query and key matrices are in its own order of
rotary pairs, those of a block drafter, which are Qwen3's, are not. The tokenizer's keys are those
of the target's own GGUF file, so that both agree and no pre-tokenizer has to be recognised. What
llama.cpp would pass over without a word, or end of, is refused here:

- it reads the inputs of layers, so the captures are shifted by one, of an EAGLE-3 head three; the
  input of the layer after the last one is empty in its `llama` and `qwen3` graphs;
- a file has no place for the norms of EAGLE-3.1 or a scaled embedding;
- the mask of a block drafter is named among the tokenizer's keys and must be a token there;
- other architectures of the target have no hook for captured layers: it ends by an assertion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from drafters.block import BlockDrafter, DSparkDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.eagle3 import Eagle3Drafter
from drafters.export import vllm
from drafters.export.card import Export
from drafters.export.heads import (
    Mapped,
    captured_layers,
    dflash_tensors,
    dspark_tensors,
    eagle3_tensors,
    own_embedding,
    reduced,
    refuse_not_finite,
)
from drafters.export.hf import check as check_ids
from drafters.export.hf import pad_vocabulary
from target.gguf import read
from trainer.errors import RunFault, UserError
from trainer.files import whole_folder

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "drafter.gguf"
MASK = "tokenizer.ggml.mask_token_id"
HOOKED = ("llama", "qwen3")  # targets whose captured layers were seen to arrive
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # of draft models
Fields = dict[str, Any]  # key -> value, of Python's types


def check_eagle3(drafter: Eagle3Drafter) -> None:
    """Raise UserError for an EAGLE-3 head that llama.cpp cannot serve."""
    vllm.check_eagle3(drafter)
    settings, count = drafter.settings, len(captured_layers(drafter))
    for refused, why in (
        (count != 3, f"reads three layers, this head {count}"),
        (settings.fc_norm, "has no fc_norm"),
        (settings.norm_output, "has no norm_output"),
        *_unserved(drafter),
    ):
        if refused:
            raise _refused(why)


def check_dflash(drafter: BlockDrafter) -> None:
    """Raise UserError for a block drafter that llama.cpp cannot serve."""
    vllm.check_dflash(drafter)
    for refused, why in _unserved(drafter):
        if refused:
            raise _refused(why)


def check_dspark(drafter: DSparkDrafter) -> None:
    """Raise UserError for a DSpark drafter that llama.cpp cannot serve."""
    vllm.check_dspark(drafter)
    check_dflash(drafter)


def _unserved(drafter: Mapped) -> list[tuple[bool, str]]:
    """What llama.cpp has not of drafters that read layers of the target: whether it is so, and a
    clause on it."""
    target, last = drafter.shared.target, captured_layers(drafter)[-1]
    kind = target.model.config.get_text_config().model_type
    return [
        (kind not in HOOKED, f"reads layers of {' and '.join(HOOKED)} targets only, not of {kind}"),
        (
            last == target.num_layers - 1,
            f"reads an empty state for the output of the last layer ({last})",
        ),
        (own_embedding(drafter) is not None, "gives heads the unscaled table of embeddings"),
        (_rope(drafter.config) is None, "gets only plain rotary embeddings from here"),
    ]


def _refused(why: str) -> UserError:
    return UserError(
        f"llama.cpp {why}: train another head, or use another engine", key="script.engine",
        value="llamacpp",
    )  # fmt: skip


def check_causal_lm(drafter: CausalLMDrafter) -> None:
    """Raise UserError for a draft model that is not written as GGUF."""
    check_ids(drafter)
    config = drafter.model.config.get_text_config()
    kind = config.model_type
    if kind not in ARCHITECTURES or _rope(config) is None:
        raise UserError(
            f"a draft model of type {kind} is not written, only {', '.join(ARCHITECTURES)} with "
            "plain rotary embeddings: run convert_hf_to_gguf.py of llama.cpp on its export for "
            "transformers", key="script.engine", value="llamacpp",
        )  # fmt: skip


def write_eagle3(drafter: Eagle3Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-3 head."""
    config, settings = drafter.config, drafter.settings
    fields = _layer_fields(config, blocks=1) | {
        "target_layers": [layer + 1 for layer in captured_layers(drafter)],
        "target_hidden_size": settings.target_width,
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False,
        "vocab_size": drafter.fingerprint["vocab_size"],
    }
    named = {
        "fc.weight": "fc.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "l.input_layernorm.weight": "blk.0.attn_norm.weight",
        "l.hidden_norm.weight": "blk.0.attn_norm_2.weight",
        "l.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "l.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "l.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "l.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "l.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "l.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "l.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "l.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    tensors = eagle3_tensors(drafter, "l")
    found = {new: tensors[old].detach().cpu() for old, new in named.items()} | _ids(drafter)
    _pair_rows(found, config)
    return _write(folder, "eagle3", fields, found, drafter.tokenizer, asked)


def write_dflash(drafter: BlockDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a block drafter."""
    return _write_blocks(drafter, dflash_tensors(drafter), {}, folder, asked)


def write_dspark(drafter: DSparkDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a DSpark drafter, whose blocks are a DFlash drafter's."""
    fields = {
        "sample_from_anchor": drafter.settings.from_anchor,
        "has_confidence_head": drafter.settings.confidence,
    }
    return _write_blocks(drafter, dspark_tensors(drafter), fields, folder, asked)


def _write_blocks(
    drafter: BlockDrafter, tensors: Mapping[str, torch.Tensor], further: Fields,
    folder: str | Path, asked: Export,
) -> Path:  # fmt: skip
    config, settings = drafter.config, drafter.settings
    fields = _layer_fields(config, config.num_hidden_layers) | {
        "target_layers": [layer + 1 for layer in captured_layers(drafter)],
        "block_size": settings.block_size,
        "attention.causal": settings.causal,
        "vocab_size": drafter.fingerprint["vocab_size"],
        **further,
    }
    named = {
        "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output",
        "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
        "confidence_head.proj": "conf_proj",
    }  # fmt: skip
    of_layers = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"}, "self_attn.o_proj": "attn_output",
        **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
        **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    }  # fmt: skip
    for number in range(config.num_hidden_layers):
        named |= {f"layers.{number}.{old}": f"blk.{number}.{new}" for old, new in of_layers.items()}
    found = {
        f"{new}.{part}": tensors[f"{old}.{part}"].detach().cpu()
        for old, new in named.items()
        for part in ("weight", "bias")
        if f"{old}.{part}" in tensors
    }
    return _write(
        folder, "dflash", fields, found | _ids(drafter), drafter.tokenizer, asked,
        mask=settings.mask_token,
    )  # fmt: skip


def _ids(drafter: Mapped) -> dict[str, torch.Tensor]:
    """Of a reduced vocabulary the target's ids themselves, [Vd] int64."""
    kept = drafter.kept
    return {"d2t": kept.cpu()} if kept is not None and reduced(drafter) else {}


def write_causal_lm(drafter: CausalLMDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a draft model, padded to the target's vocabulary as the other exports are."""
    from gguf import MODEL_ARCH, get_tensor_name_map  # few runs need it

    width = drafter.fingerprint["vocab_size"]
    model: Any = pad_vocabulary(drafter.model, drafter.tokenizer, width, drafter.vocab_size)
    config = model.config.get_text_config()
    fields = _layer_fields(config, config.num_hidden_layers) | {"vocab_size": width}
    architecture = MODEL_ARCH[config.model_type.upper()]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    found = {}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise RunFault(f"llama.cpp has no name for the tensor {name!r}: nothing was written")
        found[new] = tensor.detach().cpu()
    if config.model_type == "llama":
        _pair_rows(found, config)
    return _write(folder, config.model_type, fields, found, drafter.tokenizer, asked)


def _rope(config: PreTrainedConfig) -> float | None:
    """The base of plain rotary embeddings; None for others."""
    rope = dict(config.rope_parameters or {})
    plain = rope.get("rope_type", "default") == "default"
    return float(rope["rope_theta"]) if plain and "rope_theta" in rope else None


def _layer_fields(config: PreTrainedConfig, blocks: int) -> Fields:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "block_count": blocks,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": _rope(config),
    }


def _pair_rows(tensors: dict[str, torch.Tensor], config: PreTrainedConfig) -> None:
    """Put the rows of query and key matrices into llama.cpp's order: the two halves that are
    rotated together next to each other."""
    for part, heads in (
        ("attn_q", config.num_attention_heads),
        ("attn_k", config.num_key_value_heads),
    ):
        for name, tensor in tensors.items():
            if f".{part}." in name:
                halves = tensor.unflatten(0, (heads, 2, -1))
                tensors[name] = halves.transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def _write(
    folder: str | Path,
    architecture: str,
    fields: Fields,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    asked: Export,
    mask: int | None = None,
) -> Path:
    """Write one file, complete or not at all, after it was read back and compared. `mask`: the id
    of a mask token, which the tokenizer's keys name."""
    from gguf import GGUFWriter

    refuse_not_finite(tensors)
    own = read(_target_file(asked), "model.target_gguf")
    tokens = own.fields["tokenizer.ggml.tokens"].contents()
    _check_tokens(tokens, tokenizer, asked)
    if mask is not None and mask >= len(tokens):
        raise UserError(
            f"has {len(tokens)} tokens, and the mask of this drafter is row {mask}, without a "
            "token: train one with method.mask_token=<a special token>",
            key="model.target_gguf", value=str(asked.gguf),
        )  # fmt: skip
    with whole_folder(folder, asked.ours) as partial:
        writer = GGUFWriter(partial / FILE, architecture)
        for key, value in fields.items():
            _add(writer, f"{architecture}.{key}", value)
        for key, field in own.fields.items():
            if key.startswith("tokenizer.") and (mask is None or key != MASK):
                kind, *inner = field.types
                writer.add_key_value(key, field.contents(), kind, inner[-1] if inner else None)
        if mask is not None:
            _add(writer, MASK, mask)
        for name, tensor in tensors.items():
            writer.add_tensor(name, _stored(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (partial / "README.md").write_text(asked.card, encoding="utf-8")
        expected = {f"{architecture}.{key}": value for key, value in fields.items()}
        expected |= {"general.architecture": architecture, "tokenizer.ggml.tokens": tokens}
        _reread(partial / FILE, expected | ({} if mask is None else {MASK: mask}), tensors)
    return Path(folder)


def _target_file(asked: Export) -> Path:
    """The target's own GGUF file; UserError without one."""
    if asked.gguf is None:
        raise UserError(
            "llama.cpp needs the target's own GGUF file, whose tokenizer the drafter's file gets: "
            "name it with model.target_gguf=<file.gguf>, or export for vllm and run llama.cpp's "
            "convert_hf_to_gguf.py <that folder> --target-model-dir <the target's folder>",
            key="script.engine", value="llamacpp",
        )  # fmt: skip
    return asked.gguf


def _check_tokens(tokens: list[str], tokenizer: PreTrainedTokenizerBase, asked: Export) -> None:
    """Raise UserError where the tokens of the GGUF file are not the drafter's."""
    for token, number in tokenizer.get_vocab().items():
        if number >= len(tokens) or tokens[number] != token:
            theirs = tokens[number] if number < len(tokens) else None
            raise UserError(
                f"its token {number} is {theirs!r}, the target's {token!r}: it is of another model",
                key="model.target_gguf", value=str(asked.gguf),
            )  # fmt: skip


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    from gguf import GGUFValueType

    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    if isinstance(value, list):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.INT32)
    else:
        writer.add_key_value(key, value, kinds[type(value)])


def _stored(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as it is stored: ids and float16 matrices as they are, all else in float32."""
    as_is = tensor.dtype == torch.int64 or (tensor.dtype == torch.float16 and tensor.ndim > 1)
    return (tensor if as_is else tensor.float()).contiguous().numpy()


def _reread(file: Path, expected: Fields, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare a file with what it was written from, value by value; RunFault where they differ."""
    found = read(file, "script.out")
    for key, value in expected.items():
        field = found.get_field(key)
        got = None if field is None else field.contents()
        same = np.float32(value) == got if isinstance(value, float) else value == got
        if not same:
            raise RunFault(f"{file}: key {key!r} differs on reading it back")
    written = {tensor.name: tensor for tensor in found.tensors}
    if written.keys() != tensors.keys():
        raise RunFault(f"{file}: other tensors on reading it back: {sorted(written)}")
    for name, tensor in tensors.items():
        stored = _stored(tensor)
        if not np.array_equal(written[name].data.reshape(stored.shape), stored):
            raise RunFault(f"{file}: tensor {name!r} differs on reading it back")
