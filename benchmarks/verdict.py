"""What a table says of a claim."""

from __future__ import annotations

ENOUGH_SEEDS = 3  # for a claim to be judged


def verdict(holds: bool, seeds: int) -> str:
    """Whether a claim holds, of measurements on so many seeds."""
    if seeds < ENOUGH_SEEDS:
        return "indicative"
    return "yes" if holds else "no"
