"""Generation and decoding on a GPU: an 8B-size target and a 0.6B-size drafter, bfloat16.

    python -m benchmarks.gpu              # needs a GPU with 40 GB or more
    python -m benchmarks.gpu tiny         # the same code on any machine, to see that it runs

Both models are randomly initialised (Qwen3 shapes), so acceptance means nothing here; speed does.
Also the share of greedy prompts whose speculative output differs from plain decoding in bfloat16,
with the gaps between the two best logits where they part. Training: `benchmarks.gpu_training`.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from drafters.causal_lm import CausalLMDrafter
from eval.engine import SpeculativeDecoder
from eval.measure import difference
from eval.policies.table import make_budget
from target.cache import CachedModel
from target.decode import Continuation, Request, decode
from target.fingerprint import fingerprint
from target.model import Target
from target.sampling import Sampling, row_key

T = TypeVar("T")
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "full": {
        "target": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        "draft": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        "common": {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 4096},
        "run": {
            "prompt": 512,
            "new": 128,
            "rows": 32,
        },
    },
    "tiny": {
        "target": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "draft": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "common": {"vocab_size": 300, "head_dim": 16, "max_position_embeddings": 256},
        "run": {"prompt": 32, "new": 16, "rows": 8},
    },
}


def byte_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A stand-in with the right number of ids; the benchmark draws ids, not text."""
    vocabulary = {f"<{i}>": i for i in range(size)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<0>", pad_token="<1>")


def build(
    shape: dict[str, int], common: dict[str, int], device: str, dtype: torch.dtype
) -> PreTrainedModel:
    config = Qwen3Config(**shape, **common, tie_word_embeddings=False, eos_token_id=0)  # type: ignore[arg-type]
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        torch.set_default_dtype(torch.float32)
    return model.eval()


def random_target(
    shapes: dict[str, dict[str, int]], size: str, device: str, dtype: torch.dtype
) -> Target:
    tokenizer = byte_tokenizer(shapes["common"]["vocab_size"])
    model = build(shapes["target"], shapes["common"], device, dtype)
    model.requires_grad_(False)
    identity = fingerprint("random", model, tokenizer, (0,))
    return Target(model, tokenizer, f"random {size}", identity, (0,))


def seconds(call: Callable[[], T]) -> tuple[float, T]:
    _sync()
    began = time.perf_counter()
    result = call()
    _sync()
    return time.perf_counter() - began, result


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    size = "tiny" if arguments[:1] == ["tiny"] else "full"
    if size == "full" and not torch.cuda.is_available():
        sys.exit("error: no GPU here; `python -m benchmarks.gpu tiny` runs the same code small")
    shapes, run = SHAPES[size], SHAPES[size]["run"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    target = random_target(shapes, size, device, dtype)
    model, tokenizer = target.model, target.tokenizer
    draft = build(shapes["draft"], shapes["common"], device, torch.float32)
    drafter = CausalLMDrafter(draft, tokenizer, target.vocab_size, target.fingerprint)
    prompts = torch.randint(
        2, shapes["common"]["vocab_size"], (run["rows"], run["prompt"])
    ).tolist()
    requests = [Request(p, row_key(0, p, 0), Sampling(0.0), str(i)) for i, p in enumerate(prompts)]
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "target_parameters": sum(p.numel() for p in model.parameters()),
        "draft_parameters": drafter.num_parameters,
    }

    def generate() -> list[Continuation]:
        return list(
            decode(
                CachedModel(model),
                list(requests),
                max_new_tokens=run["new"],
                eos_ids=(),
                batch_size=run["rows"],
            )
        )

    generate()
    spent, plain = seconds(generate)
    result["generation_tokens_per_s"] = run["rows"] * run["new"] / spent

    drafter.model.to(dtype)
    by_tag = {row.request.tag: row.response_ids for row in plain}
    for batch_size in (1, run["rows"]):
        decoder = SpeculativeDecoder(
            CachedModel(model),
            drafter,
            sampling=Sampling(0.0),
            budget=make_budget("fixed", 4),
            eos_ids=(),
            max_new_tokens=run["new"],
            batch_size=batch_size,
        )
        some = requests if batch_size > 1 else requests[:4]
        spent, found = seconds(lambda d=decoder, r=some: list(d.run(r)))
        gaps = [
            difference(target, one.request.prompt_ids, by_tag[one.request.tag], one)
            for one in found
        ]
        result[f"speculative_batch_{batch_size}"] = {
            "tokens_per_s": len(some) * run["new"] / spent,
            "differing_share": sum(g is not None for g in gaps) / len(gaps),
            "logit_gaps": sorted(g["logit_gap"] for g in gaps if g is not None),
        }
    if device == "cuda":
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(result, indent=1))
    if size == "full":
        Path("benchmarks/results").mkdir(exist_ok=True)
        Path("benchmarks/results/gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
