"""What the slots of a block weigh by how likely a round is to reach them.

A round accepts slot k where it accepts all slots up to it. With a_j for how likely slot j is
accepted, given that those before it are,

    S_k = a_1 * ... * a_k,    E[accepted] = sum_k S_k,    d E[accepted] / d log a_k = sum_{m>=k} S_m

so that a slot weighs what is won by it and by all behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipes.common.heads import Depth
from trainer.chunked import chunked_divergence
from trainer.divergence import CE_HARD

FLOOR = 0.5  # published: a slot that is wrong for sure leaves half to those behind it


def dpace(probability: torch.Tensor, right: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """D-PACE: the gradient of the expected accepted length by log a_k, [K, ...], with
    a = (1 - c) * probability + c, c = `FLOOR`."""
    passed = torch.where(trained, (1 - FLOOR) * probability + FLOOR, 1.0)
    survival = passed.cumprod(0) * trained
    return survival.flip(0).cumsum(0).flip(0)


def accept_until_fail(
    probability: torch.Tensor, right: torch.Tensor, trained: torch.Tensor
) -> torch.Tensor:
    """1 up to and including the first slot that is not right, 0 behind it, [K, ...] (accept until
    fail, arXiv:2607.01893)."""
    wrong = (trained & ~right).long()
    return (wrong.cumsum(0) - wrong == 0).to(probability)


# [K, ...] each -> [K, ...], of K slots: the probability of the label, whether the label is the
# drafter's first choice, and whether the slot is trained
SURVIVAL = {"dpace": dpace, "accept_until_fail": accept_until_fail}


@torch.no_grad()
def slot_weights(weighting: str, depths: Sequence[Depth], shape: torch.Size) -> list[torch.Tensor]:
    """What the positions of each depth weigh, [N] float32 each; `weighting`: a name of `SURVIVAL`,
    `shape`: of the batch's ids.

    The slots of one block lie at logit indices t + 1, ..., t + K of its column t.
    """
    size = len(depths), *shape  # slots side by side in the column of their block
    states = depths[0].states
    dtype = torch.promote_types(states.dtype, torch.float32)
    probability = torch.zeros(size, dtype=dtype, device=states.device)
    right, trained = (torch.zeros_like(probability, dtype=torch.bool) for _ in range(2))
    for number, one in enumerate(depths):
        found = chunked_divergence(CE_HARD, one.states, one.head, None, one.labels)
        block = number, one.at.rows, one.at.index - (number + 1)
        # all of p is on the label: the overlap is what the drafter gives it, 0 if it lacks it
        probability[block], right[block] = found.overlap.to(dtype), found.match
        trained[block] = True
    weights = SURVIVAL[weighting](probability, right, trained)
    return [
        weights[number, one.at.rows, one.at.index - (number + 1)]
        for number, one in enumerate(depths)
    ]
