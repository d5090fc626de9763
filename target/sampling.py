"""Temperature, top-k, top-p, and randomness that does not depend on batch size or order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

LEAST = 1e-5  # probability that a token excluded by top-k or top-p is counted with
# numbers of a chunk in `surprise`: as many as a CPU's cache holds, on a GPU enough to fill it
CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 24


@dataclass(frozen=True)
class Sampling:
    """Applied to target and drafter alike; temperature 0 is greedy (a one-hot distribution),
    top_k 0 is off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def warp(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """logits [..., V] -> probabilities [..., V], float32 or float64, in transformers' order:
    temperature, top-k (ties with the k-th stay), top-p (smallest set reaching top_p)."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, ids = logits.sort(dim=-1)
        below = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        below[..., -1] = False
        logits = logits.masked_fill(below.scatter(-1, ids, below), float("-inf"))
    return logits.softmax(-1)


def row_key(seed: int, prompt_ids: list[int], sample_index: int) -> int:
    """Signed 64-bit key of one sampled continuation, from (seed, prompt, sample index)."""
    text = f"{seed}|{sample_index}|{','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN, _MIX1, _MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical, not arithmetic


def keyed_uniform(keys: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
    """Uniform [0, 1) float64 as a function of (key, position, stream): splitmix64 (Steele, Lea and
    Flood 2014) of the three, cut to 53 bits. keys, positions: int64, same shape."""
    salt = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little", signed=True)
    x = keys
    for part in (positions, torch.full_like(positions, salt)):
        x = x + (part + 1) * _GOLDEN
        x = (x ^ _shift(x, 30)) * _MIX1
        x = (x ^ _shift(x, 27)) * _MIX2
        x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The tokens [B] int64 whose cumulative interval holds `uniform` [B] in [0, 1); probs [B, V]
    >= 0."""
    cumulative = probs.double().cumsum(-1)
    drawn = torch.searchsorted(
        cumulative, (uniform * cumulative[..., -1]).unsqueeze(-1), right=True
    )
    # rounding can put the draw past the last token that has mass
    last = probs.shape[-1] - 1 - probs.flip(-1).gt(0).int().argmax(-1, keepdim=True)
    return torch.minimum(drawn, last).squeeze(-1)


def surprise(probs: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-log p of each token minus the entropy of its distribution, in nats, and its variance.

    probs [n, V], tokens [n] int64 -> [n] float64 each. The mean is 0 for tokens drawn from `probs`.
    A token of probability 0 counts as LEAST. Rows are computed in chunks: there may be thousands,
    each of a whole vocabulary."""
    beyond, variance = probs.new_zeros(2, len(probs), dtype=torch.float64)
    size = max(1, (GPU_CHUNK if probs.is_cuda else CPU_CHUNK) // probs.shape[-1])
    for first in range(0, len(probs), size):
        rows = slice(first, first + size)
        p = probs[rows].double()
        cost = -p.clamp(min=LEAST).log()
        mean = torch.linalg.vecdot(p, cost)
        beyond[rows] = cost.gather(-1, tokens[rows, None])[:, 0] - mean
        variance[rows] = (torch.linalg.vecdot(p, cost.square()) - mean.square()).clamp(min=0)
    return beyond, variance


class KeyedRandom:
    """The two random calls of a speculative round, as functions of (row key, position, stream).

    A test replaces this by an object that enumerates every outcome, so all randomness of drafter
    and verifier goes through here."""

    def __init__(self, keys: torch.Tensor):
        self.keys = keys  # [B] int64 of row_key

    def choice(self, probs: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
        """probs [B, V], positions [B] int64 -> ids [B] int64 drawn from each row's distribution."""
        return inverse_cdf(probs, keyed_uniform(self.keys, positions, stream))

    def flip(self, probability: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
        """probability [B] in [0, 1] -> [B] bool, true with that probability."""
        return keyed_uniform(self.keys, positions, stream) < probability.double()
