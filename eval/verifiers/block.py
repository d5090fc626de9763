"""Exact verification of the tokens of a chain together (Sun et al. 2024, arXiv:2403.10444).

With P_0 = 1 and P_i = min(1, P_(i-1) p(x_i) / q(x_i)) for the drafts x_1 .. x_g, the accepted ones
are the first i for the largest i whose own uniform number is at most

    h_g = P_g,   h_i = s_i / (s_i + 1 - P_i)   with   s_i = sum_x (P_i p(x) - q(x))+

of the distributions behind x_i. A token that a later one makes up for is accepted, although by
itself it would not be: given the first i drafts, at least i are accepted with probability P_i,
which is never below the product of the min(1, p / q) of token verification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.trees.tree import CHAIN
from eval.verifiers.base import Verdict, Verification, Verifier
from eval.verifiers.token import ChainLaws, verify_chain
from target.sampling import Sampling


@dataclass(frozen=True)
class Block(Verifier):
    """Verify the tokens of a chain together; as token by token at temperature 0."""

    name: ClassVar[str] = "block"
    judges: ClassVar[tuple[str, ...]] = (CHAIN,)

    def replayable(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0

    def __call__(self, round: Verification) -> Verdict:
        if round.sampling.temperature == 0:
            return verify_chain(round)
        laws, lengths = ChainLaws.of(round), round.tree.lengths
        likelihood = torch.ones_like(laws.p_drafted[:, 0])
        kept, accepted = likelihood, torch.zeros_like(lengths)
        for i in range(1, laws.q.shape[1] + 1):
            ratio = laws.p_drafted[:, i - 1] / laws.q_drafted[:, i - 1].clamp_min(1e-38)
            likelihood = (likelihood * ratio).clamp(max=1.0)
            probability = likelihood
            if i < laws.q.shape[1]:
                left = likelihood.unsqueeze(-1) * laws.p[:, i] - laws.q[:, i]
                mass = left.clamp_min(0).sum(-1)
                of_all = mass + 1 - likelihood
                inner = torch.where(of_all > 0, mass / of_all.clamp_min(1e-38), 1.0)
                probability = torch.where(lengths == i, likelihood, inner)
            flip = round.random.flip(probability, round.first_position + i - 1, "accept")
            flip = flip & laws.submitted[:, i - 1]
            accepted = torch.where(flip, i, accepted)
            kept = torch.where(flip, likelihood, kept)
        return laws.verdict(round, accepted, kept.unsqueeze(-1), 1.0)
