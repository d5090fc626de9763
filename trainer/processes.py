"""Numbers that all processes of a launch add up, without their devices."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

# Processes wait this long for one that tokenises a corpus or starts a server; if one dies, the
# launcher ends the others.
PATIENCE = datetime.timedelta(days=1)


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
def _group() -> dist.ProcessGroup | int | None:
    """A group of its own, so that sums may come between any other operations of the processes."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)
