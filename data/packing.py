"""Rows of raw text for training: documents joined end to end and cut at the context length.

Which text stands in row n of a training follows from n alone: the sources take turns in exactly
their shares, and each is read in an order drawn anew per epoch. Nothing is saved, so nothing is
lost on resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from data.batches import Batch
from data.corpus import Source, TokenFile, tokenised
from data.target import Target
from trainer.config import UserError


@dataclass(frozen=True)
class RawText:
    """What a stage trains on: shares by source (any positive numbers), tokens per row, and whether
    documents of one row see each other (plain packing) or not."""

    shares: Mapping[str, float]
    context: int
    separate: bool = True

    def load(
        self, target: Target, num_tokens: int, cache_dir: str | Path, **ranks
    ) -> list[TokenFile]:
        """Every source, tokenised as far as `num_tokens` tokens of the mixture ask for."""
        files = []
        for name, share in _fractions(self.shares).items():
            needed = int(num_tokens * share) + self.context
            file = tokenised(Source.parse(name), target, needed, cache_dir, **ranks)
            if file.num_tokens < self.context:
                raise UserError(
                    f"DataError: corpus {name} has {file.num_tokens} tokens, method.context="
                    f"{self.context} asks for one row of so many: name more text or a shorter "
                    "context"
                )
            files.append(file)
        return files


def _fractions(shares: Mapping[str, float]) -> dict[str, Fraction]:
    exact = {name: Fraction(share).limit_denominator(10**6) for name, share in shares.items()}
    total = sum(exact.values())
    return {name: share / total for name, share in exact.items()}


@dataclass
class PackedBatches:
    """`batches.at(index)` of rows [batch_size, context] without padding.

    Every token is trained on, the EOS that ends a document too, but for the first of a row and
    (documents kept apart) the first of a document, which has nothing before it.
    """

    files: Sequence[TokenFile]
    text: RawText
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1
    _order: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shares = list(_fractions(self.text.shares).values())

    @property
    def fingerprint(self) -> str:
        """Of the tokens that may be read."""
        text = " ".join(file.fingerprint for file in self.files)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def at(self, index: int) -> Batch:
        """The batch of global micro-step `index` for this rank."""
        first = (index * self.world + self.rank) * self.batch_size
        rows = [self._row(first + i) for i in range(self.batch_size)]
        ids, positions, documents = (
            torch.from_numpy(np.stack([row[part] for row in rows])) for part in range(3)
        )
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        if self.text.separate:
            mask &= positions > 0
        else:
            positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
            documents = torch.zeros_like(documents)
        sources = [self.files[self._place(first + i)[0]].source for i in range(self.batch_size)]
        texts: list[list[int]] = ids.tolist()
        return Batch(
            ids, mask, positions, documents, [[] for _ in texts], texts, sources, int(mask.sum()),
            index,
        )  # fmt: skip

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        which, rank = self._place(number)
        file = self.files[which]
        epoch, place = divmod(rank, file.num_tokens // self.text.context)
        return file.row(int(self._permutation(which, epoch)[place]), self.text.context)

    def _place(self, number: int) -> tuple[int, int]:
        """(source, how many rows of it came before) of row `number`: the first source gets every
        row at which number * share passes an integer, the others share the rest likewise."""
        left = Fraction(1)
        for which, share in enumerate(self._shares):
            part = share / left
            before = int(number * part)
            if int((number + 1) * part) > before:
                return which, before
            number, left = number - before, left - share
        raise AssertionError("shares sum to one")

    def _permutation(self, which: int, epoch: int) -> np.ndarray:
        if (which, epoch) not in self._order:
            if len(self._order) > 2 * len(self.files):
                self._order.clear()
            count = self.files[which].num_tokens // self.text.context
            drawn = np.random.default_rng([self.seed, which, epoch, 2])
            self._order[which, epoch] = drawn.permutation(count)
        return self._order[which, epoch]
