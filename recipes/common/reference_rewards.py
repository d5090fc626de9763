"""The frozen reference drafter of GTO: its check, and the rewards of its trees, computed once for
each text.

    folder/manifest.json     what the rewards depend on: reference, target, tree, reward, positions
    folder/rewards-*.jsonl   one line for each text, every process appends to a file of its own

The reference, the target and the positions of a text never change while a drafter is trained, so
neither do these rewards. They stay in memory, and in a folder where one is named, for later runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from drafters.base import TrainedDrafter
from drafters.eagle import EagleDrafter
from trainer.errors import UserError
from trainer.files import read_json, write_json

MANIFEST = "manifest.json"


class Known(NamedTuple):
    """What is stored of a text, a number for each prefix."""

    rewards: list[float]
    trees: list[int]  # their names


class ReferenceRewards:
    """The rewards of one reference, by text and positions."""

    def __init__(self, folder: str | Path | None, made_of: Mapping[str, object], key: str):
        """Read the rewards in `folder`. `made_of`: what rewards depend on; a folder whose rewards
        depend on something else is refused. `key`: the setting that names the folder."""
        self._known: dict[str, Known] = {}
        self._file: Path | None = None
        if folder is None:
            return
        folder = Path(folder)
        manifest = folder / MANIFEST
        check_rewards(folder, made_of, key)
        if not manifest.exists():
            write_json(manifest, made_of)
        self._file = folder / f"rewards-{uuid.uuid4().hex[:12]}.jsonl"  # others may write now
        for path in sorted(folder.glob("rewards-*.jsonl")):
            content = path.read_bytes()
            # a kill may cut the last line, or it is being written
            for line in content[: content.rfind(b"\n") + 1].splitlines():
                self._known |= _read(line, path)

    def __len__(self) -> int:
        return len(self._known)

    def get(
        self, ids: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the rewards [P] float32 of the prefixes of `ids` with these lengths, and the names
        of their trees [P] int64; None where they are not known yet."""
        found = self._known.get(_name(ids, lengths))
        if found is None:
            return None
        return torch.tensor(found.rewards, dtype=torch.float32), torch.tensor(found.trees)

    def put(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        rewards: torch.Tensor,
        trees: torch.Tensor,
    ) -> None:
        """Store the rewards [P] of these prefixes, and the names of their trees [P]."""
        name, known = _name(ids, lengths), Known(rewards.tolist(), trees.tolist())
        self._known[name] = known
        if self._file is not None:
            row = {"text": name, "lengths": list(lengths), **known._asdict()}
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def gain(
    own: torch.Tensor, trees: torch.Tensor, known: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """The rewards `own` [P] of trees less those `known` [P] of the reference's, 0 for the same tree
    by its name, `trees` and `reference` [P]: the last bits of a reward differ with the trees that
    are scored beside it, which standardising would blow up."""
    same = trees == reference.to(trees.device)
    return torch.where(same, 0.0, own - known.to(own.device))


def _name(ids: Sequence[int], lengths: Sequence[int]) -> str:
    numbers = array("q", [len(ids), *ids, *lengths])
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:32]


def check_rewards(folder: str | Path | None, made_of: Mapping[str, object], key: str) -> None:
    """Refuse a folder whose rewards depend on something else; writes nothing."""
    if folder is None:
        return
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"{key} must be a folder, {folder} is a file: name another")
    manifest = Path(folder) / MANIFEST
    if not manifest.exists():
        return
    stored = read_json(manifest, f"{key}: delete {folder}, its rewards are then computed again")
    made_of = json.loads(json.dumps(dict(made_of)))  # so that tuples compare as they are stored
    differing = [name for name in made_of if stored.get(name) != made_of[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"{key}: the rewards in {folder} were made with another {', '.join(differing)} "
            f"({name} {stored.get(name)!r}, wanted: {made_of[name]!r}): name another folder or "
            "delete it"
        )


def _read(line: bytes, path: Path) -> dict[str, Known]:
    try:
        row = json.loads(line)
        rewards = [float(value) for value in row["rewards"]]
        return {row["text"]: Known(rewards, [int(name) for name in row["trees"]])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged: delete this file, its rewards are then computed again"
        ) from error


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
