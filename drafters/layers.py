"""The decoder layer of heads with attention: Llama's parts, and slots that the caller chooses.

Serving engines build these heads from Llama's layer whatever the target's family, so the activation
is SiLU and projections have no bias.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from target.devices import is_plain
from target.model import Target
from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RMSNorm = LlamaRMSNorm


def layer_config(target_config: PreTrainedConfig) -> LlamaConfig:
    """Configuration of one Llama layer with the target's width, heads and rotary embedding.

    Of a target that turns only a part of each head, it has the base frequency alone; where the
    width is no multiple of the number of heads, as many heads of the target's width as fill it.
    """
    config = target_config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" not in rope and "rope_theta" not in rope:  # one entry per kind of layer
        rope = rope.get("full_attention") or {"rope_type": "default", "rope_theta": 10000.0}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:  # factors of frequencies would be too few
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.hidden_size % heads:  # Llama's configuration refuses such a width
        heads = config.hidden_size // head_dim
        groups = math.gcd(groups, heads)
        if heads * head_dim != config.hidden_size:
            raise UserError(
                f"a head with attention has Llama's layer: the target's hidden size, "
                f"{config.hidden_size}, must be a multiple of its heads' width, {head_dim}; train "
                "recipe=medusa, hydra or distillspec"
            )
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 1 << 17,
        rope_parameters=dict(rope),
        vocab_size=config.vocab_size,
        hidden_act="silu",
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )


class DecoderLayer(nn.Module):
    """Attention and feed-forward.

    `input_width`: width of the input of q, k and v; the residual stream, `hidden_size` wide, is an
    argument of its own. `head_norms`: an RMS norm for the queries and one for the keys of a head,
    before they are rotated, as Qwen3's layer has them.
    """

    compiled_methods = ("keys_values", "queries", "finish")  # see `trainer.compiled`

    def __init__(self, config: LlamaConfig, input_width: int, head_norms: bool = False):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.groups = config.num_key_value_heads or self.heads
        self.head_dim = config.head_dim or width // self.heads
        self.q_proj = nn.Linear(input_width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)
        norms = (
            RMSNorm(self.head_dim, eps=config.rms_norm_eps) if head_norms else nn.Identity()
            for _ in range(2)
        )
        self.q_norm, self.k_norm = norms

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, [B, G, T, head_dim] each, of x [B, T, input_width]."""
        cos, sin = self.rotary(x, positions)
        keys = self.k_norm(self._split(self.k_proj(x), self.groups))
        rotated, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        return rotated, self._split(self.v_proj(x), self.groups)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated queries [B, H, T, head_dim] of x [B, T, input_width]."""
        cos, sin = self.rotary(x, positions)
        queries = self.q_norm(self._split(self.q_proj(x), self.heads))
        rotated, _ = apply_rotary_pos_emb(queries, queries, cos, sin)
        return rotated

    def finish(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output of the layer, [B, T, width], from mixed values [B, H, T, head_dim]."""
        hidden = residual + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


@torch.no_grad()
def start_from(drafted: DecoderLayer, layer: nn.Module) -> list[str]:
    """Copy the weights that a target's `layer` has under Llama's names in the same shape.

    Where q, k and v read an embedding before the state, the state's columns are copied. Returns the
    names of the weights that were not copied.
    """
    attention = getattr(layer, "self_attn", None)
    mlp = getattr(layer, "mlp", None)
    pairs = {
        **{name: (getattr(drafted, name), attention) for name in _ATTENTION},
        **{name: (getattr(drafted.mlp, name), mlp) for name in _MLP},
    }
    missing = []
    for name, (own, module) in pairs.items():
        weight = getattr(getattr(module, name, None), "weight", None)
        if weight is not None and is_plain(weight):  # else fused or quantised
            part = own.weight[:, own.weight.shape[1] - weight.shape[-1] :]
            if part.shape == weight.shape:
                part.copy_(weight.to_dense())  # from the layout that it has on a CPU
                continue
        missing.append(name)
    # Gemma calls the norm before its feed-forward part so
    before = getattr(layer, "pre_feedforward_layernorm", None)
    norm = before or getattr(layer, "post_attention_layernorm", None)
    if not copy_gain(drafted.post_attention_layernorm, norm):
        missing.append("post_attention_layernorm")
    return missing


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def copy_gain(own: RMSNorm, norm: nn.Module | None) -> bool:
    """Give `own` the gain of a target's RMS norm, in whatever form it is stored (Gemma: less one).

    Returns False where `norm` is no RMS norm of this width.
    """
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.shape != own.weight.shape:
        return False
    ones = torch.ones_like(weight)
    gain = norm(ones)  # of a vector whose root mean square is 1
    if bool((gain == 0).all()):  # it subtracts the mean: no RMS norm
        return False
    own.weight.copy_(gain)
    return True


class SlotKeys:
    """Keys and values of one layer in slots of the caller's choice, as `target.cache` has them."""

    def __init__(self, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Write keys, values [R, G, T, D] to slots [R, T] of rows [R] (None: all)."""
        if self.keys is None or self.values is None:
            shape = (self.rows, keys.shape[1], self.capacity, keys.shape[3])
            # zeros, not empty: a masked slot still enters the weighted sum, as 0 * value
            self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        if rows is None:
            rows = torch.arange(self.rows, device=keys.device)
        index = (rows.unsqueeze(1), slice(None), slots)
        self.keys[index] = keys.transpose(1, 2)
        self.values[index] = values.transpose(1, 2)

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, G, used, D] of the first slots."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, :used], self.values[:, :, :used]

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these batch rows only, in this order."""
        self.rows = len(rows)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class Shared:
    """A target whose embedding and head a drafter uses but does not own.

    Its weights are no parameters of the drafter; they are neither saved nor copied with it.
    """

    def __init__(self, target: Target):
        self.target = target

    def __deepcopy__(self, memo: dict[int, object]) -> Shared:
        return self
