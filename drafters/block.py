"""Block drafters: a few layers that fill a block of mask tokens in one pass.

Round behind the anchor, the last committed token, at index a (Chen et al. 2026, DFlash,
arXiv:2602.06036; with a causal mask inside of the block: JetSpec, arXiv:2606.18394):

    slot        0            1       ...   B - 1
    position    a            a + 1   ...   a + B - 1
    input       x_a          MASK    ...   MASK
    predicts    -            a + 1   ...   a + B - 1
    or, `from_anchor`:
    predicts    a + 1        a + 2   ...   a + B

The context of a block is the target's captured states at positions before a, joined, projected and
normed once: H_s = RMSNorm(fc [h_1(s) ; ... ; h_n(s)]). Every layer makes keys and values of it by
its own projections, beside those of the slots, which see all of their block, or with `causal` the
slots up to their own. The anchor's own state does not exist when a round begins, so it never
enters. The embedding is the target's, and so is the output matrix of a drafter that scores all of
its tokens; one that scores some only (`kept`) has a matrix of its own.

A block is always computed whole, however few of its tokens a round asks for: where slots see each
other, what one of them predicts depends on their number. A causal one leaves out the last slots,
which change nothing. With `correction` (`drafters.block_heads`) the slots are computed in one pass
all the same, and their logits one after the other, as the tokens before become known.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from drafters.attention import Blocks, Pair, attend_blocks
from drafters.base import TrainedDrafter
from drafters.block_heads import Confidence, Round, correction_of
from drafters.block_settings import BlockSettings
from drafters.layers import DecoderLayer, RMSNorm, Shared, SlotKeys
from drafters.output_head import copy_rows, head_over
from drafters.round import Budget, DraftState
from drafters.stored import read_stored, restore, save_tensors, without
from drafters.text import Text
from target.model import Target, check_layers, logit_scale
from target.outputs import LayerId, TargetOutputs
from target.rotary import served_context
from trainer.errors import UserError
from trainer.logits import OutputHead
from trainer.shift import at_index


class BlockLayer(DecoderLayer):
    """A layer of the slots, in Qwen3's layout."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, config.hidden_size, head_norms=True)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, text: Pair, blocks: Blocks
    ) -> torch.Tensor:
        """hidden [B, A * S, d], positions [B, A * S] of the slots of A blocks; text: keys and
        values [B, G, T, D] of the context -> [B, A * S, d]"""
        x = self.input_layernorm(hidden)
        own = self.keys_values(x, positions)
        return self.finish(hidden, attend_blocks(self.queries(x, positions), text, own, blocks))


class BlockDrafter(TrainedDrafter):
    """A block drafter."""

    kind = "dflash"
    one_pass = True
    layers: nn.ModuleList
    lm_head: nn.Linear | None
    kept: torch.Tensor | None

    def __init__(
        self,
        settings: BlockSettings,
        config: LlamaConfig,
        target: Target,
        kept: torch.Tensor | None = None,
    ):
        """`config`: that of the layers, `num_hidden_layers` of them; `kept` [Vd] int64: ids of a
        reduced vocabulary, ascending, of a drafter with an output matrix of its own."""
        super().__init__()
        if config.hidden_size != target.hidden_size:
            raise UserError(
                f"the drafter is {config.hidden_size} wide, the target {target.hidden_size}: it "
                "uses the target's embedding, so both must agree"
            )
        self.settings, self.config, self.max_depth = settings, config, settings.max_depth
        self.vocab_size, self.fingerprint = target.vocab_size, target.fingerprint
        self.tokenizer, self.shared = target.tokenizer, Shared(target)
        self.target_layers = check_layers(settings.captures, target.num_layers)
        width, eps = target.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(settings.captures) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, eps=eps)
        assert settings.own_head or kept is None
        assert isinstance(self, drafter_type(settings.correction))
        rows = self.vocab_size if kept is None else len(kept)
        self.lm_head = nn.Linear(width, rows, bias=False) if settings.own_head else None
        self.register_buffer("kept", kept)
        self.correction = correction_of(
            settings.correction, settings.correction_rank, settings.correction_width, width,
            rows, self.shared,
        )  # fmt: skip
        read = width if self.correction is None else width + settings.correction_rank
        self.confidence = Confidence(read, self.max_depth) if settings.confidence else None
        self.checkpointed = False
        self.to(target.device)

    @classmethod
    def build(
        cls,
        target: Target,
        settings: BlockSettings,
        config: LlamaConfig,
        kept: torch.Tensor | None = None,
    ) -> BlockDrafter:
        """A fresh drafter; an output matrix of its own starts as the target's."""
        drafter = drafter_type(settings.correction)(settings, config, target, kept)
        if drafter.lm_head is not None:
            copy_rows(target, drafter.lm_head, kept)
            with torch.no_grad():
                drafter.lm_head.weight.mul_(logit_scale(target.model))
        return drafter

    def fresh(self) -> BlockDrafter:
        return type(self)(self.settings, self.config, self.shared.target, self.kept).eval()

    def network(self) -> dict[str, object]:
        own = dataclasses.asdict(self.settings)
        if self.settings.correction != "gru":
            own = without(own, "correction_width")
        if self.settings.correction == "none":
            own = without(own, "correction_rank")
        return {**own, "draft_layers": self.config.num_hidden_layers}

    @property
    def context(self) -> int:
        return served_context(self.config)

    @property
    def unserved(self) -> str | None:
        if self.settings.correction != "none":
            return (
                f"no engine has block drafters with method.correction={self.settings.correction}, "
                "only with none, markov or gated"
            )
        if not self.settings.from_anchor:
            return None
        return "no engine has DFlash drafters with method.from_anchor=true"

    def drafting_parameters(self, depth: int | None = None) -> list[nn.Parameter]:
        """The blocks' once, and those of the correction for every token."""
        behind = ("acceptance", "correction", "confidence")
        own = [p for name, p in self.named_parameters() if name.split(".")[0] not in behind]
        if self.correction is None:
            return own
        return own + self.correction.weights_read() * (depth or self.settings.max_depth)

    def served_tokens(self, K: int) -> int:
        """All of a block where its slots see each other: engines make one of as many slots as they
        are asked for tokens, and one for the anchor."""
        return super().served_tokens(K) if self.settings.causal else self.settings.max_depth

    # --- the network -----------------------------------------------------------------------------

    def context_states(
        self, hidden: Mapping[LayerId, torch.Tensor], *index: slice | torch.Tensor
    ) -> torch.Tensor:
        """The context [..., d] of the captured states at these rows and columns."""
        joined = [hidden[layer][index].to(self.fc.weight.dtype) for layer in self.target_layers]
        return self.hidden_norm(self.fc(torch.cat(joined, -1)))

    def slots(
        self, anchors: torch.Tensor, positions: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [B, A * S, d] and positions [B, A * S] of the slots of blocks that predict `depth`
        tokens or more; `anchors`, `positions` [B, A] int64: the anchors' tokens and positions."""
        size = self.settings.block_size
        if self.settings.causal:
            size = depth + 1 - self.settings.from_anchor
        offsets = torch.arange(size, device=anchors.device)
        masks = torch.full_like(offsets, self.settings.mask_token)
        ids = torch.where(offsets == 0, anchors.unsqueeze(-1), masks).flatten(1)
        with torch.no_grad():
            embedded = self.shared.target.embedding(ids)
        embedded = embedded.to(self.fc.weight.dtype)
        return embedded, (positions.unsqueeze(-1) + offsets).flatten(1)

    def predicted(self, hidden: torch.Tensor, count: int, depth: int) -> torch.Tensor:
        """The states [B, A, depth, d] that the output head projects, of the slots [B, A * S, d] of
        `count` blocks A."""
        first = 1 - self.settings.from_anchor
        return self.norm(hidden).unflatten(1, (count, -1))[:, :, first : first + depth]

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        """Yield the states of all depths, which are made together, at `text.columns` alone."""
        assert outputs is not None
        batch, length = text.ids.shape
        columns, begins = _columns(text)
        rows = torch.arange(batch, device=columns.device).unsqueeze(1)
        context, positions = self.context_states(outputs.hidden), text.positions
        anchors = (columns + 1).clamp(max=length - 1)
        hidden, places = self.slots(text.ids[rows, anchors], positions[rows, anchors], depth)
        size = places.shape[1] // columns.shape[1]
        blocks = Blocks(columns, size, length, text.documents, self.settings.causal)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            if self.checkpointed and self.training:
                given = (layer, context, positions, hidden, places, blocks)
                hidden = checkpoint(_layer, *given, use_reentrant=False)
            else:
                hidden = _layer(layer, context, positions, hidden, places, blocks)
            assert isinstance(hidden, torch.Tensor)
        made = self.predicted(hidden, columns.shape[1], depth)
        if self.correction is not None:
            before = columns.unsqueeze(-1) + torch.arange(1, depth + 1, device=columns.device)
            tokens = text.ids[rows.unsqueeze(-1), before.clamp(max=length - 1)]  # [B, A, depth]
            z, _ = self.correction(made.flatten(0, 1), tokens.flatten(0, 1))
            made = torch.cat([made, z.unflatten(0, made.shape[:2])], -1)
        made = torch.where(begins[..., None, None], made, 0.0)
        for number in range(1, depth + 1):
            spread = made.new_zeros(batch, length, made.shape[-1])
            spread[rows, columns] = made[:, :, number - 1]
            yield at_index(spread, number, length)

    def gradient_checkpointing_enable(self) -> None:
        """Compute activations again in the backward pass instead of storing them."""
        self.checkpointed = True

    def output_layers(self) -> list[nn.Linear]:
        return [] if self.lm_head is None else [self.lm_head]

    def output_head(self, depth: int = 1) -> OutputHead:
        head = self.shared.target.head
        if self.lm_head is not None:
            head = head_over(self.lm_head, self.kept)
        if self.correction is not None:
            head = copy.copy(head)  # `replace` would check it again
            head.extra = self.correction.out.weight
        return head

    @property
    def judges(self) -> bool:
        return self.confidence is not None

    def judged(
        self, drafts: Sequence[torch.Tensor], depth: int, rows: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        assert self.confidence is not None
        return self.confidence(drafts[depth - 1][rows, index], depth)

    def judging_parameters(self) -> list[nn.Parameter]:
        return [] if self.confidence is None else list(self.confidence.parameters())

    # --- proposing -------------------------------------------------------------------------------

    def begin(self, rows: int, capacity: int) -> None:
        self._slots = [SlotKeys(rows, capacity) for _ in self.layers]

    def keep(self, rows: torch.Tensor) -> None:
        for slots in self._slots:
            slots.keep(rows)

    def _write(
        self, context: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """Write each layer's keys and values of the context [R, T, d] at `columns` [R, T]."""
        for layer, slots in zip(self.layers, self._slots, strict=True):
            assert isinstance(layer, BlockLayer)
            slots.write(*layer.keys_values(context, columns), columns, rows)

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None:
        assert outputs is not None
        columns = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        self._write(self.context_states(outputs.hidden), columns, rows)

    @property
    def has_slots(self) -> bool:
        return self.correction is None

    def _block(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Write the context that may be new since the last round, at most that of a full round, and
        compute the block behind the last committed token: the states [B, K, d] that the output head
        reads. No slot of it is kept."""
        assert state.outputs is not None
        back = torch.arange(-2 - budget.max_tokens, -1, device=state.ids.device)
        columns = (state.lengths.unsqueeze(1) + back).clamp(min=0)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        self._write(self.context_states(state.outputs.hidden, rows, columns), columns)
        last = state.lengths.unsqueeze(1) - 1
        hidden, places = self.slots(state.ids.gather(1, last), last, budget.max_tokens)
        self.start_width = places.shape[1]
        used = min(self._slots[0].capacity, -(-(state.max_length - 1) // 16) * 16)
        blocks = Blocks(last - 1, places.shape[1], used, causal=self.settings.causal)
        for layer, slots in zip(self.layers, self._slots, strict=True):
            hidden = layer(hidden, places, slots.read(used), blocks)
        return self.predicted(hidden, 1, budget.max_tokens)[:, 0]

    def slot_logits(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Compute the block behind the last committed token: logits [B, K, vocab_size]."""
        return self.project(self._block(state, budget), 1)

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        self._round = Round(self._block(state, budget), self.output_head(), self.correction)
        self._judges = budget.stop is not None and budget.stop.uses_head
        last = state.ids.gather(1, state.lengths.unsqueeze(1) - 1)
        return self.spread(self._round.children(last, None, 0), 1)[:, 0]

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        if self._judges and self.confidence is not None:  # of the token of a chain that is fed
            self._score = self.confidence(self._round.read[:, 0], depth)
        return self.spread(self._round.children(tokens, parents, depth), 1)

    def acceptance_score(self) -> torch.Tensor:
        return super().acceptance_score() if self.confidence is None else self._score

    # --- own format ------------------------------------------------------------------------------

    def about(self) -> Mapping[str, object]:
        return {"settings": dataclasses.asdict(self.settings), "layer": self.config.to_dict()}

    def save_weights(self, folder: Path) -> None:
        save_tensors(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Target) -> BlockDrafter:
        """Load a folder of this project; UserError where the drafter does not fit the target."""
        about, tensors = read_stored(Path(folder), target)
        config = LlamaConfig.from_dict(about["layer"])
        settings = BlockSettings(**about["settings"])
        drafter = cls(settings, config, target, tensors.get("kept"))
        restore(drafter, Path(folder), about, tensors)
        return drafter.eval()


class DSparkDrafter(BlockDrafter):
    """A block drafter whose logits the token before corrects: what engines serve as DSpark."""

    kind = "dspark"

    @property
    def unserved(self) -> str | None:
        return None


def drafter_type(correction: str) -> type[BlockDrafter]:
    """The class of a drafter with this `BlockSettings.correction`."""
    return DSparkDrafter if correction in ("markov", "gated") else BlockDrafter


def _layer(
    layer: BlockLayer,
    context: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    places: torch.Tensor,
    blocks: Blocks,
) -> torch.Tensor:
    """The slots [B, A * S, d] behind a layer; `positions` [B, T] of the `context` [B, T, d]."""
    return layer(hidden, places, layer.keys_values(context, positions), blocks)


def _columns(text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns [B, A] int64 whose blocks are computed, as many in every row, and which of these
    are no filling, [B, A] bool."""
    wanted = torch.ones_like(text.ids, dtype=torch.bool) if text.columns is None else text.columns
    wanted = wanted & (torch.arange(wanted.shape[1], device=wanted.device) < wanted.shape[1] - 1)
    counts = wanted.sum(1)
    width = max(1, int(counts.max()))
    columns = wanted.long().argsort(dim=1, descending=True, stable=True)[:, :width]
    return columns, torch.arange(width, device=columns.device) < counts.unsqueeze(1)
