"""How a process of several ends: of its own accord, with the code of its command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT

CODE = """
import atexit, sys, torch, torch.distributed as dist
from phases.exits import end

def command(words):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    atexit.register(print, "left")
    {}

end(command)
"""
# What is a race otherwise, made certain. Python's lock is given away only where somebody waits:
SELFISH = """sys.setswitchinterval(1000)
    for _ in range(3):
        dist.all_gather([torch.zeros(1)], torch.ones(1))
    return 5"""
# and there is always a tensor to be freed.
BUSY = """for _ in range(1000):
        dist.all_gather([torch.zeros(1)], torch.ones(1), async_op=True)
    return 5"""


def ended(code: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(code)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", [SELFISH, BUSY])
def test_threads_of_a_collective_do_not_hold_up_or_abort_the_end(code):
    returned, out, err = ended(code)
    assert (returned, out) == (5, "left\n"), err[-2000:]


@pytest.mark.slow
def test_the_code_of_whoever_stops_the_command_is_that_of_the_process():
    assert ended("raise SystemExit(75)")[:2] == (75, "left\n")


@pytest.mark.slow
def test_a_fault_is_shown():
    returned, out, err = ended("raise KeyError('such')")
    assert (returned, out) == (1, "left\n")
    assert err.rstrip().endswith("KeyError: 'such'")


@pytest.mark.slow
def test_a_reader_that_has_read_enough_ends_the_command_without_a_trace():
    code = "from phases.exits import end; end(lambda words: print('line\\n' * 10**6) or 0)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 128 + signal.SIGPIPE)


@pytest.mark.slow
def test_a_pipe_that_breaks_elsewhere_is_a_fault():
    returned, _, err = ended("raise BrokenPipeError('of a worker')")
    assert returned == 1
    assert err.rstrip().endswith("BrokenPipeError: of a worker")
