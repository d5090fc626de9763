"""Seconds of decoding on a real chat model: transformers, ours and vLLM, each with a drafter too.

    python -m benchmarks.real_speed drafter=runs/real/eagle3/drafter,... [target=runs/smollm2]
        [prompts=runs/real/prompts.jsonl] [count=12] [tokens=96] [K=4,5] [tree=copy:2]
        [policy=head:0.8] [batch=1,8] [gguf=runs/smollm2.gguf,...]
        [out=benchmarks/real/results/speed.json]

At temperature 0, each batch size in turn (the number of prompts, where they are fewer), the arms
alternating, medians of seven runs after a warm-up, on a GPU where there is one. `generate` is
transformers' own, on a model as transformers loads it; our arms share one target with its weights
laid out (`target.layout`), so that the two gains stand apart: `plain` over `generate`, and
speculation over `plain`. A drafter that is a language model also assists `generate` at batch 1,
`assisted chain of K`. `vllm`, and `vllm chain of K` with the exported drafter and the largest K,
run where vLLM's environment is there (`bash scripts/engine_env.sh`) and serves the drafter: a
process each time, of which the answers alone are timed, after as many as the batch holds. So are
`llama.cpp <file>` and `llama.cpp <file> chain of K` at batch 1, on each of the target's files
`gguf` (`python -m benchmarks.gguf_files` writes one in float32), and with a tree `copy:<n>`
llama.cpp's own copies before the drafter, `... ngram-mod:<n>`. Several
drafters are compared with each other: they neither assist nor run in vLLM, and their arms begin
with the names of their runs. `policy` ends the chains of a drafter with an acceptance head. Answers
that differ from `generate`'s are counted. Beside the tokens per second: where each millisecond of a
round goes (of one more run, which waits for the device after each part), and the tokens per round
that a speed-up of 1.4 would need.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells_table import WANTED
from benchmarks.layout import GROUPED, as_loaded
from benchmarks.speed import assisted, clock, generate_batches, ours
from data.prompts import MADE_HERE, load_prompts, user_turns
from data.render import render
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.export.card import SPEC_TYPES, Export
from drafters.export.gguf import FILE
from drafters.kinds import kind_of
from drafters.load import load_drafter
from drafters.round import Budget
from drafters.trees.calibrated import accuracy_at, accuracy_name
from drafters.trees.copy import CopyTree
from drafters.trees.table import parse_tree
from engines import llamacpp_run
from engines.llamacpp_run import Drafting
from engines.vllm_run import Speculation, serve
from engines.vllm_server import engine_python
from eval.engine import Speculated, SpeculativeDecoder
from eval.policies.table import budget_for, parse_policy
from phases.exits import fail
from phases.run import provenance
from target.cache import CachedModel
from target.decode import Request
from target.layout import laid_out
from target.model import Target
from target.sampling import Sampling, row_key
from trainer.checks import whole_number
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import UserError, require
from trainer.files import write_json

RUNS = 7
BASES = ("generate", "plain", "vllm")  # arms that others are compared with, and llama.cpp's
AS_LOADED = ("generate", "assisted")  # arms of transformers, on its own layout of the weights
GREEDY = Sampling(0.0)
LISTS = ("K", "batch")  # whole numbers with commas between them
NUMBERS = ("count", "tokens", *LISTS)
DEFAULTS = {
    "drafter": "", "target": "runs/smollm2", "prompts": "runs/real/prompts.jsonl", "count": "12",
    "tokens": "96", "K": "4", "tree": "", "policy": "fixed", "batch": "1,8", "gguf": "",
    "out": "benchmarks/real/results/speed.json",
}  # fmt: skip
Answers = list[list[int]]
Arm = Callable[[], tuple[float, Answers]]  # seconds, and the answers


def requests_of(target: Target, source: str, count: int) -> list[Request]:
    """`count` prompts at equal distances in the file, which has those of a domain together; of
    `questions` held-out ones."""
    made_here = source.partition(":")[0] in MADE_HERE
    most = count if made_here else sys.maxsize
    prompts = load_prompts(source, count=most, toy_split="eval")
    require(count <= len(prompts), "count", f"be at most {len(prompts)}, those of {source}", count)
    chosen = [prompts[i * len(prompts) // count] for i in range(count)]
    rows = [render(next(iter(user_turns(p))), target.tokenizer) for p in chosen]
    return [Request(ids, row_key(0, ids, 0), GREEDY, i) for i, ids in enumerate(rows)]


def engine_arms(
    target: Target, drafter: TrainedDrafter, requests: list[Request], limit: int, K: int
) -> dict[str, Callable[[int], tuple[float, Answers]]]:
    """vLLM at a batch size: alone, and with the drafter, exported to a temporary folder. Empty,
    with a line that says why, where it cannot run."""
    kind = kind_of(drafter)
    folder = Path(tempfile.mkdtemp(prefix="export"))
    atexit.register(shutil.rmtree, folder)
    try:
        engine_python()
        if kind.method is None or drafter.served_target() is not None:
            raise UserError(f"it serves no drafter of kind {kind.name} with this target")
        kind.writers["vllm"](drafter, folder, Export("", target.name, K))
    except UserError as error:
        print(f"no arm of vLLM: {error}")
        return {}
    jobs = {"vllm": None, f"vllm chain of {K}": Speculation(kind.method, folder, K)}
    prompts = [request.prompt_ids for request in requests]

    def answered(job: Speculation | None, batch: int) -> tuple[float, Answers]:
        run = serve(
            target, {"it": job}, prompts, max_new_tokens=limit, sampling=GREEDY, batch_size=batch,
            seed=0, warm_up=batch,
        )["it"]  # fmt: skip
        return run.seconds, run.tokens

    return {name: partial(answered, job) for name, job in jobs.items()}


def llamacpp_arms(
    target: Target, drafter: TrainedDrafter, requests: list[Request], given: dict[str, str],
    limit: int, Ks: Sequence[int], rounds: dict[str, dict[str, float]],
) -> dict[str, Arm]:  # fmt: skip
    """llama.cpp at batch 1 on each file, alone and with the drafter. Empty without files. An arm
    writes the tokens per round and the share of drafting to `rounds`."""
    prompts, arms = [request.prompt_ids for request in requests], dict[str, Arm]()
    files = [Path(file) for file in given["gguf"].split(",") if file]

    def answered(name: str, file: Path, job: Drafting | None) -> tuple[float, Answers]:
        run = llamacpp_run.serve(
            file, {"it": job}, prompts, max_new_tokens=limit, sampling=GREEDY, seed=0
        )["it"]
        if job is not None:
            timed = [run.timing(i) for i in range(len(prompts))]
            per_round = sum(one.tokens for one in timed) / sum(one.rounds for one in timed)
            share = run.drafting_share()
            rounds[name] = {"tokens_per_round": per_round, "drafting_share": share}
        return sum(run.seconds), run.tokens

    for file in files:
        kind, name = kind_of(drafter), f"llama.cpp {file.name}"
        assert kind.method is not None, f"llama.cpp serves no drafter of kind {kind.name}"
        folder = Path(tempfile.mkdtemp(prefix="export"))
        atexit.register(shutil.rmtree, folder)
        kind.writers["llamacpp"](drafter, folder, Export("", target.name, max(Ks), gguf=file))
        alone = SPEC_TYPES[kind.method]
        jobs: dict[str, Drafting | None] = {name: None}
        jobs |= {f"{name} chain of {K}": Drafting((alone,), folder / FILE, K) for K in Ks}
        tree = parse_tree(given["tree"], "tree") if given["tree"] else None
        if isinstance(tree, CopyTree):
            types, n = (llamacpp_run.COPIES, alone), tree.shortest
            jobs[f"{name} {types[0]}:{n}"] = Drafting(types, folder / FILE, max(Ks), n)
        arms |= {arm: partial(answered, arm, file, job) for arm, job in jobs.items()}
    return arms


def measured(arms: dict[str, Arm]) -> tuple[dict[str, Any], dict[str, Answers]]:
    """Median tokens per second of each arm with its quartiles, and its answers."""
    answers = {name: arm()[1] for name, arm in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(1, RUNS + 1):
        for name, arm in arms.items():
            if not torch.cuda.is_available():
                os.environ[GROUPED] = str(int(not name.startswith(AS_LOADED)))
            seconds[name].append(arm()[0])
        took = ", ".join(f"{name} {spent[-1]:.1f}" for name, spent in seconds.items())
        print(f"turn {turn} of {RUNS}, seconds: {took}", file=sys.stderr, flush=True)
    table: dict[str, Any] = {}
    for name in arms:
        rates = [sum(map(len, answers[name])) / spent for spent in seconds[name]]
        low, middle, high = statistics.quantiles(rates, n=4)
        table[name] = {"tokens_per_s": middle, "quartiles": [low, high]}
        bases = [one for one in arms if one in BASES or one.endswith(".gguf")]
        for other in bases:
            ratios = [b / a for a, b in zip(seconds[name], seconds[other], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            table[name][f"over_{other}"] = middle
            table[name][f"over_{other}_quartiles"] = [low, high]
            table[name][f"over_{other}_range"] = [min(ratios), max(ratios)]
    return table, answers


def main(arguments: list[str]) -> int:
    if asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        given = DEFAULTS | parse_overrides(arguments, [*DEFAULTS], DEFAULTS)
        if not given["drafter"]:
            raise UserError("name a drafter: drafter=<folder of a run>/drafter")
        folders = named(given["drafter"].split(","))
        parse_policy(given["policy"])
        words = {key: given[key].split(",") if key in LISTS else [given[key]] for key in NUMBERS}
        numbers = {key: [whole_number(key, word) for word in words[key]] for key in NUMBERS}
        name, device = given["target"], "cuda" if torch.cuda.is_available() else "cpu"
        target = Target.load(name, device=device)
        drafters = {name: loaded(folder, target) for name, folder in folders.items()}
        assistant = loaded(given["drafter"], target) if len(folders) == 1 else None
        usual = as_loaded(name, device)
        with laid_out(*drafters.values()):
            return measure(given, numbers, arguments, usual, target, drafters, assistant)
    except Exception as error:
        return fail(error, arguments)


def named(folders: list[str]) -> dict[str, str]:
    """Folders of drafters by the name of their run, with which their arms begin; that of a single
    one is empty."""
    names = [Path(folder).parent.name if len(folders) > 1 else "" for folder in folders]
    alike = next((name for name in names if names.count(name) > 1), None)
    require(alike is None, "drafter", "name drafters of runs with different names", alike)
    return dict(zip(names, folders, strict=True))


def loaded(folder: str, target: Target) -> TrainedDrafter:
    drafter = load_drafter(folder, target, key="drafter").to(target.device).eval()
    rule = "not be trained with its target: export it, and name drafter and target of the export"
    require(drafter.served_target() is None, "drafter", rule, folder)
    return drafter


def measure(
    given: dict[str, str],
    numbers: dict[str, list[int]],
    arguments: list[str],
    usual: Target,
    target: Target,
    drafters: dict[str, TrainedDrafter],
    assistant: TrainedDrafter | None,
) -> int:
    """Run all arms and write their table; `usual` and `assistant`: as transformers loads them."""
    [count], [limit], Ks = numbers["count"], numbers["tokens"], numbers["K"]
    requests = requests_of(target, given["prompts"], count)
    rounds = {
        f"{name} {shape}".strip(): (drafter, budget)
        for name, drafter in drafters.items()
        for shape, budget in budgets_of(drafter, Ks, given).items()
    }
    result: dict[str, Any] = {
        "settings": given,
        **provenance(["benchmarks.real_speed", *arguments]),
    }
    engine, one_by_one, by_llamacpp = {}, {}, dict[str, dict[str, float]]()
    if assistant is not None:
        engine = engine_arms(target, assistant, requests, limit, max(Ks))
        one_by_one = llamacpp_arms(target, assistant, requests, given, limit, Ks, by_llamacpp)
    result["threads"] = torch.get_num_threads()
    for batch in sorted({min(batch, count) for batch in numbers["batch"]}):

        def speculated(name: str, timed: bool = False, batch: int = batch) -> list[Speculated]:
            drafter, budget = rounds[name]
            decoder = SpeculativeDecoder(
                CachedModel(target.model), drafter, sampling=GREEDY, budget=budget,
                eos_ids=target.eos_ids, max_new_tokens=limit, batch_size=batch,
                vocab_size=target.vocab_size, timed=timed,
            )  # fmt: skip
            groups = [requests] if batch > 1 else [[request] for request in requests]
            found = [row for group in groups for row in decoder.run(group)]
            return sorted(found, key=lambda row: row.request.tag)

        def answered(name: str, speculated: Callable = speculated) -> Answers:
            return [row.response_ids for row in speculated(name)]

        def plain(batch: int = batch) -> Answers:
            rows = ours(target, requests, batch, limit)
            return [rows[request.tag].response_ids for request in requests]

        here: dict[str, Callable[[], Answers]] = {
            "generate": lambda batch=batch: generate_batches(usual, requests, batch, limit),
            "plain": plain,
            **{name: partial(answered, name) for name in rounds},
        }
        if batch == 1 and isinstance(assistant, CausalLMDrafter):
            here |= {
                f"assisted chain of {K}": partial(assisted, usual, assistant, requests, K, limit)
                for K in Ks
            }
        arms: dict[str, Arm] = {name: partial(clock, arm) for name, arm in here.items()}
        arms |= {name: partial(arm, batch) for name, arm in engine.items()}
        arms |= one_by_one if batch == 1 else {}
        table, answers = measured(arms)
        for name, rows in answers.items():
            same = sum(a == b for a, b in zip(rows, answers["generate"], strict=True))
            table[name]["answers_as_generate"] = f"{same} of {len(rows)}"
        for name in by_llamacpp.keys() & table.keys():
            table[name]["round"] = by_llamacpp[name]
        for name in rounds:
            over_plain = table[name]["over_plain"]
            table[name]["round"] = where_time_goes(speculated(name, timed=True), over_plain)
        result[f"batch {batch}"] = table
        print(json.dumps({f"batch {batch}": table}, indent=1), flush=True)
        write_json(Path(given["out"]), result)
    return 0


def budgets_of(
    drafter: TrainedDrafter, Ks: Sequence[int], given: dict[str, str]
) -> dict[str, Budget]:
    """What the drafter drafts in a round, by its name in the table: chains, and the tree."""
    budgets = {}
    for K in Ks:
        budget = budget_for(drafter, given["policy"], K)
        budgets[f"{given['policy']}, at most {K}" if budget.stop else f"chain of {K}"] = budget
    if given["tree"]:
        accuracy, _ = accuracy_at(drafter.rank_accuracy, accuracy_name(0.0, None))
        shape = parse_tree(given["tree"], "tree").shape(accuracy, max(Ks))
        budgets[given["tree"]] = Budget.of(shape)
    return budgets


def where_time_goes(rows: list[Speculated], over_plain: float) -> dict[str, float]:
    """Median milliseconds of a round by what they are spent on, the tokens that it emits, and
    those that rounds of this length need for `WANTED` times plain decoding, which `over_plain` is
    measured against."""
    rounds = [one for row in rows for one in row.rounds]
    tokens = statistics.mean(one.emitted for one in rounds)
    return {
        "draft_ms": 1000 * statistics.median(one.t_draft for one in rounds),
        "verify_ms": 1000 * statistics.median(one.t_verify for one in rounds),
        "other_ms": 1000 * statistics.median(one.t_other for one in rounds),
        "tokens_per_round": tokens,
        "tokens_per_round_needed": WANTED / over_plain * tokens,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
