"""Which loss on which prefixes: exact training of a bigram draft for an order-2 target.

Target: random order-2 Markov chain, logits N(0, 2^2) of the bigram plus N(0, 1.6^2) of the trigram.
Draft: a free bigram table, so it cannot represent the target. "Human" data: the target's logits
plus N(0, 2^2). Expected gradients are exact, contexts weighted by their stationary law; there is
no sampling noise but the random tables. All seeds train side by side, Adam acts entry by entry.
"""

import pytest
import torch

from tests.helpers.losses import divergence
from trainer.losses import overlap

V = 24
SEEDS = 6
STEPS = 1500

RUNS = {  # name -> divergence, prefix law, teacher
    "ce/human": ("ce_soft", "human", "human"),  # hard labels of a human, in expectation
    "fkl/human": ("fkl", "human", "target"),
    "fkl/target": ("fkl", "target", "target"),
    "rkl/target": ("rkl", "target", "target"),
    "jsd/target": ("jsd", "target", "target"),
    "tvd/human": ("tvd", "human", "target"),
    "tvd/target": ("tvd", "target", "target"),
    "nla/target": ("nla", "target", "target"),
}


def _tables():
    """Logits [S, V, V, V] (seed, two tokens of context, next token) of target and human."""
    target, human = [], []
    for seed in range(SEEDS):
        g = torch.Generator().manual_seed(seed)
        bigram, trigram = torch.randn(1, V, V, generator=g), torch.randn(V, V, V, generator=g)
        target.append(2 * bigram + 1.6 * trigram)
        human.append(target[-1] + 2 * torch.randn(V, V, V, generator=g))
    return torch.stack(target), torch.stack(human)


def _stationary(logits):
    """Law of the context, [S, V, V], of an order-2 chain."""
    p = logits.softmax(-1)
    law = torch.full((SEEDS, V, V), 1 / V**2)
    for _ in range(300):
        law = torch.einsum("sab,sabc->sbc", law, p)
    return law


def _train(name, law, teacher):
    table = torch.zeros(SEEDS, V, V, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.05)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / STEPS)
        draft = table[:, None].expand(-1, V, -1, -1).reshape(-1, V)
        loss = (law.flatten() * divergence(name, draft, teacher.reshape(-1, V))).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return table.detach()


@pytest.fixture(scope="module")
def measured():
    """run -> (acceptance, greedy agreement) per seed, [S] each, under the target's prefix law."""
    target, human = _tables()
    logits = {"target": target, "human": human}
    law = {key: _stationary(value) for key, value in logits.items()}
    results = {}
    for run, (name, prefixes, teacher) in RUNS.items():
        table = _train(name, law[prefixes], logits[teacher])
        draft = table[:, None].expand(-1, V, -1, -1).reshape(-1, V)
        accepted = overlap(draft, target.reshape(-1, V)).view(SEEDS, V, V)
        agree = (draft.argmax(-1) == target.reshape(-1, V).argmax(-1)).view(SEEDS, V, V)
        results[run] = tuple((law["target"] * x).sum((1, 2)) for x in (accepted, agree.float()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("fkl/human", "ce/human"),
        ("fkl/target", "fkl/human"),
        ("jsd/target", "fkl/target"),
        ("tvd/target", "nla/target"),
        ("nla/target", "fkl/target"),
        ("tvd/target", "tvd/human"),
    ],
)
def test_losses_order_by_acceptance(measured, better, worse):
    gain = measured[better][0] - measured[worse][0]
    assert gain.mean() > 0, (better, worse, gain)
