"""The part of a report on policies of draft length (`report["policies"]`, from rollouts)."""

from __future__ import annotations

from eval.report import plots
from eval.report.render import Block, Figure, Heading, Table, Text, number
from eval.row import Point
from eval.speed_model import COST_RATIOS

ABOUT = (
    "Every policy cuts the same rollouts of the drafter on the report's prompts (verification "
    "rate: target forwards per emitted token; discarded: drafts per emitted token that were not "
    "accepted). Thresholds and K were chosen on held-out training text at c = "
    f"{COST_RATIOS[1]:g}. Decoded: the same policy measured by decoding. All are lossless."
)


def policy_blocks(points: list[Point]) -> list[Block]:
    """Tables of the chosen policies, one for each temperature."""
    blocks: list[Block] = [Heading("Policies of draft length"), Text(ABOUT)]
    for temperature, own in _by_temperature(points).items():
        chosen = [point for point in own if point["chosen"]]
        headers = ["policy", "at most", "drafted per round", "tokens per round",
                   "verification rate", "decoded", "discarded per token", "decoded",
                   *(f"modelled, c = {c:g}" for c in COST_RATIOS)]  # fmt: skip
        rows = [
            [
                point["policy"],
                str(point["K"]),
                number(point["submitted_per_round"]),
                number(point["tokens_per_round"]),
                number(point["verification_rate"], 3),
                number(point["decoded"] and point["decoded"]["verification_rate"], 3),
                number(point["discards_per_token"], 3),
                number(point["decoded"] and point["decoded"]["discards_per_token"], 3),
                *(number(point["modelled_speedup_at"][str(c)], 3) for c in COST_RATIOS),
            ]
            for point in chosen
        ]
        strong = {i for i, point in enumerate(chosen) if point["family"] == "head"}
        blocks += [Heading(f"Temperature {temperature:g}", 3), Table(headers, rows, strong)]
    return blocks


def policy_figures(points: list[Point]) -> list[Figure]:
    """A plot of all policies for each temperature."""
    caption = (
        "Each line is one family of policies over its thresholds (fixed: over K); lower left is "
        "better. Bigger dots: what was chosen on held-out training text."
    )
    return [
        Figure(
            f"Discarded drafts against verification. Temperature {temperature:g}",
            plots.discards_over_verification(own),
            caption,
        )
        for temperature, own in _by_temperature(points).items()
    ]


def _by_temperature(points: list[Point]) -> dict[float, list[Point]]:
    found: dict[float, list[Point]] = {}
    for point in points:
        found.setdefault(point["temperature"], []).append(point)
    return found
