"""What a report must say of its text: which answers are cut, and which defaults of servers are not
measured."""

from __future__ import annotations

from collections.abc import Sequence

from data.answers import AnswerFormat, Cut
from data.config import DataConfig
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from data.traces import Trace
from eval.serving_defaults import unmeasured_defaults, unmeasured_words
from phases.run import Run
from target.model import Target

OWN_CUT_SHARE = 0.2  # of the answers to the user's own prompts, above which a warning comes


def answer_format(target: Target, data: DataConfig) -> AnswerFormat:
    """How the target's answers end and stand in its conversations."""
    return AnswerFormat(target.tokenizer, target.eos_ids, data.chat_template_kwargs)


def measured_on(
    plan: GenerationPlan, traces: Sequence[Trace], answers: AnswerFormat
) -> dict[str, object]:
    """`prompts` of the rows of a report: name, hash, answers and how many of them are cut; where
    there are any, how many prompts of the plan have no answer of their own, as too long or rendered
    like another one, and how many later turns are left out behind cut answers."""
    cut = Cut.of(traces, answers, plan.prompts)
    left_out = len(plan.prompts) - len({trace.index for trace in traces})
    return {
        "name": plan.source, "hash": plan.prompts_hash, "answers": cut.answers, "cut": cut.cut,
        **({"left_out": left_out} if left_out else {}),
        **({"later_turns_left_out": cut.turns} if cut.turns else {}),
    }  # fmt: skip


def show_cut(
    run: Run, label: str, key: str, traces: Sequence[Trace], prompts: Sequence[Prompt], own: bool
) -> None:
    """Print how many answers are cut, and warn where that misleads. `key`: the limit of their
    length, "" where it is not known; `own`: the prompts are the user's."""
    if not run.accelerator.is_main_process:
        return
    cut = Cut.of(traces, answer_format(run.target, run.config.data), prompts)
    print(f"{label}: {cut}", flush=True)
    reasons = []
    if cut.turns:
        reasons.append(f"{cut.turns} later turns of their conversations are left out")
    if cut.in_thoughts:
        reasons.append(f"{cut.in_thoughts} answers end inside a thought")
    if own and cut.cut > OWN_CUT_SHARE * cut.answers:
        reasons.append(f"more than {OWN_CUT_SHARE:.0%} of the answers to your prompts have no end")
    if key and reasons:
        print(f"warning: {label}: {', '.join(reasons)}: raise {key}", flush=True)


def show_unmeasured(run: Run) -> None:
    """Print which defaults of servers the report does not measure."""
    line = unmeasured_words(
        unmeasured_defaults(run.target.model.generation_config, run.config.eval)
    )
    if line and run.accelerator.is_main_process:
        print(f"model.target={run.target.name}: {line}", flush=True)
