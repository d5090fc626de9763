"""The ids of a vocabulary that name a token, and whether two vocabularies agree."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.errors import UserError


def real_ids(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The ids that name a token, [n] int64, ascending; gaps of the tokenizer are left out."""
    return torch.tensor(sorted(set(tokenizer.get_vocab().values())))


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    table: Any = model.get_input_embeddings()
    return table.weight.shape[0]


def check_template(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """UserError where the chat template writes a token that has no row in the embedding. Others
    without a row may never occur, as Gemma 3's token of an image in a model that reads text."""
    template = tokenizer.chat_template
    if not isinstance(template, str | dict | None):
        raise UserError(
            "its chat_template must be text", key="model.target", value=name,
            remedy="correct tokenizer_config.json, or take the key out",
        )  # fmt: skip
    rows, template = embedding_rows(model), str(template or "")
    added: dict[str, int] = tokenizer.get_added_vocab()  # type: ignore[operator]
    lacking = [token for token, i in added.items() if i >= rows and token in template]
    if lacking:
        said = f"its chat template writes {lacking[0]!r}"
        raise rowless("model.target", name, said, added[lacking[0]], rows)


def rowless(key: str, value: object, what: str, token_id: int, rows: int) -> UserError:
    """The error of a token without a row in the embedding; `what` names the token."""
    return UserError(
        f"{what}, token {token_id}, but the target's embedding has {rows} rows",
        key=key,
        value=value,
        remedy="use the tokenizer that the target was trained with, or resize_token_embeddings and "
        "train the new rows",
    )


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
