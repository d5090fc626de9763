"""Runs vLLM in the engine's environment (`engines.vllm_run` starts it):

    python vllm_worker.py request.json answer.json

It reads a `WorkerRequest` and writes a `WorkerAnswer`, both as JSON. It imports nothing of this
project.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "vllm:spec_decode_num_"


class WorkerRequest(TypedDict):
    """The jobs to run."""

    engine: dict[str, object]  # arguments of vllm.LLM
    prompts: list[list[int]]  # token ids
    sampling: list[dict[str, object]]  # arguments of vllm.SamplingParams, one for each prompt
    warm_up: int  # prompts that are answered before, untimed and not counted
    alone: list[int]  # prompts that are answered once more, one by one, for their times
    jobs: dict[str, dict[str, object] | None]  # speculative_config; None for plain decoding


class CounterValues(TypedDict):
    """vLLM's own counters of a job, for all its prompts, without their prefix."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_tokens_per_pos: list[int]


class JobAnswer(TypedDict):
    """The result of a job, by prompt."""

    tokens: list[list[int]]
    rounds: list[list[list[int]]]  # [drafted, accepted] of each round
    counters: CounterValues  # empty for plain decoding
    seconds: float  # for all prompts, the engine being loaded
    alone: list[tuple[float, int, int]]  # `timing` of each prompt of the request's `alone`


class WorkerAnswer(TypedDict):
    """The results of all jobs."""

    version: str  # of vLLM
    device: str
    jobs: dict[str, JobAnswer]


class _Metric(Protocol):
    name: str
    value: int


class _Engine(Protocol):
    """What is used here of vllm.LLM, which is not installed where types are checked."""

    def get_metrics(self) -> Iterable[_Metric]: ...
    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]: ...


def counters(llm: _Engine) -> dict[str, int | list[int]]:
    """vLLM's counters so far by name, without their prefix; those by position are lists."""
    found: dict[str, int | list[int]] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            values = getattr(metric, "values", None)
            found[metric.name[len(PREFIX) :]] = metric.value if values is None else list(values)
    return found


def difference(
    now: Mapping[str, int | list[int]], before: Mapping[str, int | list[int]]
) -> dict[str, int | list[int]]:
    """What the counters have counted since."""
    found: dict[str, int | list[int]] = {}
    for name, value in now.items():
        then = before[name]
        if isinstance(value, list) and isinstance(then, list):
            found[name] = [a - b for a, b in zip(value, then, strict=True)]
        elif isinstance(value, int) and isinstance(then, int):
            found[name] = value - then
    return found


def timing(llm: _Engine, prompt: object, params: object) -> tuple[float, int, int]:
    """(seconds, rounds, tokens) of decoding one prompt at batch 1: what follows the first token,
    which the prompt's own forward gives. Plain decoding has a round for each token. Every interval
    between two outputs of vLLM holds one forward of the target and the drafting of one round."""
    (output,) = llm.generate([prompt], [params], use_tqdm=False)
    answer, times = output.outputs[0], output.metrics
    tokens, own = len(answer.token_ids) - 1, answer.spec_decode_metrics
    rounds = tokens if own is None else len(own.per_step_drafted)
    return times.last_token_ts - times.first_token_ts, rounds, tokens


def serve(request: WorkerRequest, speculative: Mapping[str, object] | None) -> dict[str, object]:
    """Run one job with an engine of its own; the `JobAnswer`."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    options = dict(request["engine"])
    if speculative:
        options["speculative_config"] = speculative
        options["per_request_spec_decode_metrics"] = "detailed"
    llm = LLM(**options)
    try:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = [SamplingParams(**one) for one in request["sampling"]]
        warm = request["warm_up"]
        if warm:
            llm.generate(prompts[:warm], params[:warm], use_tqdm=False)
        before = counters(llm)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        answers = [output.outputs[0] for output in outputs]
        rounds = []
        for answer in answers if speculative else ():
            own = answer.spec_decode_metrics
            rounds.append(list(zip(own.per_step_drafted, own.per_step_accepted, strict=True)))
        counted = difference(counters(llm), before)  # before prompts are answered again
        alone = request["alone"]
        times = [timing(llm, prompts[i], params[i]) for i in [*alone[:1], *alone]]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "rounds": rounds,
            "counters": counted,
            "seconds": seconds,
            "alone": times[1:],  # the first one was a warm-up
        }
    finally:  # an engine holds its memory until it is shut down
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def repair() -> None:
    """Replace a kernel of vLLM's CPU build (0.32.0) by what it computes on a GPU.

    The CPU build divides logits by memory that was never written: its `expand` kernel, which
    repeats each prompt's temperature for its drafted tokens, fills a converted copy of the
    result. The sampled tokens are then noise."""
    import torch
    from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]

    def expand(
        values: Tensor,
        ends: Tensor,
        num_tokens: int,
        replace_from: float = 0,
        replace_to: float = 0,
    ) -> Tensor:
        values = torch.where(values == replace_from, replace_to, values).to(values.dtype)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def device() -> str:
    """What vLLM runs on."""
    import torch
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu():
        return f"{torch.get_num_threads()} threads of a CPU"
    return current_platform.get_device_name()


def main(request_file: str, answer_file: str) -> None:
    """Run all jobs of a request file."""
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    request: WorkerRequest = json.loads(Path(request_file).read_text())
    version = vllm.__version__
    if current_platform.is_cpu() and any(one["temperature"] for one in request["sampling"]):
        repair()
        version += " (CPU build, its sampling repaired)"
    jobs = {name: serve(request, config) for name, config in request["jobs"].items()}
    answer = {"version": version, "device": device(), "jobs": jobs}
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
