"""Rows without padding: raw text joined end to end and cut, or several whole traces.

Which text stands in row n of a training follows from n alone: the sources take turns in exactly
their shares, and each is read in an order drawn anew per epoch. Nothing is saved, so nothing is
lost on resume.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from data.batches import Batch, epoch_order, join_teachers, response_of
from data.corpus import TokenFile, tokenised
from data.raw_text import Source
from data.trace_rows import num_tokens
from data.traces import Trace
from target.devices import decoder_of, device_of
from target.model import Target
from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RawText:
    """Raw text that a stage trains on.

    `shares`: of each source, any positive numbers; `context`: tokens per row.
    """

    shares: Mapping[str, float]
    context: int

    def load(
        self, target: Target, num_tokens: int, cache_dir: str | Path, **ranks
    ) -> list[TokenFile]:
        """Each source, tokenised as far as `num_tokens` tokens of the mixture need it.

        `ranks`: is_main and barrier of `data.corpus.tokenised`. Raises UserError where a source has
        less than one row of text.
        """
        files = []
        for name, share in _fractions(self.shares).items():
            needed = int(num_tokens * share) + self.context
            file = tokenised(Source.parse(name), target, needed, cache_dir, **ranks)
            if file.num_tokens < self.context:
                raise UserError(
                    f"DataError: corpus {name} has {file.num_tokens} tokens, method.context="
                    f"{self.context} needs at least that many for one row: name more text or set a "
                    "shorter context"
                )
            files.append(file)
        return files


def _fractions(shares: Mapping[str, float]) -> dict[str, Fraction]:
    exact = {name: Fraction(share).limit_denominator(10**6) for name, share in shares.items()}
    total = sum(exact.values())
    return {name: share / total for name, share in exact.items()}


@dataclass
class PackedBatches:
    """`batches.at(index)` of rows [batch_size, context] without padding, whose documents do not see
    each other.

    Every token is trained on, the EOS that ends a document too, but for the first of a row or of a
    document, which has nothing before it.
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
        """Hash of the tokens that may be read."""
        text = " ".join(file.fingerprint for file in self.files)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def at(self, index: int) -> Batch:
        """The batch of global micro-step `index` for this rank."""
        first = (index * self.world + self.rank) * self.batch_size
        rows = [self._row(first + i) for i in range(self.batch_size)]
        ids, positions, documents = (
            torch.from_numpy(np.stack([row[part] for row in rows])) for part in range(3)
        )
        mask = positions > 0  # positions begin anew with each row and document
        sources = [self.files[self._place(first + i)[0]].source for i in range(self.batch_size)]
        texts: list[list[int]] = ids.tolist()
        return Batch(
            ids, mask, positions, documents, [[] for _ in texts], texts, sources, int(mask.sum()),
            index, seed=self.seed,
        )  # fmt: skip

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        which, rank = self._place(number)
        file = self.files[which]
        epoch, place = divmod(rank, file.num_tokens // self.text.context)
        return file.row(int(self._permutation(which, epoch)[place]), self.text.context)

    def _place(self, number: int) -> tuple[int, int]:
        """Index of the source of row `number`, and how many of its rows came before.

        The first source gets every row at which number * share passes an integer, the others share
        the rest in the same way.
        """
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


@dataclass
class PackedTraces:
    """`batches.at(index)` of rows [batch_size, row_tokens], each of several whole traces that do
    not see each other: the next of the epoch's order, as many as fit. `source`: "target" or
    "fixed", the source of all responses; `teacher`: attach the compressed teacher stored with them.
    Raises UserError where a text is longer than a row."""

    traces: Sequence[Trace]
    source: str
    row_tokens: int
    batch_size: int
    seed: int
    teacher: bool = False
    rank: int = 0
    world: int = 1
    _firsts: list[int] = field(default_factory=lambda: [0])  # row that each epoch begins with
    _rows: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        response = "fixed_ids" if self.source == "fixed" else "response_ids"
        self._lengths: list[int] = num_tokens(self.traces, response).tolist()
        longest = max(self._lengths)
        if longest > self.row_tokens:
            raise UserError(
                f"trainer.pack_tokens={self.row_tokens} holds no text of {longest} tokens, the "
                f"longest: set it to {longest} or more, or lower data.max_new_tokens"
            )

    def at(self, index: int) -> Batch:
        """The batch of global micro-step `index` for this rank."""
        first = (index * self.world + self.rank) * self.batch_size
        rows = [self._row(first + i) for i in range(self.batch_size)]
        shape = (self.batch_size, self.row_tokens)
        ids, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
        documents = torch.full(shape, -1)
        mask = torch.zeros(shape, dtype=torch.bool)
        places: list[tuple[int, int]] = []
        for row, traces in enumerate(rows):
            begin = 0
            for trace in traces:
                text = [*trace.prompt_ids, *response_of(trace, self.source)]
                end = begin + len(text)
                ids[row, begin:end] = torch.tensor(text)
                positions[row, begin:end] = torch.arange(len(text))
                documents[row, begin:end] = len(places)
                # nothing precedes the first token of a text: there are no logits for it
                mask[row, begin + max(1, len(trace.prompt_ids)) : end] = True
                places.append((row, begin))
                begin = end
            positions[row, begin:] = torch.arange(self.row_tokens - begin)
        taken = [trace for traces in rows for trace in traces]
        return Batch(
            ids, mask, positions, documents, [t.prompt_ids for t in taken],
            [response_of(t, self.source) for t in taken], [self.source] * len(taken),
            int(mask.sum()), index, join_teachers(taken) if self.teacher else None, places,
            seed=self.seed,
        )  # fmt: skip

    def _row(self, number: int) -> list[Trace]:
        while self._firsts[-1] <= number:
            self._firsts.append(self._firsts[-1] + len(self._packed(len(self._firsts) - 1)))
        epoch = bisect_right(self._firsts, number) - 1
        return [self.traces[i] for i in self._packed(epoch)[number - self._firsts[epoch]]]

    def _packed(self, epoch: int) -> list[list[int]]:
        """Indices of the traces in each row of an epoch."""
        if epoch not in self._rows:
            if len(self._rows) > 2:
                self._rows.clear()
            rows: list[list[int]] = []
            room = 0
            for i in epoch_order(self.seed, epoch, len(self.traces)).tolist():
                if self._lengths[i] > room:
                    rows.append([])
                    room = self.row_tokens
                rows[-1].append(i)
                room -= self._lengths[i]
            self._rows[epoch] = rows
        return self._rows[epoch]


@torch.no_grad()
def check_separation(model: PreTrainedModel, remedy: str) -> None:
    """Check that a transformers model separates documents of a row by their positions alone.

    Raises UserError, which ends with `remedy`, where the second document sees the first.
    """

    def states(ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        return decoder_of(model)(**given).last_hidden_state

    device = device_of(model)
    ids = torch.arange(6, device=device).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    training = model.training
    model.eval()
    packed, alone = states(ids, positions), states(ids[:, 3:], None)
    model.train(training)
    # what rounding makes of another order of sums, in half precision too
    close = 1e-4 if alone.dtype == torch.float32 else 2e-2
    if not torch.allclose(packed[:, 3:], alone, rtol=0, atol=close * float(alone.abs().max())):
        raise UserError(f"{type(model).__name__} lets packed documents see each other: {remedy}")
