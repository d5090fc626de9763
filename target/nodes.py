"""Nodes of drafted trees: the cache slots that they are written to, and those that they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class PlacedNodes:
    """The slots of the tree nodes of one forward, and the slots that they may see.

    slots, positions: [B, T] int64; first: [B] int64, lower slots hold committed text and are
    visible to all; ancestors: [B, T, M] bool, of the M nodes fed so far, in slots first, first + 1,
    ...; depths: [B, M] int64, from 1."""

    slots: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    ancestors: torch.Tensor
    depths: torch.Tensor

    def visible(self, used: int, window: int | None = None) -> torch.Tensor:
        """The visible slots, [B, T, used] bool; with `window`, only keys closer than that."""
        batch, count, size = self.ancestors.shape
        slots = torch.arange(used, device=self.first.device)
        allowed = (slots < self.first.unsqueeze(1)).unsqueeze(1).repeat(1, count, 1)
        nodes = self.first.unsqueeze(1) + torch.arange(size, device=self.first.device)
        allowed.scatter_(2, nodes.unsqueeze(1).expand(-1, count, -1), self.ancestors)
        if window is not None:
            keys = slots.expand(batch, -1).clone()
            keys.scatter_(1, nodes, self.first.unsqueeze(1) + self.depths - 1)
            allowed &= keys.unsqueeze(1) > self.positions.unsqueeze(-1) - window
        return allowed


class TreeSlots:
    """The nodes of one round, placed in consecutive slots from `first` [B] on in the order in which
    they are fed; their positions are those of their depth."""

    def __init__(self, first: torch.Tensor):
        self.first, self.count = first, 0
        batch, device = len(first), first.device
        self.ancestors = torch.zeros(batch, 0, 0, dtype=torch.bool, device=device)
        self.depths = torch.zeros(batch, 0, dtype=torch.long, device=device)

    def add(self, parents: torch.Tensor, depth: int) -> PlacedNodes:
        """parents [B, n]: among the nodes added before, -1 for none; all of them `depth` deep."""
        batch, new = parents.shape
        old, size = self.count, self.count + new
        rows = torch.arange(batch, device=parents.device).unsqueeze(1)
        grown = torch.zeros(batch, size, size, dtype=torch.bool, device=parents.device)
        grown[:, :old, :old] = self.ancestors
        if old:
            above = self.ancestors[rows, parents.clamp(min=0)]
            grown[:, old:, :old] = above & (parents >= 0).unsqueeze(-1)
        grown[:, old:, old:] = torch.eye(new, dtype=torch.bool, device=parents.device)
        self.ancestors = grown
        self.depths = torch.cat([self.depths, torch.full_like(parents, depth)], 1)
        self.count = size
        slots = self.first.unsqueeze(1) + torch.arange(old, size, device=parents.device)
        positions = (self.first + (depth - 1)).unsqueeze(1).expand(-1, new)
        return PlacedNodes(slots, positions, self.first, grown[:, old:], self.depths)


def place_tree(lengths: torch.Tensor, ancestors: torch.Tensor, depths: torch.Tensor) -> PlacedNodes:
    """The last committed token and behind it a whole tree, for its verification. lengths [B];
    ancestors [B, N, N], depths [B, N] of the nodes."""
    first = lengths.unsqueeze(1)
    nodes = torch.arange(-1, depths.shape[1], device=lengths.device)
    none = torch.zeros_like(ancestors[:, :1])
    return PlacedNodes(
        first + nodes,
        first - 1 + torch.nn.functional.pad(depths, (1, 0)),
        lengths,
        torch.cat([none, ancestors], 1),
        depths,
    )
