"""torch.compile for elementwise passes over a large vocabulary.

A softmax, a divergence and its gradient read and write [N, V] some thirty times when each operation
runs by itself, and that takes longer than the products with the output head. The compiler makes a
few passes of them. It needs a compiler for the device (C++ for a CPU, Triton for CUDA).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

FROM_VOCABULARY = 2**12  # the seconds of compiling are not gained back with fewer tokens

T = TypeVar("T")


@functools.cache
def _fused(function: Callable[..., T]) -> Callable[..., T]:
    """`function` compiled, until the compiler fails: from then on as it is."""
    from torch._dynamo.exc import ShortenTraceback  # of every backend; takes a second

    # as many positions as a batch happens to have: one compilation serves all
    compiled: list[Callable[..., T]] = [torch.compile(function, dynamic=True)]

    @functools.wraps(function)
    def run(*arguments: object) -> T:
        if compiled:
            try:
                return compiled[0](*arguments)
            except ShortenTraceback as error:
                compiled.clear()
                reason = " ".join(str(getattr(error, "inner_exception", error)).split())[:200]
                warnings.warn(
                    f"torch.compile does not work on this machine ({reason}): losses over a large "
                    "vocabulary take about twice the time",
                    stacklevel=2,
                )
        return function(*arguments)

    return run


def fused(function: Callable[..., T], vocabulary: int) -> Callable[..., T]:
    """`function` compiled, where `vocabulary` is large enough; the first call takes seconds.
    Otherwise `function` itself, which gives the same but for rounding. So it is, too, where this
    machine cannot compile, which is said once."""
    return _fused(function) if vocabulary >= FROM_VOCABULARY else function
