"""Copy where the text repeats itself, draft where it does not.

A round whose last tokens have occurred before copies what followed them, as prompt lookup does
(Saxena 2023); in the others the drafter drafts a chain. Suffix-automaton decoding joins an EAGLE
head with copies in this way (Hu et al. 2024, arXiv:2411.10666); it copies from other texts too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch

from drafters.round import Budget, ChainSteps, DraftState, Steps
from drafters.trees.chain import Chain
from drafters.trees.spec import Accuracy, TreeSpec
from drafters.trees.tree import CHAIN, TokenTree
from trainer.errors import require


@dataclass(frozen=True)
class CopyTree(TreeSpec):
    """Chains of eval.K tokens: copied where the last `shortest` tokens have occurred before, else
    drafted. Of several places the one that agrees in most tokens is copied, up to `longest`, and of
    these the latest. Raises UserError for settings out of range."""

    name: ClassVar[str] = "copy"
    drafter_alone: ClassVar[bool] = False
    shortest: int = 2
    longest: int = 8
    siblings: str = field(default=CHAIN, init=False)

    def __post_init__(self) -> None:
        require(self.shortest >= 1, "shortest", "be >= 1", self.shortest)
        rule = f"be at least shortest={self.shortest}"
        require(self.longest >= self.shortest, "longest", rule, self.longest)

    def deepest(self, K: int) -> int:
        return K

    def shape(self, accuracy: Accuracy | None, K: int) -> CopyOrDraft:
        return CopyOrDraft(self.shortest, self.longest, K)


@dataclass(frozen=True)
class CopyOrDraft:
    """The chain of `depth` tokens that `CopyTree` names.

    A copied token is a point mass, so that at temperatures above 0 the output keeps the target's
    distribution. The drafter is fed what was committed in every round, copied or not.
    """

    shortest: int
    longest: int
    depth: int

    @property
    def siblings(self) -> str:
        return CHAIN

    @property
    def width(self) -> int:
        return 1

    @property
    def num_nodes(self) -> int:
        return self.depth

    @property
    def num_fed(self) -> int:
        return self.depth - 1

    def describe(self) -> str:
        return f"K {self.depth}, copied after {self.shortest} known tokens"

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree:
        logits = drafter.start(state, Budget.of(self))
        copied, found = copies(state.ids, state.lengths, self.shortest, self.longest, self.depth)
        if bool(found.all()):
            whole = torch.full_like(state.lengths, self.depth)
            return TokenTree.chain(copied, None, whole, 1, drafter.start_width)
        # without a stop rule no acceptance head is asked
        drafted = Chain(self.depth).behind(logits, cast(ChainSteps, drafter), state)
        drafted.tokens = torch.where(found.unsqueeze(1), copied, drafted.tokens)
        if drafted.probs is not None:
            certain = torch.zeros_like(drafted.probs).scatter_(-1, copied.unsqueeze(-1), 1.0)
            drafted.probs = torch.where(found.view(-1, 1, 1), certain, drafted.probs)
        return drafted


def copies(
    ids: torch.Tensor, lengths: torch.Tensor, shortest: int, longest: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the earlier place that agrees with the end of each text in most tokens.

    ids [B, S] int64, of which `lengths` [B] count -> tokens [B, count] int64, and [B] bool: whether
    at least `shortest` tokens agree; where they do not, the tokens mean nothing. Agreement counts
    up to `longest`; of equal places the latest is taken. A copy that reaches the end of the text
    goes on with what it has copied, so that a text of period p is continued with that period.

    The rule is that of `drafters.training_free.lookup`, for all rows at once and without a copy of
    the texts to the host.
    """
    size = ids.shape[1]
    last = lengths.unsqueeze(1) - 1
    places = torch.arange(size, device=ids.device)
    same = places < last
    agreeing = torch.zeros_like(ids)  # at each place, tokens up to it that equal the text's last
    for back in range(min(longest, size)):
        token = ids.gather(1, (last - back).clamp(min=0))
        shifted = torch.nn.functional.pad(ids, (back, 0), value=-1)[:, :size]
        same = same & (shifted == token)
        agreeing += same
    best = torch.where(agreeing > 0, agreeing * size + places, 0).argmax(1, keepdim=True)
    after = best + 1
    period = (last + 1 - after).clamp(min=1)
    tokens = ids.gather(1, after + torch.arange(count, device=ids.device) % period)
    return tokens, agreeing.gather(1, best)[:, 0] >= shortest
