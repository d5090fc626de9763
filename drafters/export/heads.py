"""The common part of all layouts of heads: writing, padded output rows, tensors of layers.

Engines count the vocabulary as the target's configuration does, which may be wider than the
tokenizer. A head over the whole vocabulary is padded with the mean of its real rows, for the reason
`hf` gives. A reduced vocabulary of EAGLE-3 or DFlash needs no padding: `d2t` says for each of its
rows how far the target's id lies from the row's number, `t2d` which target ids are among them. vLLM
refuses both where the vocabularies are equal.

Engines join the captured states in the order of the layers, so the columns of `fc` are put into
that order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from drafters.base import TrainedDrafter
from drafters.block import BlockDrafter, BlockLayer, DSparkDrafter
from drafters.block_heads import Confidence, Gated, Markov
from drafters.eagle import EagleDrafter
from drafters.eagle1 import Eagle1Drafter
from drafters.eagle3 import Eagle3Drafter
from drafters.export.card import Export
from drafters.export.reread import reread, table_of
from drafters.layers import DecoderLayer
from drafters.medusa import MedusaDrafter
from target.vocabulary import real_ids
from trainer.errors import RunFault, UserError
from trainer.files import whole_folder

Layout = tuple[dict[str, object], dict[str, torch.Tensor]]  # config.json, model.safetensors
Layered = EagleDrafter | BlockDrafter  # drafters with layers, on captured states
Mapped = Eagle3Drafter | BlockDrafter  # those that may draft some of the target's tokens only


@torch.no_grad()
def write(
    folder: str | Path, layout: Layout, drafter: Layered | MedusaDrafter, asked: Export
) -> Path:
    """Write a head to `folder`, complete or not at all.

    An independent reader compares the files with the drafter before the folder gets its name.
    Raises RunFault where they differ or a weight is not finite.
    """
    config, tensors = layout
    refuse_not_finite(tensors)
    with whole_folder(folder, asked.ours) as partial:
        # copies: some names share a tensor, which the format has no way to say
        copies = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
        save_file(copies, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / "README.md").write_text(asked.card, encoding="utf-8")
        reread(partial, drafter)
    return Path(folder)


def refuse_not_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """RunFault where a value is none that a head could serve with."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise RunFault(f"tensor {name!r} holds values that are not finite: nothing was written")


def configured_vocab_size(drafter: TrainedDrafter) -> int:
    """Size of the vocabulary in the target's configuration."""
    return drafter.fingerprint["vocab_size"]


def dtype_of(drafter: TrainedDrafter) -> torch.dtype:
    """Dtype of the drafter's weights."""
    return next(drafter.parameters()).dtype


def padded_rows(
    drafter: TrainedDrafter, weight: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Pad an output matrix [at least vocab_size, d] to [configured vocab_size, d].

    `kept` [Vd] int64: the ids of its rows, where it is [Vd, d]. The result has the drafter's dtype.
    Raises UserError where the tokenizer names a higher id.
    """
    width, real = configured_vocab_size(drafter), check_ids(drafter)
    ids, dtype = torch.arange(drafter.vocab_size) if kept is None else kept.cpu(), dtype_of(drafter)
    named = torch.isin(ids, real)
    weight = weight.detach().cpu()[: len(ids)][named]
    rows = weight.mean(0, dtype=torch.float64).to(dtype).repeat(width, 1)
    rows[ids[named]] = weight.to(dtype)
    return rows


def check_ids(drafter: TrainedDrafter) -> torch.Tensor:
    """The ids [n] int64 of the tokens that both know; UserError where the target's configuration
    has too few rows for them."""
    width, real = configured_vocab_size(drafter), real_ids(drafter.tokenizer)
    real = real[real < drafter.vocab_size]
    if int(real[-1]) >= width:
        raise UserError(
            f"the tokenizer names ids up to {int(real[-1])}, but the target is configured for "
            f"{width}: no engine can serve this target with a head"
        )
    return real


def own_embedding(drafter: Layered) -> torch.Tensor | None:
    """The embedding [configured vocab_size, H] that the head was trained with.

    None where it is the target's weight, which engines use; some targets scale what they look up.
    """
    target = drafter.shared.target
    weight = table_of(target)
    table = target.embedding(torch.arange(len(weight), device=weight.device))
    if torch.equal(table, weight):
        return None
    return table[: configured_vocab_size(drafter)].to(dtype_of(drafter))


def layer_keys(drafter: Layered) -> dict[str, object]:
    """Keys of the Llama layer, with the rotary embedding in the new and in the old spelling."""
    config = drafter.config
    rope: dict[str, object] = dict(config.rope_parameters or {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    dtype = str(dtype_of(drafter)).removeprefix("torch.")
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": configured_vocab_size(drafter),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def layer_tensors(layer: DecoderLayer, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors of a layer, named under `prefix`."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    tensors = {f"{prefix}.self_attn.{name}.weight": getattr(layer, name).weight for name in names}
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{prefix}.mlp.{name}.weight"] = getattr(layer.mlp, name).weight
    tensors[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
    return tensors


def eagle1_tensors(drafter: Eagle1Drafter) -> dict[str, torch.Tensor]:
    """Tensors of an EAGLE-1 head, without an output head; with an embedding where it is needed."""
    tensors = {"fc.weight": drafter.fc.weight, **layer_tensors(drafter.layer, "layers.0")}
    embedding = own_embedding(drafter)
    return tensors if embedding is None else tensors | {"embed_tokens.weight": embedding}


def refuse_unserved_eagle1(drafter: Eagle1Drafter) -> None:
    """Raise UserError for a head that no engine can serve."""
    if drafter.settings.captures != ["final_norm"]:
        raise UserError(
            "engines feed EAGLE-1 the final-normed state, this head was trained on layers "
            f"{drafter.settings.captures}"
        )
    refuse_biased_head(drafter)


def refuse_biased_head(drafter: TrainedDrafter) -> None:
    """Raise UserError where the output head has a bias, which engines leave out."""
    if drafter.output_head(1).bias is not None:
        raise UserError(
            "the target's output head has a bias, which engines do not add to what a head drafts: "
            "this drafter cannot be served"
        )


@torch.no_grad()
def eagle3_tensors(drafter: Eagle3Drafter, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors of an EAGLE-3 head; `prefix`: of the layer's tensors, different in each layout."""
    settings, order = drafter.settings, capture_order(drafter)
    tensors = {
        "fc.weight": ordered_projection(drafter),
        **layer_tensors(drafter.layer, prefix),
        f"{prefix}.input_layernorm.weight": drafter.input_layernorm.weight,
        f"{prefix}.hidden_norm.weight": drafter.hidden_norm.weight,
        "norm.weight": drafter.norm.weight,
    }
    if settings.fc_norm:
        for new, old in enumerate(order):
            tensors[f"fc_norm.{new}.weight"] = drafter.fc_norms[old].weight  # type: ignore[assignment]
    tensors |= _output_tensors(drafter)
    embedding = own_embedding(drafter)
    return tensors if embedding is None else tensors | {"embed_tokens.weight": embedding}


@torch.no_grad()
def dflash_tensors(drafter: BlockDrafter) -> dict[str, torch.Tensor]:
    """Tensors of a block drafter in Qwen3's names, without tables of tokens that are the
    target's."""
    tensors = {
        "fc.weight": ordered_projection(drafter),
        "hidden_norm.weight": drafter.hidden_norm.weight,
        "norm.weight": drafter.norm.weight,
    }
    for number, layer in enumerate(drafter.layers):
        assert isinstance(layer, BlockLayer)
        prefix = f"layers.{number}"
        tensors |= layer_tensors(layer, prefix)
        tensors[f"{prefix}.input_layernorm.weight"] = layer.input_layernorm.weight
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = getattr(layer, name).weight
    return tensors | (_output_tensors(drafter) if drafter.lm_head is not None else {})


@torch.no_grad()
def dspark_tensors(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """Tensors of a DSpark drafter: those of its blocks, of the correction and the confidence. No
    layout has a place for the temperatures of the confidence."""
    correction, tensors = drafter.correction, dflash_tensors(drafter)
    assert isinstance(correction, Markov)
    width, out = configured_vocab_size(drafter), correction.out.weight
    found = correction.lookup.weight[:width]
    tensors["markov_head.markov_w1.weight"] = F.pad(found, (0, 0, 0, width - len(found)))
    rows = out if reduced(drafter) else padded_rows(drafter, out)
    tensors["markov_head.markov_w2.weight"] = rows
    if isinstance(correction, Gated):
        for name, weight in correction.gate.named_parameters():
            tensors[f"markov_head.gate_proj.{name}"] = weight
    if (confidence := served_confidence(drafter)) is not None:
        for name, weight in confidence.out.named_parameters():
            tensors[f"confidence_head.proj.{name}"] = weight
    return tensors


def served_confidence(drafter: DSparkDrafter) -> Confidence | None:
    """The confidence of a drafter where engines have it: theirs reads the row of the token before,
    ours what the gate has left of it."""
    return None if drafter.settings.correction == "gated" else drafter.confidence


def _output_tensors(drafter: Mapped) -> dict[str, torch.Tensor]:
    """The output matrix of a drafter's own, with the maps of a reduced vocabulary."""
    assert drafter.lm_head is not None
    weight, kept = drafter.lm_head.weight, drafter.kept
    if kept is None or not reduced(drafter):
        return {"lm_head.weight": padded_rows(drafter, weight)}
    kept, known = kept.cpu(), torch.zeros(configured_vocab_size(drafter), dtype=torch.bool)
    known[kept] = True
    return {"lm_head.weight": weight, "d2t": kept - torch.arange(len(kept)), "t2d": known}


def reduced(drafter: Mapped) -> bool:
    """Whether the draft vocabulary is smaller than the target's."""
    return drafter.kept is not None and len(drafter.kept) < configured_vocab_size(drafter)


def draft_vocab_size(drafter: Mapped) -> int:
    """Rows of the exported output head."""
    kept = drafter.kept
    return len(kept) if kept is not None else configured_vocab_size(drafter)


def ordered_projection(drafter: Layered) -> torch.Tensor:
    """The weight of `fc` for states that are joined in the order of their layers."""
    order = capture_order(drafter)
    return drafter.fc.weight.unflatten(1, (len(order), -1))[:, order].flatten(1)


def capture_order(drafter: Layered) -> list[int]:
    """Indices into `settings.captures`, lowest layer first."""
    captures = drafter.settings.captures
    numbers = [layer for layer in captures if layer != "final_norm"]
    if len(numbers) < len(captures):
        raise UserError(
            f"engines capture outputs of decoder layers, got {captures}: train with numbered layers"
        )
    return sorted(range(len(numbers)), key=lambda i: int(numbers[i]))


def captured_layers(drafter: Layered) -> list[int]:
    """Captured decoder layers, counted from 0, ascending."""
    captures = drafter.settings.captures
    return [int(captures[i]) for i in capture_order(drafter)]
