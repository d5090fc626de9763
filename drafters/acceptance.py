"""The acceptance head of a drafter: whether it fits, how it is made and read."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from drafters.acceptance_head import SETTINGS, WEIGHTS, AcceptanceHead, AcceptanceSettings
from drafters.base import TrainedDrafter, add_to_hash
from target.folder import reading
from target.loading import check_finite, check_plain
from trainer.errors import UserError


def fresh_head(drafter: TrainedDrafter, **settings: object) -> AcceptanceHead:
    """A fresh head for this drafter, on its device. `settings`: of `AcceptanceSettings`."""
    check_exposed(drafter)
    plain = AcceptanceSettings(width_of(drafter), draft=weights_hash(drafter))
    head = AcceptanceHead(dataclasses.replace(plain, **settings))
    return head.to(next(drafter.parameters()).device)


def width_of(drafter: TrainedDrafter) -> int:
    """Width of the states that the drafter's output head reads."""
    return drafter.output_head(1).weight.shape[1]


def check_exposed(drafter: TrainedDrafter) -> None:
    """Raise UserError where the drafter has no state that an acceptance head could judge."""
    if not drafter.exposes_hidden:
        raise UserError(
            f"CapabilityError: a drafter of kind {drafter.kind!r} has no state of the tokens it "
            "drafts, so no acceptance head can judge them: name a causal LM or an EAGLE head"
        )


def check_width(drafter: TrainedDrafter, head: AcceptanceHead, folder: Path, key: str) -> None:
    """Raise UserError where the head in `folder` reads states of another width."""
    width = width_of(drafter)
    if head.settings.width != width:
        raise UserError(
            f"CompatibilityError: {key}: the acceptance head in {folder} reads states "
            f"{head.settings.width} wide, the drafter's are {width}"
        )


def weights_hash(drafter: TrainedDrafter) -> str:
    """Hash of the weights that draft, without an acceptance head: its states depend on them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.draft_weights().items()):
        digest.update(name.encode())
        add_to_hash(digest, tensor)
    return digest.hexdigest()[:16]


def attach(drafter: TrainedDrafter, folder: Path, key: str) -> None:
    """Load the acceptance head beside the drafter in `folder`, if there is one.

    `key`: the setting that names the folder, for messages. Raises UserError where the head is
    damaged or was trained for another drafter.
    """
    if not (folder / SETTINGS).exists():
        return
    check_exposed(drafter)
    with reading(f"{key}: the acceptance head in {folder} is damaged"):
        check_plain(key, str(folder), [folder / WEIGHTS])
        head = AcceptanceHead.from_pretrained(folder)
        check_finite(key, str(folder), head.state_dict().items())
    own = head.settings
    check_width(drafter, head, folder, key)
    found = weights_hash(drafter)
    if own.draft != found:
        raise UserError(
            f"CompatibilityError: {key}: the acceptance head in {folder} was trained for another "
            f"drafter (weights {own.draft}, these are {found}): train it again with "
            f"recipe=specdecpp, or remove {SETTINGS}"
        )
    drafter.acceptance = head.to(next(drafter.parameters()).device)
