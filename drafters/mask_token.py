"""The token that stands in a drafter's input for one to predict.

It is an id that is never drafted behind: no text goes on behind a token that ends it, and none
holds a spare special token. Its row of the embedding must not be 0, as many a padding's is: queries
made of that are 0, too, and the first layer would see nothing but the mean of its context.
"""

from __future__ import annotations

import torch

from target.model import Target
from target.vocabulary import embedding_rows
from trainer.errors import UserError, require

MASK = "method.mask_token"


def check_mask_token(token: int, target: Target) -> int:
    """`token`; UserError where texts may hold it, or where its row of the embedding is 0 or
    missing."""
    rows = embedding_rows(target.model)
    require(0 <= token < rows, MASK, f"lie in 0..{rows - 1}, the rows of the embedding", token)
    spare = token in _special(target) or token in _unnamed(target)
    require(spare, MASK, "be a special token, or a row of the embedding without a token", token)
    require(_has_row(token, target), MASK, "have a row of the embedding that is not 0", token)
    return token


def default_mask_token(target: Target) -> int:
    """The tokenizer's mask token, else its padding, a row of the embedding without a token, a
    special token that the chat template does not write, or the end of text. UserError where there
    is none with a row of the embedding that is not 0."""
    tokenizer, ends = target.tokenizer, target.eos_ids
    written = str(tokenizer.chat_template or "")
    inside = (tokenizer.bos_token_id, tokenizer.unk_token_id)
    others = [i for i, name in _special(target).items() if i not in inside and name not in written]
    first = (tokenizer.mask_token_id, tokenizer.pad_token_id, *_unnamed(target), *others)
    spare = [token for token in first if token is not None and token not in ends]
    for token in (*spare, *ends):
        if token < embedding_rows(target.model) and _has_row(token, target):
            return token
    raise UserError(
        "the tokenizer has no special token whose row of the embedding is not 0",
        key=MASK,
        remedy="train another target, or another recipe",
    )


def _has_row(token: int, target: Target) -> bool:
    """Whether the token's row of the embedding is not 0."""
    with torch.no_grad():
        return bool(target.embedding(torch.tensor([token], device=target.device)).any())


def _special(target: Target) -> dict[int, str]:
    """The names by id of the tokens that ordinary text does not hold."""
    added = target.tokenizer.added_tokens_decoder
    return {i: str(token) for i, token in sorted(added.items()) if token.special}


def _unnamed(target: Target) -> list[int]:
    """The rows of the embedding that no token has, ascending."""
    named = set(target.tokenizer.get_vocab().values())
    return [i for i in range(embedding_rows(target.model)) if i not in named]
