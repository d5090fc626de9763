"""Costs of drafting and verifying on this machine: seconds, bytes and parameters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from drafters.base import TrainedDrafter
from drafters.causal_lm import parameters_read
from drafters.round import Budget, Drafter, DraftState
from eval.policies.base import Recorder
from target.cache import CachedModel
from target.model import Target
from target.outputs import TargetOutputs
from target.rotary import context_of
from target.sampling import KeyedRandom, Sampling
from trainer.progress import working
from trainer.threads import settle_threads


@dataclass(frozen=True)
class Cost:
    """Costs of a drafter relative to its target.

    `round_time`: time of drafting a round over that of a target forward on one token; `verify`:
    time of the target's forward on all verified tokens over that on one; `round_bytes`,
    `round_parameters`: read by the drafting of a round over those read by a step of the target;
    `source`: what the times are of, since an engine on the same device has others; `one_pass`: a
    round costs this however early a stop rule ends it, since one pass drafts all its tokens.
    """

    round_time: float
    verify: float
    round_bytes: float
    round_parameters: float
    source: str = "not measured"
    one_pass: bool = False


# of a configuration of transformers: the experts that a token is sent to, and all of a layer
ROUTED = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def routed_shares(module: nn.Module) -> dict[torch.Tensor, float]:
    """The share of each weight of routed experts in `module` that a token reads."""
    shares: dict[torch.Tensor, float] = {}
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            config = model.config.get_text_config()
            sent, of_all = (
                next((n for key in keys if isinstance(n := getattr(config, key, None), int)), 0)
                for keys in (ROUTED, EXPERTS)
            )
            if sent and of_all:
                named = model.named_parameters()
                experts = (p for name, p in named if "experts" in name.split("."))
                shares |= dict.fromkeys(experts, sent / of_all)
    return shares


def _amounts(
    read: Iterable[torch.Tensor], shares: Mapping[torch.Tensor, float]
) -> tuple[float, float]:
    """(bytes, parameters) of weights that are read, some of them to a share."""
    counts = [(p.numel() * shares.get(p, 1), p.element_size()) for p in read]
    return sum(count * size for count, size in counts), sum(count for count, _ in counts)


def read_per_step(model: PreTrainedModel) -> tuple[float, float]:
    """(bytes, parameters) that one decoding step reads for one token."""
    return _amounts(parameters_read(model), routed_shares(model))


def read_per_round(drafter: TrainedDrafter, depth: int) -> tuple[float, float]:
    """(bytes, parameters) that drafting a round of `depth` tokens reads.

    They include the target's head where the drafter uses it. A drafter with `one_pass` reads once
    what it drafts with, and of heads for the depths only those of this round; other drafters read
    all in each of `depth` forwards, but for a head of one depth, which one of them reads.
    """
    own = list(drafter.drafting_parameters(depth))
    head = drafter.output_head(1).weight
    shared = [] if any(p is head for p in own) else [head]
    forwards = 1 if drafter.one_pass else depth
    share = forwards if drafter.one_pass or drafter.max_depth is None else depth / drafter.max_depth
    own_read, shared_read = _amounts(own, routed_shares(drafter)), _amounts(shared, {})
    size, count = (a * share + b * forwards for a, b in zip(own_read, shared_read, strict=True))
    return size, count


READ = "weights that are read, in bytes: without the target's layers nothing is timed"
CONTEXT = 64  # tokens before those of the forwards that are timed, where the models see as many


def timed_context(drafter: Drafter, target: Target, K: int) -> int:
    """Tokens to time behind: `CONTEXT`, or what leaves room for a round of K tokens."""
    longest = target.context
    if isinstance(drafter, TrainedDrafter) and drafter.context is not None:
        longest = min(longest, drafter.context)
    return max(FEWEST, min(CONTEXT, longest - K - 1))


FEWEST = 4  # a round needs a prompt, and heads a column of it


@torch.inference_mode()
def step_seconds(model: PreTrainedModel, tokens: int, context: int) -> float:
    """Median seconds of one cached forward of `tokens` tokens behind `context` at batch 1.

    The nodes of a tree may be more than positions are left: the last ones share one.
    """
    cached = CachedModel(model)
    device = cached.device
    cached.begin(1, context + tokens)
    positions = torch.arange(context + tokens, device=device).unsqueeze(0)
    positions = positions.clamp(max=context_of(model.config.get_text_config()) - 1)
    first, last = positions[:, :context], positions[:, context:]
    cached.forward(torch.ones_like(first), first, used=context, first=0)
    spent = []
    for _ in range(18):
        began = time.perf_counter()
        cached.forward(torch.ones_like(last), last, used=context + tokens, first=context)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return sorted(spent[3:])[7]


@torch.inference_mode()
def draft_seconds(drafter: TrainedDrafter, target: Target, budget: Budget, context: int) -> float:
    """Median seconds of drafting one round behind `context` tokens at batch 1."""
    device = target.device
    # no token twice, so that a shape that copies drafts
    ids = torch.arange(context, device=device).unsqueeze(0) % target.vocab_size
    capacity = context + budget.max_tokens + budget.max_slots + 2
    hidden = target.outputs(ids, layers=drafter.target_layers, logits=False).hidden
    lengths = torch.tensor([context - 1], device=device)
    state = DraftState(
        ids, lengths, context - 1, Sampling(0.0), KeyedRandom(torch.zeros_like(lengths)),
        TargetOutputs(hidden),
    )  # fmt: skip
    drafter.begin(1, capacity)
    if budget.stop is not None:
        budget.stop.begin(1, device)
    prompt = TargetOutputs({layer: states[:, :-2] for layer, states in hidden.items()})
    drafter.prefill(torch.tensor([0], device=device), ids[:, :-2], lengths - 1, prompt)
    spent = []
    for _ in range(18):
        began = time.perf_counter()
        drafter.propose(state, budget)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return sorted(spent[3:])[7]


@working("timing drafting and verifying")
def cost_of(drafter: Drafter, target: Target, budget: Budget) -> Cost:
    """Measure the costs on this machine; a training-free drafter counts as free. Of a target
    without layers nothing is timed: a round takes the time that reading its weights does, and
    verification that of one token."""
    settle_threads()
    context = timed_context(drafter, target, budget.max_tokens)
    step, verify, source = 0.0, 1.0, READ
    if target.has_layers:
        step = step_seconds(target.model, 1, context)
        verify = max(1.0, step_seconds(target.model, budget.max_nodes + 1, context) / step)
        source = timed_on(target, context)
    if not isinstance(drafter, TrainedDrafter):
        return Cost(0.0, verify, 0.0, 0.0, source)
    read = read_per_round(drafter, budget.max_tokens)
    if budget.stop is not None and budget.stop.uses_head:
        head = drafter.judging_parameters()
        counts = [sum(p.numel() * size for p in head) for size in (4, 1)]  # it is in float32
        read = tuple(a + b * budget.max_tokens for a, b in zip(read, counts, strict=True))
    whole = read_per_step(target.model)
    shares = read[0] / whole[0], read[1] / whole[1]
    if not target.has_layers:
        return Cost(shares[0], verify, *shares, source, drafter.one_pass)
    # of a round of full length: where a stop rule would end it on this text means nothing
    stop = None if budget.stop is None else Recorder(uses_head=budget.stop.uses_head)
    whole_round = dataclasses.replace(budget, stop=stop)
    ratio = draft_seconds(drafter, target, whole_round, context) / step
    return Cost(ratio, verify, *shares, source, drafter.one_pass)


def timed_on(target: Target, context: int) -> str:
    """What the times of `cost_of` are of, behind `context` tokens."""
    device = target.device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{torch.get_num_threads()} threads of a {device.type.upper()}"
    dtype = str(target.model.dtype).removeprefix("torch.")
    return f"this project's decoding in {dtype} on {name}, batch 1, context {context}"
