"""Published heads of Hydra and Hydra++, in the layout of their original repository.

config.json names the architecture, `mlp` or with the prefix layer `prefix-mlp`; hydra_lm_head.pt
holds the weights. In a prefix-mlp a dropout module stands before every layer and before the output
matrix and takes a number of its own. The module of the embedding is saved with the heads, and so is
that of the prefix layer, which nothing reads.
"""

from __future__ import annotations

from pathlib import Path

from drafters.formats.files import IGNORED_TENSORS, Tensors
from drafters.formats.head import PublishedHead
from drafters.formats.keys import HeadConfig
from trainer.config import UserError

EMBEDDING = "input_embed_fn.weight"
UNREAD = "prefix_embeding_layer.embed_tokens.weight"  # the prefix layer reads states


def read_hydra(folder: Path, config: HeadConfig, tensors: Tensors) -> PublishedHead:
    """Hydra heads from the content of `folder`, under the published names.

    Names and shapes are checked where the heads are made, because those of the prefix layer are the
    target's. Raises UserError for a variant that is not known here.
    """
    arch, offset = config["hydra_head_arch"], config.get("hidden_state_offset") or 0
    if arch not in ("mlp", "prefix-mlp"):
        raise UserError(
            f"{folder}: key 'hydra_head_arch' must be 'mlp' or 'prefix-mlp', got {arch!r}"
        )
    if not config["grounded_heads"]:
        raise UserError(
            f"{folder}: key 'grounded_heads' must be true, got false: heads that read no drafted "
            "token are Medusa's"
        )
    if offset:
        raise UserError(
            f"{folder}: key 'hidden_state_offset' must be 0, got {offset}: Hydra heads here "
            "read the target's last state"
        )
    tensors = {n: tensor for n, tensor in tensors.items() if not IGNORED_TENSORS.search(n)}
    num_heads, num_layers = config["hydra_num_heads"], config["hydra_num_layers"]
    for key, count in (("hydra_num_heads", num_heads), ("hydra_num_layers", num_layers)):
        if count < 1:
            raise UserError(f"{folder}: key {key!r} must be >= 1, got {count}")
    head = PublishedHead(
        "hydra", tensors, ["final_norm"], 0, num_heads=num_heads, num_layers=num_layers,
        flags={"prefix_layer": arch == "prefix-mlp"}, folder=folder,
    )  # fmt: skip
    rows = published_names(head)["lm_heads.0.weight"]
    if rows not in tensors:
        raise UserError(f"{folder}: tensor {rows!r} is missing")
    head.vocab_size = len(tensors[rows])
    return head


def published_names(head: PublishedHead) -> dict[str, str]:
    """The published name of each of the drafter's tensors."""
    prefix = head.flags["prefix_layer"]
    step = 1 + prefix
    names = {}
    for i in range(head.num_heads):
        for part in ("weight", "bias"):
            first = f"hydra_mlp.{i}.{step - 1}"
            names[f"heads.{i}.first.{part}"] = f"{first}.linear.{part}"
            names[f"heads.{i}.residual.{part}"] = f"{first}.res_connection.{part}"
            for j in range(1, head.num_layers):
                place = step * (j + 1) - 1
                names[f"heads.{i}.layers.{j - 1}.{part}"] = f"hydra_mlp.{i}.{place}.linear.{part}"
            rows = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
            names[f"lm_heads.{i}.{part}"] = f"{rows}.{part}"
    if prefix:
        layer = "prefix_embeding_layer.layers.0"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            names[f"prefix.layer.{name}.weight"] = f"{layer}.self_attn.{name}.weight"
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
            names[f"prefix.layer.{name}.weight"] = f"{layer}.{name}.weight"
        names["prefix.input_layernorm.weight"] = f"{layer}.input_layernorm.weight"
        names["prefix.norm.weight"] = "prefix_embeding_layer.norm.weight"
    return names
