"""Drafters of this project with the weights of published heads, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from drafters.block import BlockDrafter, drafter_type
from drafters.block_settings import BlockSettings
from drafters.eagle1 import Eagle1Drafter, Eagle1Settings
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.formats.files import Tensors, check_tensors
from drafters.formats.head import PublishedHead
from drafters.formats.hydra import EMBEDDING, UNREAD, published_names
from drafters.hydra import HydraDrafter, HydraSettings
from drafters.medusa import MedusaDrafter, MedusaSettings
from target.model import Target
from target.rotary import by_length, context_of
from target.vocabulary import real_ids
from trainer.errors import UserError


def check_head(head: PublishedHead, target: Target) -> None:
    """Raise UserError where the head's vocabulary or its tables are not the target's.

    Drafters here use the target's tables.
    """
    width = target.fingerprint["vocab_size"]
    if head.vocab_size not in (0, width):
        raise UserError(
            f"CompatibilityError: the head was made for a vocabulary of {head.vocab_size}, the "
            f"target has {width}"
        )
    if head.layer is not None and by_length(head.layer):
        longest = context_of(head.layer)  # the frequencies of longer texts are others
        if longest < target.context:
            raise UserError(
                f"is for texts up to {longest} tokens here, the target reads {target.context}",
                key="rope_type",
                value=by_length(head.layer)[0]["rope_type"],
                remedy="name a head whose frequencies do not depend on the length of the text",
            )
    ids = torch.arange(target.vocab_size)
    for name in ("embed_tokens.weight", EMBEDDING):
        _only_if_equal(head, name, lambda: target.embedding(ids.to(target.device)))
    _only_if_equal(head, "lm_head.weight", lambda: target.head.weight, head.kind == "eagle")


def _only_if_equal(
    head: PublishedHead, name: str, table: Callable[[], torch.Tensor], applies: bool = True
) -> None:
    """Raise UserError where the head's own table `name` differs from the target's."""
    if not applies or name not in head.tensors:
        return
    ours = table()[: head.vocab_size].cpu()
    given = head.tensors[name]
    given = given[: len(ours)] if given.dim() else given
    # the same table, rounded to the dtype of one of them
    if not torch.equal(given.to(ours.dtype), ours) and not torch.equal(given, ours.to(given.dtype)):
        raise UserError(
            f"tensor {name!r} differs from the target's: this head has a table of its own (or "
            "another target), and drafters here borrow the target's"
        )


@torch.no_grad()
def eagle1(head: PublishedHead, target: Target) -> Eagle1Drafter:
    """A drafter of this target with the weights of an EAGLE-1 head; UserError where they do not
    fit."""
    assert head.layer is not None
    check_head(head, target)
    biased = "fc.bias" in head.tensors
    settings = Eagle1Settings(head.captures, target.hidden_size, fc_bias=biased)
    drafter = Eagle1Drafter(settings, head.layer, target)
    drafter.load_state_dict(_layer_weights(head))
    return drafter.eval()


@torch.no_grad()
def eagle3(head: PublishedHead, target: Target) -> Eagle3Drafter:
    """A drafter of this target with the weights of an EAGLE-3 head; UserError where they do not
    fit."""
    assert head.layer is not None
    check_head(head, target)
    state_width = head.tensors["fc.weight"].shape[1] // len(head.captures)
    if state_width != target.hidden_size:
        raise UserError(
            f"CompatibilityError: the head reads states {state_width} wide, the target's are "
            f"{target.hidden_size}"
        )
    settings = Eagle3Settings(head.captures, state_width, **head.flags)
    weights = _layer_weights(head)
    kept, weights["lm_head.weight"] = _rows(
        head, head.tensors["lm_head.weight"].float(), target.vocab_size
    )
    if kept is not None:
        weights["kept"] = kept
    drafter = Eagle3Drafter(settings, head.layer, target, kept)
    drafter.load_state_dict(weights)
    return drafter.eval()


@torch.no_grad()
def dflash(head: PublishedHead, target: Target) -> BlockDrafter:
    """A drafter of this target with the weights of a DFlash or DSpark drafter; UserError where they
    do not fit."""
    assert head.layer is not None
    check_head(head, target)
    tables = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    weights = {
        _own_block_name(name): tensor.float()
        for name, tensor in head.tensors.items()
        if name not in tables
    }
    causal, from_anchor = head.flags["causal"], head.flags["from_anchor"]
    settings = BlockSettings(
        head.captures, head.mask_token, head.block_size, causal, from_anchor,
        correction=head.correction, confidence="confidence.out.weight" in weights,
    )  # fmt: skip
    kept, rows = None, head.tensors.get("lm_head.weight")
    if rows is not None and not _is_targets(rows, head, target):
        settings.own_head = True
        kept, weights["lm_head.weight"] = _rows(head, rows.float(), target.vocab_size)
        if kept is not None:
            weights["kept"] = kept
    if head.correction != "none":
        settings.correction_rank = weights["correction.lookup.weight"].shape[1]
        _fit_heads(head, weights, target)
    if settings.confidence:
        weights["confidence.temperatures"] = torch.ones(settings.max_depth)
    drafter = drafter_type(settings.correction)(settings, head.layer, target, kept)
    drafter.load_state_dict(weights)
    return drafter.eval()


def _fit_heads(head: PublishedHead, weights: Tensors, target: Target) -> None:
    """Leave the rows of padding out of a correction, and let a confidence that reads the state
    alone read the correction with weight 0."""
    found = weights["correction.lookup.weight"]
    weights["correction.lookup.weight"] = found[: target.vocab_size]
    _, weights["correction.out.weight"] = _rows(
        head, weights["correction.out.weight"], target.vocab_size
    )
    if "confidence.out.weight" in weights:
        read, missing = weights["confidence.out.weight"], target.hidden_size + found.shape[1]
        weights["confidence.out.weight"] = F.pad(read, (0, missing - read.shape[1]))


def _own_block_name(name: str) -> str:
    """The drafter's name of a tensor of a DFlash or DSpark drafter."""
    for theirs, ours in (
        ("self_attn.", ""), ("markov_head.markov_w1", "correction.lookup"),
        ("markov_head.markov_w2", "correction.out"), ("markov_head.gate_proj", "correction.gate"),
        ("confidence_head.proj", "confidence.out"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def _is_targets(rows: torch.Tensor, head: PublishedHead, target: Target) -> bool:
    """Whether the output matrix of a head is the target's, as some files repeat it."""
    real = real_ids(target.tokenizer)
    real = real[real < target.vocab_size]
    whole = head.target_ids is None
    return whole and torch.equal(rows[real].float(), target.head.weight[real].cpu().float())


def _layer_weights(head: PublishedHead) -> Tensors:
    """Weights in float32 under the drafter's names, without the tables of tokens."""
    return {
        _own_name(name): tensor.float()
        for name, tensor in head.tensors.items()
        if name not in ("embed_tokens.weight", "d2t", "t2d", "lm_head.weight")
    }


def _own_name(name: str) -> str:
    """The drafter's name of a tensor; two norms of the layer lie outside of it here."""
    if name in ("layer.input_layernorm.weight", "layer.hidden_norm.weight"):
        return name.removeprefix("layer.")
    if name.startswith("fc_norm."):
        return name.replace("fc_norm.", "fc_norms.")
    return name.replace("layer.self_attn.", "layer.")


def _rows(
    head: PublishedHead, weight: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`kept`, ascending and without padding, or None, and the rows in that order."""
    ids = torch.arange(len(weight)) if head.target_ids is None else head.target_ids
    kept, order = ids.sort()
    order, kept = order[kept < vocab_size], kept[kept < vocab_size]
    return (None if len(kept) == vocab_size else kept), weight[order]


@torch.no_grad()
def medusa(head: PublishedHead, target: Target) -> MedusaDrafter:
    """A drafter of this target with the weights of Medusa heads; UserError where they do not
    fit."""
    check_head(head, target)
    tensors = {name: tensor.float() for name, tensor in head.tensors.items()}
    real = real_ids(target.tokenizer)
    real = real[real < target.vocab_size]
    rows = tensors.get("rows")
    lent = rows is not None and torch.equal(rows[real], target.head.weight[real].cpu().float())
    settings = MedusaSettings(head.num_heads, head.num_layers, own_head=not lent)
    drafter = MedusaDrafter.build(target, settings)
    weights = drafter.state_dict()
    expected = target.hidden_size
    for i in range(head.num_heads):
        for j in range(head.num_layers):
            weight = tensors[f"block.{i}.{j}.weight"]
            if len(weight) != expected:
                raise UserError(
                    f"CompatibilityError: the heads read states {len(weight)} wide, the target's "
                    f"are {expected}"
                )
            bias = tensors.get(f"block.{i}.{j}.bias", torch.zeros(expected))
            weights[f"blocks.{i}.layers.{j}.weight"] = weight
            weights[f"blocks.{i}.layers.{j}.bias"] = bias
        if not lent:
            own = tensors[f"rows.{i}"] if rows is None else rows
            weights[f"lm_heads.{i}.weight"] = own[: target.vocab_size]
            if f"lm_heads.{i}.bias" in weights:
                weights[f"lm_heads.{i}.bias"] = torch.zeros(target.vocab_size)
    drafter.load_state_dict(weights)
    return drafter.eval()


@torch.no_grad()
def hydra(head: PublishedHead, target: Target) -> HydraDrafter:
    """A drafter of this target with the weights of Hydra heads; UserError where they do not fit.

    Layers that the file repeats, as the published code makes it do, stay one module. The file does
    not hold the rate of dropout: it is 0.
    """
    check_head(head, target)
    names, tensors = published_names(head), head.tensors
    settings = HydraSettings(
        head.num_heads, head.num_layers, identity_residual=False,
        prefix_layer=head.flags["prefix_layer"], tie_layers=_repeats_layers(head),
    )  # fmt: skip
    drafter = HydraDrafter(settings, target)
    shapes: dict[str, tuple[int, ...]] = {}
    for own, weight in drafter.state_dict().items():
        counted = own.startswith("lm_heads.")  # rows of the configured vocabulary
        shapes[names[own]] = (head.vocab_size, *weight.shape[1:]) if counted else (*weight.shape,)
    table = (head.vocab_size, target.hidden_size)
    unread = {UNREAD: table} if settings.prefix_layer else {}
    check_tensors(head.folder, tensors, shapes, {EMBEDDING: table, **unread}, {})
    weights = {own: tensors[names[own]].float() for own in drafter.state_dict()}
    for own in weights:
        if own.startswith("lm_heads."):
            weights[own] = weights[own][: target.vocab_size]
    drafter.load_state_dict(weights)
    return drafter.eval()


def _repeats_layers(head: PublishedHead) -> bool:
    """Whether the layers of each Hydra head after the first are one."""
    names = published_names(head)
    for i, part in itertools.product(range(head.num_heads), ("weight", "bias")):
        found = [
            head.tensors.get(names[f"heads.{i}.layers.{j}.{part}"])
            for j in range(head.num_layers - 1)
        ]
        if len(found) < 2 or found[0] is None:
            return False
        if not all(one is not None and torch.equal(one, found[0]) for one in found):
            return False
    return True
