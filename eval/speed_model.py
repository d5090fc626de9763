"""Speed-up from acceptance and costs, by arithmetic, to stand next to what a clock says.

`c` (cost_ratio) is the time of one drafter step over one target forward on one token; `v(n)` is
the time of a target forward on n tokens over that on one token (1 while memory-bound).
Leviathan et al. 2023 (arXiv:2211.17192), Sec. 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_K = 20
COST_RATIOS = (0.02, 0.05, 0.1)  # assumed, so that rows compare on any hardware
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
KNEE = 200  # tokens in a forward up to which 16-bit weights are memory-bound: A100 156, H100 295


def expected_tokens_iid(alpha: float, K: int) -> float:
    """Emitted tokens per round, bonus included: (1 - alpha^(K+1)) / (1 - alpha).

    Assumes one acceptance probability for every prompt and position; where prompts differ it is
    too low, so it predicts and never replaces a measured `tokens_per_round`.
    """
    return float(K + 1) if alpha == 1 else (1 - alpha ** (K + 1)) / (1 - alpha)


def expected_tokens_positions(alpha_pos: Sequence[float]) -> float:
    """1 + sum_i prod_{j<=i} alpha_pos[j], with alpha_pos conditional on the positions before."""
    total, reach = 1.0, 1.0
    for alpha in alpha_pos:
        reach *= alpha
        total += reach
    return total


def modelled_speedup(
    tokens_per_round: float,
    K: float,
    cost_ratio: float,
    verify_cost: float = 1.0,
    overhead: float = 0.0,
) -> float:
    """tau / (K c + v(K + 1) + o); more than 15 % above the measured value means overheads."""
    return tokens_per_round / (K * cost_ratio + verify_cost + overhead)


def mbsu(tokens_per_round: float, K: float, byte_ratio: float) -> float:
    """Memory-bound speed-up tau / (K r + 1); r = drafter bytes / target bytes read per step.

    Ignores latency: a one-layer drafter costs more time than its bytes suggest.
    """
    return tokens_per_round / (K * byte_ratio + 1)


def best_K(
    alpha: float | Sequence[float],
    cost_ratio: float,
    v: Callable[[int], float] | None = None,
) -> tuple[int, float]:
    """The K in 0..20 with the highest modelled speed-up, and that speed-up; 0: do not speculate.

    alpha: one probability, or `alpha_pos` by position (then K is at most its length).
    """
    positions = [alpha] * MAX_K if isinstance(alpha, int | float) else list(alpha)[:MAX_K]
    best = (0, 0.0)
    for K in range(len(positions) + 1):
        tokens = expected_tokens_positions(positions[:K])
        speedup = modelled_speedup(tokens, K, cost_ratio, v(K + 1) if v else 1.0)
        if speedup > best[1]:
            best = (K, speedup)
    return best


def roofline(tokens: float, knee: float = KNEE) -> float:
    """Time of a forward on that many tokens over that on one: reading the weights, until the
    arithmetic takes longer. `knee` = peak FLOPs / bandwidth, in tokens. Keys and values are left
    out: with long contexts they keep a batch memory-bound for longer."""
    return max(1.0, tokens / knee)


def goodput(
    tokens_per_round: float,
    depth: int,
    nodes: int,
    cost_ratio: float,
    batch: int,
    knee: float = KNEE,
) -> float:
    """Tokens of the whole batch per time of a target forward on one token: B tau / (depth t_draft +
    t_target(B (nodes + 1))). A drafting step runs on B nodes / depth tokens, a chain's on B. Plain
    decoding: one token, depth and nodes 0."""
    draft = depth * cost_ratio * roofline(batch * nodes / depth, knee) if depth else 0.0
    return batch * tokens_per_round / (draft + roofline(batch * (nodes + 1), knee))


def best_K_at(
    alpha_pos: Sequence[float], cost_ratio: float, batch: int, knee: float = KNEE
) -> tuple[int, float]:
    """`best_K` by goodput: the chain that gains most over plain decoding at the same batch."""
    plain = roofline(batch, knee)  # of a drafting step too: it feeds one token a row
    return best_K(alpha_pos, cost_ratio, lambda n: roofline(batch * n, knee) / plain)
