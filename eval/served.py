"""What a real engine does with a drafter: vLLM's tokens and its own counters.

`serve` runs vLLM in an environment of its own (`bash scripts/engine_env.sh`): one process, the
drafters one after the other. vLLM logs every round of every prompt, so one batch gives counters by
prompt; they must add up to its counters for the whole set. A server that runs already is asked by
`eval.server`; `scrape` reads its counters.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.decode import Continuation
from data.law import CHECKED, unlike
from data.sampling import Sampling
from data.target import Target
from data.traces import Trace
from data.vllm import engine_python, environment, model_options
from data.web import urlopen
from drafters.base import Budget
from eval.engine import Speculated
from eval.measure import Bench, Cost, Measurement, difference
from eval.metrics import PromptCounters, Round, check_invariants, counters_from_rounds
from trainer.config import RunFault, UserError, is_address

WORKER = Path(__file__).with_name("vllm_worker.py")
ENGINE = {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # errors surface in the worker, not in a child
METRIC = re.compile(r'(?m)^vllm:spec_decode_num_(\w+)_total\{(?:.*position="(\d+)")?.*\} (\S+)')


@dataclass(frozen=True)
class Counters:
    """As vLLM counts, past the end of answers too: rounds that drafted, their drafted and accepted
    tokens, and for each position how many rounds accepted so far."""

    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> Counters:
        """From vLLM's names without prefix and suffix."""
        whole = [int(values[name]) for name in ("drafts", "draft_tokens", "accepted_tokens")]
        return cls(whole[0], whole[1], whole[2], list(values["accepted_tokens_per_pos"]))

    def __sub__(self, earlier: Counters) -> Counters:
        if self.drafts < earlier.drafts:
            raise RunFault("vLLM's counters ran backwards: the server was started again meanwhile")
        pairs = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        by_position = [now - then for now, then in pairs]
        drafts, drafted = self.drafts - earlier.drafts, self.drafted - earlier.drafted
        return Counters(drafts, drafted, sum(by_position), by_position)

    @property
    def tokens_per_round(self) -> float | None:
        """vLLM's mean acceptance length, not cut at the end of answers."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Speculation:
    """A drafter for vLLM. `method`: draft_model, medusa, eagle or eagle3; `folder`: exported for
    vLLM; `sampled`: above temperature 0 it samples what it drafts, as in our own decoding. vLLM's
    own default is False: the most likely tokens at any temperature, of which fewer are accepted."""

    method: str
    folder: str | Path
    K: int
    sampled: bool = True

    def config(self, sampling: Sampling) -> dict[str, Any]:
        folder = str(Path(self.folder).resolve())
        config = {"method": self.method, "model": folder, "num_speculative_tokens": self.K}
        sampled = self.sampled and sampling.temperature > 0
        return config | ({"draft_sample_method": "probabilistic"} if sampled else {})


@dataclass(frozen=True)
class Served:
    """tokens: by prompt, with the ending EOS; rounds: by prompt, [drafted, accepted] each. Plain
    decoding has no drafter, no rounds and no counters."""

    tokens: list[list[int]]
    drafter: Speculation | None
    rounds: list[list[list[int]]]
    counters: Counters | None
    engine: str  # name and version


def serve(
    target: Target,
    jobs: Mapping[str, Speculation | None],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int,
    seed: int,
) -> dict[str, Served]:
    """vLLM's answers to the same prompts with each drafter; None is plain decoding.

    The target is loaded by its name in its own dtype; EOS are its `eos_ids` and no others."""
    python = engine_python()
    K = max([job.K for job in jobs.values() if job], default=0)
    longest = max(len(ids) for ids in prompts) + max_new_tokens + 2 * K + 2
    own = dataclasses.asdict(sampling) | {
        "max_tokens": max_new_tokens, "stop_token_ids": list(target.eos_ids), "ignore_eos": True,
        "detokenize": False,
    }  # fmt: skip
    request = {
        "engine": {
            **model_options(target),
            "max_model_len": min(target.context, longest),
            "max_num_seqs": min(batch_size, len(prompts)),
            **ENGINE,
        },
        "prompts": list(prompts),
        "sampling": [own | {"seed": seed + index} for index in range(len(prompts))],
        "jobs": {name: job.config(sampling) if job else None for name, job in jobs.items()},
    }
    answer = _run(python, request)
    engine = f"vllm {answer['version']}"
    return {name: _served(name, job, answer["jobs"][name], engine) for name, job in jobs.items()}


def _run(python: Path, request: dict[str, Any]) -> dict[str, Any]:
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


def _served(name: str, job: Speculation | None, answer: dict[str, Any], engine: str) -> Served:
    if job is None:
        return Served(answer["tokens"], None, [], None, engine)
    counters = Counters.named(answer["counters"])
    rounds = [one for own in answer["rounds"] for one in own]
    reached = [sum(accepted > i for _, accepted in rounds) for i in range(job.K)]
    summed = Counters(len(rounds), sum(drafted for drafted, _ in rounds), sum(reached), reached)
    if summed != counters:
        raise RunFault(f"{name}: vLLM's rounds add up to {summed}, its counters say {counters}")
    return Served(answer["tokens"], job, answer["rounds"], counters, engine)


def prompt_counters(served: Served, index: int, trace: Trace, K: int) -> PromptCounters:
    """Counters of one prompt, the engine's and those cut at the end of its answer."""
    left, rounds = len(served.tokens[index]) - 1, []
    for drafted, accepted in served.rounds[index]:
        kept = min(accepted + 1, left)
        left -= kept
        one = Round(
            prompt_hash=trace.prompt_hash, submitted=drafted, depth=drafted,
            accepted=min(accepted, kept), emitted=kept,
            first_reject_pos=accepted + 1 if accepted < min(drafted, kept) else None,
            draft_forwards=0, draft_tokens=0, t_draft=0.0, t_verify=0.0, t_other=0.0, ctx_len=0,
            overlap=[], truncated=kept <= accepted, engine_accepted=accepted,
        )  # fmt: skip
        rounds.append(one)
    if left or not all(one.emitted for one in rounds):
        raise RunFault(
            f"prompt {trace.prompt_hash[:12]}: the rounds of vLLM do not make up its answer "
            "(no room to draft, or a request started anew): lower eval.batch_size or the lengths"
        )
    check_invariants(rounds, len(served.tokens[index]))
    return counters_from_rounds(rounds, trace.prompt_hash, trace.domain, K)


def served_row(bench: Bench, name: str, served: Served, plain: Served, cost: Cost) -> Measurement:
    """A row of the report, measured by vLLM on the bench's traces in their order; `plain`: vLLM
    without a drafter."""
    assert served.drafter is not None, "plain decoding is no row of a drafter"
    K = served.drafter.K
    counters = [prompt_counters(served, i, trace, K) for i, trace in enumerate(bench.traces)]
    about = {"engine": served.engine, "draft_sampled": served.drafter.sampled}
    return engine_row(bench, name, counters, served.tokens, plain.tokens, cost, about)


def engine_row(
    bench: Bench,
    name: str,
    counters: list[PromptCounters],
    answers: Sequence[list[int]],
    plain: Sequence[list[int]],
    cost: Cost,
    about: dict[str, Any],
) -> Measurement:
    """Greedy answers are compared with `plain`, of drawn ones the first few with the target's law.
    What takes the drafter's law (alpha) or a clock stays null."""
    differing, strange = list[dict[str, Any]](), None
    greedy = bench.sampling.temperature == 0
    if not greedy:
        drawn = zip(bench.requests(), answers, strict=True)
        told = [Continuation(request, tokens, "") for request, tokens in drawn]
        strange = unlike(bench.target, told[:CHECKED])
    if greedy:
        for i, (one, request) in enumerate(zip(counters, bench.requests(), strict=True)):
            trace = bench.traces[i]
            answer = Speculated(request, answers[i], trace.finish_reason, [])
            gap = difference(bench.target, trace.prompt_ids, plain[i], answer)
            one.identical = gap is None
            if gap is not None:
                differing.append({"prompt_hash": one.prompt_hash, **gap})
    row = bench._row(name, counters, cost, "vllm", Budget(counters[0].K))
    row |= {"policy": "fixed", **about}
    if greedy:
        row |= {"num_compared": len(counters), "differing_prompts": differing}
        row["lossless"] = all(one["near_tie"] for one in differing)
    elif strange:
        note = f"the engine does not sample the target's law ({strange})"
        row |= {"lossless": False, "note": "; ".join(filter(None, [row.get("note"), note]))}
    return Measurement(row, counters)


def from_metrics(text: str) -> Counters:
    """The counters in a server's `/metrics` text, summed over its engines."""
    totals = defaultdict[str, int](int)
    for name, position, value in METRIC.findall(text):
        totals[position or name] += int(float(value))
    if "drafts" not in totals:
        remedy = "start vLLM with --speculative-config and without --disable-log-stats"
        raise UserError(f"the metrics hold no counters of speculative decoding: {remedy}")
    positions = [totals[place] for place in sorted(filter(str.isdigit, totals), key=int)]
    return Counters.named({**totals, "accepted_tokens_per_pos": positions})


def scrape(url: str) -> Counters:
    """The counters of the vLLM server at `url`, such as http://127.0.0.1:8000, since its start."""
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    if not is_address(address):
        raise UserError(f"the server's address must begin with http:// or https://, got {url!r}")
    try:
        with urlopen(address, 10) as response:
            text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"cannot read {address} ({error}): is the server running?") from error
    return from_metrics(text)
