"""An ordinary small causal LM with the target's vocabulary as drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from data.cache import CachedModel
from data.sampling import warp
from data.target import LayerId, Target, TargetOutputs, check_same_vocabulary, load_causal_lm
from drafters.base import Budget, DraftState
from drafters.tree import TokenTree
from trainer.config import UserError

KIND = "causal_lm"


class CausalLMDrafter(torch.nn.Module):
    """`model`: any Hugging Face causal LM; `vocab_size`: the true vocabulary shared with the
    target. Logits past it are padding and are never drafted."""

    target_layers: tuple[LayerId, ...] = ()

    def __init__(self, model: Any, tokenizer: Any, vocab_size: int, fingerprint: dict[str, Any]):
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self._cached: CachedModel | None = None

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
        """Load from a folder of this project or any Hugging Face causal LM; the id-to-token maps
        must agree. Weights in float32: a drafter is small and is trained."""
        model, tokenizer = load_causal_lm(
            name, key, revision=revision, dtype="float32", device=target.device,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        check_same_vocabulary(target.tokenizer, tokenizer, name)
        return cls._of(model, target, name)

    @classmethod
    def from_target(cls, target: Target, *, num_layers: int, hidden_size: int) -> CausalLMDrafter:
        """A fresh drafter of the target's own architecture, `num_layers` deep and `hidden_size`
        wide; widths of attention and feed-forward shrink in proportion."""
        config = target.model.config.get_text_config()
        own = config.to_dict()
        own_names = config.attribute_map  # GPT-2 says n_embd where others say hidden_size
        shape = own | {name: own.get(renamed) for name, renamed in own_names.items()}
        ratio = hidden_size / shape["hidden_size"]
        heads = max(1, round(shape["num_attention_heads"] * ratio))
        groups = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        changed: dict[str, Any] = {"num_hidden_layers": num_layers, "hidden_size": hidden_size}
        head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        if not shape.get("head_dim"):
            heads = max(1, hidden_size // head_dim)
            if heads * head_dim != hidden_size:
                raise UserError(
                    f"method.draft_hidden_size must be a multiple of the target's head size "
                    f"{head_dim}, got {hidden_size}"
                )
        kv_heads = max(1, heads * groups // shape["num_attention_heads"])
        while heads % kv_heads:
            kv_heads -= 1
        changed["num_attention_heads"] = heads
        if "num_key_value_heads" in shape:
            changed["num_key_value_heads"] = kv_heads
        for name in ("intermediate_size", "moe_intermediate_size", "n_inner"):
            if shape.get(name):
                changed[name] = max(32, round(shape[name] * ratio / 32) * 32)
        if shape.get("layer_types"):
            changed["layer_types"] = (shape["layer_types"] * num_layers)[:num_layers]
        kept = {
            k: v
            for k, v in own.items()
            if k not in ("architectures", "dtype", "quantization_config")
        }
        changed = {own_names.get(name, name): value for name, value in changed.items()}
        try:
            config = AutoConfig.for_model(**(kept | changed))
            model = AutoModelForCausalLM.from_config(config).float().to(target.device)
        except (ValueError, StrictDataclassError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"method.draft_hidden_size={hidden_size} gives no {shape['model_type']} model "
                f"({reason}): take a multiple of its head size"
            ) from error
        model.generation_config = target.model.generation_config
        return cls._of(model, target, f"{num_layers} layers of {hidden_size}, fresh")

    @classmethod
    def of_target(cls, target: Target) -> CausalLMDrafter:
        """The target as its own drafter: the upper bound that checks the whole harness."""
        return cls._of(target.model, target, target.name)

    @classmethod
    def _of(cls, model: Any, target: Target, name: str) -> CausalLMDrafter:
        width = model.get_output_embeddings().weight.shape[0]
        if width < target.vocab_size:
            raise UserError(
                f"CompatibilityError: model.drafter {name!r} scores {width} ids, the target's "
                "vocabulary has "
                f"{target.vocab_size}: use a drafter with the target's tokenizer"
            )
        return cls(model, target.tokenizer, target.vocab_size, target.fingerprint)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids [B, L] right-padded -> logits [B, L, vocab_size]"""
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits[..., : self.vocab_size]

    def draft_logits(
        self, ids: torch.Tensor, target_outputs: TargetOutputs | None = None, depth: int = 1
    ) -> torch.Tensor:
        """The same for every depth: once drafted tokens are accepted, the cache holds target
        text."""
        return self(ids)

    def gradient_checkpointing_enable(self) -> None:
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )

    # --- proposing -------------------------------------------------------------------------------

    def cached(self) -> CachedModel:
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

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        """A chain of `budget.max_tokens`. The first step feeds the last two committed tokens: after
        a fully accepted round both are new to the cache, otherwise one is written again
        unchanged."""
        cached = self.cached()
        batch = len(state.lengths)
        single = batch == 1
        positions = state.lengths.unsqueeze(1) + torch.tensor([-2, -1], device=state.ids.device)
        ids = state.ids.gather(1, positions)
        tokens, laws, stopped, lengths = [], [], None, None
        greedy = state.sampling.temperature == 0
        for depth in range(1, budget.max_tokens + 1):
            used = state.max_length + depth - 1
            logits = cached.forward(
                ids,
                positions,
                used=used,
                first=used - ids.shape[1] if single else None,
                logits_to_keep=1,
            )[:, -1, : self.vocab_size]
            if greedy:
                chosen = logits.argmax(-1)
            else:
                law = warp(logits, state.sampling)
                chosen = state.random.choice(law, state.lengths + (depth - 1), "draft")
                laws.append(law)
            tokens.append(chosen)
            if budget.stop is not None:
                seen = logits.float().softmax(-1) if greedy else laws[-1]
                now = budget.stop(seen, chosen, depth)
                stopped = now if stopped is None else stopped | now
                grown = (~stopped).long()
                lengths = (torch.ones_like(grown) if lengths is None else lengths) + grown
                if depth == budget.max_tokens or bool(stopped.all()):
                    break
            ids, positions = chosen.unsqueeze(1), (state.lengths + (depth - 1)).unsqueeze(1)
        drafted = len(tokens)
        if lengths is None:
            lengths = torch.full_like(state.lengths, drafted)
        return TokenTree.chain(
            torch.stack(tokens, 1),
            torch.stack(laws, 1) if laws else None,
            lengths.clamp(max=drafted),
            draft_forwards=drafted,
            draft_tokens=drafted + 1,
        )

    # --- own format ------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """A Hugging Face folder plus drafter.json (kind, the target's fingerprint)."""
        folder = Path(folder)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "drafter.json").write_text(
            json.dumps(
                {"kind": KIND, "vocab_size": self.vocab_size, "target": self.fingerprint}, indent=1
            )
            + "\n"
        )
