"""The results of cells as a Markdown table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.cells import DONE, Cells, Json
from benchmarks.verdict import ENOUGH_SEEDS
from eval.report.rows import MEASURED, TRAINED, draft_shape
from eval.row import row_with

MILLISECONDS = ("draft_ms", "verify_ms", "other_ms")  # of a round
WANTED = 1.4  # times plain decoding: the goal of `benchmarks.real_speed`
SPEEDS = ("speed-up", "c", "verify")
TOKENS = ("tokens_per_round", "tokens_per_round_needed")


def markdown(table: Cells, names: Sequence[str]) -> str:
    """One line for each row, temperature and shape of the draft: means over the seeds."""
    chosen = table.chosen(names)
    results = {cell.cell: table.state(cell) for cell in chosen}
    domains = sorted({
        name for state, found in results.values() if state == DONE
        for row in drafts(found) for name in row.get("by_domain", {}).get("domains", {})
    })  # fmt: skip
    head = ["row", "T", "draft", "tokens per round", *domains, "alpha by depth", "parameters",
            *SPEEDS, "seeds"]  # fmt: skip
    rows = []
    for name in dict.fromkeys(cell.row for cell in chosen):
        cells = [cell for cell in chosen if cell.row == name]
        done = [results[c.cell][1] for c in cells if results[c.cell][0] == DONE]
        said = f"{len(done)} of {len(cells)}"
        blank = [""] * (len(head) - 3)
        if not done:
            states = ", ".join(dict.fromkeys(results[c.cell][0] for c in cells))
            rows.append([name, states, *blank, said])
            continue
        said += ", indicative" if len(done) < ENOUGH_SEEDS else ""
        measured = [*measurements(done, domains)] or [[DONE, *blank]]
        rows += [[name, *line, said] for line in measured]
    if not any(row[head.index(name)] for row in rows for name in SPEEDS):
        rows = [row[: -len(SPEEDS) - 1] + row[-1:] for row in rows]
        head = head[: -len(SPEEDS) - 1] + head[-1:]
    outputs = {name: found["outputs"] for name, (state, found) in results.items() if state == DONE}
    speeds = speed_lines(outputs)
    untimed = " Their rows ran beside others; the last table is of those timed." if speeds else ""
    lines = [f"{table.count()} are done.{untimed}", "", "| " + " | ".join(head) + " |",
             "| --- |" + " --- |" * 2 + " ---: |" * (len(head) - 4) + " --- |",
             *("| " + " | ".join(row) + " |" for row in rows)]  # fmt: skip
    return "\n".join([*lines, *engine_lines(outputs), *speeds])


def engine_lines(outputs: Mapping[str, list[Json]]) -> list[str]:
    """One line for each drafter that vLLM served, of `benchmarks.vllm_counters`; none without."""
    lines = []
    for cell, found in outputs.items():
        for one in found:
            for folder, row in one.get("drafters", {}).items():
                near = sum(place["near_tie"] for place in row["differing"])
                lines.append(
                    f"| {cell} | {row['kind']} | {folder} | {row['K']} | {row['answers_as_ours']} "
                    f"of {one['prompts']} | {near} of {len(row['differing'])} | "
                    f"{'yes' if row['equal'] else 'no'} | {row['tokens_per_round']:.3f} | "
                    f"{row['over_plain']:.2f} |"
                )
    if not lines:
        return []
    head = ["cell", "method of vLLM", "drafter", "K", "answers as ours", "near-ties of the others",
            "counters equal", "tokens per round", "over vLLM without a drafter"]  # fmt: skip
    return ["", f"| {' | '.join(head)} |", "| --- | --- | --- |" + " ---: |" * 6, *lines]


def speed_lines(outputs: Mapping[str, list[Json]]) -> list[str]:
    """One line for each arm and batch of `benchmarks.real_speed`: medians with their range."""
    lines = []
    for cell, found in outputs.items():
        for one in found:
            for batch in (key for key in one if key.startswith("batch ")):
                for arm, row in one[batch].items():
                    spent = row.get("round", {})
                    parts = [f"{spent[key]:.0f}" if key in spent else "" for key in MILLISECONDS]
                    parts += [f"{spent[key]:.2f}" if key in spent else "" for key in TOKENS]
                    ratios = [
                        "{:.2f} [{:.2f}, {:.2f}]".format(
                            row[f"over_{other}"], *row[f"over_{other}_range"]
                        )
                        if f"over_{other}" in row
                        else ""
                        for other in ("generate", "plain", "vllm")
                    ]
                    prompts = int(row["answers_as_generate"].split()[-1])
                    # earlier results name a batch of 8 where there were 6 prompts
                    size = min(int(batch.split()[1]), prompts)
                    cells = [cell, str(size), arm, f"{row['tokens_per_s']:.1f}", *ratios,
                             row["answers_as_generate"], *parts]  # fmt: skip
                    lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    head = ["cell", "batch", "arm", "tokens/s", "over `generate`", "over plain",
            "over vLLM alone", "answers as `generate`", "drafting, ms", "verifying, ms",
            "other, ms", "tokens per round", f"needed for {WANTED:g} over plain"]  # fmt: skip
    return ["", f"| {' | '.join(head)} |", "| --- |" + " ---: |" * 12, *lines]


# seeds have calibrated trees of their own, which may be of other depths
DEPTH = re.compile(r"(calibrated:\d+, \d+ nodes), depth \d+")


def drafts(found: Json) -> list[Json]:
    """The rows of the trained drafter."""
    return [
        row for one in found["outputs"] for row in one.get("rows", [])
        if row["role"] in (TRAINED, MEASURED)
    ]  # fmt: skip


def measurements(done: Sequence[Json], domains: Sequence[str]) -> Iterator[list[str]]:
    groups: dict[tuple[float, str], list[list[Json]]] = {}
    for found in done:
        own: dict[tuple[float, str], list[Json]] = {}
        for row in drafts(found):
            shape = DEPTH.sub(r"\1", draft_shape(row_with(**row)))
            own.setdefault((row["temperature"], shape), []).append(row)
        for key, rows in own.items():
            groups.setdefault(key, []).append(rows)
    for (temperature, shape), seeds in sorted(groups.items()):
        # a measurement without decoding has more prompts; only decoding has a speed
        first = [sorted(rows, key=lambda row: row["measured_by"] != "offline")[0] for rows in seeds]
        clocked = [[row for row in rows if row.get("speedup") is not None] for rows in seeds]
        timed = [rows[0] for rows in clocked if rows]  # both rows of a seed hold the same clock
        parameters = {found["outputs"][0]["drafter"].get("trained_parameters") for found in done}
        depths = [row["alpha_by_depth"] for row in first if row.get("alpha_by_depth")]
        yield [
            f"{temperature:g}", shape, mean(first, "tokens_per_round"),
            *(mean([row.get("by_domain", {}).get("domains", {}).get(name, {}) for row in first],
                   "tokens_per_round") for name in domains),
            " ".join(f"{statistics.mean(d):.2f}" for d in zip(*depths, strict=False)),
            " ".join(size(count) for count in parameters if count),
            mean(timed, "speedup"), mean(timed, "cost_ratio"), mean(timed, "verify_cost"),
        ]  # fmt: skip


def size(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def mean(rows: Sequence[Json], key: str) -> str:
    """The mean over seeds with its range; of one seed the value with its interval over prompts."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return ""
    if len(values) > 1:
        return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    interval = next(row.get(f"{key}_ci95") for row in rows if row.get(key) is not None)
    shown = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"{values[0]:.2f}{shown}"
