"""The rounds of speculative decoding along traces, as a walk with known probabilities.

Given the text, a drafted token is accepted with a known probability and the text that follows does
not depend on the coin: the starts of rounds are a Markov chain along the trace (`eval.offline`).
"""

from __future__ import annotations

import numpy as np


def replay(
    accept: np.ndarray, drafted: np.ndarray, lengths: np.ndarray, K: int
) -> dict[str, np.ndarray]:
    """Walk the round process along traces.

    accept: [B, N, K] float64, probability that depth j+1 of a round starting at response index t is
    accepted given the trace and given that the shallower ones were; drafted: [B, N] int, how many
    tokens such a round drafts (at most K); lengths: [B] int, response lengths; index 0 is the token
    of the prefill, so rounds start at 1..length-1. Returns sums per trace ([B] or [B, K]), and
    how many rounds start at each index and what those emit, `visits` and `emitted_from` [B, N].
    """
    batch, width, _ = accept.shape
    visit = np.zeros((batch, width + K + 1))
    visit[:, 1] = 1.0
    names = (
        "rounds",
        "truncated_rounds",
        "emitted",
        "submitted",
        "accepted",
        "rejections",
        "engine_drafts",
    )
    sums = {name: np.zeros(batch) for name in names}
    per_depth = {
        name: np.zeros((batch, K)) for name in ("reach", "tested", "engine_accepted_per_position")
    }
    emitted_from = np.zeros((batch, width))
    for t in range(1, int(lengths.max(initial=1))):
        emitted = sums["emitted"].copy()
        start = visit[:, t] * (t < lengths)
        room = lengths - t  # tokens the output still takes
        sums["rounds"] += start
        sums["emitted"] += start
        sums["submitted"] += start * drafted[:, t]
        sums["engine_drafts"] += start * (drafted[:, t] > 0)
        survive = start
        for j in range(K):
            tried = survive * (j < drafted[:, t])
            passed = tried * accept[:, t, j]
            inside = j < room
            ended = survive - passed  # rejected here, or nothing left to verify
            visit[:, t + j + 1] += ended
            # the j+1 tokens so far came with one more: past the room, it was cut
            sums["truncated_rounds"] += ended * (j + 1 > room)
            sums["accepted"] += passed * inside
            sums["emitted"] += passed * (j + 1 < room)
            sums["rejections"] += (tried - passed) * inside
            per_depth["tested"][:, j] += tried * inside
            per_depth["reach"][:, j] += passed * inside
            per_depth["engine_accepted_per_position"][:, j] += passed
            survive = passed
        visit[:, t + K + 1] += survive
        sums["truncated_rounds"] += survive * (room < K + 1)
        emitted_from[:, t] = sums["emitted"] - emitted
    sums["visits"] = visit[:, :width] * (np.arange(width) < lengths[:, None])
    sums["engine_drafted"] = sums["submitted"]
    sums["engine_accepted"] = per_depth["engine_accepted_per_position"].sum(1)
    return sums | per_depth | {"emitted_from": emitted_from}


def visits(accept: np.ndarray, drafted: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The `visits` [B, N] of `replay`, without its counters and much faster."""
    batch, width, K = accept.shape
    tried = np.where(np.arange(K) < drafted[..., None], accept, 0.0)
    reach = np.cumprod(np.concatenate([np.ones((batch, width, 1)), tried], -1), -1)
    ends = reach - np.concatenate([reach[..., 1:], np.zeros((batch, width, 1))], -1)
    found = np.zeros((batch, width + K + 1))
    found[:, 1] = 1.0
    for t in range(1, width):  # a round that accepts a tokens is followed by one a + 1 further on
        found[:, t + 1 : t + K + 2] += found[:, t, None] * ends[:, t]
    return found[:, :width] * (np.arange(width) < lengths[:, None])


def rejections(accept: np.ndarray, length: int, K: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Positions that rounds of K tokens are expected to test and to reject along one text.

    accept: [N] float64, probability that a token drafted at response index i is accepted given the
    text, equal at every depth (a causal LM); `length` <= N: of the response, index 0 being the
    token of the prefill. Returns [N] probabilities that i is tested, and that it is rejected, given
    the text; and the expected number of rounds. Summed, they are the counters of `replay`.
    """
    visit, tested = np.zeros(length + K + 1), np.zeros(len(accept))
    visit[min(1, length)] = 1.0
    for t in range(1, length):
        survive = visit[t]
        for i in range(t, min(t + K, length)):
            tested[i] += survive
            visit[i + 1] += survive * (1 - accept[i])
            survive *= accept[i]
        visit[t + K + 1] += survive
    return tested, tested * (1 - accept), float(visit[1:length].sum())
