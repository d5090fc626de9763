"""torch.compile for the layers of drafter and live target, where a step spends its time.

Layers are compiled rather than whole networks: one compilation serves all layers of a kind, hooks
that capture states and wrappers that shard weights stay outside, and the code around a layer (loss
functions, caches, masks) would break the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.errors import UserError


@contextmanager
def compiled(backend: str | Callable[..., object] | None, module: nn.Module) -> Iterator[None]:
    """Inside the block, every layer in an outermost `nn.ModuleList` of `module` is compiled with a
    backend of torch.compile, and so are the methods that a module lists in `compiled_methods`.
    None compiles nothing. UserError where the backend fails on this machine."""
    if backend is None:
        yield
        return
    from torch._dynamo.exc import ShortenTraceback  # of every backend; takes a second

    found = list(_parts(module))
    for owner, name in found:
        # rows are as long as their texts: a compilation for every length would never end
        made = torch.compile(getattr(owner, name), backend=backend, dynamic=True)
        owner.__dict__[name] = made
    try:
        yield
    except ShortenTraceback as error:
        reason = " ".join(str(getattr(error, "inner_exception", error)).split())[:200]
        raise UserError(
            f"trainer.compile={backend} does not work on this machine ({reason}): set it to null"
        ) from error
    finally:
        for owner, name in found:
            del owner.__dict__[name]


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost `nn.ModuleList`s of `module`, each of them once."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child.children()
        else:
            yield from layers_of(child)


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """What is compiled, as (owner, name of the method)."""
    yield from ((module, name) for name in getattr(module, "compiled_methods", ()))
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, "forward") for layer in child.children())  # each of them once
        else:
            yield from _parts(child)
