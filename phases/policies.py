"""The part of a report on draft length: policies tuned on held-out training text, measured on the
report's prompts, the chosen ones by decoding as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from data.prompts import Prompt
from data.traces import Trace
from drafters.acceptance_head import AcceptanceSettings
from drafters.base import TrainedDrafter, acceptance_of
from drafters.round import Budget
from eval.costs import cost_of
from eval.counters import PromptCounters
from eval.measure import Bench
from eval.metrics import paired_difference
from eval.policies import rollouts
from eval.policies.drafted import Drafted
from eval.policies.rollouts import FAMILIES, Rollouts
from eval.policies.table import POLICIES
from eval.report.rows import TRAINED
from eval.row import Json, Point, Rates, Row
from eval.speed_model import COST_RATIOS
from phases.cut_answers import answer_format, measured_on
from phases.generate import evaluation_traces
from phases.run import Run
from target.sampling import Sampling
from trainer.progress import TokenProgress

TUNED_AT = COST_RATIOS[1]  # cost of a drafted token, in target forwards


@dataclasses.dataclass
class Policies:
    """The measurements that are added to a report. `points`: the report's part `policies`."""

    points: list[Point]
    rows: list[Row]
    comparisons: list[Json]
    rounds: list[dict[str, object]]  # lines of rounds.jsonl


def measure_policies(
    run: Run, drafter: TrainedDrafter, prompts: list[Prompt], dev: list[Trace]
) -> Policies:
    """Tune and measure the policies of a drafter with an acceptance head; `dev` chooses thresholds
    and K, which are stored in the head's settings."""
    out, progress = Policies([], [], [], []), TokenProgress("report, policies")
    config, own = run.config.eval, acceptance_of(drafter).settings
    if not any(len(trace.response_ids) > 1 for trace in dev):
        print("policies: no held-out training text to choose them on, so none is measured")
        return out
    for temperature in config.temperatures:
        sampling = Sampling(temperature, config.top_k, config.top_p)
        traces, plan = evaluation_traces(run, prompts, temperature, alone=True)
        K = longest(run, own, [*traces, *dev])
        usable = sum(len(trace.response_ids) > 1 for trace in (*dev, *traces))
        progress.part(f"T={temperature:g}, rollouts", total=usable * rollouts.STARTS * K)
        banks = [
            rollouts.draw(
                run.target, drafter, texts, sampling, K, seed=config.seed,
                draft_sampling=config.draft_sampling(sampling), on_tokens=progress.advance,
            )
            for texts in (dev, traces)
        ]  # fmt: skip
        chosen = {family: best(banks[0], family, own.K_min) for family in FAMILIES}
        own.tuned[f"{temperature:g}"] = {
            **{family: [budget.policy, budget.max_tokens] for family, budget in chosen.items()},
            "matching_confidence": matching(banks[0], chosen["head"]),
        }
        by = {"text_by": plan.served or "hf"}
        on = measured_on(plan, traces, answer_format(run.target, run.config.data))
        bench = Bench(run.target, traces, sampling, config, on, by, progress)
        decoded = {}
        for family, budget in chosen.items():
            real = bench.decoded("after", drafter, cost_of(drafter, run.target, budget), budget)
            if family == "head" and (note := _note(own, sampling)):
                real.row.note = "; ".join(filter(None, [real.row.note, note]))
            decoded[family] = real.counters
            if budget.policy == config.policy and budget.max_tokens == config.K:
                continue  # the report has that row
            out.rows.append(real.row)
            about = {"temperature": temperature, "policy": budget.policy}
            out.rounds += [{**about, **r.line()} for r in real.rounds]
        rates = {family: rollouts.rates(counters) for family, counters in decoded.items()}
        out.points += _points(banks[1], temperature, own.K_min, chosen, rates)
        out.comparisons += _compare(decoded, temperature, chosen, run)
    progress.close()
    return out


def longest(run: Run, own: AcceptanceSettings, traces: Sequence[Trace]) -> int:
    """The most tokens that a round may draft anywhere in these texts."""
    texts = max(t.num_tokens for t in traces)
    return max(1, min(own.K_max, run.target.context - texts - 2))


def best(bank: Rollouts, family: str, K_min: int, cost_ratio: float = TUNED_AT) -> Budget:
    """Choose the family's policy with the highest modelled speed-up at this cost of a drafted
    token, in target forwards."""
    budgets = POLICIES[family].grid(bank.K, K_min)
    return max(budgets, key=lambda budget: rollouts.speed(bank.counters(budget), cost_ratio))


def matching(bank: Rollouts, head: Budget) -> float:
    """Choose the confidence threshold with which transformers, which has no acceptance head,
    verifies as often as `head` does."""

    def verified(budget: Budget) -> float:
        return rollouts.rates(bank.counters(budget))["verification_rate"]

    wanted = verified(head)
    budgets = {t: Drafted(t).budget(head.max_tokens) for t in Drafted.THRESHOLDS}
    return min(budgets, key=lambda t: abs(verified(budgets[t]) - wanted))


def _note(own: AcceptanceSettings, sampling: Sampling) -> str | None:
    trained = Sampling(own.temperature, own.top_k, own.top_p)
    if trained == sampling:
        return None
    return f"the acceptance head was trained for {trained}, this row has {sampling}"


def _points(
    bank: Rollouts,
    temperature: float,
    K_min: int,
    chosen: Mapping[str, Budget],
    decoded: Mapping[str, Rates],
) -> list[Point]:
    """Model every policy of every family; the chosen ones carry their numbers by decoding."""
    found = []
    for family in FAMILIES:
        mine = chosen[family]
        for budget in POLICIES[family].grid(bank.K, K_min):
            counters = bank.counters(budget)
            same = (budget.policy, budget.max_tokens) == (mine.policy, mine.max_tokens)
            found.append({
                "temperature": temperature, "family": family, "policy": budget.policy,
                "K": budget.max_tokens, "chosen": same, **rollouts.rates(counters),
                "modelled_speedup_at": {str(c): rollouts.speed(counters, c) for c in COST_RATIOS},
                "decoded": decoded[family] if same else None,
            })  # fmt: skip
    return found


def _compare(
    decoded: Mapping[str, list[PromptCounters]],
    temperature: float,
    chosen: Mapping[str, Budget],
    run: Run,
) -> list[Json]:
    """Compare the modelled speed-up of the head with that of the others, as decoded, by prompt."""
    config, rows = run.config.eval, []

    def counters(family: str, cost_ratio: float) -> list[PromptCounters]:
        return rollouts.at_cost(decoded[family], cost_ratio)

    for family in FAMILIES:
        for c in COST_RATIOS[1:] if family != "head" else ():
            diff = paired_difference(
                counters("head", c), counters(family, c), "tokens_per_round",
                draws=config.bootstrap_draws, seed=config.seed,
            )  # fmt: skip
            names = {"a": named(chosen["head"]), "b": named(chosen[family])}
            names |= {"a_role": TRAINED, "b_role": TRAINED}
            diff["metric"] = f"modelled speed-up at c = {c:g}"
            rows.append({**names, "temperature": temperature, **diff})
    return rows


def named(budget: Budget) -> str:
    """The name of a policy in comparisons."""
    return budget.policy if budget.stop is not None else f"fixed K = {budget.max_tokens}"
