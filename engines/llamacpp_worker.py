"""Runs llama.cpp on prompts with one drafter, or with none, and writes what it said and counted:

    python llamacpp_worker.py <asked.json> <answered.json>

llama.cpp ends its process where an assertion of it fails, so it has one of its own. Its server
listens on this machine while it works; prompts go one by one, and its counters are read after each.
This file imports nothing of the project.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, TypedDict

COUNTER = re.compile(r'(?m)^llamacpp:spec_decode_num_(\w+)_total(?:\{position="(\d+)"\})? (\S+)')
TRACE = 4  # the verbosity at which it writes the milliseconds of drafting after each answer


class Asked(TypedDict):
    """A job. `types`: how it drafts, by the names of `--spec-type`, none for plain decoding;
    `drafter`: the file of one, or null; `ngram`: tokens that a copy goes by; `rejected`: every
    draft is, whatever it holds, and answers end at their limit alone; `prompts`: token ids;
    `limits`: the tokens of each answer; `draws`: the keys of sampling."""

    target: str
    types: list[str]
    drafter: str | None
    ngram: int
    K: int
    rejected: bool
    context: int
    threads: int
    prompts: list[list[int]]
    limits: list[int]
    draws: dict[str, object]
    seed: int


class Answer(TypedDict):
    """What came for one prompt: tokens, the ending one included; seconds from the first token to
    the last; what the counters have counted for it, and by position in a draft."""

    tokens: list[int]
    seconds: float
    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]


def parameters(asked: Asked) -> Any:  # noqa: ANN401 - of xllamacpp
    """llama.cpp's settings: one prompt at a time, nothing kept from one to the next, cache and
    attention in float32 (its flash attention moves logits by 1e-3), and drafts of K tokens however
    unlikely they are."""
    llama: Any = importlib.import_module("xllamacpp")

    exact = llama.ggml_type.GGML_TYPE_F32
    found = llama.CommonParams()
    found.model.path = asked["target"]
    found.n_ctx, found.n_parallel, found.n_gpu_layers = asked["context"], 1, 0
    found.warmup, found.fit_params, found.endpoint_metrics = False, False, True
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = asked["threads"]
    found.cache_type_k = found.cache_type_v = exact
    found.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    found.verbosity = TRACE
    if asked["types"]:
        speculative, K = found.speculative, asked["K"]
        names = [one.upper().replace("-", "_") for one in asked["types"]]
        known = llama.common_speculative_type
        speculative.types = [getattr(known, f"COMMON_SPECULATIVE_TYPE_{one}") for one in names]
        simple, mod = speculative.ngram_simple, speculative.ngram_mod
        simple.size_n, simple.size_m = asked["ngram"], K
        mod.n_match, mod.n_min, mod.n_max = asked["ngram"], 1, K
        if asked["rejected"]:
            speculative.synth_rates = [0.0] * K
        draft = speculative.draft
        draft.mparams.path = asked["drafter"] or ""
        draft.n_max, draft.n_min, draft.p_min, draft.n_gpu_layers = K, 0, 0.0, 0
        draft.cache_type_k = draft.cache_type_v = exact
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = asked["threads"]
    return found


def post(address: str, content: object) -> dict[str, Any]:
    request = urllib.request.Request(
        address, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    try:
        return json.loads(OPENER.open(request).read())
    except urllib.error.HTTPError as error:
        sys.exit(f"llama.cpp answers {error.code}: {error.read().decode(errors='replace')}")


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine


def counters(address: str) -> dict[str, list[int]]:
    """Since the start of the server: drafts, draft_tokens, accepted_tokens, and by position."""
    found: dict[str, list[int]] = {}
    for name, position, value in COUNTER.findall(OPENER.open(f"{address}/metrics").read().decode()):
        values = found.setdefault(name, [])
        assert int(position or 0) == len(values), f"{name}: positions in another order"
        values.append(int(float(value)))
    return found


def answer(address: str, asked: Asked, prompt: list[int], limit: int, seed: int) -> Answer:
    before = counters(address)
    said = post(f"{address}/completion", {
        "prompt": prompt, "n_predict": limit, "seed": seed, "ignore_eos": asked["rejected"],
        "cache_prompt": False, "return_tokens": True, **asked["draws"],
    })  # fmt: skip
    now = counters(address)
    positions = now.get("accepted_tokens_per_pos", [])
    earlier = before.get("accepted_tokens_per_pos", []) or [0] * len(positions)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (now[name][0] - before[name][0] for name in names)
    return {
        "tokens": said["tokens"], "seconds": said["timings"]["predicted_ms"] / 1000,
        "drafts": drafts, "drafted": drafted, "accepted": accepted,
        "accepted_per_position": [a - b for a, b in zip(positions, earlier, strict=True)],
    }  # fmt: skip


def main(asked_file: str, answered_file: str) -> None:
    llama: Any = importlib.import_module("xllamacpp")

    asked: Asked = json.loads(Path(asked_file).read_text())
    server = llama.Server(parameters(asked))
    address = server.listening_address
    prompts = list(zip(asked["prompts"], asked["limits"], strict=True))
    # the first forward reads the files; reversed, so that copies do not know the first prompt
    answer(address, asked, prompts[0][0][::-1], prompts[0][1], asked["seed"])
    answers = [
        answer(address, asked, prompt, limit, asked["seed"] + index)
        for index, (prompt, limit) in enumerate(prompts)
    ]
    version = importlib.metadata.version("xllamacpp")
    Path(answered_file).write_text(json.dumps({"version": version, "answers": answers}))


if __name__ == "__main__":
    main(*sys.argv[1:])
