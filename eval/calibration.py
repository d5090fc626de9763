"""The drafter's confidence against acceptance, for the report's plot."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

CONFIDENCE_BINS = 10


class CalibrationBin(TypedDict):
    """Mean confidence and acceptance of the tokens in a bin of confidence."""

    confidence: float
    acceptance: float
    count: int


class Calibration(TypedDict, total=False):
    """The drafter's confidence against acceptance; empty for a drafter without probabilities."""

    bins: list[CalibrationBin]


def calibration(confidence: list[np.ndarray], agreement: list[np.ndarray]) -> Calibration:
    """The bins of tokens with this confidence and agreement, arrays of the same shapes [n]."""
    if not confidence:
        return {}
    sure, agreed = np.concatenate(confidence), np.concatenate(agreement)
    known = np.isfinite(sure)  # weights that are not finite are refused elsewhere, by name
    sure, agreed = sure[known], agreed[known]
    bins = np.minimum((sure * CONFIDENCE_BINS).astype(int), CONFIDENCE_BINS - 1)
    rows: list[CalibrationBin] = []
    for b in range(CONFIDENCE_BINS):
        inside = bins == b
        if inside.any():
            rows.append(
                {
                    "confidence": float(sure[inside].mean()),
                    "acceptance": float(agreed[inside].mean()),
                    "count": int(inside.sum()),
                }
            )
    return {"bins": rows}
