"""llama.cpp run with each drafter in turn: its tokens, its own counters and its seconds.

It is the wheel `xllamacpp`, in a process of its own for each drafter, since a failed assertion
aborts it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.llamacpp_worker import Asked
from engines.vllm_run import EngineCounters, Timing
from target.sampling import Sampling
from trainer.errors import RunFault, UserError
from trainer.progress import working

WORKER = Path(__file__).with_name("llamacpp_worker.py")
# the newest of November 2026, llama.cpp's build b11549; builds differ in counters and in the keys
# of drafters
WHEEL = "xllamacpp==2026.10.11549"


COPIES = "ngram-mod"  # what copies before a drafter's own tokens, which it does where it can
ROWS = (1, 2, 3, 4, 5, 8)  # tokens that a forward of the target is timed on
# the log after each answer: milliseconds of drafting since the start, a line for each type
DRAFTED = re.compile(r"statistics +[\w-]+: .*dur\(b,g,a\) = [\d.]+, ([\d.]+), [\d.]+ ms")


@dataclass(frozen=True)
class Drafting:
    """How llama.cpp drafts at most K tokens a round: the likeliest ones at every temperature.

    `types`: names of `--spec-type`; `file`: the drafter's, where one of them reads it; `ngram`:
    tokens that a copy goes by."""

    types: tuple[str, ...]
    file: Path | None
    K: int
    ngram: int = 0

    @property
    def always(self) -> bool:
        """Whether it drafts in every round that has room."""
        return self.file is not None


@dataclass(frozen=True)
class LlamaRun:
    """The result of a job, each by prompt."""

    tokens: list[list[int]]
    counters: list[EngineCounters]
    seconds: list[float]  # from the first token to the last
    drafting: list[float]  # seconds of these
    drafter: Drafting | None
    engine: str
    machine: str

    def timing(self, index: int) -> Timing:
        """The decoding of one answer; a step without a draft is a round."""
        counted, tokens = self.counters[index], len(self.tokens[index]) - 1
        rounds = counted.drafts + plain_steps(counted, tokens) if self.drafter else tokens
        return Timing(self.seconds[index], rounds, tokens)

    def drafting_share(self) -> float:
        """Of the seconds of decoding."""
        return sum(self.drafting) / sum(self.seconds)


def plain_steps(counted: EngineCounters, emitted: int) -> int:
    """How many steps of an answer had no draft. `emitted`: its tokens but for the first.

    llama.cpp drafts no further than the limit of the answer, less the token that it adds itself:
    min(K, left - 1) tokens with `left` to go. Where one is left it drafts none, and counts no
    draft. Other engines draft K tokens to the end, past it too."""
    return max(0, emitted - counted.drafts - counted.accepted)


def check_wheel() -> None:
    """Raise UserError where llama.cpp is not installed, or too old to count and draft alike."""
    name, _, wanted = WHEEL.partition("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found == "none" or _numbers(found) < _numbers(wanted):
        raise UserError(
            f"needs {name} {wanted} or later in this environment, found {found}",
            key="eval.engine", value="llamacpp",
            remedy='pip install -c constraints.txt -e ".[llamacpp]"',
        )  # fmt: skip


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def serve(
    target: Path,
    jobs: Mapping[str, Drafting | None],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> dict[str, LlamaRun]:
    """llama.cpp's answers to the same prompts with each drafter; None is plain decoding.

    `target`: its GGUF file. Raises UserError without the wheel, RunFault where it fails."""
    check_wheel()
    K = max([job.K for job in jobs.values() if job], default=0)
    longest = max(map(len, prompts)) + max_new_tokens + K + 2
    limits, found = [max_new_tokens] * len(prompts), dict[str, LlamaRun]()
    for name, job in jobs.items():
        asked = _asked(target, job, prompts, limits, longest, sampling, seed)
        version, answers, drafting = _run(name, asked)
        counters = [
            EngineCounters(
                one["drafts"], one["drafted"], one["accepted"], one["accepted_per_position"]
            )
            for one in answers
        ]
        found[name] = LlamaRun(
            [one["tokens"] for one in answers], counters, [one["seconds"] for one in answers],
            drafting, job, f"llama.cpp (xllamacpp {version})",
            f"{target.name} on {asked['threads']} threads of a CPU, cache and attention in float32",
        )  # fmt: skip
    return found


def seconds_by_rows(
    target: Path, drafting: Drafting, prompts: Sequence[list[int]]
) -> dict[int, list[float]]:
    """Median seconds of a round by the tokens that it verifies (`ROWS`): [all but drafting,
    drafting]. The first holds the target's forward, what the drafter reads of it and the engine's
    own work. llama.cpp is told to reject every draft.

    An answer of 40 tokens less one of 16 to the same prompt, as the last rounds of both are short
    of room. Raises RunFault where an answer is shorter: the context has no room for it."""
    check_wheel()
    short, long = 16, 40
    twice = [prompt for prompt in prompts for _ in (short, long)]
    longest, found = max(map(len, prompts)) + long + max(ROWS) + 2, dict[int, list[float]]()
    for rows in ROWS:
        job = dataclasses.replace(drafting, K=rows - 1) if rows > 1 else None
        limits = [short, long] * len(prompts)
        asked = _asked(target, job, twice, limits, longest, Sampling(0.0), 0)
        _, answers, drafted = _run(f"{rows} rows", {**asked, "rejected": True})
        if [len(one["tokens"]) for one in answers] != limits:
            raise RunFault(f"llama.cpp ended answers before their limits of {short} and {long}")
        verified = [one["seconds"] - took for one, took in zip(answers, drafted, strict=True)]
        found[rows] = [
            statistics.median(
                (b - a) / (long - short) for a, b in zip(spent[::2], spent[1::2], strict=True)
            )
            for spent in (verified, drafted)
        ]
    return found


def _asked(
    target: Path,
    job: Drafting | None,
    prompts: Sequence[list[int]],
    limits: list[int],
    longest: int,
    sampling: Sampling,
    seed: int,
) -> Asked:
    return {
        "target": str(target.resolve()),
        "types": list(job.types) if job else [],
        "drafter": str(job.file.resolve()) if job and job.file else None,
        "ngram": job.ngram if job else 0,
        "K": job.K if job else 0,
        "rejected": False,
        "context": -(-longest // 64) * 64,
        "threads": torch.get_num_threads(),
        "prompts": list(prompts),
        "limits": limits,
        "draws": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "samplers": ["temperature", "top_k", "top_p"],
        },
        "seed": seed,
    }


def drafting_seconds(log: str, types: int, answers: int) -> list[float]:
    """Seconds of drafting of each answer, after the one that warmed up."""
    if not types:
        return [0.0] * answers
    written = [float(ms) / 1000 for ms in DRAFTED.findall(log)]
    if len(written) != types * (answers + 1):
        raise RunFault(
            f"llama.cpp wrote {len(written)} times how long it drafted, of {answers + 1} answers "
            f"with {types} drafters: its log has changed, install {WHEEL}"
        )
    since = [sum(written[i : i + types]) for i in range(0, len(written), types)]
    return [now - before for before, now in itertools.pairwise(since)]


@working("llama.cpp")
def _run(name: str, asked: Asked) -> tuple[str, list, list[float]]:
    with tempfile.TemporaryDirectory() as scratch:
        files = asked_file, answered, log = [
            Path(scratch) / file for file in ("asked.json", "answered.json", "log")
        ]
        asked_file.write_text(json.dumps(asked))
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, WORKER, *files[:2]], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode or not answered.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise RunFault(
                "\n".join([f"llama.cpp ended with code {done.returncode} ({name}):", *lines[-8:]])
            )
        found = json.loads(answered.read_text())
        said = log.read_text(errors="replace")
    drafting = drafting_seconds(said, len(asked["types"]), len(found["answers"]))
    return found["version"], found["answers"], drafting
