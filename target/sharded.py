"""A frozen model sharded over all processes: each layer is gathered to compute, then resharded.

torch's `fully_shard` requires all processes to compute at the same time. They do not: each has
prompts of its own, and one alone writes the report. A pass therefore begins with a vote: a process
without a pass of its own helps the others with a pass over one token, until none needs one.
Embedding, final norm and output head, which drafters and losses read, are whole on every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from target.devices import decoder_of
from trainer.errors import RunFault
from trainer.processes import PATIENCE

IDLE, PASS = 0, 1  # votes; PASS + 1 + i: layer i is to be read


class Sharded:
    """Shards `layers` of a frozen `model` that every process has on the CPU; the rest is moved to
    `device`. Weights in the checkpoint's own dtype are memory-mapped and read here layer by layer.

    Raises ValueError or NotImplementedError where torch cannot shard them."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, device: torch.device | str):
        kind = torch.device(device).type
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        self.base, self.helping = decoder_of(model), False
        self.layers = list(layers.children())  # each of them once
        rest = set(model.parameters()) - set(layers.parameters())
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.base, mesh=mesh, ignored_params=rest)  # one stream for all: it looks ahead
        model.to(device)  # type: ignore[arg-type] - transformers hides its arguments
        self.votes = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.base.register_forward_pre_hook(self._before_pass, prepend=True)
        with torch.inference_mode(False):  # a tensor made in it cannot be used outside
            self._help(PASS)

    def sync(self) -> None:
        """Wait for all processes, helping those that still compute; every process calls it."""
        self._agree(IDLE)

    def of_all(self, own: list[str]) -> list[str]:
        """The words of all processes, each once; every process calls it at the same time."""
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, own, group=self.votes)
        return sorted({word for words in found for word in words})

    @contextmanager
    def whole(self, layer: nn.Module) -> Iterator[None]:
        """Inside the block, the parameters of `layer` are whole on this process."""
        number = self.layers.index(layer)
        self._agree(PASS + 1 + number)
        shard = _shard(layer)
        shard.unshard()
        try:
            yield
        finally:
            shard.reshard()

    def _before_pass(self, module: nn.Module, inputs: object) -> None:
        if not self.helping:
            self._agree(PASS)

    def _agree(self, wanted: int) -> None:
        """Vote until all processes vote as this one; help the others before."""
        while True:
            vote = torch.tensor(wanted)
            try:
                dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.votes)
            except RuntimeError as error:
                raise RunFault("another process has ended: see its error") from error
            if vote == wanted:
                return
            self._help(int(vote))

    @torch.no_grad()
    def _help(self, vote: int) -> None:
        if vote == PASS:
            self.helping = True
            try:
                device = self.base.get_input_embeddings().get_parameter("weight").device
                ids = torch.zeros(1, 1, dtype=torch.long, device=device)
                self.base(input_ids=ids, use_cache=False)
            finally:
                self.helping = False
        else:
            layer = _shard(self.layers[vote - PASS - 1])
            layer.unshard()
            layer.reshard()


def _shard(layer: nn.Module) -> FSDPModule:
    """A layer that `fully_shard` has changed."""
    assert isinstance(layer, FSDPModule)
    return layer
