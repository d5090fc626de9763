"""Probabilities of acceptance against acceptance itself: the report's bins, and the error."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
import torch

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


def calibration_error(predicted: torch.Tensor, accept: torch.Tensor) -> float:
    """The expected calibration error of probabilities `predicted` [n] of acceptance: the gap
    between mean prediction and mean acceptance in each of ten bins, weighted by its share of the
    tokens. `accept` [n], in [0, 1]: whether, or how probably, a token is accepted."""
    predicted, accept = predicted.double(), accept.double()
    bins = (predicted * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    gaps = torch.zeros(CONFIDENCE_BINS, dtype=torch.double, device=predicted.device)
    gaps.index_add_(0, bins, accept - predicted)
    return float(gaps.abs().sum() / len(predicted))


TEMPERATURES = torch.logspace(-3, 3, 61, base=2.0).tolist()  # from 1 / 8 to 8


def best_temperature(logits: torch.Tensor, accept: torch.Tensor) -> float:
    """The temperature of a grid at which sigmoid(logits / T) [n] has the least calibration error;
    the nearest to 1 of several, since a few tokens decide between them."""
    errors = {
        T: calibration_error((logits.double() / T).sigmoid(), accept)
        for T in sorted(TEMPERATURES, key=lambda T: abs(math.log(T)))
    }
    return min(errors, key=lambda T: errors[T])
