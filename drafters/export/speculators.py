"""EAGLE-3 in the layout of the speculators library (read in 0.9), which vLLM opens directly.

The layer's configuration is nested, its tensors are named `layers.0.*`.

`norm_before_residual` is always written, since speculators and vLLM have different defaults for it.
`d2t` and `t2d` are both written where the draft vocabulary is reduced. Where it is not, neither
reader has a place for them, and vLLM refuses the file.
"""

from __future__ import annotations

from pathlib import Path

from drafters.eagle3 import Eagle3Drafter
from drafters.export.card import Export
from drafters.export.heads import (
    Layout,
    captured_layers,
    draft_vocab_size,
    eagle3_tensors,
    layer_keys,
    write,
)

VERSION = "0.9.0"


def write_eagle3(drafter: Eagle3Drafter, folder: str | Path, asked: Export) -> Path:
    """Write an EAGLE-3 head. Readers load the target by `asked.target`, best an id on the Hub."""
    return write(folder, layout(drafter, asked.target, asked.num_tokens), drafter, asked)


def layout(drafter: Eagle3Drafter, target: str, num_tokens: int) -> Layout:
    """config.json and tensors of an EAGLE-3 head."""
    settings, layers = drafter.settings, captured_layers(drafter)
    # vLLM passes the nested part on whole and this key only there
    layer = layer_keys(drafter) | {"num_aux_hidden_states": len(layers)}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config: dict[str, object] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target,
                "architectures": drafter.shared.target.model.config.architectures or [],
            },
        },
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
