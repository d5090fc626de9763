"""The training-free drafters that have a name."""

from __future__ import annotations

from drafters.training_free.base import TrainingFree
from drafters.training_free.lookup import PromptLookup
from drafters.training_free.ngram_simple import NgramSimple
from trainer.specs import parse

TRAINING_FREE: dict[str, type[TrainingFree]] = {
    one.name: one for one in (PromptLookup, NgramSimple)
}


def parse_training_free(text: str, key: str) -> TrainingFree:
    """The drafter that `text` names; UserError, with `key`, where it names none."""
    return parse(key, text, TRAINING_FREE)


def is_training_free(text: str | None) -> bool:
    """Whether `text` names one of these; a folder of such a name is written ./<name>."""
    return text is not None and text.partition(",")[0].partition(":")[0] in TRAINING_FREE
