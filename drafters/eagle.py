"""The shared part of all EAGLE heads: one layer on the target's states, unrolled on its outputs.

Column t holds the target's state at position t and the embedding of token t + 1; it predicts token
t + 2, and its output stands for the target's state at t + 1 in the next draft step (Li et al. 2024,
arXiv:2401.15077; 2025, arXiv:2503.01840). `drafters.eagle1` and `drafters.eagle3` say what a column
reads, what the output head projects and what the next step recycles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from drafters.attention import Pair, attend, attend_unrolled
from drafters.base import DrafterJson, TrainedDrafter, check_fingerprint
from drafters.layers import DecoderLayer, Shared, SlotKeys
from drafters.round import Budget, DraftState, Steps
from drafters.text import Text
from target.attention import Branches, Visible, branched
from target.model import Target, check_layers
from target.nodes import TreeSlots
from target.outputs import LayerId, TargetOutputs
from target.rotary import served_context
from trainer.errors import UserError
from trainer.files import load_json
from trainer.shift import at_index

Index: TypeAlias = slice | torch.Tensor  # of rows, or of columns
COMPACT_BELOW = 0.75  # share of columns; from there on all of them without a mask cost less


@dataclass
class EagleSettings:
    """Settings of an EAGLE head.

    `captures`: the target's layers that it reads, ids as in `target.model`; `target_width`: width
    of their states; `detach_recycled`: no gradient through recycled states (HASS).
    """

    captures: list[LayerId]
    target_width: int
    detach_recycled: bool = False


class EagleDrafter(TrainedDrafter):
    """An EAGLE head; a subclass for each version says what a column reads and recycles."""

    version: ClassVar[int]
    settings_type: ClassVar[type[EagleSettings]]
    exposes_hidden = True
    fc: nn.Linear
    layer: DecoderLayer

    def __init__(
        self,
        settings: EagleSettings,
        config: LlamaConfig,
        target: Target,
        kept: torch.Tensor | None = None,
    ):
        """`config`: that of the layer; `kept` [Vd] int64: ids of a reduced vocabulary, ascending.

        Raises UserError where the head is not as wide as the target.
        """
        super().__init__()
        self.settings, self.config = settings, config
        self.vocab_size, self.fingerprint = target.vocab_size, target.fingerprint
        self.tokenizer = target.tokenizer
        self.target_layers = check_layers(settings.captures, target.num_layers)
        self.shared = Shared(target)
        if config.hidden_size != target.hidden_size:
            raise UserError(
                f"the head is {config.hidden_size} wide, the target {target.hidden_size}: it uses "
                "the target's embedding, so both must agree"
            )
        self.make_network(kept)
        self.register_buffer("kept", kept)
        self.kept: torch.Tensor | None
        self.checkpointed = False
        self.to(target.device)

    def network(self) -> dict[str, object]:
        return dataclasses.asdict(self.settings)

    def fresh(self) -> EagleDrafter:
        return type(self)(self.settings, self.config, self.shared.target, self.kept).eval()

    @property
    def context(self) -> int:
        return served_context(self.config)

    # --- the differences of the versions --------------------------------------------------------

    def make_network(self, kept: torch.Tensor | None) -> None:
        """Make `fc`, `layer` and the other modules of this version."""
        raise NotImplementedError

    def fuse(self, hidden: Mapping[LayerId, torch.Tensor], *index: Index) -> torch.Tensor:
        """Features [..., width] of the captured states at these rows and columns."""
        raise NotImplementedError

    def layer_inputs(
        self, feature: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of attention, and the residual stream that its output is added to."""
        raise NotImplementedError

    def layer_outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that the head projects and those that the next step recycles."""
        raise NotImplementedError

    # --- the network -----------------------------------------------------------------------------

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            embedded = self.shared.target.embedding(ids)
        return embedded.to(self.fc.weight.dtype)

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        """Yield the states of the training-time test: true tokens, and the head's own states.

        Columns outside of `text.columns` are only keys of the first step.
        """
        assert outputs is not None
        ids, documents, paths = text.ids, text.documents, text.paths
        (batch, length), position_ids = ids.shape, text.positions
        columns, wanted, valid = _compact(text.columns, batch, length, ids.device)
        rows = torch.arange(batch, device=ids.device).unsqueeze(1)
        embedded = self._embed(ids)
        feature = self.fuse(outputs.hidden, slice(None), slice(0, length - 1))
        x, residual = self.layer_inputs(feature, embedded[:, 1:])
        keys, values = self.layer.keys_values(x, position_ids[:, :-1])
        if documents is not None:
            documents = documents[:, :-1]
        causal = columns is None and documents is None
        visible = Visible(length - 1, wanted, documents, causal)
        if columns is not None:
            x, residual = x[rows, wanted], residual[rows, wanted]
        positions = position_ids[rows, wanted]
        own: list[Pair] = []  # of the later steps
        for step in range(depth):
            if step:
                at = wanted + 1 + step
                if paths is None:
                    token = embedded[rows, at.clamp(max=length - 1)] * (at < length).unsqueeze(-1)
                else:
                    token = self._embed(paths[rows, wanted, step - 1])
                x, residual = self.layer_inputs(feature, token)
            arguments = (x, residual, positions + step, keys, values, own, visible, step > 0)
            if self.checkpointed and self.training:
                hidden, new = checkpoint(self._step, *arguments, use_reentrant=False)  # type: ignore[misc]
            else:
                hidden, new = self._step(*arguments)
            own = [*own, new] if step else own
            projected, feature = self.layer_outputs(hidden)
            if self.settings.detach_recycled:
                feature = feature.detach()
            if columns is not None:
                spread = projected.new_zeros(batch, length - 1, projected.shape[-1])
                # no index by mask, for which the host would wait
                spread[rows, wanted] = torch.where(valid.unsqueeze(-1), projected, 0.0)
                projected = spread
            yield at_index(projected, step + 1, length)

    def _step(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor,
        values: torch.Tensor, own: list[Pair], visible: Visible, later: bool,
    ) -> tuple[torch.Tensor, Pair]:  # fmt: skip
        new = self.layer.keys_values(x, positions) if later else (keys, values)
        own = [*own, new] if later else own
        queries = self.layer.queries(x, positions)
        mixed = attend_unrolled(queries, keys, values, own, visible)
        return self.layer.finish(residual, mixed), new

    def gradient_checkpointing_enable(self) -> None:
        """Compute activations again in the backward pass instead of storing them."""
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
        """Write the columns whose next token is known: all but the last."""
        assert outputs is not None
        if ids.shape[1] < 2:
            return
        feature = self.fuse(outputs.hidden, slice(None), slice(0, ids.shape[1] - 1))
        x, _ = self.layer_inputs(feature, self._embed(ids[:, 1:]))
        slots = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        self._slots.write(*self.layer.keys_values(x, slots), slots, rows)

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Feed the columns that may be new since the last round, with the target's own states.

        These are at most those of a full round; columns that are not new are written again
        unchanged.
        """
        assert state.outputs is not None
        self._round = state
        self.start_width = budget.max_tokens + 1
        back = torch.arange(-1 - self.start_width, -1, device=state.ids.device)
        columns = (state.lengths.unsqueeze(1) + back).clamp(min=0)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        feature = self.fuse(state.outputs.hidden, rows, columns)
        embedded = self._embed(state.ids.gather(1, columns + 1))
        used = self._rounded(state.max_length - 1)
        allowed = torch.arange(used, device=columns.device) <= columns.unsqueeze(-1)
        hidden = self._cached(feature, embedded, columns, columns, allowed[:, -1:], used)
        projected, recycled = self.layer_outputs(hidden)
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
        projected, recycled = self.layer_outputs(hidden)
        self._recycled = torch.cat([self._recycled, recycled], 1)
        self.hidden = projected[:, -1]
        return self.project(projected, depth + 1)

    def branches(self, ids: torch.Tensor, outputs: TargetOutputs) -> EagleBranches:
        """See `drafters.round.Branching`."""
        return EagleBranches(self, ids, outputs)

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
        """Write keys and values of all columns [B, T]; states of the last ones, as many as
        `allowed` [B, t, S] has."""
        x, residual = self.layer_inputs(feature, embedded)
        self._slots.write(*self.layer.keys_values(x, positions), slots)
        last = slice(-allowed.shape[1], None)
        queries = self.layer.queries(x[:, last], positions[:, last])
        mixed = attend(queries, *self._slots.read(used), allowed)
        return self.layer.finish(residual[:, last], mixed)

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> Mapping[str, object]:
        """Entries of drafter.json. All versions are stored under one kind, with their version."""
        settings = {"version": self.version, **dataclasses.asdict(self.settings)}
        return {"kind": "eagle", "settings": settings, "layer": self.config.to_dict()}

    def save_weights(self, folder: Path) -> None:
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.draft_weights().items()}
        save_file(tensors, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> EagleDrafter:
        """Load a folder of this project; UserError where the head was made for another target."""
        folder = Path(folder)
        about: DrafterJson = load_json(folder / "drafter.json")
        check_fingerprint(about["target"], target.fingerprint, str(folder))
        tensors = load_file(folder / "model.safetensors")
        # False is the default of every switch; earlier versions stored those of EAGLE-3 for EAGLE-1
        settings = {
            name: value
            for name, value in about["settings"].items()
            if name != "version" and value is not False
        }
        drafter = cls(
            cls.settings_type(**settings),
            LlamaConfig.from_dict(about["layer"]),
            target,
            tensors.get("kept"),
        )
        drafter.load_state_dict(tensors)
        drafter.rank_accuracy = about.get("rank_accuracy")
        return drafter.eval()


class EagleBranches(Steps):
    """Rounds of a head at prefixes of one text, which share its columns."""

    start_width = 1

    def __init__(self, head: EagleDrafter, ids: torch.Tensor, outputs: TargetOutputs):
        """ids [1, S] int64; outputs.hidden[layer] [1, S, H]."""
        self.head, self.size = head, ids.shape[1] - 1
        feature = head.fuse(outputs.hidden, slice(None), slice(0, self.size))
        self._inputs = head.layer_inputs(feature, head._embed(ids[:, 1:]))
        columns = torch.arange(self.size, device=ids.device).unsqueeze(0)
        self._text = head.layer.keys_values(self._inputs[0], columns)

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Logits [R, vocab_size] behind the prefixes of `state.lengths` [R] tokens, in one row."""
        layer, columns = self.head.layer, state.lengths.unsqueeze(0) - 2
        x, residual = (one[:, columns[0]] for one in self._inputs)
        visible = Visible(self.size, columns)
        mixed = attend_unrolled(layer.queries(x, columns), *self._text, [], visible)
        projected, recycled = self.head.layer_outputs(layer.finish(residual, mixed))
        self._recycled = recycled.transpose(0, 1)
        self._nodes, self._own = TreeSlots(state.lengths - 1), None
        return self.head.project(projected[0], 1)

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        placed, layer = self._nodes.add(parents, depth), self.head.layer
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        feature = self._recycled[rows, parents + 1]
        x, residual = self.head.layer_inputs(feature, self.head._embed(tokens))
        keys, values = layer.keys_values(x, placed.positions)
        if self._own is not None:
            keys, values = torch.cat([self._own[0], keys], 2), torch.cat([self._own[1], values], 2)
        self._own = keys, values
        branches = Branches(placed.first, self.size, placed.ancestors)
        mixed = branched(layer.queries(x, placed.positions), self._text, self._own, branches)
        projected, recycled = self.head.layer_outputs(layer.finish(residual, mixed))
        self._recycled = torch.cat([self._recycled, recycled], 1)
        return self.head.project(projected, depth + 1)


def _compact(
    columns: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The columns to compute, as (columns, wanted [B, C] int64, valid [B, C] bool).

    `columns` [B, L] bool or None (all that have a next token) comes back as None where computing
    all of them costs less; `wanted`: the columns that each row computes; `valid`: which of these
    are no filling.
    """
    if columns is not None:
        columns = columns[:, : length - 1]
        counts = columns.sum(1)
        width = max(1, int(counts.max()))
        if width < COMPACT_BELOW * (length - 1):
            wanted = columns.long().argsort(dim=1, descending=True, stable=True)[:, :width]
            return columns, wanted, torch.arange(width, device=device) < counts.unsqueeze(1)
    wanted = torch.arange(length - 1, device=device).expand(batch, -1)
    return None, wanted, torch.ones_like(wanted, dtype=torch.bool)
