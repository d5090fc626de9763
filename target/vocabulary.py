"""What two vocabularies must agree on, and which of their ids name a token."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import UserError


def real_ids(tokenizer: Any) -> torch.Tensor:
    """[n] int64, ascending: the ids that name a token; the tokenizer's own gaps are left out."""
    return torch.tensor(sorted(set(tokenizer.get_vocab().values())))


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any, drafter: str) -> None:
    """Speculative decoding compares ids: the two id-to-token maps must be equal."""
    ours = {i: token for token, i in target_tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in draft_tokenizer.get_vocab().items()}
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differing:
        i = differing[0]
        raise UserError(
            f"CompatibilityError: model.drafter {drafter!r} and the target name "
            f"{len(differing)} ids differently, "
            f"first id {i} ({theirs.get(i)!r} and {ours.get(i)!r}): use a drafter with the "
            "target's tokenizer, "
            "or model.drafter=null to build one from the target's own configuration"
        )
