"""The frozen model whose output speculative decoding must reproduce: load, outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from target.attention import packed
from target.causal_lm import load_causal_lm
from target.devices import (
    Device,
    decoder_of,
    device_of,
    in_place,
    is_elsewhere,
    is_plain,
    spread,
)
from target.fingerprint import eos_ids, fingerprint, vocabulary_size
from target.layout import blocked, lay_out
from target.loading import loaded_tensors, not_finite, refuse_not_finite
from target.masks import LayerMasks
from target.outputs import LayerId, ProjectedLogits, TargetOutputs, TargetRequest
from target.rotary import context_of
from target.sharded import Sharded
from target.shared_text import TextGroup, can_share
from target.vocabulary import check_template, embedding_rows, rowless
from trainer.errors import UserError
from trainer.logits import OutputHead


class Checkpoint(Protocol):
    """The weights of a model where they are stored."""

    def filled(self, layer: torch.nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """Inside the block, a layer has its numbers."""
        ...


class StoredStates(Protocol):
    """The states of some texts."""

    def hidden(
        self, ids: torch.Tensor, layers: Sequence[LayerId]
    ) -> dict[LayerId, torch.Tensor] | None:
        """Those [B, L, H] of right-padded rows [B, L]; None where a text or a layer is missing."""
        ...


@dataclass
class Target:
    """The frozen model with its tokenizer; `fingerprint` identifies both, see `fingerprint`."""

    model: Any  # a PreTrainedModel, whose class and configuration decide what it has
    tokenizer: Any  # a PreTrainedTokenizerBase
    name: str
    fingerprint: dict[str, Any]
    eos_ids: tuple[int, ...]
    sharded: Sharded | None = None
    parts: str = "all"  # that are loaded: "all", "head" (`target.parts`), "none" (`target.outline`)
    checkpoint: Checkpoint | None = None  # with the parts "head", what a layer is read from
    stored: StoredStates | None = None  # with the parts "head", what gives states in its place

    @classmethod
    def load(
        cls,
        name: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        device_map: str | Mapping[str, object] | None = None,
        max_memory: Mapping[Device, str] | None = None,
        quantization: Mapping[str, object] | None = None,
    ) -> Target:
        """Load a target from a folder or the Hub. `device`: of its inputs and outputs; a
        `device_map` may use others too. Raises UserError where it cannot be loaded, or not whole,
        and RunFault where the memory does not suffice."""
        given = spread(device, device_map, max_memory or {}, quantization or {})
        model, tokenizer = load_causal_lm(
            name,
            "model.target",
            revision=revision,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            spread=given,
        )
        check_template(name, model, tokenizer)
        model.requires_grad_(False)
        eos = eos_ids(model, tokenizer)
        facts, sharded = fingerprint(name, model, tokenizer, eos), None
        if device_map == "fsdp2" and given:
            try:
                sharded = Sharded(model, decoder_layers(model), device)
            except (ValueError, NotImplementedError) as error:
                raise UserError(
                    f"model.device_map=fsdp2 must be auto for {type(model).__name__}, which cannot "
                    f"be sharded: {error}"
                ) from error
        elif device_map == "fsdp2":
            print(f"model.device_map=fsdp2: one process holds {name} whole", flush=True)
        if given.get("device_map") == "cpu":  # each process has read a part of it
            found = not_finite(loaded_tensors(model))
            found = found if sharded is None else sharded.of_all(found)
            refuse_not_finite("model.target", name, found)
        if sharded is None:
            lay_out(model)
        return cls(model, tokenizer, name, facts, eos, sharded)

    def sync(self) -> None:
        """Wait for all processes of a sharded target, see `target.sharded`; every process calls it
        before they wait for each other elsewhere."""
        if self.sharded is not None:
            self.sharded.sync()

    @contextmanager
    def in_place(self, layer: torch.nn.Module, *others: torch.nn.Module | None) -> Iterator[None]:
        """Inside the block, all parameters of a decoder layer and of `others` can be read."""
        whole: AbstractContextManager[None] = nullcontext()
        if self.sharded is not None:
            whole = self.sharded.whole(layer)
        elif self.checkpoint is not None:
            whole = self.checkpoint.filled(layer, self.device)
        with in_place(layer, *others), whole:
            yield

    @cached_property  # a tokenizer of 150,000 tokens takes half a second to list them
    def vocab_size(self) -> int:
        """The true vocabulary: ids the tokenizer knows; wider logits are padding."""
        return min(vocabulary_size(self.tokenizer), self.logits_width)

    @property
    def logits_width(self) -> int:
        """Rows of the output head, padding included."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def has_layers(self) -> bool:
        """Whether it can read text. Without layers `outputs` answers from `stored` alone."""
        return self.parts == "all"

    def check_ids(self, ids: Sequence[int], source: str) -> None:
        """UserError where a token of a text has no row in the embedding. `source`: of the text."""
        rows, largest = embedding_rows(self.model), max(ids)
        if largest >= rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise rowless(source, ..., f"the text has {token!r}", largest, rows)

    @property
    def context(self) -> int:
        """The most positions of a text."""
        return context_of(self.model.config.get_text_config())

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def num_layers(self) -> int:
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @cached_property
    def head(self) -> OutputHead:
        """The output head from final-normed states to logits of the true vocabulary."""
        with self._without_layers():
            return output_head(self.model, self.vocab_size)

    @cached_property
    def norm(self) -> torch.nn.Module:
        """The module that makes `final_norm` of the last layer's output."""
        with self._without_layers():
            return final_norm(self.model)

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        """Inside the block, a forward of the model passes over layers that are not loaded."""
        layers = torch.nn.ModuleList() if self.has_layers else decoder_layers(self.model)
        kept, layers._modules = layers._modules, {}
        try:
            yield
        finally:
            layers._modules = kept

    @property
    def embedding(self) -> torch.nn.Module:
        """The embedding module, not its weight: some models scale the looked-up rows."""
        return self.model.get_input_embeddings()

    @torch.no_grad()
    def outputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        layers: Sequence[LayerId] = (),
        logits: bool = True,
        project_later: bool = False,
        group: TextGroup | None = None,
    ) -> TargetOutputs:
        """One parallel pass over right-padded rows, without gradient.

        input_ids, position_ids: [B, L] int64. Right padding needs no mask: under causal attention
        no real token sees it. `project_later`: logits are computed when they are indexed. `group`:
        processes that read these rows together, where the model can do so (`can_share`)."""
        if logits and project_later:
            every = TargetRequest(tuple(layers)).states
            made = self.outputs(input_ids, position_ids, layers=every, logits=False, group=group)
            return self.projected(made)
        wanted = check_layers(layers, self.num_layers)
        if not self.has_layers:
            return self._stored_outputs(input_ids, wanted)
        found: dict[LayerId, torch.Tensor] = {}
        if group is not None and can_share(self.model):
            assert not logits, "logits of whole rows are computed later"
            reading, decoder = group.reading(input_ids, position_ids), decoder_of(self.model)
            with captured(self.model, wanted, found):
                decoder(use_cache=False, **reading.arguments(LayerMasks.of(self.model)))
            return TargetOutputs({layer: reading.whole(own) for layer, own in found.items()})
        with captured(self.model, wanted, found):
            result = self.model(
                input_ids=input_ids,
                use_cache=False,
                logits_to_keep=0 if logits else last_columns(1, input_ids),
                **packed(self.model, position_ids),
            )
        return TargetOutputs(found, result.logits if logits else None)

    def _stored_outputs(self, ids: torch.Tensor, layers: Sequence[LayerId]) -> TargetOutputs:
        """What is stored for these rows. UserError where that is not all of it."""
        found = None if self.stored is None else self.stored.hidden(ids, layers)
        if found is None:
            raise UserError(
                "leaves the target without layers, and the states of this text are not stored",
                key="model.parts", value=self.parts, remedy="set model.parts=all",
            )  # fmt: skip
        return TargetOutputs(found)

    def projected(self, found: TargetOutputs) -> TargetOutputs:
        """`found`, which has the states of final_norm, with the logits that follow from them."""
        return replace(found, logits=ProjectedLogits(self.head, found.hidden["final_norm"]))


def last_columns(count: int, ids: torch.Tensor) -> int | torch.Tensor:
    """transformers' `logits_to_keep` of the last `count` columns of ids [B, L], 0: all. Told by a
    number, a model whose last layers read the keys of earlier ones computes no other states there
    (Gemma 4); told by a tensor, all."""
    length = ids.shape[1]
    return torch.arange(length - count, length, device=ids.device) if 0 < count < length else 0


def check_layers(layers: Sequence[LayerId], num_layers: int) -> tuple[LayerId, ...]:
    """`layers` as a tuple; UserError unless they are distinct and in range, or "final_norm"."""
    for layer in layers:
        if layer != "final_norm" and not (isinstance(layer, int) and 0 <= layer < num_layers):
            raise UserError(
                f"layer id must lie in 0..{num_layers - 1} or be 'final_norm', got {layer!r}"
            )
    if len(set(layers)) != len(layers):
        raise UserError(f"layer ids must be distinct, got {list(layers)}")
    return tuple(layers)


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers of a model in order. UserError where they are not found."""
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(model).__name__}: no list of {count} decoder layers found")


@contextmanager
def captured(
    model: PreTrainedModel, layers: Sequence[LayerId], found: dict[LayerId, torch.Tensor]
) -> Iterator[None]:
    """Inside the block, write the outputs [B, L, H] of these layers to `found` in each forward."""

    def normed(module: torch.nn.Module, inputs: object, output: BaseModelOutput) -> None:
        assert output.last_hidden_state is not None
        found["final_norm"] = output.last_hidden_state.to(device_of(model))

    def output_of(layer: int) -> Callable[..., None]:
        def hook(
            module: torch.nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]
        ) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if states.dim() != 3:
                raise UserError(
                    f"the layers of {type(model).__name__} give several states for a token "
                    f"{tuple(states.shape)}: heads that read layers cannot be trained with it"
                )
            found[layer] = states.to(device_of(model))

        return hook

    handles = []
    for layer in layers:
        if isinstance(layer, int):
            handle = decoder_layers(model)[layer].register_forward_hook(output_of(layer))
        else:
            handle = decoder_of(model).register_forward_hook(normed)
        handles.append(handle)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def final_norm(model: PreTrainedModel) -> torch.nn.Module:
    """The module that makes `final_norm` of the last layer's output. UserError where there is
    none."""
    made: list[tuple[torch.nn.Module, object]] = []
    decoder = decoder_of(model)
    with contextlib.ExitStack() as hooks:
        for child in decoder.children():
            hook = child.register_forward_hook(lambda own, _, output: made.append((own, output)))
            hooks.callback(hook.remove)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
        states = decoder(ids, use_cache=False).last_hidden_state
    for module, output in made:
        if isinstance(output, torch.Tensor) and torch.equal(output, states):
            return module
    raise UserError(f"{type(model).__name__}: no norm behind the last decoder layer found")


def logit_scale(model: PreTrainedModel) -> float:
    """By how much the model multiplies its output matrix's products: Cohere multiplies them,
    Granite divides."""
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None)
    return factor or 1 / (getattr(config, "logits_scaling", None) or 1)


def output_head(model: PreTrainedModel, vocab_size: int) -> OutputHead:
    """The model's own map from final-normed states to logits, validated on a few tokens. UserError
    where the head is quantised or computes more than a known transform."""
    config = model.config.get_text_config()
    projection = model.get_output_embeddings()
    assert projection is not None, "a causal language model has an output head"
    cap = getattr(config, "final_logit_softcapping", None)
    scale = logit_scale(model)

    def transform(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    device = device_of(model)
    with in_place(projection):
        weight, bias = projection.weight, getattr(projection, "bias", None)
        if not is_plain(weight):
            raise UserError(
                f"the output head of {type(model).__name__} is quantised ({weight.dtype}): losses "
                "are computed through it, leave it out of the quantization"
            )
        if is_elsewhere(projection, device):  # a copy, since losses read it at every step
            weight = weight.to(device, copy=True)
            bias = bias if bias is None else bias.to(device, copy=True)
    head = OutputHead(
        weight,
        bias,
        transform=None if cap is None and scale == 1 else transform,
        vocab_size=vocab_size,
        blocked=blocked(projection),
    )
    ids = (torch.arange(4, device=device) % vocab_size).unsqueeze(0)
    found: dict[LayerId, torch.Tensor] = {}
    with torch.no_grad(), captured(model, ("final_norm",), found):
        logits = model(input_ids=ids, use_cache=False).logits[..., :vocab_size].float()
    mine = head.logits(found["final_norm"]).float()
    largest = float(logits.abs().max())  # NaN is reported elsewhere, with a better remedy
    if largest >= 0 and not torch.allclose(mine, logits, rtol=1e-2, atol=1e-2 * largest):
        raise UserError(
            f"{type(model).__name__} computes logits from its last state in an unknown way: heads "
            "and distillation cannot be trained with it"
        )
    return head
