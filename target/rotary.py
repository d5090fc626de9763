"""Rotary frequencies that depend on the length of the text, and the texts that may be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BY_LENGTH = ("dynamic", "longrope")
UNKNOWN = 1 << 20  # tokens, of a model that names no limit


def by_length(config: object) -> list[Mapping[str, Any]]:
    """The parameters of rotary embeddings whose frequencies depend on the longest text of a call;
    `config`: of the text model."""
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary, *(one for one in rotary.values() if isinstance(one, dict))]
    return [one for one in kinds if one.get("rope_type") in BY_LENGTH]


def served_context(config: object) -> int:
    """The most positions at which an engine drafts with a head; `config`: of its layer.

    vLLM multiplies the length of a linear and of a yarn embedding by its factor
    (`_get_and_verify_max_len`), whatever `max_position_embeddings` says.
    """
    longest, rotary = context_of(config), getattr(config, "rope_parameters", None) or {}
    kind, factor = rotary.get("rope_type"), rotary.get("factor") or 1.0
    if kind == "linear":
        return int(longest * factor)
    if kind == "yarn":
        return max(longest, int(rotary["original_max_position_embeddings"] * factor))
    return longest


def context_of(config: object) -> int:
    """The most positions of a text; `config`: of the text model.

    transformers chooses such frequencies for a whole batch by its longest text (Phi-3 and 4: beyond
    4,096 tokens). Up to that length a text does not depend on those beside it, nor on what has been
    read of it before, so longer ones are not read."""
    longest = getattr(config, "max_position_embeddings", None) or UNKNOWN
    lengths = [one.get("original_max_position_embeddings") for one in by_length(config)]
    return min([longest, *(length for length in lengths if length)])
