"""Sampling that servers take from a generation config, and that a report does not measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from eval.config import EvalConfig

# by key, the values without effect. vLLM and SGLang serve with the others by default, whatever
# do_sample says.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (1.0,), "top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,),
    "repetition_penalty": (1.0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,),
}  # fmt: skip


def unmeasured_defaults(
    generation: GenerationConfig | None, config: EvalConfig
) -> dict[str, float]:
    """The settings of a generation config that change the distribution, without those that the
    report measures with."""
    stored = {} if generation is None else generation.to_dict()
    measured = {
        "temperature": config.temperatures,
        "top_k": [config.top_k],
        "top_p": [config.top_p],
    }
    return {
        key: stored[key]
        for key, neutral in NEUTRAL.items()
        if stored.get(key) is not None and stored[key] not in (*neutral, *measured.get(key, ()))
    }


def unmeasured_words(defaults: Mapping[str, float]) -> str:
    """One line about them, "" where there are none."""
    if not defaults:
        return ""
    named = ", ".join(f"{key}={value:g}" for key, value in defaults.items())
    return (
        f"its generation config sets {named}, with which vLLM and SGLang serve unless a request or "
        "--generation-config vllm says otherwise; the report measures without them "
        "(eval.temperatures, eval.top_k and eval.top_p name what it measures)"
    )
