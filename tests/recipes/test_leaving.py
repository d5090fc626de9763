"""Leaving the process group at the end of a command."""

from __future__ import annotations

import subprocess
import sys

from tests.commands import ROOT

# Python's lock is given away only where somebody waits: what hung once in many runs always does
CODE = """
import sys, torch, torch.distributed as dist
from recipes.phases import run

def command():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    for _ in range(3):
        dist.all_gather([torch.zeros(1)], torch.ones(1))
    run.leave()

sys.setswitchinterval(1000)
for _ in range(30):
    command()
print("left")
"""


def test_a_model_that_outlives_its_group_does_not_hang():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "left\n", done.stderr[-2000:]
