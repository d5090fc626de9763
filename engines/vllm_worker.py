"""Runs in the engine's environment and imports nothing of this project (`eval.served` starts it):

    python vllm_worker.py request.json answer.json

request: {"engine": arguments of vllm.LLM, "prompts": [[ids], ...], "sampling": [arguments of
vllm.SamplingParams, one a prompt], "jobs": {name: speculative_config, or null for plain decoding}}.
answer: {"version", "jobs": {name: {"tokens": [[ids], ...], "rounds": [[[drafted, accepted], ...],
...] one list a prompt, "counters": {...}}}}, the counters being vLLM's own for the whole set.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters so far by name, without its prefix; by position they are lists."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            values = getattr(metric, "values", None)
            found[metric.name[len(PREFIX) :]] = metric.value if values is None else list(values)
    return found


def serve(request: dict[str, Any], speculative: dict[str, Any] | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    options = dict(request["engine"])
    if speculative:
        options["speculative_config"] = speculative
        options["per_request_spec_decode_metrics"] = "detailed"
    llm = LLM(**options)
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in request["prompts"]],
            [SamplingParams(**one) for one in request["sampling"]],
            use_tqdm=False,
        )
        answers = [output.outputs[0] for output in outputs]
        rounds = []
        for answer in answers if speculative else ():
            own = answer.spec_decode_metrics
            rounds.append(list(zip(own.per_step_drafted, own.per_step_accepted, strict=True)))
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "rounds": rounds,
            "counters": counters(llm),
        }
    finally:  # an engine holds its share of the memory until it is told to let go
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def repair() -> None:
    """vLLM's CPU build (0.32.0) divides logits by memory never written: its `expand` kernel, which
    repeats each prompt's temperature for its drafted tokens, fills a converted copy of the result.
    What is sampled then is noise. This is what the kernel computes on a GPU."""
    import torch
    from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]

    def expand(values: Any, ends: Any, num_tokens: int, replace_from: Any = 0, replace_to: Any = 0):
        values = torch.where(values == replace_from, replace_to, values).to(values.dtype)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def main(request_file: str, answer_file: str) -> None:
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    request = json.loads(Path(request_file).read_text())
    version = vllm.__version__
    if current_platform.is_cpu() and any(one["temperature"] for one in request["sampling"]):
        repair()
        version += " (CPU build, its sampling repaired)"
    jobs = {name: serve(request, config) for name, config in request["jobs"].items()}
    answer = {"version": version, "jobs": jobs}
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
