"""The ids of a vocabulary that name a token, and whether two vocabularies agree."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from trainer.errors import UserError


def real_ids(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The ids that name a token, [n] int64, ascending; gaps of the tokenizer are left out."""
    return torch.tensor(sorted(set(tokenizer.get_vocab().values())))


def check_same_vocabulary(
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
    drafter: str,
) -> None:
    """UserError unless the two id-to-token maps are equal: speculative decoding compares ids."""
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
