"""What all processes of a launch add up or compute together, without their devices."""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
R = TypeVar("R")

# Processes wait this long for one that tokenises a corpus or starts a server; if one dies, the
# launcher ends the others.
PATIENCE = datetime.timedelta(days=1)

# torch 2.13 has new names for these
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Sum:
    """Sums of float64 numbers over all processes, which begin when it is made. They are computed on
    the CPU beside whatever the process does next: a reduction on a GPU would wait for the work
    before it. All processes make and await their sums in the same order."""

    def __init__(self, values: Sequence[float]) -> None:
        self._total, self._work = torch.tensor(values, dtype=torch.float64), None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._total, group=_group(), async_op=True)

    def wait(self) -> list[float]:
        """The sums, once every process has given its numbers."""
        if self._work is not None:
            self._work.wait()
        return self._total.tolist()


@functools.cache
def _group() -> dist.ProcessGroup:
    """A group of its own, so that sums may come between any other operations of the processes."""
    made = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(made, dist.ProcessGroup), "every process is in it"
    return made


class Spread(Generic[T, R]):
    """`compute` of many items on all processes of a launch. The first calls `each` inside of its
    `with` block; the others are in `help` until that ends."""

    def __init__(self, compute: Callable[[T], R]) -> None:
        self.compute = compute
        self.processes = dist.get_world_size() if dist.is_initialized() else 1
        self._waiting = True  # the others, for more

    def __enter__(self) -> Spread[T, R]:
        return self

    def __exit__(self, *fault: object) -> None:
        if self._waiting:  # else they have results that a fault here asks nobody for
            self._received([None] * self.processes)

    def each(self, items: Iterable[T]) -> Iterator[R]:
        """Yield `compute` of each item, in order."""
        left = iter(items)
        while given := list(itertools.islice(left, self.processes)):
            self._received([(item,) for item in given] + [()] * (self.processes - len(given)))
            self._waiting = False
            own = self.compute(given[0])
            found: list[Any] = [own] * self.processes
            if self.processes > 1:
                dist.gather_object(own, found, group=_group())
            self._waiting = True
            yield from found[: len(given)]

    def help(self) -> None:
        """Compute what the first process gives, until it has no more."""
        while (share := self._received(None)) is not None:
            dist.gather_object(self.compute(*share) if share else None, group=_group())

    def _received(self, shares: Sequence[tuple[T, ...] | None] | None) -> tuple[T, ...] | None:
        """What the first process gives this one of `shares`: an item, () for none this time, None
        for the end."""
        own: list[Any] = [None]
        if self.processes > 1:
            dist.scatter_object_list(own, None if shares is None else list(shares), group=_group())
        return own[0]
