"""Static trees that are built from the accuracies of a drafter's ranks (Medusa)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from drafters.trees.spec import Accuracy, TreeSpec
from drafters.trees.static import Ranks, StaticTree
from drafters.trees.tree import WITHOUT_REPLACEMENT
from trainer.errors import UserError, require

MAX_RANKS = 10  # children of one node


@dataclass(frozen=True)
class CalibratedTree(TreeSpec):
    """The tree of `num_nodes` with the largest expected acceptance, no deeper than eval.K."""

    name: ClassVar[str] = "calibrated"
    needs_accuracy: ClassVar[bool] = True
    num_nodes: int
    siblings: str = field(default=WITHOUT_REPLACEMENT, kw_only=True)

    def deepest(self, K: int) -> int:
        # five levels already hold more nodes than one pass can verify
        most = sum(MAX_RANKS**level for level in range(1, min(K, 5) + 1))
        rule = f"lie in 1..{most} for depth {K}"
        require(1 <= self.num_nodes <= most, "num_nodes", rule, self.num_nodes)
        return K

    def shape(self, accuracy: Accuracy | None, K: int) -> StaticTree:
        if accuracy is None:
            raise UserError(
                "the drafter holds no accuracies of its ranks; train it with this project, or "
                "name another tree"
            )
        tree = calibrated_tree(accuracy[:K], self.num_nodes)
        return replace(tree, siblings=self.siblings)


def accuracy_name(temperature: float, drawn_at: float | None) -> str:
    """The name under which a drafter stores its accuracies: those of ranks at the target's
    temperature, or those of draws, where the drafter has the temperature `drawn_at`."""
    if drawn_at is None:
        return f"{temperature:g}"
    return f"{temperature:g}, drawn" + f" at T={drawn_at:g}" * (drawn_at != temperature)


def accuracy_at(
    stored: Mapping[str, Accuracy] | Accuracy | None, wanted: str
) -> tuple[Accuracy | None, str]:
    """The accuracies that were measured as the name `wanted` says, and their name; else those at
    the nearest temperature, of ranks where there are none of such draws.

    Earlier versions stored ranks alone, the first of them one table without a temperature.
    """
    if not isinstance(stored, Mapping):
        return stored, wanted
    parts = {name: name.partition(", ") for name in (*stored, wanted)}
    temperature, _, form = parts[wanted]
    own = [name for name in stored if parts[name][2] == form]
    own = own or [name for name in stored if not parts[name][2]] or list(stored)
    nearest = min(own, key=lambda name: abs(float(parts[name][0]) - float(temperature)))
    return stored[nearest], nearest


def calibrated_tree(accuracy: Accuracy, num_nodes: int) -> StaticTree:
    """The tree with the largest expected acceptance (Cai et al. 2024, Medusa, Sec. 2.3).

    accuracy[j][r]: probability that the rank-r token of depth j + 1 is the target's, or that the
    r-th drawn one is accepted, given that the path before it is. A node's value is the product
    along its path; the tree grows by its best next sibling or first child, which is optimal because
    values fall with rank and depth. Raises UserError where fewer nodes are possible.
    """
    require(num_nodes >= 1, "number of nodes", "be >= 1", num_nodes)
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
            f"only {len(chosen)} nodes fit {len(table)} depths and "
            f"{len(table[0])} ranks, got {num_nodes}"
        )
    return StaticTree(tuple(chosen), f"calibrated:{num_nodes}")


def expected_tokens(tree: StaticTree, accuracy: Accuracy) -> float:
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
