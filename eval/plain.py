"""Plain decoding, which speculative decoding is compared with: its text, its time, its loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

import torch
from transformers import GenerationConfig

from data.batches import collate
from data.traces import Trace
from eval.engine import Speculated
from target.model import Target
from target.padding import by_length
from target.sampling import Sampling
from trainer.chunked import chunked_divergence
from trainer.divergence import DIVERGENCES
from trainer.errors import RunFault
from trainer.logits import OutputHead
from trainer.shift import supervised

T = TypeVar("T")
NEAR_TIE = 1e-4  # logits closer than this may swap between kernels in float32
NEAR_TIE_ROUNDINGS = 4  # and in a shorter dtype those within so many of its last places


class Parting(TypedDict):
    """The first place at which an answer differs from that of plain decoding."""

    position: int
    logit_gap: float  # of the target there: its best logit less those of the two answers' tokens
    near_tie: bool  # the gap is no more than rounding explains


def timed(call: Callable[[], T], target: Target) -> tuple[T, float]:
    """The result of a call and its seconds, with the device synchronised."""
    began = time.perf_counter()
    result = call()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


@torch.inference_mode()
def next_token_loss(target: Target, traces: Sequence[Trace], batch_size: int = 16) -> float:
    """Mean -log p of the traces' responses at temperature 1, in nats per token."""
    total, count = 0.0, 0
    for group in by_length(traces, lambda t: t.num_tokens, batch_size):
        texts = [t.prompt_ids for t in group], [t.response_ids for t in group]
        batch = collate(*texts, ["target"] * len(group)).to(target.device)
        states = target.outputs(batch.input_ids, layers=("final_norm",), logits=False).hidden
        where = supervised(batch.loss_mask)
        picked, labels = states["final_norm"][:, :-1][where], batch.input_ids[:, 1:][where]
        loss = chunked_divergence(DIVERGENCES["ce_hard"](), picked, target.head, None, labels)
        total += float(loss.total)
        count += len(labels)
    if not math.isfinite(total):
        raise RunFault("logits of the target contain NaN or Inf at a position of a response")
    return total / count


@torch.inference_mode()
def plain_generate(
    target: Target, prompt_ids: list[int], sampling: Sampling, max_new_tokens: int
) -> list[int]:
    """transformers' own generate at batch 1: the plain decoding that ours must equal at T=0."""
    options: dict[str, object] = {"do_sample": False}
    if sampling.temperature > 0:
        options |= {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": None,
        }
    ids = torch.tensor([prompt_ids], device=target.device)
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()  # the model's may change the distribution
    try:
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(target.eos_ids) or None,
            pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
            # ids without a token: their logits are padding
            suppress_tokens=list(range(target.vocab_size, target.logits_width)) or None,
            synced_gpus=False,  # processes wait for each other in `target.sharded`
            **options,
        )
    finally:
        target.model.generation_config = own
    return output[0, len(prompt_ids) :].tolist()


def difference(
    target: Target,
    prompt_ids: list[int],
    plain: list[int],
    ours: Speculated,
    dtype: torch.dtype | None = None,
) -> Parting | None:
    """The place where two answers part, with the gap between the target's logits; None if equal.
    `dtype`: that rounds as what wrote them does; None: the target's own.

    The gap is of float32 products with the head: in bfloat16 two logits of size 20 are equal up to
    0.125. Where one answer ends, it is that of the two best logits."""
    mine = ours.response_ids
    if plain == mine:
        return None
    where = next(
        (i for i, (a, b) in enumerate(zip(plain, mine, strict=False)) if a != b),
        min(len(plain), len(mine)),
    )
    ids = torch.tensor([prompt_ids + plain[:where]], device=target.device)
    states = target.outputs(ids, layers=("final_norm",), logits=False).hidden["final_norm"][0, -1:]
    head = target.head
    best = head.logits(states)[0].float().topk(2).indices
    parted = [answer[where] for answer in (plain, mine) if where < len(answer)]
    asked = torch.tensor(parted, device=target.device) if len(parted) == 2 else best
    tokens = torch.cat([asked, best])
    exact = OutputHead(
        head.weight[tokens].float(),
        None if head.bias is None else head.bias[tokens].float(),
        transform=head.transform,
    )
    logits = exact.logits(states)[0]
    gap = float(logits.max() - logits[: len(asked)].min())
    tie = near_tie(dtype or target.model.dtype, logits)
    return {"position": where, "logit_gap": gap, "near_tie": gap < tie}


def near_tie(dtype: torch.dtype, logits: torch.Tensor) -> float:
    """The gap below which two logits as large as these may swap between kernels."""
    rounding = torch.finfo(dtype).eps * float(logits.abs().max())
    return max(NEAR_TIE, NEAR_TIE_ROUNDINGS * rounding)
