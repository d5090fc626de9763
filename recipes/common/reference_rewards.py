"""The frozen reference drafter of GTO: its check, and the rewards of its trees.

The reference, the target and the positions of a text never change while a drafter is trained, so
neither do these rewards: they are computed once for each text.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence

import torch

from drafters.base import TrainedDrafter
from drafters.eagle import EagleDrafter
from trainer.errors import UserError


class ReferenceRewards:
    """The rewards of one reference, and the names of its trees, by text and positions."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(
        self, ids: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the rewards [P] float32 of the prefixes of `ids` with these lengths, and the names
        of their trees [P] int64; None where they are not known yet."""
        return self._known.get(_name(ids, lengths))

    def put(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        rewards: torch.Tensor,
        trees: torch.Tensor,
    ) -> None:
        """Keep the rewards [P] of these prefixes, and the names of their trees [P]."""
        self._known[_name(ids, lengths)] = rewards.float().cpu(), trees.cpu()


def gain(
    own: torch.Tensor, trees: torch.Tensor, known: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """The rewards `own` [P] of trees less those `known` [P] of the reference's, 0 for the same tree
    by its name, `trees` and `reference` [P]: the last bits of a reward differ with the trees that
    are scored beside it, which standardising would blow up."""
    same = trees == reference.to(trees.device)
    return torch.where(same, 0.0, own - known.to(own.device))


def _name(ids: Sequence[int], lengths: Sequence[int]) -> bytes:
    numbers = array("q", [len(ids), *ids, *lengths])
    return hashlib.sha256(numbers.tobytes()).digest()[:16]


def check_same_network(reference: TrainedDrafter, drafter: TrainedDrafter) -> None:
    """Refuse a reference that is not an earlier state of the same head: the loss compares two
    distributions over the same tokens, made from the same states."""
    if reference.kind != drafter.kind:
        raise UserError(
            f"method.reference is a drafter of kind {reference.kind!r}, the trained one of "
            f"{drafter.kind!r}: name an earlier state of the same head"
        )
    assert isinstance(reference, EagleDrafter)  # as all bases of GTO
    assert isinstance(drafter, EagleDrafter)
    theirs, ours = reference.kept, drafter.kept
    same = theirs is ours if theirs is None or ours is None else torch.equal(theirs, ours)
    if not same:
        raise UserError(
            "CompatibilityError: method.reference drafts from another vocabulary, "
            f"{reference.draft_vocab_size} tokens against {drafter.draft_vocab_size}: name an "
            "earlier state of the same head"
        )
    a, b = dataclasses.asdict(reference.settings), dataclasses.asdict(drafter.settings)
    a |= {name: list(p.shape) for name, p in reference.named_parameters()}
    b |= {name: list(p.shape) for name, p in drafter.named_parameters()}
    differing = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    differing = [name for name in differing if name != "detach_recycled"]  # of training alone
    if differing:
        name = differing[0]
        raise UserError(
            f"method.reference is another network: {name} is {a.get(name)!r} there and "
            f"{b.get(name)!r} here: name an earlier state of the same head"
        )
