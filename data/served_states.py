"""The target's hidden states of batches from a serving engine, in place of a features store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain

import torch

from data.batches import Batch, collate
from data.features_layout import row_key
from data.imported import continuation_of
from data.traces import Trace
from engines.distribution_check import evidence_of, judged
from engines.states import TOLERANCE, StatesClient, layer_numbers
from target.devices import in_place
from target.model import Target
from target.outputs import LayerId, TargetOutputs
from trainer.device import sent
from trainer.errors import UserError
from trainer.logits import chunk_rows

CHECKED_TEXTS, CHECKED_TOKENS = 4, 256


class ServedStates:
    """Answers like `FeaturesStore`, from a server that reads the texts.

    Texts that were announced by `ahead` are under way while others are trained on; a text is held
    until a batch asks for it.
    """

    def __init__(self, client: StatesClient, target: Target, layers: Sequence[LayerId]):
        self.client, self.target, self.layers = client, target, tuple(layers)
        self._numbers = layer_numbers(layers, target.num_layers)
        self._asked: dict[bytes, Future[torch.Tensor]] = {}

    def ahead(self, batch: Batch) -> None:
        """Ask for the states of a batch to come, unless the drafter has yet to write text of it:
        another batch may take its place."""
        if "draft" not in batch.sources:
            self._ask(batch)

    def _ask(self, batch: Batch) -> None:
        for prompt, response in zip(batch.prompts, batch.responses, strict=True):
            key = row_key(prompt, response)
            if key not in self._asked:
                self._asked[key] = self.client.submit([*prompt, *response])

    @torch.no_grad()
    def outputs(self, batch: Batch, device: torch.device | str = "cpu") -> TargetOutputs:
        """States of a batch: hidden[layer] [B, L, H] in the target's dtype, on `device`. Raises
        RunFault where the server does not give them."""
        self._ask(batch)
        keys = [row_key(p, r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        texts = {key: self._asked[key].result() for key in dict.fromkeys(keys)}
        for key in texts:
            del self._asked[key]
        some = texts[keys[0]]
        states = some.new_zeros(*batch.input_ids.shape, *some.shape[1:])
        for key, (row, first) in zip(keys, batch.starts(), strict=True):
            states[row, first : first + len(texts[key])] = texts[key]
        states = sent(states, device)
        hidden: dict[LayerId, torch.Tensor] = {}
        for layer in self.layers:
            own = states[:, :, self.client.numbers.index(self._numbers[layer])].contiguous()
            if isinstance(layer, str):
                own = own.to(self.target.device, self.target.model.dtype)
                with in_place(self.target.norm):
                    own = self.target.norm(own).to(device)
            hidden[layer] = own.to(self.target.model.dtype)
        return TargetOutputs(hidden)

    def check(self, traces: Sequence[Trace]) -> None:
        """Compare the states of a few texts with those that transformers computes. UserError where
        they are another model's or other layers': too far off, or nearer to a layer beside; of a
        target without layers, where their logits are not those that wrote the texts. The client
        asks one server."""
        texts = [(t.prompt_ids + t.response_ids)[:CHECKED_TOKENS] for t in traces[:CHECKED_TEXTS]]
        prompts, responses = [ids[:1] for ids in texts], [ids[1:] for ids in texts]
        batch = collate(prompts, responses, ["target"] * len(texts))
        device = self.target.device
        found = self.outputs(batch, device)
        if not self.target.has_layers:
            self._check_answers(traces[:CHECKED_TEXTS], found)
            return
        served, batch = found.hidden, batch.to(device)
        near = {layer: _near(layer, self.target.num_layers) for layer in self.layers}
        every = tuple(dict.fromkeys(chain(*near.values())))
        own = self.target.outputs(batch.input_ids, layers=every, logits=False).hidden
        lengths = torch.tensor([len(ids) for ids in texts], device=device)
        real = torch.arange(batch.input_ids.shape[1], device=device) < lengths.unsqueeze(1)
        for layer in self.layers:
            states = served[layer][real]
            apart = {other: _apart(states, own[other][real]) for other in near[layer]}
            nearest = min(apart, key=apart.__getitem__)
            if nearest != layer or not apart[layer] <= TOLERANCE[self.target.model.dtype]:
                dtype = str(self.target.model.dtype).removeprefix("torch.")
                root = self.client.servers[0].root
                raise UserError(
                    f"data.features_engine: the states of layer {layer} from {root} are "
                    f"{apart[layer]:.1%} off those of {self.target.name} here, and nearest to "
                    f"layer {nearest}: it must serve this model, in {dtype}, and write the layers "
                    f"{self.client.numbers} as vLLM counts them"
                )

    def _check_answers(self, traces: Sequence[Trace], found: TargetOutputs) -> None:
        assert "final_norm" in self.layers, "whoever needs no layers asks for it"
        logits = self.target.projected(found).logits
        assert logits is not None
        chunk, evidence = chunk_rows(self.target.device, self.target.vocab_size), []
        for place, trace in enumerate(traces):
            read = max(0, CHECKED_TOKENS - len(trace.prompt_ids))
            response = torch.tensor(trace.response_ids[:read], dtype=torch.long)
            request = continuation_of(trace).request
            response = response.to(self.target.device)
            evidence.append(evidence_of(logits, place, request, response, chunk))
        said = judged(evidence)
        if said:
            raise UserError(
                f"data.features_engine: the states from {self.client.servers[0].root} are not "
                f"those that the answers were written from ({said}): it must serve "
                f"{self.target.name}, and so must what wrote them"
            )


def _near(layer: LayerId, num_layers: int) -> list[LayerId]:
    """The layer, then those before and behind it."""
    if isinstance(layer, str):
        return [layer]
    return [layer, *(other for other in (layer - 1, layer + 1) if 0 <= other < num_layers)]


def _apart(states: torch.Tensor, own: torch.Tensor) -> float:
    """Relative difference of [N, H] states from our own, of the median token: a few tokens have
    massive activations, which hardly change between layers and would decide a norm of all."""
    states, own = states.float(), own.float()
    return float(((states - own).norm(dim=-1) / own.norm(dim=-1)).median())
