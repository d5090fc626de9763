"""The dtype that a drafter is measured in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from drafters.base import ACCEPTANCE, TrainedDrafter
from target.model import Target


@contextmanager
def in_served_dtype(drafters: Iterable[object], target: Target) -> Iterator[None]:
    """Inside the block, drafters draft in the target's dtype, as vLLM loads them (its configuration
    of a draft model takes the target's), and not in the one that they train in. Afterwards their
    weights are the former ones again. An acceptance head stays in float32, and so do buffers, of
    which some hold the frequencies of rotary embeddings."""
    dtype = target.model.dtype
    former = {
        parameter: parameter.data
        for drafter in drafters
        if isinstance(drafter, TrainedDrafter)
        for name, parameter in drafter.named_parameters()
        if not name.startswith(f"{ACCEPTANCE}.") and parameter.dtype != dtype
    }
    try:
        for parameter, data in former.items():
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in former.items():
            parameter.data = data
