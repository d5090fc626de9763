"""A row of the report: what was measured, and how. The fields are the keys of report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from typing_extensions import TypedDict

COUNTING = "emitted_per_target_forward"
Json = dict[str, Any]


class Worst(TypedDict):
    """The domain with the lowest value of a metric."""

    domain: str
    value: float


class ByDomain(TypedDict):
    """Headline metrics by domain, their mean over domains, and the worst domain of each."""

    domains: dict[str, dict[str, Any]]
    mean: dict[str, float | None]
    worst: dict[str, Worst | None]


class AtPosition(TypedDict):
    """Tokens per round of the rounds that begin in a range of positions of the answer."""

    first: int
    last: int | None  # None: no end
    num_rounds: int | float
    tokens_per_round: float
    tokens_per_round_ci95: list[float] | None


@dataclass(kw_only=True)
class Acceptance:
    """What the counters of rounds say of acceptance, by replay or by decoding. An interval
    `<metric>_ci95` is [lower, upper], bootstrapped over prompts, null below two of them."""

    num_prompts: int  # the turns of a conversation are one
    num_rounds: int | float  # target forwards
    tokens_per_round: float | None  # emitted tokens per target forward, the bonus token among them
    tokens_per_round_ci95: list[float] | None
    accepted_per_round: float | None  # accepted drafts per target forward
    accepted_per_round_ci95: list[float] | None
    draft_acceptance_rate: float | None  # accepted / submitted drafts
    draft_acceptance_rate_ci95: list[float] | None
    # mean overlap sum_v min(p_v, q_v) of target and drafter on the target's text, at depth 1
    alpha: float | None
    alpha_ci95: list[float] | None
    alpha_hat: float | None  # accepted / (accepted + rounds with a rejection)
    alpha_hat_ci95: list[float] | None
    greedy_match: float | None  # share of positions where the two most likely tokens agree
    greedy_match_ci95: list[float] | None
    alpha_pos: list[float | None] | None  # position i accepted, given that all before it were
    reach_pos: list[float | None] | None  # share of rounds with at least i accepted
    discard_rate: float | None  # 1 - draft_acceptance_rate
    verification_rate: float | None  # target forwards per emitted token
    # engine_*: as a serving engine counts the same run, not cut at the end of an answer; rounds
    # with drafts
    engine_drafts: int | float | None
    engine_drafted: int | float | None  # drafted tokens; of a replayed stop rule unknown
    engine_accepted: int | float | None  # accepted tokens
    engine_accepted_per_position: list[int | float] | None  # by depth in the draft
    engine_tokens_per_round: float | None = None  # 1 + engine_accepted / engine_drafts
    tokens_per_round_prompt_mean: float | None = None  # mean over prompts of their own ratios
    truncated_rounds: int | float | None = None  # cut at the end of an answer
    tokens_per_round_iid: float | None = None  # of a chain, if every position had alpha_hat
    alpha_by_depth: list[float | None] | None = None  # alpha of the i-th draft, those before given
    by_domain: ByDomain | None = None  # headline metrics by domain, their mean, the worst
    by_position: list[AtPosition] | None = None  # tokens per round by where rounds begin
    # {"bins": [{"confidence", "acceptance", "count"}]}, by the drafter's own confidence
    calibration: Mapping[str, Any] | None = None
    # of a reduced one: its size, and what it costs at most
    draft_vocabulary: Mapping[str, Any] | None = None
    # {"context", "share"}: the drafter's own context, and the rounds without drafts for it
    beyond_context: Mapping[str, Any] | None = None

    @property
    def domains(self) -> dict[str, dict[str, Any]]:
        """Headline metrics by domain."""
        return {} if self.by_domain is None else self.by_domain["domains"]


@dataclass(kw_only=True)
class Timing:
    """What only decoding shows: seconds, and whether the text is that of plain decoding."""

    plain_tokens_per_s: float | None  # of transformers' own generate
    speculative_tokens_per_s: float | None  # of the drafter's rounds
    speedup: float | None  # on prompts decoded both ways, one at a time, on this machine
    speedup_ci95: list[float] | None
    identical_to_plain: float | None  # share of prompts, greedy
    num_compared: int | None = None  # prompts of that share
    # of each prompt whose greedy text differs: its hash, position, gap of the two best logits
    differing_prompts: Sequence[Mapping[str, Any]] | None = None


@dataclass(kw_only=True)
class Summary(Acceptance, Timing):
    """Everything that counters determine (`eval.metrics.summarise`)."""


@dataclass(kw_only=True)
class Row(Summary):
    """A summary with what identifies the measurement and what its rounds cost. null: not measured,
    or without meaning here."""

    drafter: str  # before, control, after, prompt_lookup, target, or its own name
    role: str  # trained, measured, control, baseline, plain, untrained, before, stage or target
    prompts: dict[str, Any]  # name and hash; how many have no answer, how many answers are cut
    temperature: float  # of the target's answers
    top_k: int  # 0: all tokens
    top_p: float  # 1: all tokens
    verifier: str | None  # rule that decides which drafts are accepted
    policy: str | None  # rule that may end a chain before K
    counting: str  # emitted_per_target_forward
    bonus_counted: bool  # true
    lossless: bool  # the output has the target's distribution, greedy output is its own
    measured_by: str  # offline, decoding, vllm, llamacpp
    K: int | None = None  # drafted tokens of a chain, depth of a tree
    tree: str | None = None  # its description; null for a chain
    tree_children: Literal["top", "sampled"] | None = None  # the likeliest ones, or drawn
    nodes: int | None = None  # drafted tokens that the target verifies at most in a round
    draft_temperature: float | None = None  # of a drafter that has its own
    max_new_tokens: int | None = None  # longest answer
    batch_size: int | None = None  # prompts decoded side by side
    seed: int | None = None  # of the draws
    cost_ratio: float | None  # seconds of a drafter's step over those of a target forward
    verify_cost: float | None = None  # seconds of verifying over those of a forward on one token
    cost_source: str | None = None  # where these were timed
    modelled_speedup: float | None  # tokens per round / (depth x cost_ratio + verify_cost)
    modelled_speedup_at: dict[str, float] | None = None  # by assumed cost ratio
    mbsu: float | None  # tokens per round / (K r + 1), r = bytes of drafter over target
    mbsu_params: float | None = None  # the same by parameters
    draft_time_share: float | None = None  # of the seconds of decoding
    token_s: list[float] | None = None  # of an engine: seconds a token without drafter, quartiles
    round_s: list[float] | None = None  # of an engine: seconds a round at batch 1, quartiles
    round_cost: float | None = None  # ratio of the medians
    # of an engine's forward on so many tokens, and of drafting those behind the first
    seconds_by_rows: dict[str, list[float]] | None = None
    engine: str | None = None  # its name and version
    draft_sampled: bool | None = None  # whether the engine drew its drafts
    text_by: str | None = None  # data.engine of the target's answers, or log
    target_changed: bool | None = None  # the drafter brings a trained target
    next_token_loss: dict[str, float] | None = None  # of that one and of the original, nats/token
    replay_differs_from_decoding: int | None = None  # prompts whose counters differ, greedy
    quality: float | None = None  # of the answers of a lossy verifier
    quality_metric: str | None = None  # what quality is
    note: str | None = None  # a sentence below the table


def row_with(**values: object) -> Row:
    """A row in which all else is null."""
    known: Json = {**dict.fromkeys(field.name for field in fields(Row)), **values}
    return Row(**known)


class Rates(TypedDict):
    """Rates of decoding (Huang et al. 2024, arXiv:2405.19715, Sec. 4.1)."""

    discards_per_token: float  # discarded drafts per emitted token
    verification_rate: float  # target forwards per emitted token
    submitted_per_round: float
    draft_steps_per_round: float
    tokens_per_round: float


class Point(Rates):
    """A policy of draft length at one temperature, measured on rollouts."""

    temperature: float
    family: str
    policy: str
    K: int
    chosen: bool  # on held-out training text
    modelled_speedup_at: dict[str, float]
    decoded: Rates | None  # the same policy by decoding
