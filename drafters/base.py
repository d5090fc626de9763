"""The face every drafter shows: how it is asked for tokens, and with which randomness.

- `target_layers`: ids of the target outputs it consumes, () for none;
- `begin(rows, capacity)`: forget everything, make room for `rows` sequences of `capacity` slots;
- `prefill(rows, ids, lengths, outputs)`: take in whole prompts for these batch rows, right-padded
  ids [R, P] (rows are refilled while others go on);
- `keep(rows)`: only these batch rows go on, in this order;
- `propose(state, budget) -> TokenTree`: draft; commits and rolls back its own slots.

Trained drafters (`TrainedDrafter`) build chains and trees from two steps of their own, `start` and
`extend`, and offer one teacher-forced unroll, `states`, that training, loss and acceptance without
decoding share, so they cannot drift apart. Training-free drafters offer
`continuation(context, count)` instead: what they copy after a context.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

from drafters.round import Budget, DraftState
from drafters.trees.chain import Chain
from drafters.trees.tree import TokenTree
from target.model import LayerId, Target, TargetOutputs
from trainer.chunked import OutputHead
from trainer.config import UserError

if TYPE_CHECKING:
    from drafters.acceptance_head import AcceptanceHead

ACCEPTANCE = "acceptance"  # the attribute that holds an acceptance head, and its tensors' prefix


@runtime_checkable
class Drafter(Protocol):
    """See the module's docstring for what each method owes."""

    target_layers: tuple[LayerId, ...]

    def begin(self, rows: int, capacity: int) -> None: ...

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None,
    ) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def propose(self, state: DraftState, budget: Budget) -> TokenTree: ...


class TrainedDrafter(torch.nn.Module):
    """A network that drafts. `vocab_size`: the target's true vocabulary; `fingerprint`: of the
    target it was made for; `start_width`: tokens that `start` feeds. `exposes_hidden`: its state
    after each token it is fed tells that token from others, so that an acceptance head can judge
    it; then `extend` leaves in `hidden` [B, d] what `states` has there."""

    kind: ClassVar[str]
    exposes_hidden: ClassVar[bool] = False
    hidden: torch.Tensor
    acceptance: AcceptanceHead | None
    target_layers: tuple[LayerId, ...] = ()
    start_width: int = 1
    max_depth: int | None = None  # of what it can draft; None: no limit
    vocab_size: int
    fingerprint: dict[str, Any]
    tokenizer: Any
    # [depth][rank]: how often that token is the target's on held-out text, for calibrated trees
    rank_accuracy: list[list[float]] | None = None
    provenance: dict[str, Any] | None = None  # how it was fine-tuned, told by drafter.json

    def __init__(self) -> None:
        super().__init__()
        self.register_module(ACCEPTANCE, None)

    def train(self, mode: bool = True) -> TrainedDrafter:
        """Under an acceptance head the drafter is frozen, its dropout too."""
        super().train(mode and self.acceptance is None)
        if self.acceptance is not None:
            self.acceptance.train(mode)
        return self

    # --- teacher-forced --------------------------------------------------------------------------

    def states(
        self,
        ids: torch.Tensor,
        outputs: TargetOutputs | None,
        depth: int,
        position_ids: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:
        """For the depths 1..depth in turn: [B, L, d], what `output_head` of that depth projects.

        ids [B, L] right-padded. Index i holds what scores token i + 1 when it is the depth-th of
        its round and the tokens before it are the given ones; 0 where the round would have begun
        before the text. A drafter whose law is the same at every depth yields one object again
        and again. `columns` [B, L] bool: the target's positions that rounds may begin from, where
        nothing else is asked for; a drafter may leave the rest at 0, or ignore it.
        """
        raise NotImplementedError

    def output_head(self, depth: int) -> OutputHead:
        raise NotImplementedError

    def project(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """[..., d] -> float logits [..., vocab_size], -inf outside a reduced draft vocabulary."""
        head = self.output_head(depth)
        logits = head.logits(states)
        if head.kept is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., head.kept] = logits
        return full

    def draft_logits(
        self, ids: torch.Tensor, target_outputs: TargetOutputs | None = None, depth: int = 1
    ) -> torch.Tensor:
        """The teacher-forced law [B, L, vocab_size] at one depth, for all positions at once."""
        *_, last = self.states(ids, target_outputs, depth)
        return self.project(last, depth)

    def forward(
        self,
        ids: torch.Tensor,
        outputs: TargetOutputs | None,
        depth: int,
        score: Callable[[int, torch.Tensor], Any],
        position_ids: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        **options: torch.Tensor,
    ) -> list[Any]:
        """[score(depth, states) for each depth]: the loss is formed in here, so that wrappers which
        gather sharded weights around `forward` have them in place for the output head too.
        `options`: of this drafter's own `states`."""
        unrolled = self.states(ids, outputs, depth, position_ids, columns, **options)
        return [score(number, states) for number, states in enumerate(unrolled, start=1)]

    # --- proposing -------------------------------------------------------------------------------

    def begin(self, rows: int, capacity: int) -> None: ...

    def keep(self, rows: torch.Tensor) -> None: ...

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None: ...

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Begin a round: logits [B, vocab_size] of the token after the last committed one."""
        raise NotImplementedError

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        """Feed drafted nodes of one depth: tokens [B, n], parents [B, n] (index among the nodes fed
        so far in this round, -1: children of the last committed token) -> logits
        [B, n, vocab_size] of their children."""
        raise NotImplementedError

    def acceptance_score(self) -> torch.Tensor:
        """[B] float32: what the acceptance head gives the token that `extend` fed last."""
        return acceptance_of(self).probability(self.hidden)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        shape = budget.tree or Chain(budget.max_tokens, budget.stop)
        return shape.grow(self, state)

    # --- what it needs to serve ------------------------------------------------------------------

    def served_target(self) -> Target | None:
        """The target that verifies, where it was trained with the drafter; None: the given one."""
        return None

    def servable(self, folder: Path, ours: bool = False) -> tuple[TrainedDrafter, Target | None]:
        """What an engine loads, and the target it needs beside it, which is written to `folder`
        (`ours`: of `whole_folder`); None: the one it was made for."""
        return self, None

    def drafting_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Those that drafting reads, the acceptance head's left out."""
        own = self.named_parameters()
        return [p for name, p in own if not name.startswith(f"{ACCEPTANCE}.")]

    def draft_weights(self) -> dict[str, torch.Tensor]:
        """All tensors but the acceptance head's, by name."""
        own = self.state_dict().items()
        return {name: t for name, t in own if not name.startswith(f"{ACCEPTANCE}.")}

    # --- own format ------------------------------------------------------------------------------

    @property
    def draft_vocab_size(self) -> int:
        """How many different tokens it can draft."""
        kept = self.output_head(1).kept
        return self.vocab_size if kept is None else len(kept)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def fresh(self) -> TrainedDrafter:
        """The same shape with untrained weights."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """What drafter.json says beside kind, vocabulary and target: the constructor's settings."""
        return {}

    def save_weights(self, folder: Path) -> None:
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """The project's own format: weights, tokenizer, and drafter.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_weights(folder)
        self.tokenizer.save_pretrained(folder)
        about = {"kind": self.kind, "vocab_size": self.vocab_size, "target": self.fingerprint}
        about["rank_accuracy"] = self.rank_accuracy
        if self.provenance is not None:
            about["provenance"] = self.provenance
        (folder / "drafter.json").write_text(json.dumps(about | self.about(), indent=1) + "\n")
        if self.acceptance is not None:
            self.acceptance.save(folder)


def acceptance_of(drafter: TrainedDrafter) -> AcceptanceHead:
    if drafter.acceptance is None:
        raise UserError(
            "CapabilityError: eval.policy=head:... needs a drafter with an acceptance head, which "
            f"this one, of kind {drafter.kind!r}, has not: train it with recipe=specdecpp"
        )
    return drafter.acceptance


def served_target(drafter: Any) -> Target | None:
    """Of any drafter; one that is not trained leaves the target as it is."""
    return drafter.served_target() if isinstance(drafter, TrainedDrafter) else None


FINGERPRINT_MUST_AGREE = ("tokenizer", "weights", "vocab_size")


def check_fingerprint(stored: dict[str, Any], target: dict[str, Any], name: str) -> None:
    """A head reads the hidden states of one target: another one's are noise to it."""
    differing = [key for key in FINGERPRINT_MUST_AGREE if stored.get(key) != target.get(key)]
    if differing:
        raise UserError(
            f"CompatibilityError: drafter {name!r} was made for another target "
            f"({', '.join(differing)} differ): name its own target as model.target"
        )


def weights_hash(drafter: torch.nn.Module) -> str:
    """Of its weights, whatever their dtype."""
    weights = hashlib.sha256()
    for tensor in drafter.state_dict().values():
        weights.update(tensor.detach().double().cpu().contiguous().numpy().tobytes())
    return weights.hexdigest()[:16]
