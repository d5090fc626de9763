"""The training of an EAGLE-3 head beside speculators 0.9.0 and nvidia-modelopt 0.47.0, on a CPU.

    python -m benchmarks.peers setup      # their environments, .venv-speculators, .venv-modelopt
    OMP_NUM_THREADS=1 python -m benchmarks.peers speed
    OMP_NUM_THREADS=1 python -m benchmarks.peers quality
    ... speed --runs 1 --steps 10 --prompts 60 --out /tmp/peers.json    # a look; see also --help
    ... speed --target runs/smollm2 --traces runs/real/traces --draft-vocab 8192 --tokens 640 \
        --out benchmarks/results/peers_smollm2.json    # a chat model

The same for all: the toy target or `--target`, three of its layers read (those that recipe eagle3
reads by default), the whole vocabulary or its `--draft-vocab` most frequent tokens, three unrolled
steps, float32; the target's own answers, the same rows in the same order in every step, about
`--tokens` of prompt and answer in each (of the toy's: with 512 the peers are faster than with
1024); the same positions supervised at the first step of the unroll: those whose token and next
token are the answer's. Of `--traces`, a store of answers, the rows of 256 to 512 tokens are
trained on. AdamW, weight decay 0.01, clipping at 1, a linear schedule. Loss, initialisation and
data path are each tool's own:

- ours: recipe eagle3 in the loop of `trainer`, states cached in float32, with the log-sum-exp of
  the target's logits where a part of the vocabulary is drafted, or the target live;
- speculators (cached): its command line and trainer on its own files, packed to `--tokens`. Its
  output head is the target's, frozen, where ours trains a copy;
- modelopt (online, target in process): rows padded as ours are. By default it borrows the target's
  head, too; here it trains a copy, which it does better with (`--modelopt-head lent` for its
  default: a few percent faster). A head over fewer tokens is always its own.

What was patched in them, and why, is said in `peers_worker_<tool>.py`.

`speed`: supervised tokens of a second, between the same moments of consecutive steps, so that
start-up, logging and checkpoints are outside; the tools in turn, one process at a time. Beside it
by CPU time, for a machine that is shared. Interval of the ratio: runs and steps drawn again.

`quality`: each learning rate for each tool, on the same tokens; the best by tokens per round on
development prompts, at K=3, mean of T=0 and T=1; with it `--seeds` trainings (order and start).
The folder that a tool wrote is read by `drafters.load` and measured on held-out prompts by
`eval.offline`. Two networks: "plain" EAGLE-3, and "normed", the same with `norm_before_residual`
and `norm_output`, which are on by default in speculators and not to be had in modelopt. (By default
speculators also norms before fc, which our loader does not know.)

Before a draft is measured or a tool timed, the logits of the tool itself on one row must be those
of the drafter that was read, at every step of the unroll: conventions that differ stop here.
Modelopt's are so only if the feature is normed twice: its layer, which it takes from transformers,
applies `input_layernorm` before `hidden_norm`, and its export cannot say so. "modelopt" is the
draft as it was written and as an engine would run it, "modelopt as trained" has both norms.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from data.batches import Batch, collate
from data.features import FeaturesStore, write_features
from data.features_layout import FeaturesPlan, features_folder
from data.generate import generate_traces
from data.generation_plan import GenerationPlan, traces_folder
from data.prompts import Prompt, load_prompts
from data.traces import Trace, TraceStore
from drafters.base import TrainedDrafter
from drafters.eagle3 import default_captures
from drafters.load import load_drafter
from drafters.round import Budget
from drafters.text import Text
from eval.metrics import PromptCounters, hierarchical_difference, summarise
from eval.offline import OfflineEvaluator
from recipes import eagle3
from recipes.common.draft_vocabulary import frequent_tokens, is_reduced
from target.model import Target
from target.outputs import LayerId, TargetOutputs
from target.sampling import Sampling
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.shift import supervised
from trainer.tracking import Tracker

TARGET = "assets/toy/target"
UNROLL = 3
LENGTHS = 256, 512  # of the rows of stored answers, in tokens
DEPTHS = (3, 4)
TEMPERATURES = (0.0, 1.0)
# the options that decide `Data`
PREPARED = ("target", "traces", "draft_vocab", "prompts", "development", "held_out")
FIXED = {"weight_decay": 0.01, "max_grad_norm": 1.0}
RESULTS = Path("benchmarks/results/peers.json")
# the settings that are on, and who has them
NETWORKS = {
    "plain": ([], ("ours", "speculators", "modelopt")),
    "normed": (["norm_before_residual", "norm_output"], ("ours", "speculators")),
}
SAME_LOGITS = 1e-3


# --- environments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """`packages`: what the peer needs on a CPU, and no more; `peer`: installed without what it asks
    for, which brings torchvision, torchaudio and ninja."""

    packages: tuple[str, ...]
    peer: tuple[str, ...]
    module: str

    @property
    def wanted(self) -> str:
        return " ".join((*self.packages, *self.peer))


# the local version of torch: else an index gives the build for CUDA
ENVIRONMENTS = {
    "speculators": Environment(
        (
            "torch==2.13.0+cpu", "transformers==5.19.0", "datasets==5.1.0", "numpy>=2,<=2.5.4",
            "aiohttp", "click", "httpx", "huggingface-hub", "loguru==0.7.3", "openai>=2",
            "protobuf", "psutil", "pydantic>=2", "pydantic-settings>=2", "rich", "safetensors",
            "tqdm<=4.70.1", "typer>=0.12",
        ),
        ("speculators==0.9.0", "hs-connectors==0.9.0"),
        "speculators.train.cli",
    ),
    "modelopt": Environment(
        (
            "torch==2.13.0+cpu", "transformers==5.14.1", "accelerate", "datasets",
            "huggingface-hub", "numpy", "omegaconf>=2.3", "packaging", "pulp<4", "pydantic>=2",
            "pyyaml", "regex", "requests", "rich", "safetensors", "scipy", "setuptools>=80", "tqdm",
        ),
        ("nvidia-modelopt==0.47.0",),
        "modelopt.torch.speculative",
    ),
}  # fmt: skip


def folder_of(tool: str) -> Path:
    return Path(f".venv-{tool}")


def set_up() -> None:
    """A second call finds them and does nothing. Where packages come from is pip's own setting."""
    for tool, environment in ENVIRONMENTS.items():
        folder, began = folder_of(tool), time.monotonic()
        stamp, python = folder / ".set-up", folder / "bin" / "python"
        if not stamp.exists() or stamp.read_text() != environment.wanted:
            print(f"installing {' '.join(environment.peer)} into {folder} (minutes)", flush=True)
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            subprocess.run([*pip, *environment.packages], check=True)
            subprocess.run([*pip, "--no-deps", *environment.peer], check=True)
            check = f"import torch, {environment.module}; assert torch.version.cuda is None"
            subprocess.run([python, "-c", check], check=True, stdout=subprocess.DEVNULL)
            stamp.write_text(environment.wanted)
        print(f"{tool}: {folder}, {time.monotonic() - began:.0f} s", flush=True)


# --- the same text for all -----------------------------------------------------------------------


@dataclass
class Data:
    """`traces`: what is trained on; a row's number is its place there. `development` and
    `held_out`: by temperature."""

    target: Target
    traces: list[Trace]
    features: FeaturesStore
    states: Path  # the same in the format of speculators, one file a row
    development: dict[float, list[Trace]]
    held_out: dict[float, list[Trace]]
    kept: torch.Tensor | None  # target ids of a reduced draft vocabulary, ascending

    @property
    def layers(self) -> list[LayerId]:
        return default_captures(self.target.num_layers)

    @property
    def rows(self) -> Path:
        """The texts for all tools: [tokens of the prompt, ids]."""
        return self.states / "rows.json"


def answers(
    target: Target, prompts: Sequence[Prompt], temperatures: tuple[float, ...], work: Path
) -> list[Trace]:
    plan = GenerationPlan("toy", tuple(prompts), temperatures, max_new_tokens=96)
    folder = traces_folder(plan, target, work)
    traces = generate_traces(target, plan, folder, batch_size=32, rows_per_shard=512)
    return sorted(traces, key=lambda t: t.index)


Texts = tuple[list[Trace], dict[float, list[Trace]], dict[float, list[Trace]]]


def generated(target: Target, sizes: argparse.Namespace) -> Texts:
    """What is trained on, development and held-out texts of the toy."""
    work = sizes.work
    prompts = load_prompts("toy", count=sizes.prompts + sizes.development, seed=3)
    random.Random(0).shuffle(prompts)
    kept_out, trained = prompts[: sizes.development], prompts[sizes.development :]
    unseen = load_prompts("toy", count=sizes.held_out, seed=21, toy_split="eval")
    return (
        answers(target, trained, TEMPERATURES, work),
        {T: answers(target, kept_out, (T,), work) for T in TEMPERATURES},
        {T: answers(target, unseen, (T,), work) for T in TEMPERATURES},
    )


def stored(target: Target, sizes: argparse.Namespace) -> Texts:
    """The same of a store of answers: rows of LENGTHS are trained on, all others are held out."""
    store = TraceStore.open(sizes.traces, None, create=False)
    if store.identity["target"] != target.fingerprint:
        raise SystemExit(f"--traces {sizes.traces} holds the answers of another target")
    low, high = LENGTHS
    trained, others = list[Trace](), dict[float, list[Trace]]()
    for trace in store.load():
        fits = low <= length(trace) <= high
        (trained if fits else others.setdefault(trace.temperature, [])).append(trace)
    first, end = sizes.development, sizes.development + sizes.held_out
    return (
        trained[: sizes.prompts],
        {T: others[T][:first] for T in TEMPERATURES},
        {T: others[T][first:end] for T in TEMPERATURES},
    )


def prepare(sizes: argparse.Namespace) -> Data:
    target, work = Target.load(sizes.target, dtype="float32"), sizes.work
    traces, development, held_out = (stored if sizes.traces else generated)(target, sizes)
    traces = [trace for trace in traces if len(trace.response_ids) > UNROLL]
    layers = (*default_captures(target.num_layers), "final_norm")
    plan = FeaturesPlan(layers, "fp32", summary=is_reduced(sizes.draft_vocab, target))
    folder = features_folder(target, traces, plan, work)
    data = Data(
        target, traces, write_features(target, traces, plan, folder, batch_size=16),
        work / "states" / folder.name, development, held_out,
        frequent_tokens(traces, sizes.draft_vocab, target),
    )  # fmt: skip
    if not data.rows.exists():
        write_states(data)
    return data


def write_states(data: Data) -> None:
    data.states.mkdir(parents=True, exist_ok=True)
    last = data.target.num_layers - 1  # speculators applies the final norm itself
    rows = [(len(t.prompt_ids), t.prompt_ids + t.response_ids) for t in data.traces]
    for i, (_, ids) in enumerate(rows):
        tokens = torch.tensor(ids)
        hidden = data.target.outputs(tokens[None], layers=[*data.layers, last], logits=False).hidden
        stacked = torch.stack([states[0] for states in hidden.values()], 1)
        path = data.states / f"hs_{i}.safetensors"
        save_file({"hidden_states": stacked, "token_ids": tokens}, path)
    data.rows.write_text(json.dumps(rows))  # last: they are complete


def length(trace: Trace) -> int:
    return len(trace.prompt_ids) + len(trace.response_ids)


def schedule(data: Data, tokens: int, steps: int, seed: int) -> list[list[int]]:
    """The rows of every step: in a new order each epoch, as many as fit into `tokens`."""
    rng, batches, order, room = random.Random(seed), list[list[int]](), list[int](), 0
    while len(batches) <= steps:
        if not order:
            order = list(range(len(data.traces)))
            rng.shuffle(order)
        if length(data.traces[order[-1]]) > room:
            batches.append([])
            room = tokens
        batches[-1].append(order.pop())
        room -= length(data.traces[batches[-1][-1]])
    return batches[:steps]


def assembled(traces: Sequence[Trace], index: int) -> Batch:
    texts = [t.prompt_ids for t in traces], [t.response_ids for t in traces]
    return collate(*texts, ["target"] * len(traces), index)


def supervised_tokens(data: Data, batches: Sequence[Sequence[int]]) -> list[int]:
    """Positions that count in the loss at the first step of the unroll."""
    made = [assembled([data.traces[i] for i in rows], 0) for rows in batches]
    return [int(supervised(batch.loss_mask, 1).sum()) for batch in made]


# --- one training --------------------------------------------------------------------------------


def run(
    tool: str,
    data: Data,
    batches: list[list[int]],
    sizes: argparse.Namespace,
    out: Path,
    **settings: object,
) -> np.ndarray:
    """Train in a process of its own; seconds and CPU seconds of each step, [steps, 2]. A draft that
    is there already is not trained again."""
    job: dict[str, Any] = {
        **FIXED, "target": sizes.target, "layers": data.layers, "unroll": UNROLL,
        "tokens": sizes.tokens, "kept": None if data.kept is None else data.kept.tolist(),
        "rows": str(data.rows), "states": str(data.states), "out": str(out), "batches": batches,
        "sizes": {name: getattr(sizes, name) for name in PREPARED},
        "work": str(sizes.work), "check": data.traces.index(max(data.traces, key=length)),
        "own_head": sizes.modelopt_head == "own", "warmup": len(batches) // 20, **settings,
    }  # fmt: skip
    text, path, done = json.dumps(job), out / "job.json", out / "stamps.json"
    if not (job["draft"] and done.exists() and path.read_text() == text):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        path.write_text(text)
        command = [sys.executable, "-m", "benchmarks.peers", "one", str(path)]
        if tool != "ours":
            # as a module: as a file, its folder would hide Python's own module `queue`
            worker = ["-m", f"benchmarks.peers_worker_{tool}"]
            command = [str(folder_of(tool) / "bin" / "python"), *worker, str(path)]
        quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **quiet, "HF_HUB_OFFLINE": "1"}
        with open(out / "log.txt", "w") as log:
            ended = subprocess.run(command, env=environment, stdout=log, stderr=log)
        if ended.returncode:
            tail = "\n".join((out / "log.txt").read_text().splitlines()[-15:])
            raise SystemExit(f"{' '.join(command)} failed:\n{tail}")
    return np.diff(np.array(json.loads(done.read_text())), axis=0)


@dataclass
class Scheduled:
    """For our loop; stamps the moment in which each batch is asked for."""

    traces: list[Trace]
    batches: list[list[int]]

    def __post_init__(self) -> None:
        self.stamps: list[tuple[float, float]] = []

    def at(self, index: int) -> Batch:
        self.stamps.append((time.perf_counter(), time.process_time()))
        return assembled([self.traces[i] for i in self.batches[index]], index)


def train_ours(job: dict[str, Any]) -> None:
    """Train as `train.py` does between the traces and the drafter, without evaluations."""
    out, sizes = Path(job["out"]), argparse.Namespace(work=Path(job["work"]), **job["sizes"])
    data = prepare(sizes)
    norms: dict[str, Any] = dict.fromkeys(job["norms"], True)
    method = eagle3.Config(
        steps=job["unroll"], layers=job["layers"], draft_vocab_size=sizes.draft_vocab, **norms
    )
    recipe = eagle3.Recipe(method, data.target)
    torch.manual_seed(job["seed"])
    drafter = recipe.build(data.traces)
    objective = recipe.objective
    batches, count = Scheduled(data.traces, job["batches"]), len(job["batches"])
    config = TrainerConfig(
        max_steps=count, lr=job["lr"], lr_schedule="linear", lr_warmup_steps=job["warmup"],
        lr_min_ratio=0.0, weight_decay=job["weight_decay"], max_grad_norm=job["max_grad_norm"],
        log_every=count, save_every=count,
    )  # fmt: skip

    def outputs(batch: Batch, step: int) -> TargetOutputs:
        request = objective.target_request(batch, step)
        assert request is not None
        if job["features"] == "cached":
            found = data.features.outputs(batch)
            assert found is not None, "all rows are stored"
            return found
        return data.target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=False
        )

    fit(Fit(
        objective=objective, drafter=drafter, source=Source(batches, outputs), evaluate=None,
        config=config, folder=out / "fit", seed=job["seed"], tracker=Tracker(config, out, "", {}),
        accelerator=make_accelerator(config, cpu=True),
    ))  # fmt: skip
    if job["draft"]:
        drafter.save_pretrained(out / "draft")
    (out / "stamps.json").write_text(json.dumps(batches.stamps))  # last: the rest is complete


# --- speed ---------------------------------------------------------------------------------------

PAIRS = {"speculators": "ours cached", "modelopt": "ours live"}


def interval(draws: np.ndarray) -> list[float]:
    return [float(edge) for edge in np.percentile(draws, [2.5, 97.5])]


def faster(tokens: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Median rate of ours over theirs; tokens [steps], seconds [runs, steps]."""
    rng = np.random.default_rng(0)

    def ratio(runs: np.ndarray, steps: np.ndarray) -> float:
        total = tokens[steps].sum()
        rates = (np.median(total / one[runs][:, steps].sum(1)) for one in (ours, theirs))
        return float(np.divide(*rates))

    shape = ours.shape
    draws = [ratio(*(rng.integers(0, count, count) for count in shape)) for _ in range(2000)]
    return {"ratio": ratio(*map(np.arange, shape)), "ci95": interval(np.array(draws))}


def speed(data: Data, sizes: argparse.Namespace) -> dict[str, Any]:
    gaps = {}
    for tool in ENVIRONMENTS:
        out, settings = sizes.work / "check" / tool, {"norms": [], "lr": 1e-3, "seed": 0}
        run(tool, data, schedule(data, sizes.tokens, 2, 0), sizes, out, draft=True, **settings)
        *_, drafter = variants(tool, out / "draft", data.target).values()
        gaps[tool] = require_same_logits(tool, disagreement(data, drafter, out))
    # one more, since our loop saves within its last
    batches = schedule(data, sizes.tokens, sizes.warmup + sizes.steps + 1, 0)
    timed = slice(sizes.warmup, sizes.warmup + sizes.steps)
    found: dict[str, list[np.ndarray]] = {}
    for number in range(sizes.runs):
        for peer, ours in PAIRS.items():
            for arm in (ours, peer) if number % 2 == 0 else (peer, ours):
                tool, _, features = arm.partition(" ")
                out = sizes.work / "speed" / arm.replace(" ", "-")
                settings = {"features": features, "norms": [], "lr": 1e-3, "seed": 0}
                seconds = run(tool, data, batches, sizes, out, draft=False, **settings)[timed]
                found.setdefault(arm, []).append(seconds)
                print(f"run {number}, {arm}: {seconds[:, 0].sum():.1f} s", flush=True)
    tokens = np.array(supervised_tokens(data, batches[timed]))
    seconds = {arm: np.stack(runs) for arm, runs in found.items()}  # [runs, steps, 2]
    arms = {}
    for arm, both in seconds.items():
        rates, by_cpu = (tokens.sum() / both[..., clock].sum(1) for clock in (0, 1))
        arms[arm] = {
            "tokens_per_s": float(np.median(rates)),
            "spread": [float(rates.min()), float(rates.max())],
            "tokens_per_cpu_s": float(np.median(by_cpu)),
            "median_step_ms": float(np.median(both[..., 0]) * 1000),
        }
    ratios = {
        peer: {
            "wall": faster(tokens, seconds[ours][..., 0], seconds[peer][..., 0]),
            "cpu": faster(tokens, seconds[ours][..., 1], seconds[peer][..., 1]),
        }
        for peer, ours in PAIRS.items()
    }
    return {
        "supervised_tokens_per_step": float(tokens.mean()), "log_probability_gaps": gaps,
        "arms": arms, "ratios": ratios,
    }  # fmt: skip


def speed_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [
        f"{settings['runs']} runs of {settings['steps']} steps after {settings['warmup']}, "
        f"{result['supervised_tokens_per_step']:.0f} supervised tokens a step",
        "",
        "| | tokens/s | spread | tokens per CPU second | step, ms | ours / it | by CPU time |",
        "| --- | ---: | --- | ---: | ---: | --- | --- |",
    ]
    for arm, row in result["arms"].items():
        low, high = row["spread"]
        cells = [
            f"{row['tokens_per_s']:,.0f}", f"{low:,.0f} to {high:,.0f}",
            f"{row['tokens_per_cpu_s']:,.0f}", f"{row['median_step_ms']:.1f}",
        ]  # fmt: skip
        for clock in ("wall", "cpu"):
            one = result["ratios"].get(arm, {}).get(clock)
            cells.append("" if one is None else f"{one['ratio']:.2f} {between(one['ci95'])}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def between(edges: Sequence[float]) -> str:
    return "[" + ", ".join(f"{edge:.3f}" for edge in edges) + "]"


# --- quality -------------------------------------------------------------------------------------


class Measure:
    """Tokens per round of a drafter: counters by (temperature, K)."""

    def __init__(self, target: Target, traces: dict[float, list[Trace]]):
        self.evaluators = {
            (T, K): OfflineEvaluator(target, rows, Sampling(T), Budget(K), engine_counters=False)
            for T, rows in traces.items()
            for K in DEPTHS
        }

    def __call__(self, drafter: TrainedDrafter) -> dict[tuple[float, int], list[PromptCounters]]:
        return {cell: one(drafter).counters for cell, one in self.evaluators.items()}


def tokens_per_round(counters: list[PromptCounters]) -> float:
    return sum(one.emitted for one in counters) / sum(one.rounds for one in counters)


@torch.no_grad()
def disagreement(data: Data, drafter: TrainedDrafter, out: Path) -> list[float]:
    """Largest distance between the tool's own log-probabilities and those of the drafter as it was
    read, where either is likely; one number for each step of the unroll."""
    theirs = load_file(out / "check.safetensors")
    trace = max(data.traces, key=length)
    ids = torch.tensor([trace.prompt_ids + trace.response_ids])
    outputs = data.target.outputs(ids, layers=drafter.target_layers, logits=False)
    gaps = []
    for j, states in enumerate(drafter.states(Text(ids), outputs, UNROLL)):
        own = drafter.output_head(j + 1).logits(states[0, j + 1 :]).log_softmax(-1)
        other = theirs[str(j)].log_softmax(-1)
        likely = torch.maximum(own, other) > math.log(1e-3)
        gaps.append(float((own - other)[likely].abs().max()))
    return gaps


def require_same_logits(tool: str, gaps: list[float]) -> list[float]:
    if max(gaps) > SAME_LOGITS:
        raise SystemExit(f"{tool} computes other logits than the drafter read: {gaps}")
    return gaps


def variants(tool: str, draft: Path, target: Target) -> dict[str, Any]:
    """The drafters that are measured of a draft, by name; last, the one that the tool trained."""
    drafter: Any = load_drafter(str(draft), target)
    if tool != "modelopt":
        return {tool: drafter}
    twice = copy.deepcopy(drafter)
    twice.hidden_norm = torch.nn.Sequential(drafter.input_layernorm, drafter.hidden_norm)
    return {tool: drafter, "modelopt as trained": twice}


def quality(data: Data, sizes: argparse.Namespace) -> dict[str, Any]:
    choose, measure = Measure(data.target, data.development), Measure(data.target, data.held_out)
    trainings, rows = [], []
    for network in sizes.networks:
        norms, tools = NETWORKS[network]
        counters: dict[str, list[dict[Any, list[PromptCounters]]]] = {}
        rates: dict[str, float] = {}

        def trained(tool: str, lr: float, seed: int, network: str = network) -> Path:
            batches = schedule(data, sizes.tokens, sizes.steps, seed)
            out = sizes.work / "quality" / f"{network}-{tool}-{lr:g}-{seed}"
            settings = {"features": "cached", "norms": NETWORKS[network][0], "draft": True}
            run(tool, data, batches, sizes, out, lr=lr, seed=seed, **settings)
            return out

        for tool in tools:
            chosen: dict[float, float] = {}
            for lr in sizes.lrs:
                found = choose(load_drafter(str(trained(tool, lr, 0) / "draft"), data.target))
                chosen[lr] = statistics.fmean(tokens_per_round(found[T, 3]) for T in TEMPERATURES)
                print(f"{network} {tool}, {lr:g}: {chosen[lr]:.3f} on development", flush=True)
            lr = max(chosen, key=lambda one: chosen[one])
            gaps: dict[str, list[list[float]]] = {}
            for seed in range(sizes.seeds):
                out = trained(tool, lr, seed)
                for name, drafter in variants(tool, out / "draft", data.target).items():
                    counters.setdefault(name, []).append(measure(drafter))
                    rates[name] = lr
                    if tool != "ours":
                        gaps.setdefault(name, []).append(disagreement(data, drafter, out))
            for seed_gaps in list(gaps.values())[-1] if gaps else []:
                require_same_logits(tool, seed_gaps)
            about = {"network": network, "norms": norms, "tool": tool, "development": chosen}
            trainings.append({**about, "log_probability_gaps": gaps})
        for name, seeds in counters.items():
            for T, K in measure.evaluators:
                row: dict[str, Any] = {"network": network, "tool": name, "lr": rates[name]}
                row |= {"temperature": T, "K": K}
                row["tokens_per_round"] = [tokens_per_round(one[T, K]) for one in seeds]
                row["alpha"] = [summarise(one[T, K], draws=0).alpha for one in seeds]
                if name != "ours":
                    pairs = [
                        (a[T, K], b[T, K]) for a, b in zip(counters["ours"], seeds, strict=True)
                    ]
                    row["ours_minus_it"] = hierarchical_difference(pairs, "tokens_per_round")
                rows.append(row)
    tokens = sum(supervised_tokens(data, schedule(data, sizes.tokens, sizes.steps, 0)))
    return {
        "supervised_tokens": tokens, "num_prompts": len(data.held_out[0.0]),
        "trainings": trainings, "rows": rows,
    }  # fmt: skip


def quality_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [
        f"{settings['steps']} steps, {result['supervised_tokens']:,} supervised tokens, "
        f"{settings['seeds']} seeds, {result['num_prompts']} held-out prompts",
        "",
        "| network | | learning rate | T | K | tokens per round | alpha | ours - it | 95 % |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in result["rows"]:
        difference = row.get("ours_minus_it")
        cells = [
            row["network"], row["tool"], f"{row['lr']:g}", f"{row['temperature']:g}",
            str(row["K"]), f"{statistics.fmean(row['tokens_per_round']):.3f}",
            f"{statistics.fmean(row['alpha']):.3f}",
            "" if difference is None else f"{difference['diff']:+.3f}",
            "" if difference is None else between(difference["ci95"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- command line --------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("command", choices=("setup", "speed", "quality", "one"))
    parser.add_argument("job", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--traces", help="store of the target's answers; default: the toy's")
    parser.add_argument("--draft-vocab", type=int, default=0, help="tokens; 0: all")
    parser.add_argument("--prompts", type=int, default=1200, help="trained on")
    parser.add_argument("--development", type=int, default=100, help="prompts")
    parser.add_argument("--held-out", type=int, default=300, help="prompts")
    parser.add_argument("--tokens", type=int, default=512, help="of prompt and answer, a step")
    parser.add_argument("--steps", type=int, help="default: 60 for speed, 600 for quality")
    parser.add_argument("--warmup", type=int, default=10, help="of speed: steps not timed")
    parser.add_argument("--runs", type=int, default=5, help="of speed")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=3, help="of quality")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--modelopt-head", choices=("lent", "own"), default="own")
    parser.add_argument("--work", type=Path, default=Path("runs/peers"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    sizes = parser.parse_args()
    sizes.steps = sizes.steps or {"speed": 60, "quality": 600}.get(sizes.command)
    return sizes


def main() -> None:
    sizes = arguments()
    if sizes.command == "setup":
        set_up()
        return
    if sizes.command == "one":
        train_ours(json.loads(sizes.job.read_text()))
        return
    missing = [tool for tool in ENVIRONMENTS if not (folder_of(tool) / ".set-up").exists()]
    if missing:
        raise SystemExit(
            f"no environment of {', '.join(missing)}: python -m benchmarks.peers setup"
        )
    data = prepare(sizes)
    part, table = (speed, speed_table) if sizes.command == "speed" else (quality, quality_table)
    result: dict[str, Any] = json.loads(sizes.out.read_text()) if sizes.out.exists() else {}
    settings = {k: v for k, v in vars(sizes).items() if k not in ("command", "job", "work", "out")}
    result[sizes.command] = part(data, sizes) | {
        "settings": settings,
        "machine": f"{platform.machine()}, torch {torch.__version__}, "
        f"{os.environ.get('OMP_NUM_THREADS', '1')} threads, load {os.getloadavg()[1]:.1f}",
        "python": platform.python_version(),
        "peers": {tool: one.wanted for tool, one in ENVIRONMENTS.items()},
    }
    print(table(result[sizes.command]))
    sizes.out.parent.mkdir(exist_ok=True)
    sizes.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
