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
from trainer.errors import UserError

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
    prefix = arch == "prefix-mlp"
    rows = f"{_rows(num_heads - 1, prefix)}.weight"
    deepest = f"{_layer(0, num_layers - 1, prefix)}.weight"
    counted = {"hydra_num_heads": (num_heads, rows), "hydra_num_layers": (num_layers, deepest)}
    for key, (count, name) in counted.items():  # tables as long as these are made below
        if count < 1 or name not in tensors:
            raise UserError(f"{folder}: key {key!r} is {count}, and tensor {name!r} is missing")
    if tensors[rows].dim() != 2:
        raise UserError(f"{folder}: tensor {rows!r} must be a matrix")
    return PublishedHead(
        "hydra", tensors, ["final_norm"], len(tensors[rows]), num_heads=num_heads,
        num_layers=num_layers, flags={"prefix_layer": prefix}, folder=folder,
    )  # fmt: skip


def _layer(head: int, number: int, prefix: bool) -> str:
    """Name of a head's layer, where each has a dropout module before it or none."""
    place = 2 * number + 1 if prefix else number
    return f"hydra_mlp.{head}.{place}.linear"


def _rows(head: int, prefix: bool) -> str:
    """Name of a head's output matrix."""
    return f"hydra_lm_head.{head}.1" if prefix else f"hydra_lm_head.{head}"


def published_names(head: PublishedHead) -> dict[str, str]:
    """The published name of each of the drafter's tensors."""
    prefix = head.flags["prefix_layer"]
    names = {}
    for i in range(head.num_heads):
        first = _layer(i, 0, prefix)
        residual = first.replace("linear", "res_connection")
        for part in ("weight", "bias"):
            names[f"heads.{i}.first.{part}"] = f"{first}.{part}"
            names[f"heads.{i}.residual.{part}"] = f"{residual}.{part}"
            for j in range(1, head.num_layers):
                names[f"heads.{i}.layers.{j - 1}.{part}"] = f"{_layer(i, j, prefix)}.{part}"
            names[f"lm_heads.{i}.{part}"] = f"{_rows(i, prefix)}.{part}"
    if prefix:
        layer = "prefix_embeding_layer.layers.0"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            names[f"prefix.layer.{name}.weight"] = f"{layer}.self_attn.{name}.weight"
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
            names[f"prefix.layer.{name}.weight"] = f"{layer}.{name}.weight"
        names["prefix.input_layernorm.weight"] = f"{layer}.input_layernorm.weight"
        names["prefix.norm.weight"] = "prefix_embeding_layer.norm.weight"
    return names
