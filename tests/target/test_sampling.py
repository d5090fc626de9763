"""Warped laws against transformers' own warpers; keyed randomness; the draw from a law."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from target import sampling as sampling_module
from target.sampling import (
    LEAST,
    KeyedRandom,
    Sampling,
    inverse_cdf,
    keyed_uniform,
    row_key,
    surprise,
    warp,
)


def random_logits(ties: bool) -> torch.Tensor:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    return logits.round() if ties else logits  # rounded: many equal logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.05])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 80])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_warp_equals_transformers_warpers(temperature, top_k, top_p, ties):
    logits = random_logits(ties)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    probs = warp(logits, Sampling(temperature, top_k, top_p))
    assert torch.equal(probs > 0, scores.softmax(-1) > 0)
    # top-p before or after the division by the temperature: the same numbers, so the same bits
    torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-6, atol=0)


def test_warp_keeps_leading_shape_and_works_in_float32_or_wider():
    logits = torch.randn(2, 3, 11, dtype=torch.bfloat16)
    assert warp(logits, Sampling(1.0)).dtype == torch.float32
    assert warp(logits.double(), Sampling(0.5, 3, 0.5)).dtype == torch.float64
    flat = warp(logits.flatten(0, 1), Sampling(0.5, 3, 0.5))
    torch.testing.assert_close(warp(logits, Sampling(0.5, 3, 0.5)).flatten(0, 1), flat)


def test_temperature_zero_is_a_point_mass_on_the_argmax():
    logits = random_logits(ties=True)
    probs = warp(logits, Sampling(0.0, top_k=3, top_p=0.5))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert torch.equal(probs.sum(-1), torch.ones(64))
    assert int((probs > 0).sum()) == 64


def test_warp_does_not_change_its_input():
    logits = random_logits(ties=False)
    before = logits.clone()
    for sampling in (Sampling(0.0), Sampling(0.5, 5, 0.5)):
        warp(logits, sampling)
    assert torch.equal(logits, before)


# --- keyed randomness ------------------------------------------------------------------------


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic), Wilson and Hilferty 1931: good to a few per cent in the tail."""
    cube = (statistic / degrees) ** (1 / 3)
    z = (cube - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("along", ["keys", "positions"])
@pytest.mark.parametrize("stream", ["draft", "accept", "target"])
def test_uniforms_are_uniform_along_keys_and_along_positions(along, stream):
    count = 50_000
    index = torch.arange(count)
    fixed = torch.full((count,), 17)
    keys, positions = (index, fixed) if along == "keys" else (fixed, index)
    drawn = keyed_uniform(keys, positions, stream)
    assert drawn.dtype == torch.float64
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    # fixed inputs, so a fixed outcome: 4 standard errors
    assert float(drawn.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * count))
    observed = torch.histc(drawn, 64, 0, 1)
    expected = count / 64
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square_tail(statistic, 63) > 1e-3
    pairs = torch.histogramdd(torch.stack([drawn[:-1], drawn[1:]], 1), [8, 8], range=[0, 1, 0, 1])
    expected = (count - 1) / 64
    assert chi_square_tail(float(((pairs.hist - expected) ** 2 / expected).sum()), 63) > 1e-3


def test_streams_positions_and_keys_are_independent():
    keys = torch.tensor([row_key(0, [i], 0) for i in range(20_000)])
    zeros = torch.zeros_like(keys)
    columns = [
        keyed_uniform(keys, zeros + position, stream)
        for stream in ("draft", "accept", "target")
        for position in (0, 1, 2)
    ]
    correlation = torch.corrcoef(torch.stack(columns))
    off = correlation - torch.eye(len(columns))
    assert float(off.abs().max()) < 5 / math.sqrt(len(keys))


def test_uniforms_depend_on_their_own_row_only():
    keys = torch.tensor([row_key(1, [5, i], 0) for i in range(40)])
    positions = torch.arange(40) * 3
    whole = keyed_uniform(keys, positions, "draft")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_uniform(keys[order], positions[order], "draft"), whole[order])
    one = [keyed_uniform(keys[i : i + 1], positions[i : i + 1], "draft") for i in range(40)]
    assert torch.equal(torch.cat(one), whole)


def test_row_key_tells_seed_prompt_and_sample_apart():
    variants = [(0, [1, 2], 0), (1, [1, 2], 0), (0, [12], 0), (0, [1, 2], 1), (0, [2, 1], 0)]
    variants += [(0, [], 0), (10, [], 0), (1, [], 0)]
    keys = [row_key(*variant) for variant in variants]
    assert len(set(keys)) == len(keys)
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)
    assert keys == [row_key(*variant) for variant in variants]


def test_uniforms_are_splitmix64_and_do_not_change_between_versions():
    """Texts drawn earlier can be drawn again: these numbers belong to the format of a trace."""
    keys = [row_key(0, [1, 2, 3], 0), 0, -1, (1 << 63) - 1, -(1 << 63)]
    positions = [0, 1, 2, 3, 1 << 40]
    drawn = keyed_uniform(torch.tensor(keys), torch.tensor(positions), "target").tolist()
    assert drawn == [splitmix(key, at, "target") for key, at in zip(keys, positions, strict=True)]
    assert drawn[:3] == [0.15165528416018503, 0.9089218255605646, 0.4163257834597507]


def splitmix(key: int, position: int, stream: str) -> float:
    """The same on Python's integers."""
    salt = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    x = key % 2**64
    for part in (position, salt):
        x = (x + (part + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


# --- the draw ----------------------------------------------------------------------------------


def test_inverse_cdf_takes_the_interval_that_holds_the_uniform():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).double().expand(7, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.9999]).double()
    assert inverse_cdf(probs, uniform).tolist() == [0, 0, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_returns_a_token_without_mass(dtype):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(4000, 37, generator=generator).to(dtype)
    probs[torch.rand(4000, 37, generator=generator) < 0.7] = 0
    probs[torch.arange(4000), torch.randint(37, (4000,), generator=generator)] = 1e-30
    largest = 1 - 2.0**-53
    rows = [cdf_edges(row) for row in probs[:200].double()]
    for uniform in (torch.zeros(4000), torch.full((4000,), largest), torch.rand(4000)):
        drawn = inverse_cdf(probs, uniform.double())
        assert bool((probs.gather(1, drawn.unsqueeze(1)) > 0).all())
    for row, edges in zip(probs[:200], rows, strict=True):  # exactly on the cumulative sums
        many = row.expand(len(edges), -1)
        drawn = inverse_cdf(many, edges)
        assert bool((many.gather(1, drawn.unsqueeze(1)) > 0).all())


def cdf_edges(row: torch.Tensor) -> torch.Tensor:
    cumulative = row.cumsum(-1)
    return (cumulative / cumulative[-1]).clamp(max=1 - 2.0**-53)


def test_inverse_cdf_needs_no_normalised_law():
    probs = torch.tensor([[1.0, 2.0, 1.0]])
    for scale in (1e-20, 1.0, 1e20):
        drawn = [int(inverse_cdf(probs * scale, torch.tensor([u]).double())) for u in (0.2, 0.5)]
        assert drawn == [0, 1]


def test_choice_and_flip_follow_their_probabilities():
    count = 40_000
    random = KeyedRandom(torch.tensor([row_key(3, [i], 0) for i in range(count)]))
    law = torch.tensor([0.1, 0.0, 0.6, 0.3])
    positions = torch.full((count,), 9)
    drawn = torch.bincount(random.choice(law.expand(count, -1), positions, "draft"), minlength=4)
    expected = law * count
    statistic = float(((drawn - expected) ** 2 / expected)[law > 0].sum())
    assert int(drawn[1]) == 0
    assert chi_square_tail(statistic, 2) > 1e-3
    rate = float(random.flip(torch.full((count,), 0.3), positions, "accept").double().mean())
    assert rate == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / count))
    assert bool(random.flip(torch.ones(count), positions, "accept").all())
    assert not bool(random.flip(torch.zeros(count), positions, "accept").any())


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.81, 3), (0.99, 4)):
        assert int((warp(probs.log(), Sampling(1.0, top_p=top_p)) > 0).sum()) == kept
    sizes = [
        int((warp(random_logits(False), Sampling(1.0, top_p=p)) > 0).sum())
        for p in (0.1, 0.4, 0.7, 0.95)
    ]
    assert all(a < b for a, b in pairwise(sizes))


@pytest.mark.parametrize("rows", [0, 1, 4, 5])  # a chunk holds two of them
def test_surprise_is_the_cost_beyond_the_entropy_and_its_variance(rows, monkeypatch):
    monkeypatch.setattr(sampling_module, "CPU_CHUNK", 80)
    generator = torch.Generator().manual_seed(rows)
    probs = torch.randn(rows, 40, generator=generator).mul(4).softmax(-1)
    probs[:, :3] = 0  # as top-k leaves them
    probs /= probs.sum(-1, keepdim=True)
    tokens = torch.randint(0, 40, (rows,), generator=generator)
    beyond, variance = surprise(probs, tokens)
    assert beyond.shape == variance.shape == (rows,)
    for p, token, found, spread in zip(probs.double(), tokens, beyond, variance, strict=True):
        cost = [-math.log(max(float(one), LEAST)) for one in p]
        mean = sum(float(one) * c for one, c in zip(p, cost, strict=True))
        square = sum(float(one) * c * c for one, c in zip(p, cost, strict=True))
        assert float(found) == pytest.approx(cost[int(token)] - mean, abs=1e-9)
        assert float(spread) == pytest.approx(square - mean * mean, abs=1e-9)


def test_surprise_makes_no_call_for_a_row():
    calls = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Counted():
        surprise(torch.full((500, 16), 1 / 16), torch.zeros(500, dtype=torch.long))
    assert len(calls) < 50
