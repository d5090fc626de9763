"""YAML of anyone's: a text whose aliases would expand without end, or which is nested too deep for
what reads its value, is refused before it is built.
"""

from __future__ import annotations

from itertools import chain

import yaml

MOST_VALUES = 100_000
MOST_LEVELS = 50  # of lists and mappings inside each other


def parse(text: str) -> object:
    """The value of a YAML text, without Python's own tags. Raises yaml.YAMLError where it is no
    YAML; ValueError where its aliases make more than MOST_VALUES values, or it is nested more than
    MOST_LEVELS deep, or a value holds itself; RecursionError where it is nested far deeper."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        values, levels = _measured(node, {})
        if values > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES} values, its aliases expanded")
        if levels > MOST_LEVELS:
            raise ValueError(f"it is nested more than {MOST_LEVELS} deep, its aliases expanded")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _measured(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels inside each other) of a node, aliases expanded. `known`: of the nodes so far,
    (0, 0) while one is open."""
    found = known.get(id(node))
    if found is None:
        known[id(node)] = 0, 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = chain.from_iterable(node.value)
        inner = [_measured(part, known) for part in parts]
        found = 1 + sum(count for count, _ in inner), 1 + max((n for _, n in inner), default=0)
        known[id(node)] = found
    elif found == (0, 0):
        raise ValueError("a value holds itself")
    return found
