"""torch.compile for what a step spends its time in: the layers of drafter and live target.

Layers rather than whole networks: one compilation serves all layers of a kind, hooks that capture
states and wrappers that share out weights stay outside, and what surrounds a layer (loss functions
handed in, caches, masks) would break the graph anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.config import UserError


@contextmanager
def compiled(backend: Any, module: Any) -> Iterator[None]:
    """Inside, every layer in an outermost `nn.ModuleList` of `module` computes through a backend of
    torch.compile; of modules that name `compiled_methods`, these. None: nothing does."""
    if backend is None:
        yield
        return
    from torch._dynamo.exc import BackendCompilerFailed  # takes a second

    found = list(_parts(module))
    for owner, name in found:
        # rows are as long as their texts: a compilation for every length would never end
        made = torch.compile(getattr(owner, name), backend=backend, dynamic=True)
        owner.__dict__[name] = made
    try:
        yield
    except BackendCompilerFailed as error:
        reason = " ".join(str(error.inner_exception).split())[:200]
        raise UserError(
            f"trainer.compile={backend} does not work on this machine ({reason}): set it to null"
        ) from error
    finally:
        for owner, name in found:
            del owner.__dict__[name]


def _parts(module: Any) -> Iterator[tuple[Any, str]]:
    """(owner, method)"""
    yield from ((module, name) for name in getattr(module, "compiled_methods", ()))
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, "forward") for layer in child.children())  # each of them once
        else:
            yield from _parts(child)
