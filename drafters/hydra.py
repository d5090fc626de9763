"""Hydra: Medusa's heads, each of which also reads the tokens drafted before its own.

The head of depth j on the state s_t reads u = [s_t ; e(x_{t+1}) ; ... ; e(x_{t+j})] and predicts
token t + 1 + j: r = R u + SiLU(A u), then r + SiLU(B r), then its output matrix (Ankner et al.
2024, arXiv:2402.05109). e is the target's own embedding; s_t the target's last state or, in
Hydra++, what a decoder layer over the prefix makes of it. Departures from the published code: R
starts as [I 0 .. 0], so that without the prefix layer a fresh head is the target's next-token
predictor, where the published one is a random map; the later layers of a head are distinct modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig

from drafters.attention import attend, attend_unrolled
from drafters.base import TrainedDrafter
from drafters.layers import DecoderLayer, RMSNorm, Shared, SlotKeys, layer_config
from drafters.output_head import ResidualLayers, copy_head, head_of, own_heads, zero_linear
from drafters.round import Budget, DraftState
from drafters.stored import read_stored, restore, save_tensors, without
from drafters.text import Text
from target.attention import Visible
from target.model import Target
from target.outputs import TargetOutputs
from trainer.errors import UserError, require
from trainer.logits import OutputHead
from trainer.shift import at_index


@dataclass
class HydraSettings:
    """Settings of Hydra heads.

    `num_layers`: layers of each head, 4 in Hydra++; `prefix_layer`: the decoder layer of Hydra++;
    `dropout`: before every layer of a head and before its output matrix; `shared_lm_head`: the
    target's, frozen, instead of one per head that starts as the target's; `identity_residual`: R
    starts as [I 0 .. 0], else at random; `tie_layers`: one module for all later layers of a head,
    like a slip in the published code.
    """

    num_heads: int = 4
    num_layers: int = 1
    prefix_layer: bool = False
    dropout: float = 0.0
    shared_lm_head: bool = False
    identity_residual: bool = True
    tie_layers: bool = False

    def __post_init__(self) -> None:
        require(self.num_heads >= 1, "method.num_heads", "be >= 1", self.num_heads)
        require(self.num_layers >= 1, "method.num_layers", "be >= 1", self.num_layers)
        require(0 <= self.dropout < 1, "method.dropout", "lie in [0, 1)", self.dropout)


class HydraDrafter(TrainedDrafter):
    """A set of Hydra heads."""

    kind = "hydra"
    target_layers = ("final_norm",)

    def __init__(self, settings: HydraSettings, target: Target, kept: torch.Tensor | None = None):
        """`kept` [Vd] int64: target ids that the own matrices score, ascending; None: all."""
        super().__init__()
        self.settings, self.max_depth = settings, settings.num_heads
        self.vocab_size, self.fingerprint = target.vocab_size, target.fingerprint
        self.tokenizer = target.tokenizer
        self.shared = Shared(target)
        width = target.hidden_size
        depths = range(1, settings.num_heads + 1)
        self.heads = nn.ModuleList(GroundedHead(width, depth, settings) for depth in depths)
        embedded = self._embed(torch.zeros(1, dtype=torch.long, device=target.device))
        if embedded.shape[-1] != width:
            raise UserError(
                f"the target's embedding is {embedded.shape[-1]} wide, its states {width}: Hydra's "
                "heads read both as one and cannot be made for it"
            )
        if settings.prefix_layer:
            self.prefix = PrefixLayer(prefix_config(target))
        if not settings.shared_lm_head:
            self.lm_heads = own_heads(target, settings.num_heads, True, kept)
        self.register_buffer("kept", kept)
        self.kept: torch.Tensor | None
        self.to(target.device)

    @classmethod
    def build(
        cls, target: Target, settings: HydraSettings, kept: torch.Tensor | None = None
    ) -> HydraDrafter:
        """Fresh heads for this target."""
        drafter = cls(settings, target, kept)
        if not settings.shared_lm_head:
            copy_head(target, drafter.lm_heads, kept)
        return drafter

    def fresh(self) -> HydraDrafter:
        return HydraDrafter.build(self.shared.target, self.settings, self.kept).eval()

    # --- the network -----------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the heads' weights."""
        return next(self.heads.parameters()).dtype

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            embedded = self.shared.target.embedding(ids)
        return embedded.to(self.dtype)

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        """Yield the inputs of the output matrix, in training after dropout."""
        assert outputs is not None
        length = text.ids.shape[1]
        state = outputs.hidden["final_norm"].to(self.dtype)
        if self.settings.prefix_layer:
            state = self.prefix(state, text.positions, documents=text.documents)
        embedded = self._embed(text.ids)
        for number in range(1, depth + 1):
            count = max(length - number, 0)  # columns whose tokens t + 1 .. t + number are there
            tokens = [embedded[:, i : i + count] for i in range(1, number + 1)]
            made = self.heads[number - 1](torch.cat([state[:, :count], *tokens], -1))
            yield at_index(made, number, length)

    def network(self) -> dict[str, object]:
        own = without(dataclasses.asdict(self.settings), "identity_residual", "dropout")
        return own if self.settings.num_layers > 2 else without(own, "tie_layers")

    def set_dropout(self, rate: float) -> None:
        """Train with another rate of dropout."""
        self.settings = dataclasses.replace(self.settings, dropout=rate)
        for head in self.heads:
            head.dropout = rate  # type: ignore[assignment]

    def output_layers(self) -> list[nn.Linear]:
        shared = self.settings.shared_lm_head
        return [] if shared else list(self.lm_heads)  # type: ignore[arg-type]

    def output_head(self, depth: int = 1) -> OutputHead:
        heads = None if self.settings.shared_lm_head else self.lm_heads
        return head_of(self.shared.target, heads, depth, self.kept)

    # --- proposing -------------------------------------------------------------------------------

    def begin(self, rows: int, capacity: int) -> None:
        self._slots = SlotKeys(rows, capacity)

    def keep(self, rows: torch.Tensor) -> None:
        self._slots.keep(rows)

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None:
        if not self.settings.prefix_layer:
            return
        assert outputs is not None
        slots = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        hidden = outputs.hidden["final_norm"].to(self.dtype)
        self._slots.write(*self.prefix.keys_values(hidden, slots), slots, rows)

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Compute the state that all heads of this round read.

        The prefix layer runs over the positions that may be new since the last round, at most those
        of a full round, and never over drafted tokens.
        """
        assert state.outputs is not None
        hidden = state.outputs.hidden["final_norm"]
        self.start_width = budget.max_tokens + 1 if self.settings.prefix_layer else 1
        back = torch.arange(-1 - self.start_width, -1, device=state.ids.device)
        columns = (state.lengths.unsqueeze(1) + back).clamp(min=0)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        seen = hidden[rows, columns].to(self.dtype)
        if self.settings.prefix_layer:
            used = min(self._slots.capacity, -(-(state.max_length - 1) // 16) * 16)
            seen = self.prefix(seen, columns, self._slots, used)
        self._state = seen[:, -1:]
        # [B, 1 + fed, num_heads]: the tokens that the heads below a node read. First the root's
        self._paths = state.ids.new_zeros(len(rows), 1, self.settings.num_heads)
        self._paths[:, 0, :1] = state.ids.gather(1, state.lengths.unsqueeze(1) - 1)
        return self._head(self._paths, 1)[:, 0]

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        paths = self._paths[rows, parents + 1]
        paths[..., depth] = tokens
        self._paths = torch.cat([self._paths, paths], 1)
        return self._head(paths, depth + 1)

    def _head(self, paths: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, n, vocab_size] of the nodes' children; paths [B, n, num_heads] int64."""
        embedded = self._embed(paths[..., :depth]).flatten(-2)
        state = self._state.expand(-1, paths.shape[1], -1)
        return self.project(self.heads[depth - 1](torch.cat([state, embedded], -1)), depth)

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> Mapping[str, object]:
        return {"settings": dataclasses.asdict(self.settings)}

    def save_weights(self, folder: Path) -> None:
        save_tensors(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> HydraDrafter:
        """Load a folder of this project; UserError where the heads do not fit the target."""
        about, tensors = read_stored(Path(folder), target)
        drafter = cls(HydraSettings(**about["settings"]), target, tensors.get("kept"))
        restore(drafter, Path(folder), about, tensors)
        return drafter.eval()


class GroundedHead(ResidualLayers):
    """A head of one depth up to its output matrix; `depth` token embeddings follow the state."""

    def __init__(self, width: int, depth: int, settings: HydraSettings):
        super().__init__(width, settings.num_layers - 1, settings.tie_layers, settings.dropout)
        self.first = zero_linear((1 + depth) * width, width)
        self.residual = nn.Linear((1 + depth) * width, width)
        if settings.identity_residual:
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Map z [..., (1 + depth) * width] to [..., width]."""
        z = F.dropout(z, self.dropout, self.training)
        made = super().forward(self.residual(z) + F.silu(self.first(z)))
        return F.dropout(made, self.dropout, self.training)


class PrefixLayer(nn.Module):
    """One decoder layer over the target's states of the text so far."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer = DecoderLayer(config, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def keys_values(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer.keys_values(self.input_layernorm(hidden), positions)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: SlotKeys | None = None,
        used: int = 0,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output [B, T, width] of the layer for hidden [B, T, width].

        Without `slots`, hidden is a whole text, or several by `documents` [B, T] int64. With
        `slots`, hidden is some positions of a text: they are written to the slots and attend to all
        slots up to their own, among those below `used`.
        """
        x = self.input_layernorm(hidden)
        keys, values = self.layer.keys_values(x, positions)
        queries = self.layer.queries(x, positions)
        if slots is None:
            columns = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            visible = Visible(x.shape[1], columns, documents, causal=documents is None)
            mixed = attend_unrolled(queries, keys, values, [], visible)
        else:
            slots.write(keys, values, positions)
            allowed = torch.arange(used, device=x.device) <= positions.unsqueeze(-1)
            mixed = attend(queries, *slots.read(used), allowed)
        return self.norm(self.layer.finish(hidden, mixed))


def prefix_config(target: Target) -> LlamaConfig:
    """Configuration of the prefix layer; UserError for a target without rotary positions."""
    config = target.model.config.get_text_config()
    if not getattr(config, "rope_parameters", None):
        raise UserError(
            f"method.prefix_layer must be false for a {config.model_type} target: its "
            "configuration has no rotary positions that the layer could use"
        )
    return layer_config(config)
