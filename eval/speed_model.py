"""Speed-up from acceptance and costs, by arithmetic, to stand next to what a clock says.

`c` (cost_ratio) is the time of one drafter step over one target forward on one token; `v(n)` is
the time of a target forward on n tokens over that on one token (1 while memory-bound).
Leviathan et al. 2023 (arXiv:2211.17192), Sec. 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_K = 20


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
