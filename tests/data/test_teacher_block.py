"""What the compressed teacher of finished traces costs in memory."""

from __future__ import annotations

import dataclasses

import torch

from data.generate import _Teacher
from tests.data.test_generate import NEW, fill, plan
from tests.helpers.watch import Reads

BLOCK = ("teacher_ids", "teacher_logp", "teacher_log_tail", "tail_ids", "tail_logp")


def test_a_teacher_is_computed_for_a_few_texts_and_positions_at_a_time(
    tiny_target, tmp_path, monkeypatch
):
    """One text of 32,000 tokens has 20 GB of logits over a vocabulary of 152,000, and 40 GB of
    probabilities in float64."""
    target, chunk, tokens = tiny_target("llama"), 5, 100
    wanted = plan(samples_per_prompt=2, teacher_top_k=3, teacher_samples=2)
    whole = list(fill(target, tmp_path, wanted))
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", chunk * target.vocab_size)
    monkeypatch.setattr("target.padding.MOST_TOKENS", tokens)
    teacher = _Teacher(target, wanted)
    found = []
    with Reads(target) as reads:
        for trace in whole:
            found += teacher.add(dataclasses.replace(trace, **dict.fromkeys(BLOCK)))
        found += teacher.rest()
    assert tokens / 2 < max(reads.forwards) <= tokens
    assert reads.positions == chunk < NEW
    assert [trace.key for trace in found] == [trace.key for trace in whole]
    for one, other in zip(found, whole, strict=True):
        for name in BLOCK:
            ours, theirs = (torch.tensor(getattr(trace, name)) for trace in (one, other))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
