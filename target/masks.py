"""Which masks a causal LM reads: one for all of its layers, or one for each kind of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedModel

from target.devices import decoder_of

T = TypeVar("T")
FULL, SLIDING = "full_attention", "sliding_attention"


@functools.cache
def _chooses(decoder: type) -> bool:
    """Whether a decoder chooses the mask of a layer from a dict."""
    choice = "isinstance(causal_mask_mapping := attention_mask, dict)"
    return choice in inspect.getsource(decoder.forward)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LayerMasks:
    """The masks of a model.

    `kinds`: of its layers, sorted; `by_kind`: whether it chooses the mask of a layer from a dict by
    kind, else it takes one mask for all; `window`: the most keys that a sliding layer sees, None
    without such layers.
    """

    kinds: tuple[str, ...]
    by_kind: bool
    window: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks:
        config = model.config.get_text_config()
        kinds = sorted(set(getattr(config, "layer_types", None) or [FULL]))
        window = getattr(config, "sliding_window", None)
        known = {FULL, SLIDING}.issuperset(kinds)
        by_kind = known and _chooses(type(decoder_of(model)))
        if not by_kind and kinds in ([FULL], [SLIDING]):
            kinds = [FULL if window is None else SLIDING]
        return cls(tuple(kinds), by_kind, window if SLIDING in kinds else None)

    @property
    def is_known(self) -> bool:
        """Whether every layer sees all keys before a token or a window of them, and the model takes
        a mask for each kind that it has."""
        return {FULL, SLIDING}.issuperset(self.kinds) and (self.by_kind or len(self.kinds) == 1)

    def each(self, make: Callable[[int | None], T]) -> T | dict[str, T]:
        """What the model takes as attention_mask. `make`: from a window, None for no limit, to a
        mask."""
        masks = {kind: make(self.window if kind == SLIDING else None) for kind in self.kinds}
        return masks if self.by_kind else next(iter(masks.values()))
