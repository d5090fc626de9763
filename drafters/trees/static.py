"""Fixed trees of rank paths, such as those in a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from drafters.round import Budget, DraftState, Steps
from drafters.trees.spec import Accuracy, TreeSpec
from drafters.trees.tree import TOP, WITHOUT_REPLACEMENT, TokenTree
from target.sampling import warp
from trainer.checks import is_file
from trainer.errors import UserError, excerpt, require
from trainer.files import load_json

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree(TreeSpec):
    """A fixed tree of rank paths: (0, 2) is the third most likely child of the most likely one.

    Paths are unique and prefix-closed, and where rank r is present so are all lower ranks of the
    same parent. They are stored level by level, so that a node's index is its place among the
    nodes. `title`: the name in reports. At temperatures above 0 children are the most likely tokens
    too, `top`, or drawn from the drafter's distribution `without_replacement`: then rank r is the
    r-th draw, as EAGLE-1 published it (Li et al. 2024), and the trees that `eval.tree` names do so.
    Raises UserError where the paths form no tree.
    """

    paths: tuple[Ranks, ...]
    title: str = "static"
    siblings: str = field(default=TOP, kw_only=True)

    def __post_init__(self) -> None:
        rule = f"be {TOP} or {WITHOUT_REPLACEMENT}"
        require(self.siblings in (TOP, WITHOUT_REPLACEMENT), "siblings", rule, self.siblings)
        known = set(self.paths)
        if not self.paths or len(known) != len(self.paths):
            raise UserError(f"{self.title} must hold at least one path, none twice")
        for path in self.paths:
            if not path or min(path) < 0:
                raise UserError(f"a path is a list of ranks >= 0, got {list(path)}")
            if path[:-1] and path[:-1] not in known:
                raise UserError(f"{list(path)} has no parent {list(path[:-1])}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise UserError(
                    f"{list(path)} is there, its more likely sibling "
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
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def width(self) -> int:
        return max(path[-1] for path in self.paths) + 1

    def describe(self) -> str:
        return f"{self.title}, {self.num_nodes} nodes, depth {self.depth}"

    def deepest(self, K: int) -> int:
        return self.depth

    def shape(self, accuracy: Accuracy | None, K: int) -> StaticTree:
        return self

    def grow(self, drafter: Steps, state: DraftState) -> TokenTree:
        sampled = self.siblings == WITHOUT_REPLACEMENT and state.sampling.temperature > 0
        index = {path: i for i, path in enumerate(self.paths)}
        parents = torch.tensor(
            [index.get(path[:-1], -1) for path in self.paths], device=state.ids.device
        )
        batch = len(state.lengths)
        tokens = torch.zeros(batch, self.num_nodes, dtype=torch.long, device=state.ids.device)
        drawn_from: list[torch.Tensor] = []
        logits = drafter.start(state, Budget.of(self)).unsqueeze(1)
        expanded: list[tuple[int, ...]] = [()]  # the nodes that `logits` belong to, one level
        fed: dict[tuple[int, ...], int] = {(): -1}  # path -> its number among the nodes fed
        forwards, num_fed = 1, 0
        for depth in range(1, self.depth + 1):
            level = [path for path in self.paths if len(path) == depth]
            families: dict[tuple[int, ...], list[int]] = {}
            for path in level:
                families.setdefault(path[:-1], []).append(index[path])
            for place, parent in enumerate(expanded):
                children = families[parent]
                if sampled:
                    probs = warp(logits[:, place], state.sampling)
                    drawn_from += [probs] * len(children)
                    drawn = _without_replacement(probs, state, depth, children)
                else:
                    drawn = logits[:, place].topk(len(children), -1).indices
                # siblings lie side by side; a list of places would be copied to the device, for
                # which the host waits
                tokens[:, children[0] : children[-1] + 1] = drawn
            inner = {path[:-1] for path in self.paths if len(path) == depth + 1}
            expanded = [path for path in level if path in inner]
            if expanded:
                places = torch.tensor([index[path] for path in expanded], device=tokens.device)
                above = torch.tensor([fed[path[:-1]] for path in expanded], device=tokens.device)
                logits = drafter.extend(tokens[:, places], above.expand(batch, -1), depth)
                for path in expanded:
                    fed[path] = num_fed
                    num_fed += 1
                forwards += 1
        return TokenTree(
            tokens,
            parents.expand(batch, -1),
            torch.stack(drawn_from, 1) if drawn_from else None,
            torch.full_like(state.lengths, self.num_nodes),
            siblings=self.siblings if sampled else TOP,
            draft_forwards=forwards,
            draft_tokens=drafter.start_width + num_fed,
        )


def _without_replacement(
    probs: torch.Tensor, state: DraftState, depth: int, children: list[int]
) -> torch.Tensor:
    """Draw distinct tokens [B, len(children)] from probs [B, V].

    Where no probability is left, token 0 is drawn, which the verifier passes over.
    """
    left, drawn = probs.clone(), []
    for node in children:
        total = left.sum(-1, keepdim=True)
        alive = total > 0
        usable = torch.where(alive, left / total.clamp_min(1e-38), torch.ones_like(left))
        usable = usable / usable.sum(-1, keepdim=True)
        token = state.random.choice(usable, state.lengths + (depth - 1), f"draft {node}")
        token = torch.where(alive.squeeze(-1), token, 0)
        drawn.append(token)
        left.scatter_(-1, token.unsqueeze(-1), 0.0)
    return torch.stack(drawn, 1)


@dataclass(frozen=True)
class FileTree(StaticTree):
    """The rank paths in a JSON file, a list of lists."""

    name: ClassVar[str] = "static"
    paths: tuple[Ranks, ...] = field(init=False)
    title: str = field(init=False)
    file: str
    siblings: str = field(default=WITHOUT_REPLACEMENT, kw_only=True)

    def __post_init__(self) -> None:
        path = Path(self.file)
        require(is_file("file", path), "file", "be a JSON file of rank paths", self.file)
        object.__setattr__(self, "title", path.stem)
        try:
            object.__setattr__(self, "paths", read_paths(load_json(path)))
            super().__post_init__()
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not a list of rank paths ({error})") from error


def read_paths(paths: Sequence[Sequence[object]]) -> tuple[Ranks, ...]:
    """Rank paths as tuples; UserError where a rank is no whole number."""
    return tuple(tuple(map(_rank, path)) for path in paths)


def static_tree(paths: Sequence[Sequence[object]], title: str = "static") -> StaticTree:
    """The tree of these rank paths."""
    return StaticTree(read_paths(paths), title)


def _rank(given: object) -> int:
    if type(given) is int:
        return given
    raise UserError(f"a rank must be a whole number, got {excerpt(given)}")
