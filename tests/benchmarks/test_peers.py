"""Training beside other tools: the texts that all of them read, and the check of their logits."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import peers
from data.trace_identity import TraceIdentity
from data.traces import Trace, TraceStore
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.text import Text
from target.model import Target

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def toy():
    return Target.load(peers.TARGET, dtype="float32")


def trace(index, num_tokens, temperature):
    ids = [(7 * index + i) % 500 + 3 for i in range(num_tokens)]
    return Trace(
        ids[:10], ids[10:], "target", "text", str(index), 0, 0, temperature, 0, 1.0, 0, "length",
        "", "", index=index,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path, toy):
    def make(fingerprint=toy.fingerprint):
        identity = TraceIdentity("x", "x", fingerprint, [0.0, 1.0], 0, 1.0, 600, 1, 0, [], 0)
        made = TraceStore.open(tmp_path / "store", identity)
        lengths = [255, 256, 300, 512, 513, 40, 50, 60, 70, 80, 90]
        with made.writer() as writer:
            for index, num_tokens in enumerate(lengths):
                writer.add(trace(index, num_tokens, float(index % 2)))
        made.finish()
        return argparse.Namespace(
            traces=str(made.folder), prompts=9, development=1, held_out=2, draft_vocab=0
        )

    return make


def test_rows_of_256_to_512_tokens_are_trained_on_and_the_others_held_out_by_temperature(
    toy, store
):
    trained, development, held_out = peers.stored(toy, store())
    assert [t.num_tokens for t in trained] == [256, 300, 512]
    assert {T: [t.index for t in rows] for T, rows in development.items()} == {0.0: [0], 1.0: [5]}
    assert {T: [t.index for t in rows] for T, rows in held_out.items()} == {
        0.0: [4, 6],
        1.0: [7, 9],
    }


def test_answers_of_another_target_are_refused(toy, store):
    with pytest.raises(SystemExit, match="another target"):
        peers.stored(toy, store(toy.fingerprint | {"weights": "0"}))


@pytest.mark.parametrize("reduced", [False, True])
def test_logits_of_another_convention_are_a_gap_and_the_drafters_own_are_none(
    toy, tmp_path, reduced
):
    kept = torch.arange(3, toy.vocab_size, 2) if reduced else None
    settings = Eagle3Settings([1, 3, 4], toy.hidden_size)
    drafter = Eagle3Drafter.build(toy, settings, kept=kept).eval()
    one = trace(0, 40, 0.0)
    ids = torch.tensor([one.prompt_ids + one.response_ids])
    outputs = toy.outputs(ids, layers=drafter.target_layers, logits=False)
    with torch.no_grad():
        states = list(drafter.states(Text(ids), outputs, peers.UNROLL))
    columns = slice(0, toy.vocab_size) if kept is None else kept
    logits = {
        str(j): drafter.project(one[0, j + 1 :], j + 1)[:, columns].detach()
        for j, one in enumerate(states)
    }
    save_file(logits, tmp_path / "check.safetensors")
    data: peers.Data = SimpleNamespace(target=toy, traces=[one])  # type: ignore[assignment]
    gaps = peers.disagreement(data, drafter, tmp_path)
    assert max(peers.require_same_logits("x", gaps)) < 1e-5

    logits["2"] = logits["2"].roll(1, 0).contiguous()  # one column off, in the last step only
    save_file(logits, tmp_path / "check.safetensors")
    gaps = peers.disagreement(data, drafter, tmp_path)
    assert max(gaps[:2]) < 1e-5
    with pytest.raises(SystemExit, match="other logits"):
        peers.require_same_logits("x", gaps)
