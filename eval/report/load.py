"""The part of a report on load (`report["load"]`, from servers with requests side by side)."""

from __future__ import annotations

import json

from eval.report.render import Block, Bullets, Heading, Table, Text, number
from eval.row import Json

ABOUT = (
    "The report's prompts with so many requests under way at a time, with the drafter and without "
    "it. A token's milliseconds are those that a reader waits for it. Best K: drafted tokens with "
    "the most tokens per second at that load, modelled from the measured round, the measured step "
    "without the drafter and how often each position was reached; 0: do not draft."
)


def load_blocks(parts: list[Json]) -> list[Block]:
    """A table for each temperature, up to which load drafting pays, and the engines' schedules."""
    blocks: list[Block] = [Heading("Load"), Text(ABOUT)]
    headers = ["requests at once", "tokens/s", "without", "gain", "ms a token", "without",
               "ms a round", "tokens per round", "best K", "its gain"]  # fmt: skip
    for part in parts:
        rows = [
            [
                str(one["concurrency"]),
                number(one["tokens_per_s"], 1),
                number(one["plain_tokens_per_s"], 1),
                number(one["gain"]),
                number(1e3 * one["token_s"], 1),
                number(one["plain_token_s"] and 1e3 * one["plain_token_s"], 1),
                number(1e3 * one["round_s"], 1),
                number(one["tokens_per_round"]),
                "–" if one["best_K"] is None else str(one["best_K"]),
                number(one["best_gain"]),
            ]
            for one in part["levels"]
        ]
        blocks += [Heading(f"Temperature {part['temperature']:g}, K {part['K']}", 3)]
        blocks += [Table(headers, rows), Bullets(sentences(part))]
    return blocks


def sentences(part: Json) -> list[str]:
    """What follows from one temperature's loads."""
    found = [f"Measured in {part['source']}."]
    if part["levels"][0]["gain"] is None:
        return [*found, "eval.plain_engine names the same server without the drafter: then the "
                "table says from which load on the drafter costs more than it gains."]  # fmt: skip
    most = part["pays_up_to"]
    paid = f"pays up to {most} requests at once" if most else "pays at none of these loads"
    found.append(f"Drafting {part['K']} tokens {paid}.")
    if schedules := part.get("schedules"):
        vllm = json.dumps({"num_speculative_tokens_per_batch_size": schedules["vllm"]})
        found.append(f"vLLM, in --speculative-config: {vllm}.")
        sglang = json.dumps(schedules["sglang"])
        found.append(f"SGLang, as the file of --speculative-adaptive-config: {sglang}.")
    else:
        found.append(
            "No schedule is recommended from a server that this run started: name yours with "
            "eval.engine and eval.plain_engine."
        )
    return found
