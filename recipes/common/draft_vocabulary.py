"""The vocabulary of heads that may draft some of the target's tokens only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from data.trace_rows import chosen, column, tokens
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.widen import widen
from recipes.common.heads import HeadConfig, HeadRecipe
from target.model import Target
from trainer.errors import UserError, require
from trainer.keys import key

WHOLE = 16_384  # up to here, leaving tokens out saves too little
ENOUGH = 0.995  # share of the training text that a chosen vocabulary covers
STEP, LEAST = 1024, 8192  # tokens
LOW_SEEN, LOW_OTHER = 0.98, 0.95  # shares of the training text and of other text
FOLDS = 8  # of the conversations; each is covered by the tokens of the others

KEY = "method.draft_vocab_size"


@dataclass
class VocabularyConfig(HeadConfig):
    """Settings of a head that may draft some of the target's tokens only."""

    # tokens that are drafted, the most frequent of the traces; 0: all; null: all of up to 16,384,
    # else at least 8,192 that cover 99.5 % of the traces. With model.drafter: null leaves it as it
    # is, a larger number than it drafts adds the most frequent others
    draft_vocab_size: int | None = key(None, ge=0)

    def draft_whole_vocabulary(self, where: str) -> None:
        """Draft all tokens, for heads that share the target's output matrix; UserError where
        another number of them is asked for. `where`: the setting that makes them share it."""
        rule = f"be 0 or null where {where}: these heads share the target's output matrix"
        require(not self.draft_vocab_size, KEY, rule, self.draft_vocab_size)
        self.draft_vocab_size = 0


ConfigT = TypeVar("ConfigT", bound=VocabularyConfig)


class VocabularyRecipe(HeadRecipe[ConfigT]):
    """A recipe of such a head."""

    @property
    def builds_from_traces(self) -> bool:
        return self.is_reduced

    @property
    def is_reduced(self) -> bool:
        if self.given is not None:
            return self._size_for(self.given) < self.target.vocab_size
        return is_reduced(self.config.draft_vocab_size, self.target)

    def check_given(self, drafter: TrainedDrafter) -> None:
        super().check_given(drafter)
        self.check_vocabulary(drafter)

    def check_vocabulary(self, drafter: TrainedDrafter) -> None:
        """Refuse a trained head that drafts more tokens than asked for; `widen` adds the others
        to one that drafts fewer."""
        own, size, most = drafter.draft_vocab_size, self._size_for(drafter), drafter.vocab_size
        rule = (
            f"be null, or one of {own} to {most}: model.drafter drafts {own} tokens and keeps them"
        )
        require(own <= size <= most, KEY, rule, size)

    def _size_for(self, drafter: TrainedDrafter) -> int:
        """How many tokens a trained head shall draft; null leaves it as it is."""
        size = self.config.draft_vocab_size
        return drafter.draft_vocab_size if size is None else size or drafter.vocab_size

    def widen(self, drafter: TrainedDrafter, traces: Sequence[Trace]) -> None:
        size, known = self._size_for(drafter), drafter.output_head(1).kept
        if known is not None and size > len(known):
            size = size if size < drafter.vocab_size else 0
            kept = frequent_tokens(traces, size, self.target, known.cpu().numpy())
            widen(drafter, kept, self.target)

    def kept(self, traces: Sequence[Trace]) -> torch.Tensor | None:
        """The tokens that the head drafts, see `frequent_tokens`."""
        return frequent_tokens(traces, self.config.draft_vocab_size, self.target)


def is_reduced(size: int | None, target: Target) -> bool:
    """Whether a head with this `method.draft_vocab_size` drafts some of the tokens only."""
    return target.vocab_size > WHOLE if size is None else size > 0


def frequent_tokens(
    traces: Sequence[Trace],
    size: int | None,
    target: Target,
    known: np.ndarray | None = None,
) -> torch.Tensor | None:
    """The most frequent response tokens, ids [W] int64 ascending; None for all tokens.

    size: W, 0 for all tokens; None: all of a vocabulary up to `WHOLE` tokens, else as many
    thousands as cover the share `ENOUGH` of the response tokens. known: ids that are among them,
    however rare they are. Prints that share, and the share of conversations that are left out of
    the count: about what alpha can reach on other prompts of the kind. Of a small text the two are
    far apart. UserError if there is no response token.
    """
    vocab_size = target.vocab_size
    if not is_reduced(size, target):
        return None
    rule = f"lie in 1..{vocab_size}, the target's vocabulary, or be 0 for all of it"
    require(size is None or size <= vocab_size, KEY, rule, size)
    # an id beyond the vocabulary counts as text that is not covered
    counts = np.zeros((FOLDS, vocab_size + 1), np.int64)
    conversations = column(traces, "conversation_id")
    folds = np.array([zlib.crc32(name.encode()) % FOLDS for name in conversations], np.int64)
    for fold in range(FOLDS):
        for ids in tokens(chosen(traces, np.flatnonzero(folds == fold)), "response_ids"):
            counts[fold] += np.bincount(np.minimum(ids, vocab_size), minlength=vocab_size + 1)
    if not (total := int(counts.sum())):
        raise UserError(f"{KEY}: the traces hold no response token to count")
    own = counts[:, :vocab_size]
    every = own.sum(0)
    ranked = _ranked(every, known)
    seen = every[ranked].cumsum() / total
    # known ones may have been chosen by this very text, so the share without them bounds it too
    others = np.min(
        [
            np.sum([fold[_ranked(every - fold, given)].cumsum() for fold in own], 0) / total
            for given in (known, None)
        ],
        0,
    )
    why = ""
    if size is None:
        enough = int((seen < ENOUGH).sum()) + 1
        size = min(vocab_size, max(LEAST, -(-enough // STEP) * STEP))
        why = f"; {KEY}=0 keeps all {vocab_size}"
    covered = float(others[size - 1])
    print(
        f"draft vocabulary: {size} tokens, {seen[size - 1]:.2%} of the training text and about "
        f"{covered:.2%} of other text of its kind, which bounds alpha{why}"
    )
    if seen[size - 1] < LOW_SEEN or covered < LOW_OTHER:
        print(
            f"warning: below {LOW_SEEN:.0%} of the training text or {LOW_OTHER:.0%} of other text; "
            f"train on more text or raise {KEY}"
        )
    return torch.from_numpy(np.sort(ranked[:size]))


def _ranked(counts: np.ndarray, known: np.ndarray | None) -> np.ndarray:
    """Ids by falling counts [V], the `known` ones first; of equal counts the lower id first, which
    most tokenizers gave to the more frequent token."""
    first = counts.astype(np.int64)
    if known is not None:
        first[known] += first.max() + 1
    return np.argsort(-first, kind="stable")
