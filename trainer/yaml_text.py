"""YAML of anyone's: a text whose aliases would expand without end is refused before it is built."""

from __future__ import annotations

from itertools import chain

import yaml

MOST_VALUES = 100_000


def parse(text: str) -> object:
    """The value of a YAML text, without Python's own tags. Raises yaml.YAMLError where it is no
    YAML, ValueError where its aliases make more than MOST_VALUES values or a value holds itself,
    and RecursionError where it is nested too deep."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES} values, its aliases expanded")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The values of a node, aliases expanded. `known`: of the nodes so far, 0 while one is open."""
    found = known.get(id(node))
    if found is None:
        known[id(node)] = 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = chain.from_iterable(node.value)
        found = known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    elif found == 0:
        raise ValueError("a value holds itself")
    return found
