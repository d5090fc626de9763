"""train.py without the dropout of Medusa-2's adapter, which each process draws for itself."""

from __future__ import annotations

import train
from phases.exits import end
from target import adapted

if __name__ == "__main__":
    adapted.DROPOUT = 0.0
    end(train.main)
