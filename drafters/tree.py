"""Trees of drafted tokens: what a drafter proposes in one round, and the shapes it may take.

A node's children are candidates for the position after it. A chain is the tree with one path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import torch

from trainer.checks import excerpt, is_file
from trainer.config import UserError, require

MAX_RANKS = 10  # children of one node that a calibrated tree may have


@dataclass
class TokenTree:
    """A tree of drafted tokens per batch row.

    tokens: [B, N] int64, parents before children;
    parents: [B, N] int64, index of each node's parent, -1 for children of the last committed token;
    laws: [B, N, V] float, the exact distribution each token was drawn from, or None when the
        choice was deterministic (its law is a point mass, whatever the drafter's softmax said).
        Siblings are drawn without replacement, in the order of their indices: the law of each is
        that of the parent's position, the earlier siblings not yet taken out;
    lengths: [B] int64, how many leading nodes a row really drafted (a stop rule may end it early);
    is_chain: node i follows node i - 1 in every row (known to whoever built it);
    draft_forwards, draft_tokens: what the round cost the drafter.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    laws: torch.Tensor | None
    lengths: torch.Tensor
    is_chain: bool = False
    draft_forwards: int = 0
    draft_tokens: int = 0

    @classmethod
    def chain(
        cls, tokens: torch.Tensor, laws: torch.Tensor | None, lengths: torch.Tensor, **cost: int
    ) -> TokenTree:
        nodes = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        return cls(tokens, nodes, laws, lengths, is_chain=True, **cost)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """[B, N, N] bool: entry (i, j) is true when node i may attend to node j (itself or above
        it)."""
        return ancestors(self.parents)

    @cached_property
    def depths(self) -> torch.Tensor:
        """[B, N] int64: 1 for children of the last committed token."""
        return self.ancestors.sum(-1)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """parents [B, N], before their children -> [B, N, N] bool, a node itself included."""
    batch, size = parents.shape
    allowed = torch.eye(size, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=parents.device)
    for node in range(1, size):
        parent = parents[:, node]
        above = allowed[rows, parent.clamp(min=0)] & (parent >= 0).unsqueeze(-1)
        allowed[:, node] |= above
    return allowed


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree of rank paths: (0, 2) is the third most likely child of the most likely one.

    Paths are unique and prefix-closed, and where rank r is present so are all lower ranks of the
    same parent. Kept level by level, so that a node's index is its place among the nodes.
    """

    paths: tuple[Ranks, ...]
    name: str = "static"

    def __post_init__(self) -> None:
        known = set(self.paths)
        if not self.paths or len(known) != len(self.paths):
            raise UserError(f"eval.tree: {self.name} must hold at least one path, none twice")
        for path in self.paths:
            if not path or min(path) < 0:
                raise UserError(f"eval.tree: a path is a list of ranks >= 0, got {list(path)}")
            if path[:-1] and path[:-1] not in known:
                raise UserError(f"eval.tree: {list(path)} has no parent {list(path[:-1])}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise UserError(
                    f"eval.tree: {list(path)} is there, its more likely sibling "
                    f"{[*path[:-1], path[-1] - 1]} is not"
                )
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def num_fed(self) -> int:
        """Nodes that a drafter is fed, those with children."""
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def width(self) -> int:
        """The largest number of children of one node."""
        return max(path[-1] for path in self.paths) + 1

    def describe(self) -> str:
        return f"{self.name}, {self.num_nodes} nodes, depth {self.depth}"

    def save(self, path: FilePath) -> None:
        path.write_text(json.dumps([list(p) for p in self.paths]) + "\n")


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: the `top_k` best nodes of each level are expanded to their `top_k` best
    children, and of all candidates the `num_nodes` with the highest cumulative probability are
    kept. Depends on the prefix alone, so it is verified as a deterministic tree."""

    num_nodes: int
    depth: int
    top_k: int = 10

    def __post_init__(self) -> None:
        for name in ("num_nodes", "depth", "top_k"):
            require(getattr(self, name) >= 1, f"eval.tree: {name}", "be >= 1", getattr(self, name))
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_nodes > most:
            raise UserError(
                f"eval.tree: {self.num_nodes} nodes are more than the {most} candidates of depth "
                f"{self.depth} and top_k {self.top_k}"
            )

    @property
    def num_fed(self) -> int:
        return self.top_k * (self.depth - 1)

    @property
    def width(self) -> int:
        return self.top_k

    def describe(self) -> str:
        return f"dynamic, {self.num_nodes} nodes, depth {self.depth}, top {self.top_k}"


TreeShape = StaticTree | DynamicTree

# 25 nodes of depth 5, Li et al. 2024 (EAGLE), their published default
EAGLE_PATHS = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)


def parse_tree(text: str) -> TreeShape:
    """`eval.tree`: eagle | dynamic:<nodes>:<depth>[:<top_k>] | a JSON file of rank paths."""
    if text == "eagle":
        paths = tuple(tuple(map(int, word)) for word in EAGLE_PATHS.split())
        return StaticTree(paths, "eagle")
    kind, _, rest = text.partition(":")
    if kind == "dynamic":
        numbers = rest.split(":")
        if len(numbers) not in (2, 3) or not all(n.isdecimal() and len(n) < 7 for n in numbers):
            raise UserError(
                "eval.tree must be dynamic:<nodes>:<depth>[:<top_k>], numbers of at most six "
                f"digits, got {excerpt(text)}: "
                "for example dynamic:60:7:10"
            )
        return DynamicTree(*map(int, numbers))
    path = FilePath(text)
    if not is_file("eval.tree file", path):
        raise UserError(
            "eval.tree must be eagle, dynamic:<nodes>:<depth>[:<top_k>], calibrated:<nodes> or a "
            f"JSON file of rank paths, got {excerpt(text)}"
        )
    try:
        return static_tree(json.loads(path.read_text()), path.stem)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"eval.tree: {path} is not a list of rank paths ({error})") from error


def static_tree(paths: Sequence[Sequence[int]], name: str = "static") -> StaticTree:
    return StaticTree(tuple(tuple(map(_rank, path)) for path in paths), name)


def _rank(given: Any) -> int:
    require(type(given) is int, "eval.tree: a rank", "be a whole number", given)
    return given


def calibrated_nodes(text: str | None, depth: int) -> int | None:
    """Nodes of `eval.tree` calibrated:<nodes>, as many as that deep there can be; None for any
    other."""
    kind, _, nodes = (text or "").partition(":")
    if kind != "calibrated":
        return None
    # of more than five levels there are more than anybody verifies in one pass
    most = sum(MAX_RANKS**level for level in range(1, min(depth, 5) + 1))
    if not nodes.isdecimal() or len(nodes) > 6 or not 1 <= int(nodes) <= most:
        raise UserError(
            f"eval.tree must be calibrated:<nodes> with 1 to {most} nodes at eval.K={depth}, got "
            f"{excerpt(text)}: for example calibrated:{min(25, most)}"
        )
    return int(nodes)


def calibrated_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The tree with the largest expected acceptance (Cai et al. 2024, Medusa, Sec. 2.3).

    accuracy[j][r]: probability that the rank-r token of depth j + 1 is the target's, the path
    before it being right. A node's value is the product along its path; the tree grows by its best
    next sibling or first child, which is optimal because values fall with rank and depth.
    """
    require(num_nodes >= 1, "eval.tree: number of nodes", "be >= 1", num_nodes)
    # a higher rank can measure better by chance; the tree may not skip a sibling for it
    table = [_falling(row) for row in accuracy]
    value: dict[Ranks, float] = {(): 1.0}
    chosen: list[Ranks] = []
    frontier: dict[Ranks, float] = {(0,): table[0][0]}
    while len(chosen) < num_nodes and frontier:
        path = max(frontier, key=lambda p: (frontier[p], -len(p), [-r for r in p]))
        value[path] = frontier.pop(path)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(table[depth - 1]):
            sibling = (*path[:-1], rank + 1)
            frontier[sibling] = value[path[:-1]] * table[depth - 1][rank + 1]
        if depth < len(table):
            frontier[(*path, 0)] = value[path] * table[depth][0]
    if len(chosen) < num_nodes:
        raise UserError(
            f"eval.tree: only {len(chosen)} nodes fit {len(table)} depths and "
            f"{len(table[0])} ranks, got {num_nodes}"
        )
    return StaticTree(tuple(chosen), f"calibrated:{num_nodes}")


def expected_tokens(tree: StaticTree, accuracy: Sequence[Sequence[float]]) -> float:
    """1 + the sum of the node values: tokens per round if depths were independent."""
    total = 1.0
    for path in tree.paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= accuracy[depth][rank]
        total += value
    return total


def _falling(row: Sequence[float]) -> list[float]:
    out: list[float] = []
    for one in row:
        out.append(min(one, out[-1]) if out else one)
    return out
