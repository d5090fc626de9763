"""The identity of a report's rows: drafter and role, shape of the draft, how it was measured."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import NotRequired, TypedDict

from eval.report.render import NONE
from eval.row import Json, Point, Row

DRAFTERS = (
    "plain", "untrained", "before", "control", "offline", "after", "prompt_lookup", "target",
)  # fmt: skip
STAGES = ("pretrained", "continued")  # of a drafter that is trained in several, between two
ORDER = (*DRAFTERS[:3], *STAGES, *DRAFTERS[3:])

# what a row is in the report for
TRAINED, MEASURED, CONTROL, BASELINE = "trained", "measured", "control", "baseline"
PLAIN, UNTRAINED, BEFORE, STAGE, TARGET = "plain", "untrained", "before", "stage", "target"
ROLES = {
    "plain": PLAIN, "untrained": UNTRAINED, "before": BEFORE, **dict.fromkeys(STAGES, STAGE),
    "control": CONTROL, "offline": CONTROL, "after": TRAINED, "prompt_lookup": BASELINE,
    "target": TARGET,
}  # fmt: skip
REFERENCES = (PLAIN, UNTRAINED, BASELINE, TARGET)
USUAL = ("token", "multi_round", "none")  # verifiers
GREEDY_DRAFTS = ", greedy drafts"  # behind the name of a row of an engine as it drafts by itself
ENGINES = {"vllm": "vLLM", "llamacpp": "llama.cpp"}  # by what measured a row


class Report(TypedDict):
    """The content of report.json, with rows as records."""

    schema: int
    run: Json
    target: Json
    drafter: Json
    results: list[Row]
    comparisons: list[Json]  # {a, a_role, b, b_role, temperature} and `eval.metrics.Difference`
    series: list[Json]
    policies: NotRequired[list[Point]]
    load: NotRequired[list[Json]]  # entries of `eval.load.load_part`
    readings: NotRequired[list[Json]]  # the text of a few answers (`eval.report.readings`)


def role_of(name: str) -> str:
    """The role of a drafter's row; a drafter with a name of its own is the measured one."""
    return ROLES.get(name.removesuffix(GREEDY_DRAFTS), MEASURED)


def is_trained(row: Row) -> bool:
    """Whether the row is of the trained or the measured drafter."""
    return row.role in (TRAINED, MEASURED)


def draft_shape(row: Row) -> str:
    """`K 4` for a chain, with the rule that may end it early; the tree's description for a tree.
    Behind it the drafter's temperature, where it has its own, and the verifier, where it is none of
    the usual ones, which are lossless."""
    verifier = "" if row.verifier in USUAL else f", {row.verifier}"
    if row.draft_temperature is not None:
        verifier = f", drafted at T={row.draft_temperature:g}{verifier}"
    if row.tree is not None:
        sampled = row.tree_children == "sampled" and row.temperature > 0
        return row.tree + ", sampled children" * sampled + verifier
    rule = "" if row.policy in ("fixed", "none") else f", {row.policy}"
    return f"K {row.K}{rule}{verifier}" if row.K else NONE


def num_nodes(row: Row) -> int | None:
    """Drafted tokens that the target verifies in every round, None where it is unknown."""
    chain = row.K if row.tree is None else None
    return row.nodes or chain or None


def prompts_of(row: Row) -> str:
    """How many prompts were measured, how many have no answer, and the share of cut answers."""
    prompts, parts = row.prompts, [f"{row.num_prompts} prompts"]
    if left_out := prompts.get("left_out"):
        parts.append(f"{left_out} left out as too long or equal to another")
    if prompts.get("answers"):
        parts.append(f"{prompts['cut'] / prompts['answers']:.0%} of the answers cut")
    if turns := prompts.get("later_turns_left_out"):
        parts.append(f"{turns} later turns left out behind those")
    return ", ".join(parts)


def label(row: Row) -> str:
    """The drafter with its shape."""
    shape = draft_shape(row)
    return row.drafter if shape == NONE else f"{row.drafter} ({shape})"


def key(row: Row) -> tuple[str, ...]:
    """The identity that a measurement on traces and the same by decoding have in common."""
    same = ("drafter", "temperature", "top_k", "top_p", "policy", "verifier")
    place = str(row.prompts["hash"])
    return (*(str(getattr(row, name)) for name in same), place, str(row.K), draft_shape(row))


def once(rows: Sequence[Row]) -> list[Row]:
    """The rows without decoded or served ones that were measured on the traces as well."""
    offline = {key(row) for row in rows if row.measured_by == "offline"}
    return [row for row in rows if row.measured_by == "offline" or key(row) not in offline]


def asked(rows: Sequence[Row]) -> list[Row]:
    """The rows without chains that were only decoded or served, where a drafter has others.

    Policies were tuned to those lengths, and nothing is compared with them.
    """
    replayed = {r.drafter for r in rows if r.measured_by == "offline" and not r.tree}
    return [
        row
        for row in rows
        if row.tree or row.measured_by == "offline" or row.drafter not in replayed
    ]


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Comparable rows by the heading of their table."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        prompts = row.prompts
        heading = f"Temperature {row.temperature:g}, prompts {prompts['name']}"
        heading += f", top-k {row.top_k}" if row.top_k else ""
        heading += f", top-p {row.top_p:g}" if row.top_p < 1 else ""
        same_name = {r.prompts["hash"] for r in rows if r.prompts["name"] == prompts["name"]}
        heading += f" ({prompts['hash']})" if len(same_name) > 1 else ""
        found.setdefault(heading, []).append(row)
    return found


def focus(rows: Sequence[Row]) -> Row | None:
    """The row of the headline: the best lossless shape of the trained drafter."""
    own = [row for row in asked(rows) if row.role not in (PLAIN, TARGET)]
    own = [row for row in own if row.tokens_per_round is not None]
    own = [row for row in own if is_trained(row)] or own
    own = [row for row in own if row.lossless] or own
    # a rule that ends chains early is there to draft less, not for more tokens a round
    own = [row for row in own if row.policy == "fixed"] or own
    return max(own, key=lambda row: row.tokens_per_round or 0.0, default=None)


def focus_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the headline's drafter, one for each shape."""
    best = focus(rows)
    known = [row for row in rows if row.tokens_per_round is not None]
    return [row for row in known if best and row.drafter == best.drafter]


def best_chain(rows: Sequence[Row], drafter: str) -> Row | None:
    """The row of a drafter's best chain, lossless ones first."""
    chains = [row for row in asked(rows) if row.drafter == drafter and not row.tree]
    chains = [row for row in chains if row.tokens_per_round is not None and row.K]
    chains = [row for row in chains if row.policy == "fixed"] or chains
    return max(chains, key=lambda row: (row.lossless, row.tokens_per_round or 0.0), default=None)


def known_positions(row: Row, name: str = "alpha_pos") -> list[float]:
    """Values up to the first position that no round tested."""
    found: list[float] = []
    for value in getattr(row, name) or []:
        if value is None:
            break
        found.append(value)
    return found
