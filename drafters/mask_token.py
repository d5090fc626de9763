"""The token that stands in a drafter's input for one to predict: an id that no text holds."""

from __future__ import annotations

from target.model import Target
from target.vocabulary import embedding_rows
from trainer.errors import UserError, require

MASK = "method.mask_token"


def check_mask_token(token: int, target: Target) -> int:
    """`token`; UserError where the target's embedding has no row for it, or texts may hold it."""
    rows = embedding_rows(target.model)
    require(0 <= token < rows, MASK, f"lie in 0..{rows - 1}, the rows of the embedding", token)
    spare = token in _special(target) or token in _unnamed(target)
    rule = "be a special token that ends no text, or a row of the embedding without a token"
    require(spare and token not in target.eos_ids, MASK, rule, token)
    return token


def default_mask_token(target: Target) -> int:
    """The tokenizer's mask token, else its padding, else a row of the embedding without a token,
    else a special token that the chat template does not write. UserError where there is none that
    ends no text."""
    tokenizer, rows = target.tokenizer, embedding_rows(target.model)
    written = str(tokenizer.chat_template or "")
    inside = (tokenizer.bos_token_id, tokenizer.unk_token_id)
    others = [i for i, name in _special(target).items() if i not in inside and name not in written]
    known = (tokenizer.mask_token_id, tokenizer.pad_token_id)
    for token in (*known, *_unnamed(target)[:1], *others):
        if token is not None and token < rows and token not in target.eos_ids:
            return token
    raise UserError(
        "the tokenizer has no mask token, no padding that ends no text and no spare special token",
        key=MASK,
        remedy="name the id of a token that no text holds",
    )


def _special(target: Target) -> dict[int, str]:
    """The names by id of the tokens that ordinary text does not hold."""
    added = target.tokenizer.added_tokens_decoder
    return {i: str(token) for i, token in sorted(added.items()) if token.special}


def _unnamed(target: Target) -> list[int]:
    """The rows of the embedding that no token has, ascending."""
    named = set(target.tokenizer.get_vocab().values())
    return [i for i in range(embedding_rows(target.model)) if i not in named]
