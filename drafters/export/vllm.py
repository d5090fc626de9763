"""Heads for vLLM (read in 0.32): Medusa, EAGLE-1, DFlash, DSpark and the flat layout of EAGLE-3.

- Medusa drafts a chain of first choices, one head a token. Heads that share the target's output
  matrix are written with `original_lm_head` and that matrix once, as head 0's: vLLM then builds one
  matrix for all of them, where a copy a head would cost vocabulary x width x heads twice, in the
  file and in memory. The loader drops biases silently unless `medusa_fc_bias` is true. A matrix of
  a head's own must have a row for every token: the loader refuses one of `truncated_vocab_size`
  rows, which it knows for a shared matrix. A reduced vocabulary is therefore padded with the mean
  of its rows; the logit of that row is the mean of theirs, so the first choice stays the same.
- EAGLE-1 is a Llama of one layer plus `fc`, which has no bias there; vLLM puts "Eagle" before the
  architecture's name.
- EAGLE-3 names the captured layers twice: vLLM looks at the top-level key and counts the states
  that have passed k layers, SGLang at `eagle_config` and counts layers from 0.
- DFlash counts layers from 0, too. vLLM makes a block of the anchor and as many slots as it is
  asked for tokens, whatever `block_size` says. That blocks are causal is read at the top level
  first, then in `dflash_config`. An output matrix of its own may have the rows of a reduced
  vocabulary, mapped as in EAGLE-3.
- DSpark has the published flat keys. vLLM corrects by the token before alone, whatever
  `markov_head_type` says, and runs DSpark on a GPU only (its second model runner).
"""

from __future__ import annotations

from pathlib import Path

import torch

from drafters.base import TrainedDrafter
from drafters.block import BlockDrafter, DSparkDrafter
from drafters.eagle1 import Eagle1Drafter
from drafters.eagle3 import Eagle3Drafter
from drafters.export.card import Export
from drafters.export.heads import (
    Layout,
    captured_layers,
    check_ids,
    configured_vocab_size,
    dflash_tensors,
    draft_vocab_size,
    dspark_tensors,
    dtype_of,
    eagle1_tensors,
    eagle3_tensors,
    layer_keys,
    own_embedding,
    padded_rows,
    reduced,
    refuse_biased_head,
    refuse_unserved_eagle1,
    served_confidence,
    write,
)
from drafters.medusa import MedusaDrafter
from trainer.errors import UserError

MARKOV_TYPES = {"markov": "vanilla", "gated": "gated"}  # the published names of corrections


def check_eagle1(drafter: Eagle1Drafter) -> None:
    """Raise UserError for an EAGLE-1 head that vLLM cannot serve."""
    if drafter.settings.fc_bias:
        raise UserError(
            "vLLM's EAGLE loader drops 'fc.bias', which this head has: export it with "
            "script.engine=sglang, or train a head of your own, which has none"
        )
    refuse_unserved_eagle1(drafter)


def check_medusa(drafter: TrainedDrafter) -> None:
    """Raise UserError for Medusa heads that vLLM cannot serve."""
    refuse_biased_head(drafter)
    check_ids(drafter)


def check_eagle3(drafter: Eagle3Drafter) -> None:
    """Raise UserError for an EAGLE-3 head that vLLM cannot serve."""
    captured_layers(drafter)
    if not reduced(drafter):
        check_ids(drafter)


def check_dflash(drafter: BlockDrafter) -> None:
    """Raise UserError for a block drafter that vLLM cannot serve."""
    if drafter.unserved is not None:
        raise UserError(drafter.unserved)
    captured_layers(drafter)
    refuse_biased_head(drafter)
    check_ids(drafter)


def check_dspark(drafter: DSparkDrafter) -> None:
    """Raise UserError for a DSpark drafter that vLLM would run as another one."""
    check_dflash(drafter)
    if drafter.settings.correction != "markov":
        raise UserError(
            "vLLM and llama.cpp correct by the token before alone, as method.correction=markov "
            f"does: this drafter has {drafter.settings.correction}; use script.engine=sglang"
        )


def write_medusa(drafter: MedusaDrafter, folder: str | Path, asked: Export) -> Path:
    """Write Medusa heads."""
    return write(folder, medusa(drafter), drafter, asked)


def write_eagle1(drafter: Eagle1Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-1 head."""
    config: dict[str, object] = {"architectures": ["LlamaForCausalLM"], **layer_keys(drafter)}
    return write(folder, (config, eagle1_tensors(drafter)), drafter, asked)


def write_eagle3(drafter: Eagle3Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-3 head."""
    return write(folder, eagle3(drafter), drafter, asked)


def write_dflash(drafter: BlockDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a block drafter."""
    return write(folder, dflash(drafter), drafter, asked)


def write_dspark(drafter: DSparkDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a DSpark drafter."""
    return write(folder, dspark(drafter), drafter, asked)


def medusa(drafter: MedusaDrafter) -> Layout:
    """config.json and tensors of Medusa heads."""
    settings, weights, dtype = drafter.settings, drafter.state_dict(), dtype_of(drafter)
    width = drafter.shared.target.hidden_size
    num_layers = max(settings.num_layers, 1)  # a layer of zeros passes its input unchanged
    tensors: dict[str, torch.Tensor] = {}
    for i in range(settings.num_heads):
        for j in range(num_layers):
            shapes = {"weight": (width, width), "bias": (width,)}
            for part, shape in shapes.items():
                given = weights.get(f"blocks.{i}.layers.{j}.{part}")
                given = torch.zeros(shape, dtype=dtype) if given is None else given
                tensors[f"medusa_heads.{i}.{j}.linear.{part}"] = given
        if settings.own_head or i == 0:
            rows = padded_rows(drafter, drafter.output_head(i + 1).weight, drafter.kept)
            tensors[f"medusa_heads.{i}.{num_layers}.weight"] = rows
    config: dict[str, object] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": configured_vocab_size(drafter),
        "truncated_vocab_size": configured_vocab_size(drafter),
        "num_heads": settings.num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not settings.own_head,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return config, tensors


def eagle3(drafter: Eagle3Drafter) -> Layout:
    """config.json and tensors of an EAGLE-3 head, for SGLang too."""
    settings, layers = drafter.settings, captured_layers(drafter)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(drafter),
        "draft_vocab_size": draft_vocab_size(drafter),
        "target_hidden_size": settings.target_width,
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers,
        },
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
    }
    return config, eagle3_tensors(drafter, "midlayer")


def dflash(drafter: BlockDrafter) -> Layout:
    """config.json and tensors of a block drafter, for SGLang too."""
    settings = drafter.settings
    inner = _read_states(drafter) | {"causal": settings.causal}
    config = _blocks(drafter, "DFlashDraftModel") | {"dflash_config": inner}
    return config, _with_embedding(drafter, dflash_tensors(drafter))


def dspark(drafter: DSparkDrafter) -> Layout:
    """config.json and tensors of a DSpark drafter, for SGLang too."""
    config = _blocks(drafter, "Qwen3DSparkModel") | _read_states(drafter) | dspark_keys(drafter)
    config["dflash_config"] = {"causal": drafter.settings.causal}
    return config, _with_embedding(drafter, dspark_tensors(drafter))


def dspark_keys(drafter: DSparkDrafter) -> dict[str, object]:
    """The keys of the correction and the confidence."""
    settings, judges = drafter.settings, served_confidence(drafter) is not None
    return {
        "sample_from_anchor": settings.from_anchor,
        "markov_rank": settings.correction_rank,
        "markov_head_type": MARKOV_TYPES[settings.correction],
        "enable_confidence_head": judges,
        "confidence_head_with_markov": judges,
    }


def _read_states(drafter: BlockDrafter) -> dict[str, object]:
    mask = drafter.settings.mask_token
    return {"mask_token_id": mask, "target_layer_ids": captured_layers(drafter)}


def _blocks(drafter: BlockDrafter, architecture: str) -> dict[str, object]:
    """The keys of the layers and the blocks."""
    settings, count = drafter.settings, drafter.config.num_hidden_layers
    return {
        "architectures": [architecture],
        **layer_keys(drafter),
        "model_type": "qwen3",
        "num_hidden_layers": count,
        "layer_types": ["full_attention"] * count,
        "block_size": settings.block_size,
        "num_target_layers": drafter.shared.target.num_layers,
        **({"is_causal": True} if settings.causal else {}),
        **({"draft_vocab_size": draft_vocab_size(drafter)} if settings.own_head else {}),
    }


def _with_embedding(
    drafter: BlockDrafter, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    embedding = own_embedding(drafter)
    return tensors if embedding is None else tensors | {"embed_tokens.weight": embedding}
