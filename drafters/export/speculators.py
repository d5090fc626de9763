"""EAGLE-3, DFlash and DSpark in the layout of the speculators library (read in 0.9), which vLLM
opens directly.

The layers' configuration is nested, the tensors of EAGLE-3's are named `layers.0.*`. Captured
layers are counted by those that a state has passed.

`norm_before_residual` is always written, since speculators and vLLM have different defaults for it.
`d2t` and `t2d` are both written where the draft vocabulary is reduced. Where it is not, neither
reader has a place for them, and vLLM refuses the file.

The library lets the slots of a DFlash block see each other in layers with full attention, whatever
`sliding_window_non_causal` says; vLLM makes all layers causal unless it is true. An output matrix
of DFlash is read of a reduced vocabulary only, and the embedding is the target's.
"""

from __future__ import annotations

from pathlib import Path

from drafters.block import BlockDrafter, DSparkDrafter
from drafters.eagle3 import Eagle3Drafter
from drafters.export import vllm
from drafters.export.card import Export
from drafters.export.heads import (
    Layout,
    Mapped,
    captured_layers,
    dflash_tensors,
    draft_vocab_size,
    dspark_tensors,
    eagle3_tensors,
    layer_keys,
    own_embedding,
    reduced,
    write,
)
from trainer.errors import UserError

VERSION = "0.9.0"


def write_eagle3(drafter: Eagle3Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-3 head. Readers load the target by `asked.target`, best an id on the Hub."""
    return write(folder, layout(drafter, asked.target, asked.num_tokens), drafter, asked)


def check_dflash(drafter: BlockDrafter) -> None:
    """Raise UserError for a block drafter that this layout does not hold."""
    vllm.check_dflash(drafter)
    for refused, why in (
        (drafter.settings.causal, "has no causal blocks (method.causal=false has none)"),
        (
            drafter.settings.own_head and not reduced(drafter),
            "has an output matrix of a drafter's own for a reduced vocabulary only",
        ),
        (own_embedding(drafter) is not None, "has the target's embedding, which is scaled here"),
    ):
        if refused:
            raise UserError(f"script.engine=speculators: this layout {why}: use script.engine=vllm")


def check_dspark(drafter: DSparkDrafter) -> None:
    """Raise UserError for a DSpark drafter that vLLM would misread from this layout."""
    check_dflash(drafter)
    vllm.check_dspark(drafter)


def write_dflash(drafter: BlockDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a block drafter."""
    config = _blocks(drafter, "dflash", "DFlashDraftModel", asked) | {
        "sliding_window_non_causal": True, "sample_from_anchor": False
    }  # fmt: skip
    return write(folder, (config, dflash_tensors(drafter)), drafter, asked)


def write_dspark(drafter: DSparkDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a DSpark drafter."""
    config = _blocks(drafter, "dspark", "DSparkSpeculator", asked) | vllm.dspark_keys(drafter)
    return write(folder, (config, dspark_tensors(drafter)), drafter, asked)


def _blocks(
    drafter: BlockDrafter, method: str, architecture: str, asked: Export
) -> dict[str, object]:
    settings, count = drafter.settings, drafter.config.num_hidden_layers
    layers = {
        "model_type": "qwen3", "num_hidden_layers": count,
        "layer_types": ["full_attention"] * count,
    }  # fmt: skip
    return _named(method, architecture, drafter, asked.target, asked.num_tokens) | {
        "transformer_layer_config": layer_keys(drafter) | layers,
        "draft_vocab_size": draft_vocab_size(drafter),
        "target_hidden_size": drafter.config.hidden_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in captured_layers(drafter)],
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token,
    }


def _named(
    method: str, architecture: str, drafter: Mapped, target: str, num_tokens: int
) -> dict[str, object]:
    """The keys that name the method and the target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": method,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target,
                "architectures": drafter.shared.target.model.config.architectures or [],
            },
        },
    }


def layout(drafter: Eagle3Drafter, target: str, num_tokens: int) -> Layout:
    """config.json and tensors of an EAGLE-3 head."""
    settings, layers = drafter.settings, captured_layers(drafter)
    # vLLM passes the nested part on whole and this key only there
    layer = layer_keys(drafter) | {"num_aux_hidden_states": len(layers)}
    config = _named("eagle3", "Eagle3Speculator", drafter, target, num_tokens) | {
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab_size(drafter),
        "target_hidden_size": settings.target_width,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "embed_requires_grad": False,
    }
    return config, eagle3_tensors(drafter, "layers.0")
