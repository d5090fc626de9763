"""A frozen model in parts on all processes: each layer is gathered where it computes, and let go.

torch's `fully_shard` does that, and asks that all processes compute at the same time. They do not:
each has prompts of its own, and one alone writes the report. So a pass begins with a vote: who is
asked for nothing helps those who are, with a pass over one token, until nobody is asked for more.
Embedding, final norm and output head, which drafters and losses read, are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from target.devices import decoder_of
from trainer.config import RunFault
from trainer.loop import PATIENCE

IDLE, PASS = 0, 1  # votes; PASS + 1 + i: layer i is to be read


class Sharded:
    """Shares out `layers` of a frozen `model` that every process has on the CPU; the rest comes to
    `device`. Weights loaded in the checkpoint's own dtype are mapped, and read here layer by layer.

    Raises ValueError or NotImplementedError where torch cannot share them out."""

    def __init__(self, model: Any, layers: nn.ModuleList, device: torch.device | str):
        kind = torch.device(device).type
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        self.base, self.helping = decoder_of(model), False
        self.layers: Any = list(layers.children())  # each of them once
        rest = set(model.parameters()) - set(layers.parameters())
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.base, mesh=mesh, ignored_params=rest)  # one stream for all: it looks ahead
        model.to(device)
        self.votes = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.base.register_forward_pre_hook(self._before_pass, prepend=True)
        with torch.inference_mode(False):  # what is first gathered in it cannot be used outside
            self._help(PASS)

    def meet(self) -> None:
        """Every process calls it where they wait for each other, after passes of which each made
        as many as it liked."""
        self._agree(IDLE)

    @contextmanager
    def whole(self, layer: nn.Module) -> Iterator[None]:
        """Inside, the parameters of `layer` are whole on this process."""
        number = self.layers.index(layer)
        self._agree(PASS + 1 + number)
        self.layers[number].unshard()
        try:
            yield
        finally:
            self.layers[number].reshard()

    def _before_pass(self, module: nn.Module, inputs: Any) -> None:
        if not self.helping:
            self._agree(PASS)

    def _agree(self, wanted: int) -> None:
        """Returns once all do what this process wants."""
        while True:
            vote = torch.tensor(wanted)
            try:
                dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.votes)
            except RuntimeError as error:
                raise RunFault("another process ended: see what it said") from error
            if vote == wanted:
                return
            self._help(int(vote))

    @torch.no_grad()
    def _help(self, vote: int) -> None:
        if vote == PASS:
            self.helping = True
            try:
                device = self.base.get_input_embeddings().weight.device
                ids = torch.zeros(1, 1, dtype=torch.long, device=device)
                self.base(input_ids=ids, use_cache=False)
            finally:
                self.helping = False
        else:
            layer = self.layers[vote - PASS - 1]
            layer.unshard()
            layer.reshard()
