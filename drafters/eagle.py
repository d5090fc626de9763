"""EAGLE-1, EAGLE-2 (the same network, another tree) and EAGLE-3: one layer on the target's states.

Column t holds the target's state at position t and the embedding of token t + 1; it predicts token
t + 2, and its output stands for the target's state at t + 1 in the next draft step (Li et al. 2024,
arXiv:2401.15077; 2025, arXiv:2503.01840). EAGLE-1 reads the final-normed state and drafts through
the target's own head; EAGLE-3 reads the states of three layers and has a head of its own, over the
whole vocabulary or over its most frequent tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from data.cache import TreeSlots
from data.devices import decoder_of
from data.target import LayerId, Target, TargetOutputs, check_layers, decoder_layers
from drafters.base import Budget, DraftState, TrainedDrafter, check_fingerprint
from drafters.layers import (
    DecoderLayer,
    RMSNorm,
    Shared,
    SlotKeys,
    attend,
    attend_unrolled,
    copy_gain,
    layer_config,
    start_from,
)
from trainer.chunked import OutputHead
from trainer.config import UserError, require
from trainer.shift import at_index

COMPACT_BELOW = 0.75  # share of columns; from there on all of them without a mask cost less
FUSED_NOISE = 0.1  # of a projection that starts as the identity: the other captures are not dead


@dataclass
class EagleSettings:
    """`captures`: the target's layers it reads, ids as in `data.target`. `norm_before_residual`,
    `fc_norm`, `norm_output`: variants that engines know (the last two are EAGLE-3.1's).
    `detach_recycled`: no gradient through recycled states (HASS). `target_width`: of the captured
    states."""

    version: int
    captures: list[LayerId]
    target_width: int
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    detach_recycled: bool = False

    def __post_init__(self) -> None:
        require(self.version in (1, 3), "version", "be 1 or 3", self.version)
        if self.version == 1 and (self.norm_before_residual or self.fc_norm or self.norm_output):
            raise UserError("norm_before_residual, fc_norm and norm_output are settings of EAGLE-3")
        if self.version == 1 and len(self.captures) != 1:
            raise UserError(f"EAGLE-1 reads the states of one layer, got {self.captures}")


def default_captures(num_layers: int) -> list[LayerId]:
    """Low, middle and high: outputs of layers 1, L/2 - 1 and L - 4."""
    layers: list[LayerId] = [1, num_layers // 2 - 1, num_layers - 4]
    if len(set(layers)) < 3 or min(layers) < 0:  # type: ignore[type-var]
        raise UserError(
            f"method.layers: the defaults {layers} collide on a target of {num_layers} layers: "
            "name three distinct ones, for example method.layers=[0,1,2]"
        )
    return layers


class EagleDrafter(TrainedDrafter):
    kind = "eagle"
    exposes_hidden = True

    def __init__(
        self,
        settings: EagleSettings,
        config: LlamaConfig,
        target: Target,
        kept: torch.Tensor | None = None,
    ):
        """`kept` [Vd] int64 ascending: target ids of a reduced draft vocabulary, EAGLE-3 only."""
        super().__init__()
        self.settings, self.config = settings, config
        self.vocab_size, self.fingerprint = target.vocab_size, target.fingerprint
        self.tokenizer = target.tokenizer
        self.target_layers = check_layers(settings.captures, target.num_layers)
        self.shared = Shared(target)
        width, eps = config.hidden_size, config.rms_norm_eps
        if width != target.hidden_size:
            raise UserError(
                f"the head is {width} wide, the target {target.hidden_size}: it takes the target's "
                "embedding, so both must agree"
            )
        inputs = len(settings.captures) * settings.target_width
        if settings.version == 1:
            self.fc = nn.Linear(width + inputs, width, bias=False)
            self.layer = DecoderLayer(config, width)
        else:
            self.fc = nn.Linear(inputs, width, bias=False)
            if settings.fc_norm:
                self.fc_norms = nn.ModuleList(
                    RMSNorm(settings.target_width, eps=eps) for _ in settings.captures
                )
            self.input_layernorm = RMSNorm(width, eps=eps)
            self.hidden_norm = RMSNorm(width, eps=eps)
            self.layer = DecoderLayer(config, 2 * width)
            self.norm = RMSNorm(width, eps=eps)
            rows = target.vocab_size if kept is None else len(kept)
            self.lm_head = nn.Linear(width, rows, bias=False)
        self.register_buffer("kept", kept)
        self.kept: torch.Tensor | None
        self._head: OutputHead | None = None
        self.checkpointed = False
        self.to(target.device)

    @classmethod
    def build(
        cls,
        target: Target,
        settings: EagleSettings,
        *,
        kept: torch.Tensor | None = None,
        head_from_target: bool = True,
        layer_from_target: bool = True,
    ) -> EagleDrafter:
        """A fresh one in the target's shape. Of EAGLE-3: `head_from_target`: its own head starts as
        the target's rows; `layer_from_target`: its layer starts as the target's last one, fed with
        the last state captured."""
        drafter = cls(settings, layer_config(target.model.config), target, kept)
        if settings.version == 3 and head_from_target:
            rows = torch.arange(target.vocab_size) if kept is None else kept
            with torch.no_grad():
                drafter.lm_head.weight.copy_(target.head.weight[rows.to(target.device)])
        if settings.version == 3 and layer_from_target:
            drafter._start_from_target()
        return drafter

    @torch.no_grad()
    def _start_from_target(self) -> None:
        """As if the target's layers between the last capture and its last one were left out."""
        target = self.shared.target
        model = target.model
        last, norm = decoder_layers(model)[-1], getattr(decoder_of(model), "norm", None)
        with target.in_place(last, norm):
            missing = start_from(self.layer, last)
            if not copy_gain(self.hidden_norm, getattr(last, "input_layernorm", None)):
                missing.append("input_layernorm")
            if not copy_gain(self.norm, norm):
                missing.append("norm")
        if missing:
            print(f"layer_from_target: a fresh start for {', '.join(missing)}, which the target's "
                  "last layer has in another form")  # fmt: skip
        width = self.fc.weight.shape[0]
        self.fc.weight.mul_(FUSED_NOISE)
        self.fc.weight[:, -width:].diagonal().add_(1)

    def fresh(self) -> EagleDrafter:
        return EagleDrafter(self.settings, self.config, self.shared.target, self.kept).eval()

    # --- the network -----------------------------------------------------------------------------

    def _fuse(self, hidden: dict[LayerId, torch.Tensor], *index: Any) -> torch.Tensor:
        """The feature of each column: [.., width] for EAGLE-3, the state itself for EAGLE-1."""
        states = [hidden[layer][index].to(self.fc.weight.dtype) for layer in self.target_layers]
        if self.settings.version == 1:
            return states[0]
        if self.settings.fc_norm:
            states = [norm(one) for norm, one in zip(self.fc_norms, states, strict=True)]
        return self.fc(torch.cat(states, -1))

    def _inputs(
        self, feature: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the residual stream it is added to."""
        if self.settings.version == 1:
            mixed = self.fc(torch.cat([embedded, feature], -1))
            return mixed, mixed
        normed = self.hidden_norm(feature)
        residual = normed if self.settings.norm_before_residual else feature
        return torch.cat([self.input_layernorm(embedded), normed], -1), residual

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            embedded = self.shared.target.embedding(ids)
        return embedded.to(self.fc.weight.dtype)

    def _outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From the layer's output: what the head projects, and what the next step recycles."""
        if self.settings.version == 1:
            return hidden, hidden
        normed = self.norm(hidden)
        return normed, normed if self.settings.norm_output else hidden

    def states(
        self,
        ids: torch.Tensor,
        outputs: TargetOutputs | None,
        depth: int,
        position_ids: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        paths: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:
        """The training-time test: every step feeds the true tokens and the head's own states. The
        others of the `columns` are keys of the first step only. `paths` [B, L, depth - 1] int64:
        tokens that the later steps of each column feed instead of the true ones, as a round does
        that drafts along another branch."""
        assert outputs is not None
        batch, length = ids.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=ids.device).expand_as(ids)
        columns, wanted, valid = _compact(columns, batch, length, ids.device)
        rows = torch.arange(batch, device=ids.device).unsqueeze(1)
        embedded = self._embed(ids)
        x, residual = self._inputs(
            self._fuse(outputs.hidden, slice(None), slice(0, length - 1)), embedded[:, 1:]
        )
        keys, values = self.layer.keys_values(x, position_ids[:, :-1])
        allowed = None
        if columns is not None or documents is not None:
            allowed = torch.arange(length - 1, device=ids.device) <= wanted.unsqueeze(-1)
            if documents is not None:
                allowed &= documents[:, None, :-1] == documents[rows, wanted].unsqueeze(-1)
        if columns is not None:
            x, residual = x[rows, wanted], residual[rows, wanted]
        positions = position_ids[rows, wanted]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the later steps
        for step in range(depth):
            if step:
                at = wanted + 1 + step
                if paths is None:
                    token = embedded[rows, at.clamp(max=length - 1)] * (at < length).unsqueeze(-1)
                else:
                    token = self._embed(paths[rows, wanted, step - 1])
                x, residual = self._inputs(feature, token)  # noqa: F821 (of the step before)
            arguments = (x, residual, positions + step, keys, values, own, allowed, step > 0)
            if self.checkpointed and self.training:
                hidden, new = checkpoint(self._step, *arguments, use_reentrant=False)  # type: ignore[misc]
            else:
                hidden, new = self._step(*arguments)
            own = [*own, new] if step else own
            projected, feature = self._outputs(hidden)
            if self.settings.detach_recycled:
                feature = feature.detach()
            if columns is not None:
                spread = projected.new_zeros(batch, length - 1, projected.shape[-1])
                spread[rows.expand_as(wanted)[valid], wanted[valid]] = projected[valid]
                projected = spread
            yield at_index(projected, step + 1, length)

    def _step(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor,
        values: torch.Tensor, own: list[tuple[torch.Tensor, torch.Tensor]],
        allowed: torch.Tensor | None, later: bool,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        new = self.layer.keys_values(x, positions) if later else (keys, values)
        own = [*own, new] if later else own
        queries = self.layer.queries(x, positions)
        mixed = attend_unrolled(queries, keys, values, own, allowed)
        return self.layer.finish(residual, mixed), new

    def output_head(self, depth: int = 1) -> OutputHead:
        if self.settings.version == 1:
            return self.shared.target.head
        head = self._head
        # made once: checking `kept` waits for the device
        if head is None or head.weight is not self.lm_head.weight or head.kept is not self.kept:
            head = self._head = OutputHead(self.lm_head.weight, kept=self.kept)
        return head

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointed = True

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
        """Columns whose next token is known; the prompt's last waits for the token of the
        prefill."""
        assert outputs is not None
        if ids.shape[1] < 2:
            return
        feature = self._fuse(outputs.hidden, slice(None), slice(0, ids.shape[1] - 1))
        x, _ = self._inputs(feature, self._embed(ids[:, 1:]))
        slots = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        self._slots.write(*self.layer.keys_values(x, slots), slots, rows)

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Columns that may be new since the last round, at most a full round's, with the target's
        own states; those that are not are written again unchanged."""
        assert state.outputs is not None
        self._round = state
        self.start_width = budget.max_tokens + 1
        back = torch.arange(-1 - self.start_width, -1, device=state.ids.device)
        columns = (state.lengths.unsqueeze(1) + back).clamp(min=0)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        feature = self._fuse(state.outputs.hidden, rows, columns)
        embedded = self._embed(state.ids.gather(1, columns + 1))
        used = self._rounded(state.max_length - 1)
        allowed = torch.arange(used, device=columns.device) <= columns.unsqueeze(-1)
        hidden = self._cached(feature, embedded, columns, columns, allowed, used)[:, -1:]
        projected, recycled = self._outputs(hidden)
        self._recycled = recycled
        # the first drafted node is the column of the last committed position
        self._nodes = TreeSlots(state.lengths - 1)
        return self.project(projected[:, 0], 1)

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        placed = self._nodes.add(parents, depth)
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        feature = self._recycled[rows, parents + 1]
        used = self._rounded(self._round.max_length - 1 + self._nodes.count)
        hidden = self._cached(
            feature, self._embed(tokens), placed.positions, placed.slots, placed.visible(used), used
        )
        projected, recycled = self._outputs(hidden)
        self._recycled = torch.cat([self._recycled, recycled], 1)
        self.hidden = projected[:, -1]
        return self.project(projected, depth + 1)

    def _rounded(self, used: int) -> int:
        return min(self._slots.capacity, -(-used // 16) * 16)

    def _cached(
        self,
        feature: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        allowed: torch.Tensor,
        used: int,
    ) -> torch.Tensor:
        x, residual = self._inputs(feature, embedded)
        self._slots.write(*self.layer.keys_values(x, positions), slots)
        mixed = attend(self.layer.queries(x, positions), *self._slots.read(used), allowed)
        return self.layer.finish(residual, mixed)

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        return {"settings": dataclasses.asdict(self.settings), "layer": self.config.to_dict()}

    def save_weights(self, folder: Path) -> None:
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.draft_weights().items()}
        save_file(tensors, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> EagleDrafter:
        folder = Path(folder)
        about = json.loads((folder / "drafter.json").read_text())
        check_fingerprint(about["target"], target.fingerprint, str(folder))
        tensors = load_file(folder / "model.safetensors")
        drafter = cls(
            EagleSettings(**about["settings"]),
            LlamaConfig.from_dict(about["layer"]),
            target,
            tensors.get("kept"),
        )
        drafter.load_state_dict(tensors)
        drafter.rank_accuracy = about.get("rank_accuracy")
        return drafter.eval()


def _compact(
    columns: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """columns [B, L] bool -> the same, None where all are computed after all; which columns each
    row computes, [B, C] int64, and which of these are no filling, [B, C] bool. None: all that have
    a next token."""
    if columns is not None:
        columns = columns[:, : length - 1]
        counts = columns.sum(1)
        width = max(1, int(counts.max()))
        if width < COMPACT_BELOW * (length - 1):
            wanted = columns.long().argsort(dim=1, descending=True, stable=True)[:, :width]
            return columns, wanted, torch.arange(width, device=device) < counts.unsqueeze(1)
    wanted = torch.arange(length - 1, device=device).expand(batch, -1)
    return None, wanted, torch.ones_like(wanted, dtype=torch.bool)
