"""Checkpoints appear whole or not at all, and only the ones still wanted stay."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainer import checkpoint
from trainer.errors import RunFault
from trainer.store import Counters


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def save(folder, network, step, best_step=None):
    manifest = {"step": step, "best_step": best_step}
    checkpoint.write(checkpoint.step_dir(folder, step), network.state_dict(), manifest, {"x": step})


def save_best(folder, network, step):
    checkpoint.write(checkpoint.best_dir(folder, step), network.state_dict(), {"step": step})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_weights_come_back_exactly(tmp_path, network):
    save(tmp_path, network, 3)
    other = nn.Linear(4, 3)
    checkpoint.load_weights(checkpoint.step_dir(tmp_path, 3), other)
    assert torch.equal(other.weight, network.weight)
    assert names(tmp_path / "checkpoints") == ["step-000003"]


@pytest.mark.parametrize("kind", ["step", "best", "in the place of a damaged one"])
def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, network, kind, syncs):
    """Or a power loss would leave a whole folder of empty files."""
    if kind != "best":
        save(tmp_path, network, 3)
    if kind == "in the place of a damaged one":
        syncs.clear()
        save(tmp_path, network, 3)
    if kind == "best":
        save_best(tmp_path, network, 3)
    step = (checkpoint.best_dir if kind == "best" else checkpoint.step_dir)(tmp_path, 3)
    early = {sync.inode: sync.size for sync in syncs if step not in (sync.path, *sync.path.parents)}
    for path in (step, *step.iterdir()):
        assert early[path.stat().st_ino] == path.stat().st_size, path
    assert syncs[-1].path == step.parent  # the name too


def test_a_checkpoint_is_there_until_the_one_in_its_place_stands(tmp_path, network, monkeypatch):
    save(tmp_path, network, 3)
    rename = Path.rename

    def watched(path, target):
        if target == checkpoint.step_dir(tmp_path, 3):
            assert [checkpoint.is_whole(p) for p in path.parent.iterdir()] == [True, True]
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    save(tmp_path, network, 3)
    assert names(tmp_path / "checkpoints") == ["step-000003"]


def test_tied_weights_come_back_tied_and_equal(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    first, second = Tied(), Tied()
    save(tmp_path, first, 1)
    checkpoint.load_weights(checkpoint.step_dir(tmp_path, 1), second)
    assert torch.equal(second.head.weight, first.embed.weight)
    assert second.head.weight is second.embed.weight


def test_weights_of_another_network_are_refused(tmp_path, network):
    save(tmp_path, network, 1)
    with pytest.raises(RunFault, match="size mismatch"):
        checkpoint.load_weights(checkpoint.step_dir(tmp_path, 1), nn.Linear(4, 2))


def test_latest_is_the_newest_by_number(tmp_path, network):
    for step in (999999, 1000000, 5):
        save(tmp_path, network, step)
    assert checkpoint.latest(tmp_path).name == "step-1000000"


def test_nothing_saved_is_nothing_found(tmp_path):
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("name", ["drafter.safetensors", "state.pt", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_file_sends_latest_to_the_checkpoint_before(
    tmp_path, network, capsys, name, damage
):
    save(tmp_path, network, 1)
    save(tmp_path, network, 2)
    path = checkpoint.step_dir(tmp_path, 2) / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        content[0] ^= 255
        path.write_bytes(content)
    assert checkpoint.latest(tmp_path).name == "step-000001"
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "step-000002 is damaged" in said


def test_a_checkpoint_whose_best_weights_are_damaged_is_not_gone_on_from(tmp_path, network, capsys):
    save(tmp_path, network, 1)
    save_best(tmp_path, network, 2)
    save(tmp_path, network, 2, best_step=2)
    assert checkpoint.latest(tmp_path).name == "step-000002"
    (checkpoint.best_dir(tmp_path, 2) / "drafter.safetensors").write_bytes(b"")
    assert checkpoint.latest(tmp_path).name == "step-000001"
    assert "best/step-000002 is damaged" in capsys.readouterr().out


def test_half_written_checkpoints_are_ignored_and_cleared(tmp_path, network):
    save(tmp_path, network, 1)
    save_best(tmp_path, network, 1)
    for parent in ("checkpoints", "checkpoints/best"):
        half = tmp_path / parent / ".tmp-step-000002"
        half.mkdir()
        (half / "drafter.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path).name == "step-000001"
    checkpoint.discard_after(tmp_path, 1)
    assert names(tmp_path / "checkpoints") == ["best", "step-000001"]
    assert names(tmp_path / "checkpoints/best") == ["step-000001"]


def test_retention_keeps_the_last_and_the_best_they_name(tmp_path, network):
    for step in (10, 20, 30, 40):
        save(tmp_path, network, step, best_step=step - 10 if step > 20 else 0)
    for step in (0, 20, 30, 35):
        save_best(tmp_path, network, step)
    checkpoint.prune(tmp_path, keep=2)
    assert names(tmp_path / "checkpoints") == ["best", "step-000030", "step-000040"]
    assert names(tmp_path / "checkpoints/best") == ["step-000020", "step-000030"]


def test_what_lies_beyond_the_resumed_step_is_discarded(tmp_path, network):
    for step in (10, 20):
        save(tmp_path, network, step)
        save_best(tmp_path, network, step)
    checkpoint.discard_after(tmp_path, 10)
    assert names(tmp_path / "checkpoints") == ["best", "step-000010"]
    assert names(tmp_path / "checkpoints/best") == ["step-000010"]


def test_writing_over_a_checkpoint_replaces_it(tmp_path, network):
    save(tmp_path, network, 1)
    with torch.no_grad():
        network.weight.zero_()
    save(tmp_path, network, 1)
    other = nn.Linear(4, 3)
    checkpoint.load_weights(checkpoint.step_dir(tmp_path, 1), other)
    assert other.weight.abs().sum() == 0
    assert names(tmp_path / "checkpoints") == ["step-000001"]


@pytest.mark.parametrize("heavy", ["weights", "state"])
def test_a_disk_that_takes_no_more_is_named_and_leaves_no_trace(tmp_path, network, heavy):
    """The kernel refuses to write past a size limit; a full disk is refused at the same places."""
    save(tmp_path, network, 1)
    large, small = {"x": torch.zeros(100_000)}, {"x": torch.zeros(1)}
    weights, state = (large, small) if heavy == "weights" else (small, large)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(RunFault, match=r"cannot write checkpoint .*step-000002"):
            checkpoint.write(checkpoint.step_dir(tmp_path, 2), weights, {"step": 2}, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path / "checkpoints") == ["step-000001"]
    assert checkpoint.latest(tmp_path).name == "step-000001"


def test_the_manifest_names_size_and_checksum_of_every_file(tmp_path, network):
    save(tmp_path, network, 1)
    directory = checkpoint.step_dir(tmp_path, 1)
    files = json.loads((directory / "checkpoint.json").read_text())["files"]
    assert sorted(files) == ["drafter.safetensors", "state.pt"]
    assert files["state.pt"]["bytes"] == (directory / "state.pt").stat().st_size


def test_generators_go_on_where_they_were(tmp_path):
    def draw():
        return random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()  # noqa: NPY002

    draw()  # leaves half a pair of normal numbers in the first two
    path = tmp_path / "rng.pt"
    torch.save(checkpoint.rng_state(), path)
    expected = [draw(), draw()]
    checkpoint.set_rng_state(torch.load(path, weights_only=True))
    assert [draw(), draw()] == expected


def test_of_two_equal_evaluations_the_earlier_one_is_the_best():
    counters = Counters(step=10)
    assert counters.improved_by({"select": 0.5})
    counters.step = 20
    assert not counters.improved_by({"select": 0.5})
    assert (counters.best_step, counters.best_metric) == (10, 0.5)
    counters.step = 30
    assert counters.improved_by({"select": 0.6})
    assert counters.best_step == 30
