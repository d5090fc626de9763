"""Decoding forwards as CUDA graphs, which a device runs without Python between their kernels.

A graph repeats the kernels of its capture with the addresses and numbers that they had. Inputs are
therefore copied into tensors of the graph, every number and shape is part of its key, and outputs
are copied out of it.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Forwards of a shape before it is captured. Trial, capture and first replay take as long as about
# so many, and many shapes do not come up again before the buffers are replaced.
BEFORE_CAPTURE = 4
WAITS = "called a synchronizing CUDA operation"  # torch's words for it

_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that cannot be captured


@dataclass(frozen=True)
class Weights:
    """What decides whether a model's decoding forwards become graphs.

    `devices`: all that hold weights; `sharded`: whether processes gather weights to compute.
    """

    devices: frozenset[torch.device]
    sharded: bool

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Where the weights of this model are now; of weights that are loaded layer by layer
        ("offloaded") that is the device "meta"."""
        weights = list(model.parameters())
        devices = frozenset(one.device for one in weights)
        return cls(devices, any(isinstance(one, DTensor) for one in weights))

    @property
    def captured(self) -> bool:
        """Whether forwards are captured: all weights lie whole on one GPU."""
        return [one.type for one in self.devices] == ["cuda"] and not self.sharded


class Capture:
    """Captures CUDA graphs on one device, in one memory pool.

    Graphs of a pool overwrite each other's intermediate results, so their outputs are to be read
    before another one runs.
    """

    def __init__(self, device: torch.device):
        self.device, self.side = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, run: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Capture `run`: what replays it, and the outputs that a replay writes. RuntimeError where
        it cannot be captured.

        A capture that fails may spoil torch's allocator. The trial on a side stream, which torch
        asks for anyhow, therefore looks for operators that wait for the device.
        """
        here = torch.cuda.current_stream(self.device)
        mode = torch.cuda.get_sync_debug_mode()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side), warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # "error" would reach other threads
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                here.wait_stream(self.side)
        for one in shown:
            if WAITS in str(one.message):
                raise RuntimeError(f"{one.filename}:{one.lineno} waits for the device")
        graph = torch.cuda.CUDAGraph()
        # The outer block brings the stream back where a capture fails. Other threads may use the
        # device meanwhile.
        with (
            torch.cuda.stream(here),
            torch.cuda.graph(graph, self.pool, self.side, capture_error_mode="thread_local"),
        ):
            outputs = run()
        return graph.replay, outputs


class _Graph:
    """One captured forward with the tensors that it reads and writes."""

    def __init__(
        self,
        capture: Capture,
        run: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
    ):
        self.inputs = [one.clone() for one in inputs]
        self.replay, self.outputs = capture(partial(run, *self.inputs))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for own, one in zip(self.inputs, inputs, strict=True):
            own.copy_(one)
        self.replay()
        return [one.clone() for one in self.outputs]


class Graphs:
    """The captured forwards of `model` on one set of cache buffers."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.capture: Capture | None = None
        self.graphs: dict[Hashable, _Graph] = {}
        self.seen: Counter[Hashable] = Counter()

    def __call__(
        self,
        run: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        **constants: Hashable,
    ) -> Sequence[torch.Tensor]:
        """run(*inputs, **constants), replayed where inputs of these shapes and the same constants
        came up often enough in inference mode. The result is the caller's: no later forward
        overwrites it. `run` may depend on nothing else that changes.
        """
        key = (*constants.items(), *(one.shape for one in inputs))
        run = partial(run, **constants)
        if self.model in _waiting or not torch.is_inference_mode_enabled():
            return run(*inputs)
        if key in self.graphs:
            return self.graphs[key](inputs)
        self.seen[key] += 1
        if self.seen[key] <= BEFORE_CAPTURE:
            return run(*inputs)
        try:
            self.capture = self.capture or Capture(inputs[0].device)
            self.graphs[key] = _Graph(self.capture, run, inputs)
        except RuntimeError as error:
            _waiting.add(self.model)
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"{type(self.model).__name__} decodes without CUDA graphs, kernel by kernel "
                f"({reason})",
                stacklevel=2,
            )
            return run(*inputs)
        return self.graphs[key](inputs)
