"""The chat model from the Hub."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "scripts.get_smollm2", "source=hub", str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == (
        "error: the Hub did not give HuggingFaceTB/SmolLM2-135M-Instruct ([Errno 111] Connection "
        "refused): check that this machine reaches it\n"
    )
    assert not (tmp_path / "out").exists()
