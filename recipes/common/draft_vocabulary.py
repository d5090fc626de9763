"""The vocabulary of a head that drafts some of the target's tokens only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data.trace_rows import tokens
from data.traces import Trace
from target.model import Target
from trainer.config import UserError, require

WHOLE = 16_384  # up to here, leaving tokens out saves too little
ENOUGH = 0.995  # share of the training text that a chosen vocabulary covers
STEP, LEAST = 1024, 8192  # tokens
LOW = 0.98

KEY = "method.draft_vocab_size"


def is_reduced(size: int | None, target: Target) -> bool:
    """Whether a head with this `method.draft_vocab_size` drafts some of the tokens only."""
    return target.vocab_size > WHOLE if size is None else size > 0


def frequent_tokens(
    traces: Sequence[Trace], size: int | None, target: Target
) -> torch.Tensor | None:
    """The most frequent response tokens, ids [W] int64 ascending; None for all tokens.

    size: W, 0 for all tokens; None: all of a vocabulary up to `WHOLE` tokens, else as many
    thousands as cover the share `ENOUGH` of the response tokens. Prints the share that is covered,
    which no drafter over these tokens can exceed at T=1. UserError if there is no response token.
    """
    vocab_size = target.vocab_size
    if not is_reduced(size, target):
        return None
    rule = f"lie in 1..{vocab_size}, the target's vocabulary, or be 0 for all of it"
    require(size is None or size <= vocab_size, KEY, rule, size)
    # an id beyond the vocabulary counts as text that is not covered
    counts = np.zeros(vocab_size + 1, np.int64)
    for ids in tokens(traces, "response_ids"):
        counts += np.bincount(np.minimum(ids, vocab_size), minlength=vocab_size + 1)
    if not (total := int(counts.sum())):
        raise UserError(f"{KEY}: the traces hold no response token to count")
    own = torch.from_numpy(counts[:vocab_size])
    ranked = own.argsort(descending=True, stable=True)  # of equal counts the lower id first
    shares = own[ranked].cumsum(0) / total
    why = ""
    if size is None:
        enough = int((shares < ENOUGH).sum()) + 1
        size = min(vocab_size, max(LEAST, -(-enough // STEP) * STEP))
        why = f"; {KEY}=0 keeps all {vocab_size}"
    covered = float(shares[size - 1])
    print(
        f"draft vocabulary: {size} tokens, {covered:.2%} of the training text: alpha <= "
        f"{covered:.4f}{why}"
    )
    if covered < LOW:
        print(f"warning: below {LOW:.0%}; raise {KEY}")
    return ranked[:size].sort().values
