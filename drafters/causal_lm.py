"""An ordinary small causal LM with the target's vocabulary as drafter."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.base import TrainedDrafter
from drafters.round import Budget, DraftState
from drafters.text import Text
from target.attention import packed
from target.cache import CachedModel
from target.causal_lm import load_causal_lm
from target.devices import decoder_of
from target.model import Target, output_head
from target.nodes import TreeSlots
from target.outputs import LayerId, TargetOutputs
from target.rotary import context_of
from target.shared_text import TextGroup
from target.vocabulary import check_same_vocabulary
from trainer.errors import UserError
from trainer.logits import OutputHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

KIND = "causal_lm"
# keys for the widths of feed-forward layers and experts in the families' configurations
WIDTHS = re.compile(r"intermediate_size|n_inner$|ffn_dim$")


class CausalLMDrafter(TrainedDrafter):
    """A causal LM of Hugging Face as drafter.

    `vocab_size`: the true vocabulary that it shares with the target; logits past it are padding and
    are never drafted.
    """

    kind = KIND
    exposes_hidden = True
    start_width = 2

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        fingerprint: dict[str, Any],
    ):
        super().__init__()
        # any architecture of transformers; a wrapper for training may stand in its place
        self.model: Any = model
        self.tokenizer = tokenizer
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self._cached: CachedModel | None = None
        self._head: OutputHead | None = None

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        target: Target,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        key: str = "model.drafter",
    ) -> CausalLMDrafter:
        """Load a folder of this project or a causal LM of Hugging Face, with float32 weights.

        Raises UserError where it cannot be loaded or its id-to-token map is not the target's.
        """
        model, tokenizer = load_causal_lm(
            name, key, revision=revision, dtype="float32", device=target.device,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        check_same_vocabulary(target.tokenizer, tokenizer, name)
        return cls._of(model, target, name)

    @classmethod
    def from_target(
        cls,
        target: Target,
        *,
        num_layers: int,
        hidden_size: int,
        tie_embeddings: bool | None = None,
    ) -> CausalLMDrafter:
        """A drafter with fresh weights in the shape of `shrunk_config`."""
        config = shrunk_config(target, num_layers, hidden_size, tie_embeddings)
        model = AutoModelForCausalLM.from_config(config).float().to(target.device).eval()
        try:  # some architectures check their shape only now, for example CodeGen its heads
            with torch.no_grad():
                decoder_of(model)(torch.zeros(1, 2, dtype=torch.long, device=target.device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _no_such_width(hidden_size, config.model_type, error) from error
        model.train().generation_config = target.model.generation_config
        return cls._of(model, target, f"{num_layers} layers of {hidden_size}, fresh")

    @classmethod
    def of_target(cls, target: Target) -> CausalLMDrafter:
        """The target as its own drafter: the upper bound that checks the whole harness."""
        return cls._of(target.model, target, target.name)

    @classmethod
    def _of(cls, model: PreTrainedModel, target: Target, name: str) -> CausalLMDrafter:
        width = output_weight(model).shape[0]
        if width < target.vocab_size:
            raise UserError(
                f"CompatibilityError: model.drafter {name!r} scores {width} ids, the target's "
                "vocabulary has "
                f"{target.vocab_size}: use a drafter with the target's tokenizer"
            )
        return cls(model, target.tokenizer, target.vocab_size, target.fingerprint)

    @property
    def context(self) -> int:
        """Length in tokens of the longest text that the model can read."""
        return context_of(self.model.config.get_text_config())

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        """Yield the same states at every depth: once tokens are accepted, the cache holds them."""
        decoder = decoder_of(self.model)
        if text.group is None:
            hidden = decoder(
                input_ids=text.ids, use_cache=False, **packed(self.model, text.position_ids)
            ).last_hidden_state
        else:
            hidden = text.group.reading(text.ids, text.position_ids).states(self.model)
        for _ in range(depth):
            yield hidden

    def check_group(self, group: TextGroup) -> None:
        group.check(self.model, "the drafter", trains=True)

    def output_head(self, depth: int = 1) -> OutputHead:
        # built again where sharding has put another tensor in the weight's place
        weight = self.model.get_output_embeddings().weight
        if self._head is None or self._head.weight is not weight:
            self._head = output_head(self.model, self.vocab_size)
        return self._head

    def gradient_checkpointing_enable(self) -> None:
        """Compute activations again in the backward pass instead of storing them."""
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )

    def fresh(self) -> CausalLMDrafter:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(self.model.config)).float()
        device = next(self.model.parameters()).device
        return CausalLMDrafter(
            model.to(device).eval(), self.tokenizer, self.vocab_size, self.fingerprint
        )

    # --- proposing -------------------------------------------------------------------------------

    def cached(self) -> CachedModel:
        """The model with its slot cache, made at the first call."""
        if self._cached is None:
            self._cached = CachedModel(self.model)
        return self._cached

    def begin(self, rows: int, capacity: int) -> None:
        self.cached().begin(rows, capacity)

    def keep(self, rows: torch.Tensor) -> None:
        self.cached().keep(rows)

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None:
        cached = self.cached()
        everything = len(rows) == cached.rows
        cached.forward(
            ids,
            torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            used=ids.shape[1],
            rows=None if everything else rows,
            first=0,
            logits_to_keep=1,
        )

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Feed the committed tokens that may be missing in the cache.

        These are two after a fully accepted chain, and depth + 1 after a tree, whose nodes lay in
        other slots. Tokens that are there already are written again unchanged.
        """
        self._round = state
        self._judged = budget.stop is not None and budget.stop.uses_head
        self._nodes = TreeSlots(state.lengths) if budget.tree is not None else None
        self.start_width = budget.max_tokens + 1 if budget.tree is not None else 2
        back = torch.arange(-self.start_width, 0, device=state.ids.device)
        positions = (state.lengths.unsqueeze(1) + back).clamp(min=0)
        return self._forward(state.ids.gather(1, positions), positions, state.max_length)[:, -1]

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        lengths = self._round.lengths
        if self._nodes is None:
            positions = (lengths + (depth - 1)).unsqueeze(1)
            return self._forward(tokens, positions, self._round.max_length + depth)
        placed = self._nodes.add(parents, depth)
        return self.cached().forward(
            tokens,
            placed.positions,
            used=self._round.max_length + self._nodes.count,
            tree=placed,
        )[..., : self.vocab_size]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, used: int) -> torch.Tensor:
        first = used - ids.shape[1] if len(ids) == 1 and used >= ids.shape[1] else None
        found: dict[LayerId, torch.Tensor] = {}
        logits = self.cached().forward(
            ids, positions, used=used, first=first, logits_to_keep=1,
            layers=("final_norm",) if self._judged else (), found=found,
        )  # fmt: skip
        if self._judged:
            self.hidden = found["final_norm"][:, -1]
        return logits[..., : self.vocab_size]

    # --- own format ------------------------------------------------------------------------------

    def drafting_parameters(self, depth: int | None = None) -> list[torch.nn.Parameter]:
        return parameters_read(self.model)

    def save_weights(self, folder: Path) -> None:
        """Write a folder that Hugging Face's own loaders read."""
        self.model.save_pretrained(folder)


def output_weight(model: PreTrainedModel) -> torch.Tensor:
    """The weight [V, d] of the output head of a causal LM."""
    head = model.get_output_embeddings()
    assert head is not None
    return head.weight


def parameters_read(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The parameters that one decoding step of a causal LM reads.

    Those are the parameters of its decoder and output head, without embedding tables that are only
    looked up, and without an image or audio encoder.
    """
    decoder, head = decoder_of(model), model.get_output_embeddings()
    assert head is not None
    tables = (m for m in decoder.modules() if isinstance(m, torch.nn.Embedding))
    looked_up = {table.weight for table in tables} - {head.weight}
    read = dict.fromkeys((*decoder.parameters(), *head.parameters()))
    return [parameter for parameter in read if parameter not in looked_up]


def shrunk_config(
    target: Target, num_layers: int, hidden_size: int, tie_embeddings: bool | None = None
) -> PreTrainedConfig:
    """A configuration of the target's architecture, `num_layers` deep and `hidden_size` wide.

    Widths of attention and feed-forward shrink in proportion. `tie_embeddings`: one matrix for
    looking tokens up and for scoring them; None: as in the target. Raises UserError where the
    family has no such shape.
    """
    config = target.model.config.get_text_config()
    own = config.to_dict()
    for name in ("architectures", "dtype", "quantization_config"):  # the drafter trains
        own.pop(name, None)
    own_names = config.attribute_map  # GPT-2 says n_embd where others say hidden_size
    shape = own | {name: own.get(renamed) for name, renamed in own_names.items()}
    depth, all_heads = getattr(config, "num_hidden_layers", 0), shape.get("num_attention_heads")
    if not (depth and all_heads):
        raise _no_such_width(hidden_size, own["model_type"], "no attention heads to shrink")
    ratio, heads = hidden_size / shape["hidden_size"], _num_heads(shape, hidden_size)
    exceptions = {int(i): values for i, values in (own.get("per_layer_config") or {}).items()}
    # the first layers: where later ones know no positions (SmolLM3, Cohere2) or have experts, those
    # do and are dense; but Gemma 4 wants its last kind, which has heads of its own, at the end
    copied = [i % depth for i in range(num_layers)]
    if exceptions:
        copied[-1] = depth - 1
    per_layer = {
        name: [value[i] for i in copied]
        for name, value in own.items()
        if isinstance(value, list) and len(value) == depth and not name.endswith("token_id")
    }
    changed: dict[str, object] = {
        **per_layer,
        **_smaller(shape | per_layer, ratio, heads, all_heads),
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
    }
    if exceptions:
        changed["per_layer_config"] = {
            new: exceptions[old] | _smaller(exceptions[old], ratio, heads, all_heads)
            for new, old in enumerate(copied)
            if old in exceptions
        }
    # Gemma's later layers read the keys of earlier ones, and every layer has a table of the whole
    # vocabulary: nothing for a drafter of a few layers; OPT's embedding has a width of its own
    others = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "word_embed_proj_dim": hidden_size,
    }
    changed |= {name: value for name, value in others.items() if shape.get(name)}
    if tie_embeddings is not None:
        changed["tie_word_embeddings"] = tie_embeddings
    changed = {own_names.get(name, name): value for name, value in changed.items()}
    return _tried_config(own | changed, num_layers, hidden_size)


def _num_heads(shape: dict[str, Any], hidden_size: int) -> int:
    """The heads of a layer so wide: in proportion, or where a head's size follows from the width,
    as many of the target's size. UserError where these do not fill it."""
    all_heads = shape["num_attention_heads"]
    if shape.get("head_dim"):
        return max(1, round(all_heads * (hidden_size / shape["hidden_size"])))
    head_dim = shape["hidden_size"] // all_heads
    heads = max(1, hidden_size // head_dim)
    if heads * head_dim != hidden_size:
        raise UserError(
            f"method.draft_hidden_size must be a multiple of the target's head size "
            f"{head_dim}, got {hidden_size}"
        )
    return heads


def _smaller(
    values: dict[str, Any], ratio: float, heads: int, all_heads: int
) -> dict[str, int | list[int]]:
    """The smaller key-value heads and widths for those in `values`, of all layers or of one.
    `heads`: of a smaller layer, in place of `all_heads`."""
    found: dict[str, int | list[int]] = {}
    if "num_key_value_heads" in values:
        groups = max(1, heads * (values["num_key_value_heads"] or all_heads) // all_heads)
        while heads % groups:
            groups -= 1
        found["num_key_value_heads"] = groups
    for name, width in values.items():
        if width and WIDTHS.search(name):
            each = width if isinstance(width, list) else [width]
            each = [max(32, round(one * ratio / 32) * 32) for one in each]
            found[name] = each if isinstance(width, list) else each[0]
    return found


def _tried_config(settings: dict[str, Any], num_layers: int, hidden_size: int) -> PreTrainedConfig:
    """The configuration with these settings, of which a model so deep and wide can be made: one is,
    without weights. UserError where the architecture refuses."""
    try:
        config = AutoConfig.for_model(**settings)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
        made = config.num_hidden_layers, config.hidden_size
        if made != (num_layers, hidden_size):
            raise ValueError(f"it would be {made[0]} layers of {made[1]}")
    except Exception as error:  # each architecture refuses in its own way
        raise _no_such_width(hidden_size, settings["model_type"], error) from error
    return config


def _no_such_width(hidden_size: int, model_type: str, error: Exception | str) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"method.draft_hidden_size={hidden_size} gives no {model_type} model ({reason}): use a "
        "multiple of its head size, or an existing model with its tokenizer as model.drafter"
    )
