"""Divergences by name and options, of which each takes its own."""

from __future__ import annotations

import dataclasses

from trainer import chunked
from trainer.divergence import DIVERGENCES, Divergence


def named(name, **options) -> Divergence:
    """With those of `options` that this divergence has."""
    known = {field.name for field in dataclasses.fields(DIVERGENCES[name])}
    return DIVERGENCES[name](**{key: value for key, value in options.items() if key in known})


def divergence(name, draft, teacher, labels=None, *, approx=None, **options):
    return named(name, **options)(draft, teacher, labels, approx=approx)


def chunked_divergence(name, *given, chunk_positions=None, joint=None, factor=1.0, **options):
    chosen, chunks = named(name, **options), chunk_positions
    return chunked.chunked_divergence(
        chosen, *given, chunk_positions=chunks, joint=joint, factor=factor
    )


def listed(terms):
    """(total, count, weight) of each term, in the order of their names."""
    return [(term.total, term.count, term.weight) for _, term in sorted(terms.items())]


def ordered(denominators):
    """Of each term, in the order of their names."""
    return [float(count) for _, count in sorted(denominators.items())]
