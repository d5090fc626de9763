"""The trees that have a name."""

from __future__ import annotations

from drafters.round import Shape
from drafters.trees.best_first import BestFirstTree
from drafters.trees.calibrated import CalibratedTree
from drafters.trees.copy import CopyTree
from drafters.trees.dynamic import DynamicTree
from drafters.trees.eagle import EagleTree
from drafters.trees.eagle2 import Eagle2Tree
from drafters.trees.spec import TreeSpec
from drafters.trees.static import FileTree
from trainer.errors import UserError
from trainer.specs import parse

TREES: dict[str, type[TreeSpec]] = {
    one.name: one
    for one in (
        EagleTree,
        DynamicTree,
        Eagle2Tree,
        CalibratedTree,
        BestFirstTree,
        FileTree,
        CopyTree,
    )
}

# those that every drafter drafts alike, and alone
SHAPES = {
    name: one
    for name, one in TREES.items()
    if one.drafter_alone and not one.needs_accuracy and not one.needs_slots
}


def parse_tree(text: str, key: str = "eval.tree") -> TreeSpec:
    """The tree that `text` names; UserError, with `key`, where it names none."""
    if text.endswith(".json") and text.partition(",")[0].partition(":")[0] not in TREES:
        raise UserError(f"{key}={text}: a JSON file of rank paths is named as static:{text}")
    return parse(key, text, TREES)


def parse_shape(text: str, key: str = "eval.tree") -> Shape:
    """The shape that `text` names, of a tree that every drafter drafts alike, and alone."""
    return parse(key, text, SHAPES).shape(None, 1)
