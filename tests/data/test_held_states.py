"""States of held-out texts, found by their tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from data.held_states import HeldStates
from target.outputs import TargetOutputs

TEXTS = [[5, 6, 7, 8], [5, 6, 7, 9, 9], [5, 6], [8, 0, 0], [8, 0, 0, 3], [0, 0, 4], [300, 2]]


class Store:
    """Gives each token the state (token, place)."""

    layers = (1, "final_norm")

    def outputs(self, batch, device):
        places = torch.arange(batch.input_ids.shape[1]).expand(batch.input_ids.shape)
        states = torch.stack([batch.input_ids, places], -1).float()
        return TargetOutputs(dict.fromkeys(self.layers, states))


@pytest.fixture
def held():
    traces = [SimpleNamespace(prompt_ids=ids[:1], response_ids=ids[1:]) for ids in TEXTS]
    return HeldStates(Store(), traces)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*TEXTS, [5, 6, 7], [8, 0], [8]], ids=str)
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_a_text_or_its_beginning_is_found(held, text, padding):
    found = held.hidden(torch.tensor([text + [0] * padding]), (1,))
    assert found is not None
    assert found[1].shape == (1, len(text) + padding, 2)
    assert found[1][0, : len(text), 0].tolist() == text
    assert found[1][0, : len(text), 1].tolist() == [*range(len(text))]


def test_rows_of_a_batch_are_those_of_their_texts(held):
    ids = torch.tensor([[300, 2, 0, 0, 0], [5, 6, 7, 9, 9], [8, 0, 0, 3, 0]])
    assert torch.equal(held.hidden(ids, ("final_norm",))["final_norm"][..., 0].long(), ids)


@pytest.mark.parametrize("text", [[5, 6, 8], [9], [5, 6, 7, 8, 3], [0, 4], [300, 2, 1]], ids=str)
def test_another_text_is_not(held, text):
    assert held.hidden(torch.tensor([[*text, 0]]), (1,)) is None
    assert held.hidden(torch.tensor([[5, 6, 0, 0, 0, 0][: len(text)], text]), (1,)) is None


def test_nor_is_a_layer_that_is_not_stored(held):
    assert held.hidden(torch.tensor([[5, 6]]), (1, 2)) is None
