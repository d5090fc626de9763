"""vLLM run with each drafter in turn: its tokens and its own counters.

`serve` runs vLLM in an environment of its own (`bash scripts/engine_env.sh`), in one process, with
one drafter after the other. vLLM logs every round of every prompt, so one batch gives the rounds of
each prompt; they must add up to its counters for the whole set. `scrape` reads the counters of a
running server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from engines.vllm_server import engine_python, environment, memory_options, model_options
from engines.vllm_worker import CounterValues, JobAnswer, WorkerAnswer, WorkerRequest
from engines.web import Limits, ServerError, fetch, server_root
from target.model import Target
from target.sampling import Sampling
from trainer.checks import is_address
from trainer.errors import RunFault, UserError, excerpt
from trainer.progress import working

METRICS_S, METRICS_BYTES = 10.0, 2**24  # of a page, which has lines for each engine
WORKER = Path(__file__).with_name("vllm_worker.py")
ENGINE = {"enable_prefix_caching": False, "disable_log_stats": False}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # errors surface in the worker, not in a child
DECODED = re.compile(r"(?m)^vllm:request_decode_time_seconds_(count|sum)\{.*\} (\S+)")
METRIC = re.compile(r'(?m)^vllm:spec_decode_num_(\w+)_total\{(?:.*position="(\d{1,9})")?.*\} (\S+)')


@dataclass(frozen=True)
class EngineCounters:
    """vLLM's counters, which include tokens past the end of answers: rounds that drafted, their
    drafted and accepted tokens, and for each position the rounds that accepted up to it. Of a
    server also the answers that it has finished, and the seconds from their first token to their
    last."""

    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    answers: int = 0
    decode_s: float = 0.0

    @classmethod
    def named(cls, values: CounterValues) -> EngineCounters:
        """The counters, given under vLLM's names without prefix and suffix."""
        return cls(
            int(values["drafts"]),
            int(values["draft_tokens"]),
            int(values["accepted_tokens"]),
            list(values["accepted_tokens_per_pos"]),
        )

    def __sub__(self, earlier: EngineCounters) -> EngineCounters:
        places = len(self.accepted_per_position), len(earlier.accepted_per_position)
        if self.drafts < earlier.drafts or places[0] != places[1]:
            raise RunFault("vLLM's counters decreased: the server was started again meanwhile")
        pairs = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        by_position = [now - then for now, then in pairs]
        drafts, drafted = self.drafts - earlier.drafts, self.drafted - earlier.drafted
        answers, decode_s = self.answers - earlier.answers, self.decode_s - earlier.decode_s
        return EngineCounters(drafts, drafted, sum(by_position), by_position, answers, decode_s)

    @property
    def tokens_per_round(self) -> float | None:
        """vLLM's mean acceptance length, not cut at the end of answers; None without a round."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Speculation:
    """A drafter for vLLM.

    `method`: draft_model, medusa, eagle, eagle3, dflash or dspark; `folder`: exported for vLLM;
    `sampled`: above temperature 0 the drafter samples, as in draftsmith's own decoding. vLLM's
    default is False: the most likely tokens at any temperature, of which fewer are accepted."""

    method: str
    folder: str | Path
    K: int
    sampled: bool = True

    def config(self, sampling: Sampling) -> dict[str, object]:
        """vLLM's `speculative_config`."""
        folder = str(Path(self.folder).resolve())
        config: dict[str, object] = {
            "method": self.method,
            "model": folder,
            "num_speculative_tokens": self.K,
        }
        sampled = self.sampled and sampling.temperature > 0
        if sampled:
            config["draft_sample_method"] = "probabilistic"
        return config


class Timing(NamedTuple):
    """The decoding of one answer at batch 1, its first token left out, which the prompt's own
    forward gives. Plain decoding has a round for each token."""

    seconds: float
    rounds: int
    tokens: int


@dataclass(frozen=True)
class EngineRun:
    """The result of a job. tokens: by prompt, the ending EOS included; rounds: by prompt, [drafted,
    accepted] each; seconds: of generating. Plain decoding has no drafter, rounds or counters."""

    tokens: list[list[int]]
    drafter: Speculation | None
    rounds: list[list[list[int]]]
    counters: EngineCounters | None
    engine: str  # name and version
    seconds: float
    machine: str  # what it ran on and how
    alone: dict[int, Timing]  # by prompt, of those that were answered once more one by one


def serve(
    target: Target,
    jobs: Mapping[str, Speculation | None],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int,
    seed: int,
    alone: Sequence[int] = (),
    warm_up: int = 0,
) -> dict[str, EngineRun]:
    """vLLM's answers to the same prompts with each drafter; None is plain decoding.

    `alone`: prompts that are answered once more, one by one, and timed; `warm_up`: how many are
    answered before, which is neither timed nor counted.

    vLLM loads the target by its name in its own dtype; only its `eos_ids` end an answer. Raises
    UserError without an environment for vLLM, RunFault where it fails or miscounts."""
    python = engine_python()
    K = max([job.K for job in jobs.values() if job], default=0)
    longest = max(len(ids) for ids in prompts) + max_new_tokens + 2 * K + 2
    own: dict[str, object] = dataclasses.asdict(sampling) | {
        "max_tokens": max_new_tokens, "stop_token_ids": list(target.eos_ids), "ignore_eos": True,
        "detokenize": False,
    }  # fmt: skip
    eager = not torch.cuda.is_available()  # compiling takes longer than it saves there
    request: WorkerRequest = {
        "engine": {
            **model_options(target),
            **memory_options(),
            "max_model_len": min(target.context, longest),
            "max_num_seqs": min(batch_size, len(prompts)),
            "enforce_eager": eager,
            **ENGINE,
        },
        "prompts": list(prompts),
        "sampling": [own | {"seed": seed + index} for index in range(len(prompts))],
        "warm_up": warm_up,
        "alone": list(alone),
        "jobs": {name: job.config(sampling) if job else None for name, job in jobs.items()},
    }
    answer = _run(python, request)
    dtype = str(target.model.dtype).removeprefix("torch.")
    how = "in eager mode" if eager else "with captured graphs"
    machine = f"{dtype} on {answer['device']}, {how}"
    found = dict[str, EngineRun]()
    for name, job in jobs.items():
        its = answer["jobs"][name]
        found[name] = EngineRun(
            its["tokens"], job, its["rounds"], _checked(name, job, its) if job else None,
            f"vllm {answer['version']}", its["seconds"], machine,
            {i: Timing(*one) for i, one in zip(alone, its["alone"], strict=True)},
        )  # fmt: skip
    return found


@working("vLLM")
def _run(python: Path, request: WorkerRequest) -> WorkerAnswer:
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered, log = (Path(scratch) / n for n in ("asked.json", "answered.json", "log"))
        asked.write_text(json.dumps(request))
        with log.open("w") as output:
            done = subprocess.run(
                [python, WORKER, asked, answered], cwd=scratch,
                env=environment() | IN_PROCESS,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if done.returncode or not answered.exists():
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise RunFault("\n".join([f"vLLM ended with code {done.returncode}:", *said[-8:]]))
        return json.loads(answered.read_text())


def _checked(name: str, job: Speculation, answer: JobAnswer) -> EngineCounters:
    """The counters of a job; RunFault where vLLM's rounds differ from them."""
    counters = EngineCounters.named(answer["counters"])
    rounds = [one for own in answer["rounds"] for one in own]
    reached = [sum(accepted > i for _, accepted in rounds) for i in range(job.K)]
    summed = EngineCounters(
        len(rounds), sum(drafted for drafted, _ in rounds), sum(reached), reached
    )
    if summed != counters:
        raise RunFault(f"{name}: vLLM's rounds add up to {summed}, its counters say {counters}")
    return counters


def from_metrics(text: str, drafting: bool = True) -> EngineCounters:
    """The counters in a server's `/metrics` text, summed over its engines. `drafting`: whether it
    must have some of speculative decoding."""
    totals = defaultdict[str, int](int)
    for name, position, value in METRIC.findall(text):
        totals[position or name] += int(_number(value))
    if drafting and "drafts" not in totals:
        remedy = "start vLLM with --speculative-config and without --disable-log-stats"
        raise UserError(f"the metrics hold no counters of speculative decoding: {remedy}")
    positions = [totals[place] for place in sorted(filter(str.isdigit, totals), key=int)]
    decoded = dict.fromkeys(("count", "sum"), 0.0)
    for name, value in DECODED.findall(text):
        decoded[name] += _number(value)
    return EngineCounters(
        totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], positions,
        int(decoded["count"]), decoded["sum"],
    )  # fmt: skip


def _number(text: str) -> float:
    """A value of a counter. UserError where it is no number."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise UserError(f"the metrics hold a counter of {excerpt(text, 40)}, which is no number")


def scrape(url: str, drafting: bool = True) -> EngineCounters:
    """The counters of the vLLM server at `url`, such as http://127.0.0.1:8000, since its start, of
    speculative decoding too if it is `drafting`. UserError where they cannot be read."""
    address = server_root(url.rstrip("/").removesuffix("/metrics")) + "/metrics"
    if not is_address(address):
        raise UserError(f"the server's address must begin with http:// or https://, got {url!r}")
    try:
        content = fetch(address, limits=Limits(METRICS_S, METRICS_BYTES))
    except ServerError as error:
        raise UserError(f"cannot read {address} ({error.said}): is the server running?") from error
    return from_metrics(content.decode(errors="replace"), drafting)
