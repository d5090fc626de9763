"""Muon: what it does to matrices, and to which."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from drafters.medusa import MedusaDrafter, MedusaSettings
from target.model import Target
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.trainer.test_loop import TinyLM, losses_of, same_weights, train
from trainer.config import TrainerConfig
from trainer.errors import UserError
from trainer.hidden import hidden_layers
from trainer.logits import OutputHead
from trainer.optimizer import make_optimizer, orthogonal
from trainer.setup import make_accelerator, placement

MUON = TrainerConfig(optimizer="muon", lr=1e-3, muon_lr=0.1)


class Deep(TinyLM):
    """With a hidden matrix [16, 8] beside an embedding and an output head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def block(self, x):
        return super().block(self.down(torch.tanh(self.up(x))))


@pytest.mark.parametrize("shape", [(8, 8), (24, 6), (6, 24), (1, 5)])
def test_singular_values_become_one_and_singular_vectors_stay(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(0, -1, shape[1])
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonal(matrix) @ v.T
    assert found.diagonal().sub(1).abs().max() < 0.35  # the published iterations stop at 0.7 to 1.2
    assert found.sub(torch.diag(found.diagonal())).abs().max() < 1e-4
    assert torch.equal(orthogonal(1e-3 * matrix).sign(), orthogonal(matrix).sign())


def test_a_matrix_without_gradient_is_left_alone():
    assert not orthogonal(torch.zeros(3, 5)).any()
    model = Deep()
    before = {name: p.clone() for name, p in model.named_parameters()}
    make_optimizer(model, MUON).step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)])
def test_a_step_is_the_rate_times_an_orthogonal_matrix(shape):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0])
    before = layer.weight.detach().clone()
    optimizer = make_optimizer(layer, MUON)
    for group in optimizer.param_groups:
        group["lr"] = MUON.lr * group["lr_multiplier"]
    layer.weight.grad, layer.bias.grad = torch.randn(shape), torch.ones(shape[0])
    expected = before - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * orthogonal(layer.weight.grad)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-3, atol=1e-4)


def test_updates_are_those_of_the_paper():
    """Two of them: a momentum of one gradient alone points where the gradient does. The published
    form adds gradients up without (1 - momentum), which scales a direction and turns none."""
    torch.manual_seed(0)
    layer, rate, decay = nn.Linear(4, 6), 0.1, 0.5
    expected, momentum = layer.weight.detach().clone(), torch.zeros(6, 4)
    config = TrainerConfig(optimizer="muon", lr=rate, muon_lr=rate, weight_decay=decay)
    optimizer = make_optimizer(layer, config)
    for _ in range(2):
        gradient = torch.randn(6, 4)
        layer.weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + gradient
        ahead = gradient + 0.95 * momentum  # Nesterov's look-ahead
        expected = (1 - rate * decay) * expected - rate * (6 / 4) ** 0.5 * orthogonal(ahead)
        torch.testing.assert_close(layer.weight.detach(), expected)


@pytest.mark.parametrize(("inputs", "outputs"), [(4, 12), (12, 4)])
def test_a_layer_that_stores_its_matrix_transposed_takes_the_same_step(inputs, outputs):
    """As GPT-2's do."""
    torch.manual_seed(0)
    linear, conv = nn.Linear(inputs, outputs), Conv1D(outputs, inputs)
    conv.load_state_dict({"weight": linear.weight.detach().T, "bias": linear.bias.detach()})
    given = torch.randn(5, inputs)
    for layer in (linear, conv):
        layer(given).square().sum().backward()
        make_optimizer(layer, MUON).step()
    torch.testing.assert_close(conv.weight.detach().T, linear.weight.detach())


def test_all_but_hidden_matrices_are_updated_as_by_adamw():
    torch.manual_seed(0)
    found = {}
    for name in ("adamw", "muon"):
        torch.manual_seed(0)
        model = Deep()
        model.output_head = lambda depth, head=model.head: OutputHead(head.weight)
        optimizer = make_optimizer(model, TrainerConfig(optimizer=name))
        for _ in range(3):
            model(torch.arange(6)[None]).square().mean().backward()
            optimizer.step()
            for layer in (model.up, model.down):  # so that gradients stay equal
                layer.load_state_dict(Deep().state_dict(), strict=False)
            nn.init.ones_(model.up.weight), nn.init.ones_(model.down.weight)
            optimizer.zero_grad()
        found[name] = model
    assert same_weights(*found.values())
    groups = {id(p): g["orthogonal"] for g in optimizer.param_groups for p in g["params"]}
    matrices = {name for name, p in model.named_parameters() if groups[id(p)]}
    assert matrices == {"up.weight", "down.weight"}


def test_output_heads_and_embeddings_are_no_hidden_matrices(tiny_folder):
    target = Target.load(tiny_folder("llama"))
    heads = MedusaDrafter.build(target, MedusaSettings(num_heads=2))
    assert {name for name, _ in hidden_layers(heads)} == {"blocks.0.layers.0", "blocks.1.layers.0"}
    head = build_eagle(target, eagle_settings(3, (0, 1), target.hidden_size))
    names = {name for name, _ in hidden_layers(head)}
    assert {"fc", "layer.mlp.down_proj"} < names
    assert not any("lm_head" in name or "embed" in name for name in names)


def deep():
    torch.manual_seed(0)
    return Deep()


def test_it_resumes_bit_for_bit(tmp_path):
    settings = {"optimizer": "muon", "evaluate": None, "lr_schedule": "constant"}
    _, straight, rows = train(tmp_path, drafter=deep(), **settings)
    straight = copy.deepcopy(straight)
    (tmp_path / "finished.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "step-000012")
    with pytest.raises(UserError, match=r"trainer\.muon_lr was 0\.05"):
        train(tmp_path, drafter=deep(), **settings, muon_lr=0.1)
    _, resumed, more = train(tmp_path, drafter=deep(), **settings)
    assert same_weights(straight, resumed)
    assert losses_of(rows) == losses_of(more)


def test_its_rate_changes_the_weights(tmp_path):
    found = [
        train(tmp_path / str(rate), optimizer="muon", evaluate=None, drafter=deep(), muon_lr=rate)
        for rate in (0.05, 0.1)
    ]
    assert not same_weights(found[0][1], found[1][1])


def test_zero_is_refused_as_it_cuts_matrices_in_pieces(monkeypatch):
    monkeypatch.setattr("trainer.zero.used", lambda accelerator: True)
    with pytest.raises(UserError, match=r"trainer\.optimizer must be adamw under ZeRO"):
        placement(make_accelerator(MUON, cpu=True), MUON)
