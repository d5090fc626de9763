"""The bins of confidence against acceptance, by hand."""

from __future__ import annotations

import numpy as np

from eval.calibration import calibration


def test_tokens_stand_in_tenths_and_a_certain_one_in_the_last():
    sure = [np.array([0.05, 1.0, 0.95]), np.array([0.5, np.nan])]
    agreed = [np.array([0.5, 1.0, 0.5]), np.array([0.25, 1.0])]
    assert calibration(sure, agreed) == {
        "bins": [
            {"confidence": 0.05, "acceptance": 0.5, "count": 1},
            {"confidence": 0.5, "acceptance": 0.25, "count": 1},
            {"confidence": 0.975, "acceptance": 0.75, "count": 2},
        ]
    }
    assert calibration([], []) == {}
