"""Block drafters for transformers' `generate(assistant_model=, speculation_type="dflash")`.

The layout is that of Muse Glimmer's assistant (run in transformers 5.23), which any target takes:
`fc` and its norm have other names, and the settings of the block stand at the top level. Beside
them stands vLLM's `dflash_config`, so that vLLM serves the same folder. transformers embeds and
projects by the target's tables, and lets all slots of a block see each other; of the last layer it
captures the normed state.
"""

from __future__ import annotations

from pathlib import Path

from drafters.block import BlockDrafter
from drafters.export import vllm
from drafters.export.card import Export
from drafters.export.heads import captured_layers, own_embedding, write
from trainer.errors import UserError

NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


def check_dflash(drafter: BlockDrafter) -> None:
    """Raise UserError for a block drafter that transformers cannot serve."""
    vllm.check_dflash(drafter)
    last = captured_layers(drafter)[-1]
    for refused, why in (
        (drafter.settings.causal, "lets the slots of a block see each other"),
        (
            drafter.settings.own_head,
            "has no output matrix of a drafter's own, so none for a reduced vocabulary "
            "(method.draft_vocab_size=0 has none)",
        ),
        (own_embedding(drafter) is not None, "has no table for embeddings that are scaled"),
        (
            last == drafter.shared.target.num_layers - 1,
            f"captures the normed state for the output of the last layer ({last})",
        ),
    ):
        if refused:
            raise UserError(
                f"script.engine=transformers: transformers {why}: use script.engine=vllm"
            )


def write_dflash(drafter: BlockDrafter, folder: str | Path, asked: Export) -> Path:
    """Write a block drafter."""
    config, tensors = vllm.dflash(drafter)
    config |= {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "mask_token_id": drafter.settings.mask_token,
        "target_layer_ids": captured_layers(drafter),
    }
    del config["num_target_layers"]
    named = {NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    return write(folder, (config, named), drafter, asked)
