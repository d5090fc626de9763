"""llama.cpp run with each drafter in turn: its tokens, its own counters and its seconds.

It is the wheel `xllamacpp`, in a process of its own for each drafter, since it ends by assertions.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
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


@dataclass(frozen=True)
class Drafting:
    """A drafter for llama.cpp, of at most K tokens a round: the likeliest ones at every
    temperature. `method`: draft_model or eagle3."""

    method: str
    file: Path
    K: int


@dataclass(frozen=True)
class LlamaRun:
    """The result of a job, each by prompt."""

    tokens: list[list[int]]
    counters: list[EngineCounters]
    seconds: list[float]  # from the first token to the last
    drafter: Drafting | None
    engine: str
    machine: str

    def timing(self, index: int) -> Timing:
        """The decoding of one answer; a step without a draft is a round."""
        counted, tokens = self.counters[index], len(self.tokens[index]) - 1
        rounds = counted.drafts + plain_steps(counted, tokens) if self.drafter else tokens
        return Timing(self.seconds[index], rounds, tokens)


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
    draws = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
             "samplers": ["temperature", "top_k", "top_p"]}  # fmt: skip
    threads, found = torch.get_num_threads(), dict[str, LlamaRun]()
    for name, job in jobs.items():
        asked: Asked = {
            "target": str(target.resolve()),
            "drafter": [str(job.file.resolve()), job.method] if job else None,
            "K": job.K if job else 0,
            "context": -(-longest // 64) * 64,
            "threads": threads,
            "prompts": list(prompts),
            "max_new_tokens": max_new_tokens,
            "draws": draws,
            "seed": seed,
        }
        version, answers = _run(name, asked)
        counters = [
            EngineCounters(
                one["drafts"], one["drafted"], one["accepted"], one["accepted_per_position"]
            )
            for one in answers
        ]
        found[name] = LlamaRun(
            [one["tokens"] for one in answers], counters, [one["seconds"] for one in answers], job,
            f"llama.cpp (xllamacpp {version})", f"{target.name} on {threads} threads of a CPU",
        )  # fmt: skip
    return found


@working("llama.cpp")
def _run(name: str, asked: Asked) -> tuple[str, list]:
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
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise RunFault(
                "\n".join([f"llama.cpp ended with code {done.returncode} ({name}):", *said[-8:]])
            )
        found = json.loads(answered.read_text())
    return found["version"], found["answers"]
