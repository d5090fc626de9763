"""Logits of an exported head, computed from its files alone and compared with its drafter.

`logits` shares no network code with the drafters: float64, one column and one drafted token after
the other, without caches, as the method is defined.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.base import TrainedDrafter
from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.formats.files import Tensors
from drafters.formats.head import PublishedHead
from drafters.formats.reader import read
from drafters.medusa import MedusaDrafter
from target.model import Target
from target.outputs import LayerId, TargetOutputs
from trainer.errors import RunFault, UserError

TOLERANCE = 1e-5  # in units of the largest logit, for drafters in float32
COMPARED_TOKENS = 12
COMPARED_DEPTHS = 3  # for heads without an output matrix for each depth


@torch.no_grad()
def reread(folder: str | Path, drafter: EagleDrafter | MedusaDrafter | BlockDrafter) -> float:
    """Compare `folder` with `drafter.draft_logits` on random tokens and states.

    Returns the largest difference, in units of the largest logit. Raises RunFault where it is too
    large, or where the files are not a head that this reader knows.
    """
    target = drafter.shared.target
    try:
        head = read(folder, strict=True, num_target_layers=target.num_layers)
    except UserError as error:
        raise RunFault(f"on reading it back: {error}") from error
    width = drafter.fingerprint["vocab_size"]
    if head.vocab_size != width:
        raise RunFault(
            f"{folder}: key 'vocab_size' must be the target's {width}, got {head.vocab_size}"
        )
    draws = torch.Generator().manual_seed(0)
    named = set(drafter.tokenizer.get_vocab().values())
    real = torch.tensor(sorted(i for i in named if i < drafter.vocab_size))
    kept = drafter.output_head(1).kept
    drafted = torch.zeros(width, dtype=torch.bool)
    drafted[real if kept is None else kept.cpu()] = True
    ids = real[torch.randint(len(real), (COMPARED_TOKENS,), generator=draws)]
    size = (COMPARED_TOKENS, target.hidden_size)
    layers: list[LayerId] = [*range(target.num_layers), "final_norm"]
    hidden = {layer: torch.randn(size, generator=draws) for layer in layers}

    embedding, rows = (w.detach().cpu() for w in (table_of(target), target.head.weight))
    same_table = torch.equal(target.embedding(ids.to(target.device)).cpu(), embedding[ids])
    if head.kind != "medusa" and not (same_table or "embed_tokens.weight" in head.tensors):
        raise RunFault(
            f"{folder}: tensor 'embed_tokens.weight' is missing: the target scales its embeddings, "
            "engines use the table as it is"
        )
    on_device = {layer: state[None].to(target.device) for layer, state in hidden.items()}
    worst = 0.0
    deepest = head.num_heads or min(COMPARED_DEPTHS, drafter.max_depth or COMPARED_DEPTHS)
    for depth in range(1, deepest + 1):
        outputs = TargetOutputs(on_device)
        expected = drafter.draft_logits(ids[None].to(target.device), outputs, depth)
        expected = expected[0, depth:].cpu().double()
        found = logits(head, ids, hidden, embedding, rows, depth)
        padded = head.has_rows and head.target_ids is None
        if padded and not drafted[found.argmax(-1)].all():
            raise RunFault(
                f"{folder}: at depth {depth} an id could be drafted that has no token or is not in "
                "the draft vocabulary"
            )
        found, expected = found[:, real], expected[:, real]
        if (transform := drafter.output_head(depth).transform) is not None:
            found = transform(found)  # increasing: engines leave it out and choose the same
        if padded:
            found[:, ~drafted[real]] = -torch.inf
        scored = expected.isfinite()
        if not torch.equal(scored, found.isfinite()):
            raise RunFault(f"{folder}: tensor 'd2t' names other ids than the drafter scores")
        largest = max(1.0, float(expected[scored].abs().max()))
        differs = float((expected - found)[scored].abs().max()) / largest
        allowed = _tolerance(drafter)
        if differs > allowed:  # a chain may amplify rounding; this reader measures by how much
            rough = logits(head, ids, hidden, embedding, rows, depth, torch.float32)[:, real]
            rough = rough.double() if transform is None else transform(rough.double())
            allowed = max(allowed, 10 * float((rough - found)[scored].abs().max()) / largest)
        if not differs <= allowed:
            raise RunFault(
                f"{folder}: the logits at depth {depth} differ by {differs:.2g} of the largest: a "
                "tensor's values, the layer ids or a setting in config.json are not the drafter's"
            )
        worst = max(worst, differs)
    return worst


def table_of(target: Target) -> torch.Tensor:
    """The weight [V, H] of the target's embedding, which engines use; the target may scale it."""
    embedding: Any = target.embedding
    return embedding.weight


def _tolerance(drafter: TrainedDrafter) -> float:
    """Largest difference allowed: more for a drafter that computes in half precision."""
    used = {next(drafter.parameters()).dtype, drafter.output_head(1).weight.dtype}
    return max(TOLERANCE, *(16 * torch.finfo(dtype).eps * (dtype.itemsize < 4) for dtype in used))


def logits(
    head: PublishedHead,
    ids: torch.Tensor,
    hidden: dict[LayerId, torch.Tensor],
    embedding: torch.Tensor,
    rows: torch.Tensor,
    depth: int,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Logits [L - depth, V] of the token drafted at `depth` after the tokens of `ids`.

    `ids`: [L] int64; `hidden[layer]`: [L, Ht]; `embedding`, `rows`: [V, H], the tables of the
    engine; the result has `dtype` and belongs to the logit indices depth..L - 1.
    """
    starts = range(len(ids) - depth)
    if head.kind == "medusa":
        state = hidden["final_norm"][: len(starts)].to(dtype)
        return _medusa(head.tensors, state, depth - 1, head.num_layers)
    table = head.tensors.get("embed_tokens.weight", embedding)
    embedded = table[ids].to(dtype)
    features = torch.cat([hidden[layer].to(dtype) for layer in head.captures], -1)
    if head.kind in ("dflash", "dspark"):
        block, mask = _Block(head, dtype), table[head.mask_token].to(dtype)
        slot = depth - head.flags["from_anchor"]
        drafted = [
            block.draft(embedded[start + 1], mask, features, start)[slot] for start in starts
        ]
    else:
        eagle = _Eagle(head, dtype)
        drafted = [eagle.draft(embedded, features, start, depth) for start in starts]
    states = torch.stack(drafted)
    scores = _projected(states, head.tensors["lm_head.weight"] if head.has_rows else rows)
    if head.kind == "dspark":
        scores = scores + _corrected(head, states, ids[depth:])
    if head.target_ids is None:
        return scores
    full = scores.new_full((len(scores), head.vocab_size), -torch.inf)
    full[:, head.target_ids] = scores
    return full


def _corrected(head: PublishedHead, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What the tokens `before` [n] add to the logits of slots with `states` [n, H]: [n, V]."""
    tensors, dtype = head.tensors, states.dtype
    found = tensors["markov_head.markov_w1.weight"][before].to(dtype)
    if head.correction == "gated":
        gate = torch.cat([states, found], -1) @ tensors["markov_head.gate_proj.weight"].to(dtype).T
        found = found * (gate + tensors["markov_head.gate_proj.bias"].to(dtype)).sigmoid()
    return _projected(found, tensors["markov_head.markov_w2.weight"])


def _projected(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits in pieces: in float64 the matrix of a large vocabulary takes gigabytes."""
    return torch.cat([states @ piece.to(states.dtype).T for piece in rows.split(8192)], -1)


def _medusa(tensors: Tensors, state: torch.Tensor, number: int, num_layers: int) -> torch.Tensor:
    for j in range(num_layers):
        made = state @ tensors[f"block.{number}.{j}.weight"].to(state.dtype).T
        if f"block.{number}.{j}.bias" in tensors:
            made = made + tensors[f"block.{number}.{j}.bias"].to(state.dtype)
        state = state + made * torch.sigmoid(made)
    return _projected(state, tensors["rows" if "rows" in tensors else f"rows.{number}"])


class _Eagle:
    """One decoder layer, one column at a time; vectors where the drafter has batches."""

    def __init__(self, head: PublishedHead, dtype: torch.dtype):
        assert head.layer is not None
        self.head, self.config = head, head.layer
        own = ("layer.", "fc.", "fc_norm.", "norm.")
        self.tensors = {n: t.to(dtype) for n, t in head.tensors.items() if n.startswith(own)}
        self.rotary = LlamaRotaryEmbedding(head.layer)

    def draft(
        self, embedded: torch.Tensor, features: torch.Tensor, start: int, depth: int
    ) -> torch.Tensor:
        """Draft a chain of `depth` after the columns up to `start`: the last input of the head,
        [H]."""
        keys, values = [], []
        feature = projected = features[start]
        for column in range(start + depth):
            if column <= start:  # the target has been here
                feature = self.fused(features[column])
            x, residual = self.inputs(feature, embedded[column + 1])
            keys.append(self.rotated(self.heads(x, "k"), column))
            values.append(self.heads(x, "v"))
            if column < start:
                continue
            query = self.rotated(self.heads(x, "q"), column)
            output = self.layer(query, torch.stack(keys), torch.stack(values), residual)
            feature = projected = output
            if self.head.kind == "eagle3":
                projected = self.norm(output, "norm")
                feature = projected if self.head.flags["norm_output"] else output
        return projected

    def fused(self, joined: torch.Tensor) -> torch.Tensor:
        if self.head.kind == "eagle":
            return joined
        if self.head.flags["fc_norm"]:
            parts = joined.chunk(len(self.head.captures))
            joined = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.tensors["fc.weight"] @ joined

    def inputs(
        self, feature: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.head.kind == "eagle":
            mixed = self.tensors["fc.weight"] @ torch.cat([embedded, feature])
            if "fc.bias" in self.tensors:
                mixed = mixed + self.tensors["fc.bias"]
            return mixed, mixed
        normed = self.norm(feature, "layer.hidden_norm")
        token = self.norm(embedded, "layer.input_layernorm")
        residual = normed if self.head.flags["norm_before_residual"] else feature
        return torch.cat([token, normed]), residual

    def layer(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """query [heads, D]; keys, values [columns, groups, D]; residual [H] -> [H]"""
        shared = len(query) // keys.shape[1]
        mixed = []
        for number, one in enumerate(query):
            group = number // shared
            weights = (keys[:, group] @ one / len(one) ** 0.5).softmax(0)
            mixed.append(weights @ values[:, group])
        hidden = residual + self.times("self_attn.o_proj", torch.cat(mixed))
        x = self.norm(hidden, "layer.post_attention_layernorm")
        gated = F.silu(self.times("mlp.gate_proj", x)) * self.times("mlp.up_proj", x)
        return hidden + self.times("mlp.down_proj", gated)

    def times(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.tensors[f"layer.{name}.weight"] @ x

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean() + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def heads(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return self.times(f"self_attn.{which}_proj", x).view(-1, int(self.config.head_dim or 0))

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        angles = self.rotary(x.float(), torch.tensor([[position]]))
        cos, sin = (part[0, 0].to(x.dtype) for part in angles)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class _Block:
    """The layers of a DFlash drafter, one block at a time."""

    def __init__(self, head: PublishedHead, dtype: torch.dtype):
        assert head.layer is not None
        self.head, self.config = head, head.layer
        own = ("layers.", "fc.", "hidden_norm.", "norm.")
        self.tensors = {n: t.to(dtype) for n, t in head.tensors.items() if n.startswith(own)}
        self.rotary = LlamaRotaryEmbedding(head.layer)

    def draft(
        self, anchor: torch.Tensor, mask: torch.Tensor, features: torch.Tensor, start: int
    ) -> torch.Tensor:
        """The states [slots, H] behind the columns up to `start`; `anchor`, `mask` [H]: embedded
        tokens."""
        size = self.head.block_size
        seen = self.norm(features[: start + 1] @ self.tensors["fc.weight"].T, "hidden_norm")
        hidden = torch.stack([anchor, *[mask] * (size - 1)])
        positions = torch.arange(start + 1 + size)
        for number in range(self.config.num_hidden_layers):
            prefix = f"layers.{number}"
            normed = self.norm(hidden, f"{prefix}.input_layernorm")
            inputs = torch.cat([seen, normed])
            keys, values = self.heads(inputs, prefix, "k"), self.heads(inputs, prefix, "v")
            keys = self.rotated(self.norm(keys, f"{prefix}.self_attn.k_norm"), positions)
            queries = self.norm(self.heads(normed, prefix, "q"), f"{prefix}.self_attn.q_norm")
            queries = self.rotated(queries, positions[start + 1 :])
            mixed = torch.stack([
                self.mixed(query, keys, values, start + 2 + slot)
                for slot, query in enumerate(queries)
            ])  # fmt: skip
            hidden = hidden + self.times(mixed, f"{prefix}.self_attn.o_proj")
            x = self.norm(hidden, f"{prefix}.post_attention_layernorm")
            gate, up = (self.times(x, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
            hidden = hidden + self.times(F.silu(gate) * up, f"{prefix}.mlp.down_proj")
        return self.norm(hidden, "norm")

    def mixed(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: int
    ) -> torch.Tensor:
        """query [heads, D]; keys, values [columns, groups, D], of which a causal block's slot sees
        the first `causal` -> [heads * D]"""
        end = causal if self.head.flags["causal"] else len(keys)
        shared, found = len(query) // keys.shape[1], []
        for number, one in enumerate(query):
            scores = keys[:end, number // shared] @ one / len(one) ** 0.5
            found.append(scores.softmax(0) @ values[:end, number // shared])
        return torch.cat(found)

    def times(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def heads(self, x: torch.Tensor, prefix: str, which: str) -> torch.Tensor:
        made = self.times(x, f"{prefix}.self_attn.{which}_proj")
        return made.unflatten(-1, (-1, int(self.config.head_dim or 0)))

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, D] at positions [n]"""
        angles = self.rotary(x.float(), positions.unsqueeze(0))
        cos, sin = (part[0].unsqueeze(1).to(x.dtype) for part in angles)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
