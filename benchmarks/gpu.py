"""Generation and decoding on a GPU: an 8B-size target and a 0.6B-size drafter, bfloat16.

    python -m benchmarks.gpu              # needs a GPU with 80 GB; goes on where it was stopped
    python -m benchmarks.gpu budget=12    # begins no arm after 12 minutes
    python -m benchmarks.gpu tiny         # the same code on any machine, to see that it runs

An arm decodes greedily behind the ragged prompts of a chat, or behind prompts of one length:
plainly and speculatively (K=4), one by one and all at once. It gives the tokens per second of the
prompts and, without their time, of the answers. Both models are randomly initialised (Qwen3
shapes), so acceptance means nothing here; speed does. Also the share of prompts whose speculative
output differs from plain decoding in bfloat16, with the gaps between the two best logits where they
part. Training: `benchmarks.gpu_training`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from benchmarks.arms import (
    Result,
    chat_lengths,
    peak_memory_gib,
    reset_peak_memory,
    run_arms,
    sizes_of,
)
from drafters.causal_lm import CausalLMDrafter
from eval.engine import Speculated, SpeculativeDecoder
from eval.measure import difference
from eval.policies.table import make_budget
from target.cache import CachedModel
from target.decode import Continuation, Request, decode
from target.fingerprint import fingerprint
from target.model import Target
from target.sampling import Sampling, row_key

T = TypeVar("T")
A = TypeVar("A")  # an answer
NEW = {"full": 128, "tiny": 6}  # tokens of an answer
# longest prompt of a chat, then the prompts of one length each
CONTEXTS = {"full": (2048, 2048, 8192, 32768), "tiny": (64, 32, 64, 128)}
CHAT_ROWS = {"full": 32, "tiny": 4}
TOKENS = {"full": 2**16, "tiny": 256}  # of all prompts of one length
RESULT = Path("benchmarks/results/gpu.json")
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
        "common": {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960},
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


def prompt_lengths(size: str) -> dict[str, list[int]]:
    """Tokens of each prompt, by arm."""
    chat, *contexts = CONTEXTS[size]
    found = {f"{n} tokens of context": [n] * max(1, TOKENS[size] // n) for n in contexts}
    return {"chat": chat_lengths(CHAT_ROWS[size], chat), **found}


def rates(
    answer: Callable[[int], Sequence[A]], prompt_tokens: int, rows: int, new: int
) -> tuple[dict[str, float], Sequence[A]]:
    """Rates of reading the prompts, and of writing `new` tokens behind each without that, and the
    answers. `answer(n)`: answers of n tokens."""
    answer(1)
    prompts_s, _ = seconds(lambda: answer(1))
    answer(new)
    spent, found = seconds(lambda: answer(new))
    written = rows * (new - 1) / (spent - prompts_s)
    return {"prompt_tokens_per_s": prompt_tokens / prompts_s, "new_tokens_per_s": written}, found


def measure(target: Target, drafter: CausalLMDrafter, lengths: list[int], new: int) -> Result:
    """Plain and speculative decoding of prompts of these lengths, one by one and all at once."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, target.vocab_size, (n,), generator=draw).tolist() for n in lengths]
    requests = [Request(p, row_key(0, p, 0), Sampling(0.0), str(i)) for i, p in enumerate(prompts)]
    found: Result = {"prompts": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
    reset_peak_memory()

    def plain(batch_size: int, some: list[Request], count: int) -> list[Continuation]:
        return list(
            decode(
                CachedModel(target.model), list(some), max_new_tokens=count, eos_ids=(),
                batch_size=batch_size,
            )
        )  # fmt: skip

    def speculative(batch_size: int, some: list[Request], count: int) -> list[Speculated]:
        decoder = SpeculativeDecoder(
            CachedModel(target.model), drafter, sampling=Sampling(0.0),
            budget=make_budget("fixed", 4), eos_ids=(), max_new_tokens=count,
            batch_size=batch_size,
        )  # fmt: skip
        return list(decoder.run(some))

    for batch_size in (1, len(requests)):
        some = requests if batch_size > 1 else requests[:4]
        size = sum(len(request.prompt_ids) for request in some), len(some), new
        speed, answers = rates(functools.partial(plain, batch_size, some), *size)
        found[f"plain, batch {batch_size}"] = speed
        by_tag = {row.request.tag: row.response_ids for row in answers}
        speed, drafted = rates(functools.partial(speculative, batch_size, some), *size)
        gaps = [
            difference(target, one.request.prompt_ids, by_tag[one.request.tag], one)
            for one in drafted
        ]
        found[f"speculative, batch {batch_size}"] = {
            **speed,
            "differing_share": sum(gap is not None for gap in gaps) / len(gaps),
            "logit_gaps": sorted(gap["logit_gap"] for gap in gaps if gap is not None),
        }
    return {**found, "peak_memory_gib": peak_memory_gib()}


def main(arguments: list[str], path: Path | None = None) -> None:
    size, minutes = sizes_of("benchmarks.gpu", arguments)
    shapes, device = SHAPES[size], "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    target = random_target(shapes, size, device, dtype)
    model = build(shapes["draft"], shapes["common"], device, dtype)
    drafter = CausalLMDrafter(model, target.tokenizer, target.vocab_size, target.fingerprint)
    arms = {
        name: functools.partial(measure, target, drafter, lengths, NEW[size])
        for name, lengths in prompt_lengths(size).items()
    }
    run_arms(
        arms, path or (RESULT if size == "full" else None), minutes,
        target_parameters=sum(p.numel() for p in target.model.parameters()),
        draft_parameters=drafter.num_parameters,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
